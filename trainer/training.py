"""A run in progress: drafter, optimizers and counters, moved together one optimizer step at a time.

Takes this rank's rows of a step; `trainer.run_state` begins, resumes and saves it. A step sums the
loss over its rows and divides once by their weight, however they are cut: over all ranks in `ddp`,
over the rank's own where ranks step alone between two meetings.

Axes: N blocks, B block slots, M scored slots, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from hscache.errors import HscacheError
from trainer.attention import Backend
from trainer.bad_shards import Skipped, gather_skipped
from trainer.batches import Batch, StepEnd
from trainer.config import OptimConfig, SyncConfig
from trainer.drafter import Drafter
from trainer.frozen import FrozenTarget
from trainer.lowering_adamw import LoweringAdamW
from trainer.masters import Masters
from trainer.metrics import Window
from trainer.optim import learning_rate, make_optimizers, step_optimizers
from trainer.ranks import Ranks
from trainer.row_loss import Weighting, row_loss
from trainer.schedule import Position, joint_position
from trainer.sync import OuterStep, checksum, make_outer, synchronise


@dataclass(kw_only=True)
class Work:
    """What a rank has done since the last meeting."""

    num_steps: int = 0
    tokens: int = 0
    anchors: int = 0
    empty_windows: int = 0
    weight_sum: float = 0.0
    num_scored: int = 0
    sums: list[torch.Tensor] = field(default_factory=list)
    """[loss sum, right predictions, gradient norm] of each update, on the device"""


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
    ranks: Ranks = field(default_factory=Ranks)
    sync: SyncConfig = field(default_factory=SyncConfig)
    optimizers: list[torch.optim.Optimizer] = field(init=False)
    outer: OuterStep | None = field(init=False)
    step: int = 0
    position: Position = field(default_factory=Position)
    """of all ranks; of this one while it steps alone"""
    tokens: int = 0
    """context tokens consumed, over all ranks; exact at a meeting, and before it as if all ranks
    were at the same step"""
    anchors: int = 0
    empty_windows: int = 0
    """steps in which nothing was supervised, and nothing was updated"""
    window: Window = field(default_factory=Window)
    logged_step: int = 0
    """the step of the last line of metrics"""
    skipped: list[Skipped] = field(default_factory=list)
    """what could not be read, over all ranks, when they last agreed on it"""
    newly_skipped: list[Skipped] = field(default_factory=list)
    """what this rank could not read since then"""

    def __post_init__(self) -> None:
        self.optimizers = make_optimizers(self.masters.parameters, self.optim, self.masters.lowered)
        self.outer = None if self.together else make_outer(self.masters.parameters, self.sync)
        self.begin()

    def begin(self) -> None:
        """Take the counters as they are for those of a meeting; after a change from outside."""
        self.work = Work()
        self._start = self._reached = self.position
        self._met = (self.step, self.tokens, self.anchors)

    @property
    def together(self) -> bool:
        """Whether every optimizer step is one of all ranks; also if there is only one."""
        return self.ranks.alone or self.sync.mode == "ddp"

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

    def update(self, rows: list[Batch], end: StepEnd | None = None) -> None:
        """Accumulate the gradients of this rank's rows in fp32 and step once.

        `end` describes the step over all ranks; without it these are all of its rows. In `ddp`
        every rank must call this for every step, also without rows.
        """
        end = end or StepEnd(
            position=rows[-1].position,
            num_tokens=sum(batch.num_tokens for batch in rows),
            num_anchors=sum(batch.num_anchors for batch in rows),
        )
        self.step += 1
        self.newly_skipped += end.skipped
        self._reached = end.position
        self.position = joint_position([end.position], self._start)
        self.tokens += end.num_tokens
        self.anchors += end.num_anchors
        weight_sum = sum(batch.weight_sum for batch in rows)
        num_scored = sum(len(batch.labels_M) for batch in rows)
        sums = self._accumulate(rows)
        if self.together:
            weight_sum, num_scored = self._add_over_ranks(weight_sum, num_scored, sums)
        update = None
        if weight_sum > 0:
            norm = self.apply_gradients(weight_sum)
            update = torch.cat([sums, norm.double()[None]])
        if self.together:
            self.empty_windows += update is None
            self.window.add(
                self.step,
                tokens=end.num_tokens,
                anchors=end.num_anchors,
                weight_sum=weight_sum,
                num_scored=num_scored,
                sums=update,
            )
            return
        self.work.num_steps += 1
        self.work.tokens += sum(batch.num_tokens for batch in rows) + end.skipped_tokens
        self.work.anchors += sum(batch.num_anchors for batch in rows)
        self.work.weight_sum += weight_sum
        self.work.num_scored += num_scored
        self.work.empty_windows += update is None
        if update is not None:
            self.work.sums.append(update)

    def row_loss(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (weighted loss sum, number of right predictions), scalars, as this run counts."""
        return row_loss(
            self.drafter,
            self.frozen,
            batch,
            chunk_size=self.chunk_size,
            backend=self.backend,
            weighting=self.weighting,
        )

    def _accumulate(self, rows: list[Batch]) -> torch.Tensor:
        """Add the gradients of the rows; return [loss sum, right predictions], fp64."""
        losses, corrects = [], []
        for batch in rows:
            if batch.weight_sum == 0:
                continue
            loss_sum, correct = self.row_loss(batch)
            loss_sum.backward()
            losses.append(loss_sum.detach())
            corrects.append(correct)
        if not losses:
            device = self.masters.parameters[0].device
            return torch.zeros(2, dtype=torch.float64, device=device)
        return torch.stack([torch.stack(losses).double().sum(), torch.stack(corrects).sum()])

    def _add_over_ranks(
        self, weight_sum: float, num_scored: int, sums: torch.Tensor
    ) -> tuple[float, int]:
        """Replace gradients and `sums` by those of all ranks; return weight and slots of all."""
        if self.ranks.alone:
            return weight_sum, num_scored
        weight_sum, scored = self.ranks.add_numbers([weight_sum, num_scored])
        if weight_sum > 0:
            for parameter in self.masters.parameters:
                if parameter.grad is None:  # no row of this rank taught it anything
                    parameter.grad = torch.zeros_like(parameter)
            self.ranks.add_([p.grad for p in self.masters.parameters if p.grad is not None])
            self.ranks.add_([sums])
        return weight_sum, int(scored)

    def apply_gradients(self, weight_sum: float) -> torch.Tensor:
        """Divide the gradients, clip them and step; return their norm before clipping, a scalar on
        the device."""
        norm = step_optimizers(
            self.optimizers, scale=1 / weight_sum, max_norm=self.optim.clip, rate=self.rate
        )
        if not isinstance(self.optimizers[0], LoweringAdamW):
            self.masters.round_into_drafter()
        return norm

    def meet(self, *flags: int) -> list[list[int]]:
        """Let ranks that stepped alone become one again; return every rank's flags.

        All ranks must come. Afterwards weights and counters are those of the whole run. Raises
        HscacheError when the weights still differ.
        """
        work, reached = self.work, self._reached
        found = self.ranks.gather(
            [
                *flags, reached.rows, reached.tick, reached.row_in_tick, work.num_steps,
                work.tokens, work.anchors, work.empty_windows, work.num_scored, work.weight_sum,
            ]
        )  # fmt: skip
        theirs = [numbers[len(flags) :] for numbers in found]
        weights = [numbers[-1] for numbers in theirs]
        steps, tokens, anchors, empty, num_scored = (
            [int(number) for number in column] for column in list(zip(*theirs, strict=True))[3:-1]
        )
        if any(steps):
            self.step = self._met[0] + max(steps)
            self.tokens = self._met[1] + sum(tokens)
            self.anchors = self._met[2] + sum(anchors)
            self.empty_windows += sum(empty)
            self.position = joint_position(
                [
                    Position(rows=int(rows), tick=int(tick), row_in_tick=int(row))
                    for rows, tick, row, *_ in theirs
                ],
                self._start,
            )
            self.window.add(
                self.step,
                tokens=sum(tokens),
                anchors=sum(anchors),
                weight_sum=sum(weights),
                num_scored=sum(num_scored),
                sums=self._sums_of_all() if sum(weights) else None,
            )
            synchronise(
                self.masters.parameters, weights, self.ranks, mode=self.sync.mode, outer=self.outer
            )
            self.masters.round_into_drafter()
            self.require_equal_weights()
        self.work = Work()
        self._met = (self.step, self.tokens, self.anchors)
        return [[int(flag) for flag in numbers[: len(flags)]] for numbers in found]

    def _sums_of_all(self) -> torch.Tensor:
        """Return [loss sum, right predictions, largest gradient norm] since the last meeting."""
        device = self.masters.parameters[0].device
        none = torch.zeros(1, 3, dtype=torch.float64, device=device)
        own_U3 = torch.stack(self.work.sums) if self.work.sums else none
        own = torch.cat([own_U3[:, :2].sum(0), own_U3[:, 2:].amax(0)])
        all_R3 = self.ranks.gather_tensor(own)
        return torch.cat([all_R3[:, :2].sum(0), all_R3[:, 2:].amax(0)])

    def agree_on_skipped(self) -> None:
        """Let every rank know what any has skipped; all must come."""
        found = gather_skipped(self.newly_skipped, self.ranks)
        self.skipped = sorted([*self.skipped, *found])
        self.newly_skipped = []

    def require_equal_weights(self) -> None:
        """Raise HscacheError when the ranks' weights differ (waits for the device)."""
        if self.ranks.alone:
            return
        sums = self.ranks.gather_tensor(checksum(self.masters.parameters)).tolist()
        if differ := [rank for rank, found in enumerate(sums) if found != sums[0]]:
            raise HscacheError(
                f"after step {self.step} the weights of ranks {differ} differ from those of rank "
                "0: a device or a link computes or copies wrongly. Nothing was saved since the "
                "last checkpoint; continue from it with --resume on other hardware."
            )
