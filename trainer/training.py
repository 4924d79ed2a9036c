"""A run in progress: drafter, optimizers and counters, moved together one optimizer step at a time.

Takes a `RunPlan` and groups of rows; hands checkpoints their state. A step sums the loss over the
rows of its group and divides once by the group's weight, however the rows are cut.

Axes: N blocks, B block slots, M scored slots, H hidden.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from hscache.device import DTYPES
from hscache.errors import CacheMismatchError
from hscache.manifest import identity_diff
from hscache.settings import to_dict
from trainer.attention import Backend, training_backend
from trainer.batches import Batch
from trainer.checkpoint import (
    TrainerState,
    load_drafter,
    require_same_run,
    restore,
    save_checkpoint,
)
from trainer.config import OptimConfig
from trainer.drafter import Drafter
from trainer.frozen import FrozenTarget, initial_norm, load_frozen, target_config
from trainer.masters import Masters
from trainer.metrics import StepFigures, Window
from trainer.optim import learning_rate, make_optimizers, scale_gradients
from trainer.row_loss import Weighting, row_loss
from trainer.run_plan import RunPlan
from trainer.schedule import Position

_SETTINGS = ("optim", "row_tokens", "anchors_per_row", "global_batch_rows", "seed", "dtype")
"""Settings that decide the result; others may change on resume."""


# A CPU keeps a chunk's logits near its caches. A GPU wants products with as many rows as fit: all
# of a row's slots at the published sizes (512 x 15), 4 GB of logits at a vocabulary of 248,320.
_CPU_CHUNK, _GPU_CHUNK = 512, 8192


@dataclass(kw_only=True)
class Training:
    """Everything that an optimizer step changes."""

    drafter: Drafter
    masters: Masters
    frozen: FrozenTarget
    optim: OptimConfig
    total_tokens: int
    """tokens after which the learning rate has come down"""
    chunk_size: int
    """slots whose logits are in memory at once"""
    backend: Backend
    """how blocks attend"""
    weighting: Weighting = "decay"
    """how the scored slots of a block weigh"""
    optimizers: list[torch.optim.Optimizer] = field(init=False)
    step: int = 0
    position: Position = field(default_factory=Position)
    tokens: int = 0
    """context tokens consumed"""
    anchors: int = 0
    empty_windows: int = 0
    """steps in which nothing was supervised, and nothing was updated"""
    window: Window = field(default_factory=Window)

    def __post_init__(self) -> None:
        self.optimizers = make_optimizers(self.masters.parameters, self.optim)

    @property
    def rate(self) -> float:
        """The learning rate of the step that consumed the last token."""
        return learning_rate(
            max(0, self.tokens - 1),
            total_steps=self.total_tokens,
            peak=self.optim.lr,
            warmup_fraction=self.optim.warmup_fraction,
            final_fraction=self.optim.final_fraction,
            schedule=self.optim.schedule,
            decay_fraction=self.optim.decay_fraction,
        )

    def update(self, group: list[Batch]) -> None:
        """Accumulate the gradients of a group of rows in fp32 and step once."""
        weight_sum = sum(batch.weight_sum for batch in group)
        losses, corrects = [], []
        for batch in group:
            if batch.weight_sum == 0:
                continue
            loss_sum, correct = row_loss(
                self.drafter,
                self.frozen,
                batch,
                chunk_size=self.chunk_size,
                backend=self.backend,
                weighting=self.weighting,
            )
            loss_sum.backward()
            losses.append(loss_sum.detach())
            corrects.append(correct)
        self.step += 1
        self.position = group[-1].position
        num_tokens = sum(batch.num_tokens for batch in group)
        num_anchors = sum(batch.num_anchors for batch in group)
        self.tokens += num_tokens
        self.anchors += num_anchors
        sums = None
        if losses:
            norm = self.apply_gradients(weight_sum)
            sums = torch.stack(
                [torch.stack(losses).double().sum(), torch.stack(corrects).sum(), norm.double()]
            )
        else:
            self.empty_windows += 1
        self.window.add(
            self.step,
            tokens=num_tokens,
            anchors=num_anchors,
            weight_sum=weight_sum,
            num_scored=sum(len(batch.labels_M) for batch in group),
            sums=sums,
        )

    def apply_gradients(self, weight_sum: float) -> torch.Tensor:
        """Divide the gradients, clip them and step; return their norm before clipping."""
        norm = scale_gradients(self.masters.parameters, 1 / weight_sum, self.optim.clip)
        self._step_optimizers()
        return norm

    def _step_optimizers(self) -> None:
        rate = self.rate
        for optimizer in self.optimizers:
            for parameters in optimizer.param_groups:
                parameters["lr"] = rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.masters.round_into_drafter()


def start_training(run: RunPlan, device: torch.device) -> Training:
    """Return a run before its first step: weights from the seed alone, or from `init_from`.

    Raises CacheMismatchError with a diff when that drafter has another shape, mask token or layers.
    """
    training = _new_training(run, device)
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
    return training


def _new_training(run: RunPlan, device: torch.device) -> Training:
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
        chunk_size=config.loss.chunk_size or (_CPU_CHUNK if device.type == "cpu" else _GPU_CHUNK),
        backend=training_backend(config.attention, device),
        weighting=config.loss.weighting,
    )


def resume_training(
    run: RunPlan, device: torch.device, checkpoint: Path, found: TrainerState
) -> Training:
    """Return a run as it was when it wrote a checkpoint.

    Raises CacheMismatchError with a diff when this run reads or computes something else.
    """
    training = _new_training(run, device)
    require_same_run(found, training_state(run, training), checkpoint)
    restore(checkpoint, training.masters, training.optimizers)
    training.step = found.step
    training.position = found.position
    training.tokens = found.tokens
    training.anchors = found.anchors
    training.empty_windows = found.empty_windows
    training.window = Window(StepFigures(**figures) for figures in found.window)
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
    return TrainerState(
        step=training.step,
        position=training.position,
        tokens=training.tokens,
        anchors=training.anchors,
        empty_windows=training.empty_windows,
        window=[asdict(figures) for figures in training.window.read()],
        total_tokens=run.total_tokens,
        cache=to_dict(run.cache.identity),
        schedule={
            "shards": list(run.schedule.shards),
            "passes": run.schedule.passes,
            "stride": run.schedule.stride,
            "anchor_rate": run.rule.rate,
        },
        settings=settings,
    )


def save_training(run: RunPlan, training: Training) -> Path:
    """Write a checkpoint of the run; raises HscacheError instead when the loss is not finite."""
    return save_checkpoint(
        run.config.run_dir,
        training.drafter.config,
        training.masters,
        training.optimizers,
        training_state(run, training),
        target_config=target_config(run.cache),
        dtype=DTYPES[run.config.dtype],
        keep=run.config.keep_checkpoints,
    )
