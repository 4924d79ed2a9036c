"""What the ranks of `rank_pool` run: small trainings whose answer the tests compare."""

import contextlib
import dataclasses
import signal
import time
import warnings

import numpy as np
import torch
from trainer_cache import fit_config, random_bits

from hscache.errors import ShardCorruptError
from trainer import loop
from trainer import ranks as ranks_module
from trainer.attention import training_backend
from trainer.batches import to_batch
from trainer.checkpoint import read_state
from trainer.config import SyncConfig
from trainer.drafter import Drafter
from trainer.fit import fit
from trainer.frozen import load_frozen
from trainer.masters import Masters
from trainer.row_reader import RowReader, StepEnd
from trainer.rows import RowDocument, build_row, decayed_weights
from trainer.run_plan import plan_run
from trainer.run_state import resume_training
from trainer.schedule import Position
from trainer.sync import OuterStep, average_
from trainer.training import Training

CPU = torch.device("cpu")


def batch_of(run, rows, *, supervised=True):
    """One fp64 row with the given documents, every fourth position an anchor."""
    plan = run.cache.plan
    parts, anchors, states = [], [], []
    for row in rows:
        mask = plan.loss_mask(row).astype(bool) & supervised
        parts.append(
            RowDocument(document_id=row, input_ids_T=plan.input_ids(row), loss_mask_T=mask)
        )
        anchors.append(np.arange(3, len(mask) - 1, 4))
        states.append(random_bits(len(mask), row))
    built = build_row(
        parts, anchors, row_tokens=96, anchors_per_row=40, block_size=4,
        slot_weights=[decayed_weights(4, 4.0)] * len(parts),
    )  # fmt: skip
    bits = torch.from_numpy(np.concatenate(states).view(np.int16))
    features = bits.view(torch.bfloat16).flatten(1).double()
    return to_batch(built, features, Position(rows=1), CPU)


def exact_training(run, ranks, **sync) -> Training:
    """A run in fp64 whose optimizer is plain SGD, without clipping."""
    drafter = Drafter(run.drafter, torch.Generator().manual_seed(0)).double()
    training = Training(
        drafter=drafter, masters=Masters(drafter, torch.float64),
        frozen=load_frozen(run.cache).to(CPU, torch.float64), optim=run.config.optim,
        total_tokens=10**9, chunk_size=512, backend=training_backend("auto", CPU),
        ranks=ranks, sync=SyncConfig(**sync),
    )  # fmt: skip
    training.optimizers = [torch.optim.SGD(training.masters.parameters, lr=1.0)]
    return training


END = StepEnd(position=Position(rows=1), num_tokens=100, num_anchors=10)


