"""What a run will take: bytes of a checkpoint, memory of a rank, and the table of its arithmetic.

Takes a `RunPlan`; hands on numbers and words, and refuses a GPU that is too small.
"""

from __future__ import annotations

import torch

from hscache.device import DTYPES
from hscache.drafter_sizes import num_parameters
from hscache.fit_memory import RunMemory, describe_memory, predict_memory
from hscache.report import format_bytes, format_table
from trainer.anchors import valid_anchors
from trainer.attention import training_backend
from trainer.checkpoint import checkpoint_bytes
from trainer.config import FitConfig
from trainer.frozen import head_is_tied
from trainer.memory import require_gpu_memory
from trainer.mixture import MixedSchedule, describe_mixture
from trainer.run_plan import RunPlan


def checkpoint_size(run: RunPlan, num_ranks: int) -> int:
    """Predict the bytes of one checkpoint of this run."""
    return checkpoint_bytes(
        num_parameters(run.drafter),
        dtype_bytes=DTYPES[run.config.dtype].itemsize,
        num_moments=1 if run.config.optim.name == "muon" else 2,
        mode=run.config.sync.mode,
        num_ranks=num_ranks,
    )


def _describe_ranks(config: FitConfig, num_ranks: int) -> str:
    if num_ranks == 1:
        return "1"
    sync = config.sync
    meet = "every step" if sync.mode == "ddp" else f"every {sync.local_steps:,} steps"
    return f"{num_ranks}, {sync.mode} {meet}"


def predicted_memory(run: RunPlan, device: torch.device, num_ranks: int) -> RunMemory:
    """Predict a rank's peak memory on its device."""
    config = run.config
    return predict_memory(
        run.drafter,
        row_tokens=config.row_tokens,
        anchors_per_row=config.anchors_per_row,
        rows_per_step=-(-config.global_batch_rows // num_ranks),
        chunk_size=config.loss.slots_per_chunk(device.type),
        dtype_bytes=DTYPES[config.dtype].itemsize,
        optimizer=config.optim.name,
        outer_step=num_ranks > 1 and config.sync.mode == "diloco",
        tied_head=head_is_tied(run.cache),
        soft_labels=run.row.soft_labels,
        backend=training_backend(config.attention, device),
    )


def require_room(run: RunPlan, device: torch.device, num_ranks: int) -> None:
    """Raise ConfigError, before anything is on it, when a GPU lacks the memory for this run."""
    backend = training_backend(run.config.attention, device)
    require_gpu_memory(predicted_memory(run, device, num_ranks), device, backend)


def _describe_held_out(run: RunPlan) -> list[list[str]]:
    every = run.config.eval_every_tokens
    if not run.held_out:
        return [["held out", "no evaluation"]]
    anchors = sum(len(valid_anchors(document.loss_mask)) for document in run.held_out)
    # Evaluation is a forward pass, a third of training's work for a block.
    cost = anchors / 3 / (every * run.config.anchors_per_row / run.config.row_tokens)
    return [
        [
            "held out",
            f"{len(run.held_out):,} documents, {anchors:,} anchors, every {every:,} tokens (about "
            f"{100 * cost:.2g} % of the work) and at checkpoints",
        ]
    ]


def _describe_shards(run: RunPlan) -> list[list[str]]:
    schedule = run.schedule
    if isinstance(schedule, MixedSchedule):
        return describe_mixture(schedule, [str(path) for path in run.config.shards])
    text = f"{len(schedule.shards)} x {schedule.passes} passes"
    if schedule.stride < len(schedule.shards):
        text += f" of a window, {schedule.stride} ticks apart"
    if run.config.follow:
        there = sum(run.cache.is_published(shard) for shard in schedule.shards)
        text += f"; following, {there} have been made"
    return [["shards", text]]


def describe(run: RunPlan, device: torch.device, num_ranks: int = 1) -> str:
    """Return the batch arithmetic and the predicted memory as a table."""
    config, drafter = run.config, run.drafter
    layers = list(drafter.target_layer_ids)
    steps = -(-run.total_tokens // (config.row_tokens * config.global_batch_rows))
    return format_table(
        ["fit", ", ".join(map(str, config.shards))],
        [
            ["drafter", f"{num_parameters(drafter):,} parameters, block {drafter.block_size}"],
            ["features", f"layers {layers} x {drafter.hidden_size}"],
            *_describe_shards(run),
            ["tokens", f"{run.total_tokens:,} over all passes"],
            ["row", f"{config.row_tokens:,} tokens, {config.anchors_per_row} anchors"],
            ["ranks", _describe_ranks(config, num_ranks)],
            ["step", f"{config.global_batch_rows} rows over all ranks, accumulated"],
            ["steps", f"at least {steps:,}"],
            ["coverage", f"{run.coverage:.2f} scorings per supervised token and pass"],
            ["loss", f"{config.loss.labels} labels, {_weighting(run)}"],
            ["learning rate", f"{config.optim.lr:g}, {config.optim.schedule}, {config.dtype}"],
            ["checkpoint", format_bytes(checkpoint_size(run, num_ranks))],
            *_describe_held_out(run),
            *describe_memory(predicted_memory(run, device, num_ranks), f" on {device.type}"),
        ],
    )


def _weighting(run: RunPlan) -> str:
    return "D-PACE" if run.row.gamma is None else f"gamma {run.row.gamma:g}"
