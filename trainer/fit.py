"""`trainer fit`: train a drafter from a cache, without the target.

Takes a `FitConfig`; reads rows in their fixed order, accumulates gradients over `global_batch_rows`
of them, steps, logs, and leaves checkpoints that serving engines load and a resume continues bit
for bit on a CPU.

    trainer fit --config configs/demo-fit.yaml --shards /nvme/cache
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from hscache import files
from hscache.errors import (
    CacheIncompleteError,
    CacheMismatchError,
    ConfigError,
    HscacheError,
    StoppedBySignal,
)
from hscache.progress import Progress, configure_logging
from hscache.reader import Cache, open_cache
from hscache.report import format_table
from hscache.settings import save_config, to_dict
from hscache.signals import stop_requested
from trainer.anchors import coverage
from trainer.batches import Batch, Loader, RowSettings
from trainer.checkpoint import (
    TrainerState,
    list_checkpoints,
    read_state,
    require_same_run,
    restore,
    save_checkpoint,
)
from trainer.config import DrafterConfig, FitConfig, num_parameters
from trainer.drafter import Drafter, embed_blocks
from trainer.frozen import FrozenTarget, drafter_config, load_frozen, target_config
from trainer.loss import frozen_head_cross_entropy
from trainer.metrics import MetricsLog
from trainer.optim import clip_gradients, learning_rate, make_optimizer
from trainer.schedule import AnchorRule, Position, anchor_rule

log = logging.getLogger(__name__)

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_GAMMA = {16: 7.0, 10: 5.0, 8: 4.0}
_COVERAGE_SAMPLE = 2000
_SETTINGS = ("loss", "optim", "row_tokens", "anchors_per_row", "global_batch_rows", "seed", "dtype")


def run(config: FitConfig, *, dry_run: bool = False) -> int:
    """Run the command; with `dry_run` print the batch arithmetic and touch nothing."""
    configure_logging()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}: training on several ranks is not supported "
            "yet. Start one process without torchrun."
        )
    if dry_run:
        print(describe(plan_run(config)))
        return 0
    fit(config)
    return 0


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """Everything decided before the first step."""

    config: FitConfig
    cache: Cache
    drafter: DrafterConfig
    shards: list[int]
    rule: AnchorRule
    row: RowSettings
    total_tokens: int
    """context tokens over all passes"""
    coverage: float
    """expected scorings of a supervised token in a pass"""


def plan_run(config: FitConfig) -> RunPlan:
    """Open the cache, check everything that can be checked, and fix the schedule.

    Raises CacheIncompleteError for an unfinished cache without `allow_partial`, ConfigError and
    CacheMismatchError for settings that cannot work.
    """
    cache = open_cache(config.shards)
    drafter = drafter_config(config.drafter, cache)
    shards = _training_shards(cache, config.allow_partial)
    plan = cache.plan
    documents = [d for shard in shards for d in plan.shard_documents(shard)]
    lengths = plan.lengths[documents]
    if int(lengths.max()) > config.row_tokens:
        raise ConfigError(
            f"row_tokens is {config.row_tokens} and the longest document of {cache.path} has "
            f"{int(lengths.max())} tokens. Set row_tokens to at least that."
        )
    rule = anchor_rule(
        plan,
        shards,
        row_tokens=config.row_tokens,
        anchors_per_row=config.anchors_per_row,
        seed=config.seed,
    )
    sample = documents[:: max(1, len(documents) // _COVERAGE_SAMPLE)]
    gamma = config.loss.gamma or _GAMMA.get(drafter.block_size)
    if gamma is None:
        raise ConfigError(
            f"loss.gamma has no default for block_size {drafter.block_size}; published values are "
            "7 for 16, 5 for 10 and 4 for 8."
        )
    return RunPlan(
        config=config,
        cache=cache,
        drafter=drafter,
        shards=shards,
        rule=rule,
        row=RowSettings(
            row_tokens=config.row_tokens,
            anchors_per_row=config.anchors_per_row,
            block_size=drafter.block_size,
            gamma=gamma,
        ),
        total_tokens=int(lengths.sum()) * config.passes,
        coverage=coverage(
            (plan.loss_mask(d) != 0 for d in sample),
            rate=rule.rate,
            limit=rule.limit,
            block_size=drafter.block_size,
        ),
    )


def _training_shards(cache: Cache, allow_partial: bool) -> list[int]:
    wanted = cache.plan.training_shards
    published = set(cache.published_shards())
    usable = [
        shard
        for shard in wanted
        if shard in published and cache.shard(shard).manifest.num_documents > 0
    ]
    if not usable:
        raise CacheIncompleteError(
            f"{cache.path} has no training shard yet (of {len(wanted)}). Let `hscache produce` "
            "finish at least one."
        )
    missing = [shard for shard in wanted if shard not in published]
    if missing and not allow_partial:
        raise CacheIncompleteError(
            f"{cache.path} is unfinished: {len(wanted) - len(missing)} of {len(wanted)} training "
            f"shards are published. Finish it with `hscache produce`, or train on what is there "
            "with --allow-partial."
        )
    if missing:
        log.warning(
            "training on %d of %d shards (%.0f %%), as allow_partial asks; missing: %s",
            len(usable), len(wanted), 100 * len(usable) / len(wanted), missing,
        )  # fmt: skip
    return usable


def describe(run: RunPlan) -> str:
    """Return the batch arithmetic as a table."""
    config, plan = run.config, run.cache.plan
    rows = sum(
        -(-int(plan.lengths[list(plan.shard_documents(s))].sum()) // config.row_tokens)
        for s in run.shards
    )
    return format_table(
        ["fit", str(config.shards)],
        [
            ["drafter", f"{num_parameters(run.drafter):,} parameters, block {run.drafter.block_size}"],
            ["features", f"layers {list(run.drafter.target_layer_ids)} x {run.drafter.hidden_size}"],
            ["shards", f"{len(run.shards)} x {config.passes} passes"],
            ["tokens", f"{run.total_tokens:,} over all passes"],
            ["row", f"{config.row_tokens:,} tokens, {config.anchors_per_row} anchors"],
            ["step", f"{config.global_batch_rows} rows accumulated"],
            ["steps", f"at least {-(-rows * config.passes // config.global_batch_rows):,}"],
            ["coverage", f"{run.coverage:.2f} scorings per supervised token and pass"],
            ["learning rate", f"{config.optim.lr:g}, gamma {run.row.gamma:g}, {config.dtype}"],
        ],
    )


@dataclass
class _Counters:
    """Host-side counts of a run; everything else of its state is in tensors or the position."""

    step: int = 0
    position: Position = field(default_factory=Position)
    tokens: int = 0
    anchors: int = 0
    empty_windows: int = 0


class _Window:
    """Sums since the last log line; losses stay on the device until then."""

    def __init__(self) -> None:
        self.losses: list[torch.Tensor] = []
        self.correct: list[torch.Tensor] = []
        self.norms: list[torch.Tensor] = []
        self.weight_sum = 0.0
        self.scored = 0
        self.tokens = 0
        self.anchors = 0
        self.started = time.perf_counter()
        self.wait_s = 0.0


def fit(config: FitConfig) -> Path:
    """Train and return the folder of the last checkpoint.

    Raises StoppedBySignal after a checkpoint when SIGTERM or Ctrl-C came, HscacheError when the
    loss is no longer finite.
    """
    run = plan_run(config)
    device = _device(config.device)
    run_dir = config.run_dir
    checkpoint = _starting_point(config)
    with files.disk_full_named(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(run_dir)
    save_config(config, run_dir / "config.json")
    print(describe(run))

    dtype = _DTYPES[config.dtype]
    frozen = load_frozen(run.cache)
    drafter = Drafter(run.drafter, torch.Generator().manual_seed(config.seed))
    with torch.no_grad():
        # The frozen head expects vectors at the scale of the target's own final norm.
        drafter.norm.weight.copy_(frozen.norm_H)
    drafter.to(device)
    optimizer = make_optimizer(
        drafter.parameters(),
        learning_rate=config.optim.lr,
        betas=config.optim.betas,
        weight_decay=config.optim.weight_decay,
    )
    counters = _Counters()
    if checkpoint is not None:
        found = read_state(checkpoint)
        require_same_run(found, _state(run, counters), checkpoint)
        restore(checkpoint, drafter, optimizer)
        counters = _Counters(
            step=found.step,
            position=found.position,
            tokens=found.tokens,
            anchors=found.anchors,
            empty_windows=found.empty_windows,
        )
        log.info("resuming %s at step %d", checkpoint, counters.step)
    return _train(run, drafter, optimizer, frozen.to(device, dtype), counters, device, dtype)


def _train(
    run: RunPlan,
    drafter: Drafter,
    optimizer: torch.optim.Optimizer,
    frozen: FrozenTarget,
    counters: _Counters,
    device: torch.device,
    dtype: torch.dtype,
) -> Path:
    config = run.config
    target = target_config(run.cache)
    parameters = list(drafter.parameters())

    def save() -> Path:
        return save_checkpoint(
            config.run_dir,
            drafter,
            optimizer,
            _state(run, counters),
            target,
            dtype,
            config.keep_checkpoints,
        )

    loader = Loader(
        run.cache,
        run.shards,
        passes=config.passes,
        rule=run.rule,
        row=run.row,
        device=device,
        dtype=dtype,
        threads=config.threads,
        start=counters.position,
    )
    metrics = MetricsLog(
        config.run_dir,
        after_step=counters.step,
        log_with=config.log_with,
        config=to_dict(config),
    )
    window = _Window()
    saved: Path | None = None
    with (
        stop_requested() as stop,
        metrics,
        loader,
        Progress(run.total_tokens, unit="tokens", label="fit", initial=counters.tokens) as progress,
    ):
        group: list[Batch] = []
        batches = iter(loader)
        ended = False
        while not ended:
            batch = next(batches, None)
            ended = batch is None
            if batch is not None:
                group.append(batch)
            if not group or (len(group) < config.global_batch_rows and not ended):
                continue
            _step(run, drafter, optimizer, parameters, frozen, group, counters, window)
            progress.advance(sum(b.num_tokens for b in group), **_shown)
            group = []
            signum = stop()
            due = counters.step % config.log_every == 0 or ended or signum is not None
            if due and window.scored:
                window.wait_s = loader.wait_s
                loader.wait_s = 0.0
                _log(window, metrics, counters, _rate(run, counters.tokens))
                window = _Window()
            if counters.step % config.checkpoint_every == 0 or signum is not None:
                saved = save()
            if signum is not None:
                raise StoppedBySignal(
                    f"stopped by signal {signum} after step {counters.step}; saved {saved}. "
                    "Continue with --resume.",
                    signum=signum,
                )
        saved = save()
    print(_summary(run, counters, saved, progress.mean_rate))
    return saved


_shown: dict[str, Any] = {}


def _step(
    run: RunPlan,
    drafter: Drafter,
    optimizer: torch.optim.Optimizer,
    parameters: list[torch.nn.Parameter],
    frozen: FrozenTarget,
    group: list[Batch],
    counters: _Counters,
    window: _Window,
) -> None:
    """Accumulate a group of rows and update once; the loss is divided by the group's weight."""
    optim = run.config.optim
    weight_sum = sum(batch.weight_sum for batch in group)
    for batch in group:
        counters.tokens += batch.num_tokens
        counters.anchors += batch.num_anchors
        window.tokens += batch.num_tokens
        window.anchors += batch.num_anchors
        if batch.weight_sum == 0:
            continue
        loss_sum, correct = row_loss(drafter, frozen, batch, run.config.loss.chunk_size)
        (loss_sum / weight_sum).backward()
        window.losses.append(loss_sum.detach())
        window.correct.append(correct)
        window.weight_sum += batch.weight_sum
        window.scored += len(batch.labels_M)
    counters.position = group[-1].position
    counters.step += 1
    if weight_sum == 0:
        counters.empty_windows += 1
        return
    window.norms.append(clip_gradients(parameters, optim.clip))
    rate = _rate(run, counters.tokens)
    for parameter_group in optimizer.param_groups:
        parameter_group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def row_loss(
    drafter: Drafter, frozen: FrozenTarget, batch: Batch, chunk_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (weighted loss sum, number of right predictions) of one row's scored slots."""
    config = drafter.config
    blocks_NBH = embed_blocks(
        frozen.embedding_VH,
        batch.anchor_ids_N,
        mask_token_id=config.mask_token_id,
        block_size=config.block_size,
    )
    context_kv = drafter.context_kv(batch.features_SF, batch.position_ids_S)
    hidden_NBH = drafter(blocks_NBH, context_kv, batch.context_start_N, batch.context_end_N)
    hidden_MH = hidden_NBH.view(-1, config.hidden_size)[batch.scored_slots_M]
    loss_sum, _, predicted_M = frozen_head_cross_entropy(
        hidden_MH, frozen.head_VH, batch.labels_M, batch.weights_M, chunk_size=chunk_size
    )
    return loss_sum, (predicted_M == batch.labels_M).sum()


def _rate(run: RunPlan, tokens: int) -> float:
    optim = run.config.optim
    return learning_rate(
        tokens - 1,
        total_steps=run.total_tokens,
        peak=optim.lr,
        warmup_fraction=optim.warmup_fraction,
        final_fraction=optim.final_fraction,
    )


def _log(window: _Window, metrics: MetricsLog, counters: _Counters, rate: float) -> None:
    loss = float(torch.stack(window.losses).sum()) / window.weight_sum
    norm = float(torch.stack(window.norms).max())
    seconds = time.perf_counter() - window.started
    if not (loss == loss and abs(loss) != float("inf") and norm == norm):
        raise HscacheError(
            f"the loss or its gradient is not finite at step {counters.step} (loss {loss}, norm "
            f"{norm}). No checkpoint was written since; lower optim.lr, or check the states with "
            "`hscache inspect`, and go on with --resume."
        )
    values = {
        "train/loss": loss,
        "train/accuracy": float(torch.stack(window.correct).sum()) / window.scored,
        "train/grad_norm_max": norm,
        "train/lr": rate,
        "train/tokens": counters.tokens,
        "train/empty_windows": counters.empty_windows,
        "perf/tokens_per_s": window.tokens / seconds,
        "perf/anchors_per_s": window.anchors / seconds,
        "perf/data_wait": window.wait_s / seconds,
    }
    metrics.log(counters.step, **values)
    _shown.update(loss=round(loss, 3), lr=f"{rate:.1e}")


def _state(run: RunPlan, counters: _Counters) -> TrainerState:
    settings = {name: value for name, value in to_dict(run.config).items() if name in _SETTINGS}
    settings["drafter"] = to_dict(run.drafter)
    return TrainerState(
        step=counters.step,
        position=counters.position,
        tokens=counters.tokens,
        anchors=counters.anchors,
        empty_windows=counters.empty_windows,
        total_tokens=run.total_tokens,
        cache=to_dict(run.cache.identity),
        schedule={
            "shards": run.shards,
            "passes": run.config.passes,
            "stride": len(run.shards),
            "anchor_rate": run.rule.rate,
        },
        settings=settings,
        checksums={},
    )


def _starting_point(config: FitConfig) -> Path | None:
    checkpoints = list_checkpoints(config.run_dir)
    if config.resume and not checkpoints:
        raise ConfigError(f"--resume: {config.run_dir} has no checkpoint to continue from.")
    if checkpoints and not config.resume:
        raise CacheMismatchError(
            f"{config.run_dir} already holds {checkpoints[-1].name}. Continue it with --resume, or "
            "give another --run-dir."
        )
    return checkpoints[-1] if checkpoints else None


def _remove_leftovers(run_dir: Path) -> None:
    for path in run_dir.glob(f"{files.TEMPORARY_PREFIX}*"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _device(name: str) -> torch.device:
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("device is cuda, and torch sees no CUDA device; use --device cpu.")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def _summary(run: RunPlan, counters: _Counters, saved: Path, rate: float) -> str:
    return format_table(
        ["trained", str(run.config.run_dir)],
        [
            ["steps", f"{counters.step:,}"],
            ["tokens", f"{counters.tokens:,} context tokens, {counters.anchors:,} anchors"],
            ["tokens/s", f"{rate:,.0f}"],
            ["updates skipped", f"{counters.empty_windows} (nothing supervised)"],
            ["checkpoint", str(saved)],
        ],
    )