def one_step(ranks, cache, rows, supervised=True, variant=None, **sync):
    """One step on `rows[rank]` (a list of rows of documents); gradients, weights, loss, counts."""
    run = plan_run(fit_config(cache, cache / "run", optim={"clip": 1e9, "warmup_fraction": 0.0}))
    training = exact_training(run, ranks, **sync)
    training.weighting = "dpace" if variant == "dpace" else "decay"
    gradients = {}

    (optimizer,) = training.optimizers
    step = optimizer.step

    def keep_and_step():
        gradients.update((n, p.grad.numpy().copy()) for n, p in training.masters.by_name.items())
        step()

    optimizer.step = keep_and_step
    batches = [batch_of(run, documents, supervised=supervised) for documents in rows[ranks.rank]]
    if variant == "soft":  # the first captured layer stands for the last block's output
        batches = [
            dataclasses.replace(b, last_hidden_SH=b.features_SF[:, : run.drafter.hidden_size])
            for b in batches
        ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the norms compute in fp32 all the same
        training.update(batches, END)
    if not training.together:
        training.meet()
    values = training.window.values(0.0)
    weights = {n: p.detach().numpy().copy() for n, p in training.masters.by_name.items()}
    return {
        "gradients": gradients, "weights": weights, "loss": values["train/loss"],
        "empty": training.empty_windows, "step": training.step, "tokens": training.tokens,
        "norm": values["train/grad_norm_max"],
    }  # fmt: skip


def weighted_average(ranks, weights):
    """The mean of tensors full of 1, 2, 3 ... on rank 0, 1, 2 ..."""
    tensors = [torch.full((5, 3), ranks.rank + 1.0), torch.full((7,), ranks.rank + 1.0)]
    average_(tensors, weights, ranks)
    return [tensor.unique().tolist() for tensor in tensors]


def add_in_buckets(ranks, shapes):
    """Sums of tensors of many shapes, each in its own place."""
    tensors = [torch.arange(np.prod(s)).float().reshape(s) + ranks.rank for s in shapes]
    tensors.append(torch.arange(6.0).reshape(2, 3).T)  # not contiguous
    with patched(ranks_module, "_BUCKET_ELEMENTS", 16):
        ranks.add_(tensors)
    return [tensor.numpy().copy() for tensor in tensors]


def quadratic(ranks, outer_steps):
    """DiLoCo on |x - rank|^2, ten inner steps of SGD; the loss over all ranks at each meeting."""
    x = torch.full((4,), 10.0, dtype=torch.float64)
    outer, losses = OuterStep([x], lr=0.7, momentum=0.9), []
    for _ in range(outer_steps):
        losses.append(sum(row[0] for row in ranks.gather([float(((x - ranks.rank) ** 2).sum())])))
        for _ in range(10):
            x -= 0.001 * 2 * (x - ranks.rank)
        average_([x], [1.0] * ranks.num_ranks, ranks)
        outer.step_([x])
    return losses


def differ_and_meet(ranks, cache):
    """Rank 1 has other weights, which no rank's work explains."""
    run = plan_run(fit_config(cache, cache / "run"))
    training = exact_training(run, ranks, mode="ddp")
    if ranks.rank == 1:
        with torch.no_grad():
            training.masters.parameters[0][0, 0] += 1e-9
    training.require_equal_weights()


@contextlib.contextmanager
def patched(place, name, value):
    """Replace an attribute for as long as the block runs."""
    before = getattr(place, name)
    setattr(place, name, value)
    try:
        yield
    finally:
        setattr(place, name, before)


def train(ranks, stop=None, late=None, config=None, **changes):
    """`fit`; returns the documents of each of this rank's steps, and the error's text.

    `stop` is (rank, n): that rank is told to stop after n of its steps. `late` is a rank whose
    second row takes 2 seconds.
    """
    ledger, warnings = [], []
    update, batch = Training.update, RowReader._start_decoding

    def recorded(self, rows, end=None):
        ledger.append([d for row in rows for d in row.document_ids])
        update(self, rows, end)

    @contextlib.contextmanager
    def stop_after(repeats_s):
        yield lambda: signal.SIGTERM if stop == (ranks.rank, len(ledger)) else None

    def slow(self, plan, position, *where):
        if late == ranks.rank and position.rows > 3 and not hasattr(self, "was_late"):
            self.was_late = True
            time.sleep(2)
        return batch(self, plan, position, *where)

    error = None
    with contextlib.ExitStack() as stack:
        stack.enter_context(patched(Training, "update", recorded))
        said = lambda text, *values: warnings.append(text % values)  # noqa: E731
        stack.enter_context(patched(loop.log, "warning", said))
        stack.enter_context(patched(RowReader, "_start_decoding", slow))
        stack.enter_context(patched(loop, "_PATIENCE_S", 0.3))
        stack.enter_context(patched(loop, "stop_requested", stop_after))
        try:
            fit(config, ranks)
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
    return {"ledger": ledger, "error": error, "warnings": warnings}


def train_with_own_seed(ranks, config):
    """Every rank was given another seed."""
    return train(ranks, config=dataclasses.replace(config, seed=ranks.rank))


def train_with_damage(ranks, config):
    """Rank 1 cannot read its rows from the 12th of the run on."""
    batch = RowReader._start_decoding

    def damaged(self, plan, position, *where):
        if ranks.rank == 1 and position.rows > 12:
            raise ShardCorruptError("a test says so")
        return batch(self, plan, position, *where)

    with patched(RowReader, "_start_decoding", damaged):
        return train(ranks, config=config)


def moments(ranks, checkpoint, config):
    """The first moment of fc that this rank gets back."""
    state = read_state(checkpoint, rank=ranks.rank, num_ranks=ranks.num_ranks)
    training = resume_training(plan_run(config), CPU, checkpoint, state, ranks)
    parameter = training.masters.by_name["fc.weight"]
    return training.optimizers[0].state[parameter]["exp_avg"].numpy().copy()


def prepare_slowly(ranks):
    """Rank 0 needs three times the time-out before it joins; seconds that `join` took or waited."""
    slow = ranks_module.Ranks(ranks.rank, 2, store=ranks._store, timeout_s=0.5)
    started_s = time.monotonic()
    with patched(ranks_module.dist, "init_process_group", lambda *a, **k: None):
        if ranks.rank == 0:
            time.sleep(1.5)
        slow.join(CPU)
    return time.monotonic() - started_s


def compute_dtype_after_meetings(ranks, config):
    """Whether the drafter held its masters, rounded, after each meeting of a bf16 run."""
    equal, meet = [], Training.meet

    def looked_at(self, *flags):
        found = meet(self, *flags)
        master = self.masters.by_name["fc.weight"]
        equal.append(torch.equal(self.drafter.fc.weight, master.bfloat16()))
        return found

    with patched(Training, "meet", looked_at):
        return train(ranks, config=config)["error"], equal
