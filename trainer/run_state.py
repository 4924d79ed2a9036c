"""Where a run is: begun from a seed, taken up from a checkpoint, saved as one.

Takes a `RunPlan`; hands on the `Training` that its steps change, and writes what of it a resume
needs. A checkpoint of another cache, schedule or setting is refused with a diff.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from hscache.device import DTYPES
from hscache.errors import CacheMismatchError
from hscache.manifest import identity_diff
from hscache.settings import to_dict
from trainer.attention import training_backend
from trainer.cache_set import identities_of
from trainer.checkpoint import (
    TrainerState,
    require_same_run,
    restore,
    take_snapshot,
    write_checkpoint,
)
from trainer.checkpoint_writer import (
    CheckpointWriter,
    cancel_moments,
    gather_moments,
    write_moments,
)
from trainer.drafter import Drafter
from trainer.drafter_folder import load_drafter
from trainer.frozen import initial_norm, load_frozen, target_config
from trainer.masters import Masters
from trainer.metrics import StepFigures, Window
from trainer.mixture import MixedSchedule
from trainer.ranks import Ranks
from trainer.rows import PACKING
from trainer.run_folder import checkpoint_folder
from trainer.run_plan import RunPlan
from trainer.training import Training

_SETTINGS = ("optim", "row_tokens", "anchors_per_row", "global_batch_rows", "seed", "dtype")
"""Settings that decide the result; others may change on resume."""


def start_training(run: RunPlan, device: torch.device, ranks: Ranks | None = None) -> Training:
    """Return a run before its first step: weights from the seed alone, or from `init_from`.

    Raises CacheMismatchError with a diff when that drafter has another shape, mask token or layers.
    """
    training = _new_training(run, device, ranks or Ranks())
    source = run.config.init_from
    if source is not None:
        drafter = load_drafter(source, num_target_layers=run.drafter.num_target_layers)
        # how long a context it is said to serve is nobody's weight
        asked = replace(run.drafter, max_position_embeddings=drafter.config.max_position_embeddings)
        if lines := identity_diff(drafter.config, asked, "drafter.", who=str(source)):
            raise CacheMismatchError(
                f"--init-from {source} is another drafter than this run trains:\n"
                + "\n".join(lines)
                + "\nGive the drafter settings of that folder, on a cache with its layers."
            )
        training.masters.load(drafter.state_dict())
        if training.outer is not None:
            training.outer.reset(training.masters.parameters)
    return training


def _new_training(run: RunPlan, device: torch.device, ranks: Ranks) -> Training:
    config = run.config
    torch.manual_seed(config.seed)  # nothing draws from it yet; checkpoints hold its state
    frozen = load_frozen(run.cache)
    drafter = Drafter(run.drafter, torch.Generator().manual_seed(config.seed))
    with torch.no_grad():
        drafter.norm.weight.copy_(initial_norm(frozen))
    drafter = drafter.to(device)
    return Training(
        drafter=drafter,
        masters=Masters(drafter, DTYPES[config.dtype]),
        frozen=frozen.to(device, DTYPES[config.dtype]),
        optim=config.optim,
        total_tokens=run.total_tokens,
        chunk_size=config.loss.slots_per_chunk(device.type),
        backend=training_backend(config.attention, device),
        weighting=config.loss.weighting,
        ranks=ranks,
        sync=config.sync,
    )


def resume_training(
    run: RunPlan,
    device: torch.device,
    checkpoint: Path,
    found: TrainerState,
    ranks: Ranks | None = None,
) -> Training:
    """Return a run as it was when it wrote a checkpoint, maybe under another number of ranks.

    Raises CacheMismatchError with a diff when this run reads or computes something else.
    """
    ranks = ranks or Ranks()
    training = _new_training(run, device, ranks)
    require_same_run(found, training_state(run, training), checkpoint)
    restore(
        checkpoint,
        found,
        training.masters,
        training.optimizers,
        training.outer,
        rank=ranks.rank,
        num_ranks=ranks.num_ranks,
    )
    training.step = found.step
    training.position = found.position
    training.tokens = found.tokens
    training.anchors = found.anchors
    training.empty_windows = found.empty_windows
    training.window = Window(StepFigures(**figures) for figures in found.window)
    training.logged_step = found.logged_step
    training.skipped = [(document, pass_index) for document, pass_index in found.skipped]
    training.begin()
    return training


def training_state(run: RunPlan, training: Training) -> TrainerState:
    """Return what a checkpoint stores beside tensors.

    Raises HscacheError when the loss is no longer finite: such a state must not be kept.
    """
    settings: dict[str, Any] = {
        name: value for name, value in to_dict(run.config).items() if name in _SETTINGS
    }
    settings["labels"] = run.config.loss.labels
    settings["weighting"] = run.config.loss.weighting
    settings["gamma"] = run.row.gamma
    settings["sample_slots"] = run.row.sample_slots
    settings["drafter"] = to_dict(run.drafter)
    settings["sync"] = {k: v for k, v in to_dict(run.config.sync).items() if k != "timeout_s"}
    return TrainerState(
        step=training.step,
        position=training.position,
        tokens=training.tokens,
        anchors=training.anchors,
        empty_windows=training.empty_windows,
        window=[asdict(figures) for figures in training.window.read()],
        logged_step=training.logged_step,
        moment_ranks=0 if training.together else training.ranks.num_ranks,
        total_tokens=run.total_tokens,
        cache=identities_of(run.cache),
        schedule={
            "shards": list(run.schedule.shards),
            "passes": run.schedule.passes,
            "stride": run.schedule.stride,
            "anchor_rate": run.rule.rate,
            "packing": PACKING,
            **_mixture(run),
        },
        settings=settings,
        skipped=[list(pair) for pair in training.skipped],
    )


def _mixture(run: RunPlan) -> dict[str, Any]:
    if not isinstance(run.schedule, MixedSchedule):
        return {}
    return {"weights": list(run.schedule.weights), "parts": [len(p) for p in run.schedule.parts]}


def save_training(
    run: RunPlan,
    training: Training,
    writer: CheckpointWriter,
    *,
    best: bool = False,
    durable: Callable[[], None] = lambda: None,
) -> Path:
    """Copy the run's state and begin to write it as a checkpoint; return where it will appear.

    `best` marks it so once it is there, and `durable` is called then; only rank 0's count.
    To be called by every rank, at the same step and after a meeting. Raises HscacheError instead
    when the loss is not finite, and whatever the writing of the checkpoint before it raised.
    """
    writer.finish()  # before another copy of everything is made
    ranks, config = training.ranks, run.config
    state = training_state(run, training)
    final = checkpoint_folder(config.run_dir, state.step)
    if not ranks.is_first and training.together:
        return final
    snapshot = take_snapshot(
        training.masters, training.optimizers, training.outer, with_masters=ranks.is_first
    )

    def others(folder: Path) -> dict[str, str]:
        if training.together:
            return {}
        return gather_moments(folder, ranks, state.step, writer.abandoned)

    def write() -> None:
        if not ranks.is_first:
            write_moments(config.run_dir, snapshot, ranks, state.step, writer.abandoned)
            return
        try:
            write_checkpoint(
                config.run_dir,
                training.drafter.config,
                snapshot,
                state,
                target_config=target_config(run.cache),
                dtype=DTYPES[config.dtype],
                keep=config.keep_checkpoints,
                best=best,
                others=others,
            )
            durable()
        except Exception as error:
            if not training.together:
                cancel_moments(ranks, state.step, error)
            raise

    writer.start(write)
    return final
