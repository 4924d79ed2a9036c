"""Loss variants and sliding layers on CUDA against the CPU; run by hand on a machine with a GPU."""

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from trainer_cache import documents, fit_config, make_cache, random_bits

from hscache.config import TargetConfig
from hscache.target import Target
from trainer.batches import Loader
from trainer.loss import fused_divergence
from trainer.row_loss import row_loss
from trainer.run_plan import plan_run
from trainer.run_state import start_training

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA, CPU = torch.device("cuda"), torch.device("cpu")
SLIDING = {
    "num_hidden_layers": 3,
    "layer_types": ("sliding_attention", "sliding_attention", "full_attention"),
    "sliding_window": 6,
}
VARIANTS = {
    "dpace": {"loss": {"weighting": "dpace", "gamma": None}},
    "soft": {"loss": {"labels": "soft"}},
    "sliding": {"drafter": SLIDING},
    "narrow": {"drafter": {**SLIDING, "sliding_window": 2}},  # cuts the block of 4, too
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    def bits(row, num_tokens):
        last = random_bits(num_tokens, row + 99)[:, :1]
        return np.concatenate([random_bits(num_tokens, row), last], axis=1)

    corpus = documents((9, 30, 17, 24, 28, 12, 30, 21), seed=3)
    place = tmp_path_factory.mktemp("variants_gpu") / "cache"
    return make_cache(place, corpus, bits=bits, last_hidden=True)


def loss_and_gradients(folder, device, **settings):
    run = plan_run(fit_config(folder, folder / "unused", **settings))
    training = start_training(run, device)
    loader = Loader(run.cache, run.row_task(), device=device, dtype=torch.float32)
    total = torch.zeros((), device=device)
    graphs = []
    with loader:
        for batch in loader:
            loss_sum, _ = row_loss(
                training.drafter, training.frozen, batch, chunk_size=7, backend=training.backend,
                weighting=training.weighting,
            )  # fmt: skip
            total = total + loss_sum
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    total.backward()
    return total.detach().cpu(), [p.grad.cpu() for p in training.drafter.parameters()], graphs


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("attention", ["auto", "sdpa"])
def test_loss_and_gradients_equal_those_of_the_cpu(folder, variant, attention):
    settings = VARIANTS[variant]
    loss, gradients, graphs = loss_and_gradients(folder, CUDA, attention=attention, **settings)
    expected, expected_gradients, _ = loss_and_gradients(folder, CPU, **settings)
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)
    for found, wanted in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(found, wanted, rtol=2e-3, atol=2e-4)
    assert len(graphs) > 2
    assert len(set(graphs)) == 1, "a later row was compiled anew"


def test_rows_are_never_waited_for(folder):
    """Masks of both kinds, D-PACE and teachers are made without a look at the device."""
    run = plan_run(fit_config(folder, folder / "unused", drafter=SLIDING, loss={"labels": "soft"}))
    training = start_training(run, CUDA)
    loader = Loader(run.cache, run.row_task(), device=CUDA, dtype=torch.float32)
    with loader:
        batches = list(itertools.islice(loader, 2))
    plain = [without_teacher(batch) for batch in batches]
    for weighting, rows in (("decay", batches), ("dpace", plain)):
        for batch in rows:  # the first compiles, the second must not wait

            def step(batch=batch, weighting=weighting):
                loss_sum, _ = row_loss(
                    training.drafter, training.frozen, batch, chunk_size=7,
                    backend=training.backend, weighting=weighting,
                )  # fmt: skip
                loss_sum.backward()

            if batch is not rows[0]:
                torch.cuda.set_sync_debug_mode("error")
            try:
                step()
            finally:
                torch.cuda.set_sync_debug_mode("default")


def without_teacher(batch):
    return type(batch)(**{**vars(batch), "last_hidden_SH": None})


def test_fused_divergence_in_bf16_equals_autograd_and_keeps_no_copy_of_the_logits():
    generator = torch.Generator(CUDA).manual_seed(0)
    logits, teacher = (
        (4 * torch.randn(512, 49152, device=CUDA, generator=generator)).bfloat16() for _ in "lt"
    )
    wide = logits.float().requires_grad_()
    expected = F.kl_div(wide.log_softmax(-1), teacher.float().softmax(-1), reduction="none").sum(-1)
    (gradient,) = torch.autograd.grad(expected.sum(), wide)
    labels = logits.argmax(-1).clone()
    labels[::2] = 0
    fused_divergence(logits.clone(), teacher, labels, compiled=True)  # compiles
    overwritten = logits.clone()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    losses, right = fused_divergence(overwritten, teacher, labels, compiled=True)
    assert torch.cuda.max_memory_allocated() - before < logits.nbytes / 4
    torch.testing.assert_close(losses, expected.detach(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(overwritten.float(), gradient, rtol=1e-2, atol=1e-4)
    assert right[1::2].all()
    assert not right.all()


def test_last_hidden_states_on_cuda_are_those_of_the_cpu(qwen3_dir):
    def load(device):
        config = TargetConfig(
            path=str(qwen3_dir), target_layer_ids=(0, 3), last_hidden=True, device=device,
            dtype="float32",
        )  # fmt: skip
        return Target(config)

    ids = torch.randint(3, 259, (70,), generator=torch.Generator().manual_seed(0))
    found, exact = (
        load(device).capture(ids, (0, 7, 70)).float().cpu() for device in ("cuda", "cpu")
    )
    assert found.shape == (70, 3, 64)
    assert (found - exact).norm() / exact.norm() < 2**-8
