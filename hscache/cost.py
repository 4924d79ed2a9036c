"""What a run costs, as arithmetic: bytes, windows, FLOPs, and days by the way work is organised.

Takes counts and rates, gives numbers; nothing is opened or measured here. A *pipeline* is a way to
share N GPUs between the target and the drafter:

- lock step: the target runs in every pass, and each side waits for the other's half of a step
- online: the same work, both sides at once, each on its own GPUs; the slower one decides
- cached: the target runs once; all GPUs produce, then all train (they need not be split)
- window: the target runs once, both sides at once, because only a window fits the disk
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from hscache.config import DEFAULT_RESERVE
from hscache.planes import Codec
from hscache.window import visit_stride

DAY_S = 86_400.0
CACHED = "cached"
"""The pipeline in which `produce` ends before `trainer fit` starts."""

RATIOS: dict[Codec, float] = {"lossless": 1.43, "none": 1.0, "bitround4": 2.0, "fp8": 2.2}
"""bf16 bytes over stored bytes on real residual streams: the smaller of two targets' (SmolLM2 and
Gemma 3), so that a plan errs towards more disk."""


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """What a plan needs of the lengths of documents."""

    num_documents: int
    num_tokens: int
    mean_square: float
    """mean of the squared lengths"""
    longest: int

    @property
    def mean(self) -> float:
        """Tokens of a document."""
        return self.num_tokens / self.num_documents

    @property
    def mean_context(self) -> float:
        """Tokens that a token sees on average, documents weighed by their tokens."""
        return self.mean_square / self.mean / 2


def lengths_of(lengths_D: npt.NDArray[np.int64], num_tokens: int | None = None) -> Lengths:
    """Summarise documents; with `num_tokens` they are a sample of that many tokens."""
    lengths = lengths_D.astype(np.float64)
    tokens = int(lengths_D.sum()) if num_tokens is None else num_tokens
    return Lengths(
        num_documents=max(1, round(tokens / lengths.mean())),
        num_tokens=tokens,
        mean_square=float(np.square(lengths).mean()),
        longest=int(lengths_D.max()),
    )


def log_normal_lengths(
    mean_tokens: float, max_tokens: int, num_tokens: int, spread: float = 0.8
) -> Lengths:
    """Assume conversations: log-normal lengths, cut at `max_tokens`; `mean_tokens` is before."""
    from statistics import NormalDist

    quantiles = (np.arange(4096) + 0.5) / 4096
    normal = np.array([NormalDist().inv_cdf(float(q)) for q in quantiles])
    drawn = np.exp(spread * normal - spread**2 / 2) * mean_tokens
    return lengths_of(np.clip(np.rint(drawn), 2, max_tokens).astype(np.int64), num_tokens)


def num_shards(lengths: Lengths, shard_tokens: int) -> int:
    """Return the shards that documents fill, each closed before the one that would not fit.

    What is left empty is on average what has been seen of the document that did not fit.
    """
    gap = min(lengths.mean_square / lengths.mean / 2, shard_tokens / 2)
    return max(1, math.ceil(lengths.num_tokens / (shard_tokens - gap)))


@dataclass(frozen=True, kw_only=True)
class Window:
    """What a bounded cache can do."""

    shards: int
    """W that fits; 0 if none"""
    least_shards: int
    """P: with fewer no shard can be visited P times"""
    least_bytes: int
    """disk that the least window needs"""
    stride: int
    """shards between two visits of one (design.md section 5)"""
    passes: int
    """visits that the window allows, at most those wanted"""

    @property
    def fits(self) -> bool:
        """Whether every pass that is wanted can be made."""
        return self.shards >= self.least_shards


def plan_window(
    budget_bytes: float,
    *,
    shard_bytes: float,
    num_training_shards: int,
    held_out_bytes: float,
    fixed_bytes: float,
    passes: int,
    reserve: int = DEFAULT_RESERVE,
) -> Window:
    """Return the largest window in a budget, counted in worst-case shards (design.md section 5).

    Plan, frozen parts and held-out shards always stay; `reserve` shards are for those in flight.
    """
    always = fixed_bytes + held_out_bytes
    least = min(passes, num_training_shards)
    fitting = int((budget_bytes - always) // shard_bytes) - reserve
    shards = max(0, min(fitting, num_training_shards))
    return Window(
        shards=shards,
        least_shards=least,
        least_bytes=math.ceil(always + (least + reserve) * shard_bytes),
        stride=visit_stride(shards, num_training_shards, passes) if shards else 0,
        passes=passes if shards >= least else shards,
    )


@dataclass(frozen=True, kw_only=True)
class Work:
    """FLOPs of a run, a token."""

    num_tokens: int
    passes: int
    target: float
    """of the target's forward"""
    drafter: float
    """of one training pass"""

    @property
    def online_flop(self) -> float:
        """The target in every pass."""
        return self.num_tokens * self.passes * (self.target + self.drafter)

    @property
    def cached_flop(self) -> float:
        """The target once."""
        return self.num_tokens * (self.target + self.passes * self.drafter)


Writing = Literal["beside", "after", "included"]
"""Packs are encoded and written beside the next forward (a GPU), after their own (a CPU); or the
target's rate is that of shards, whose writing is in it."""


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """What one GPU reaches on each side, FLOP/s; and what the disk does, bytes/s (inf: unknown)."""

    target: float
    trainer: float
    write: float = math.inf
    read: float = math.inf
    writing: Writing = "beside"


@dataclass(frozen=True, kw_only=True)
class Pauses:
    """What a run takes beside its steps, in seconds; 0 where nothing was measured."""

    target_start_s: float = 0.0
    """from the start of `produce` to its first pack"""
    trainer_start_s: float = 0.0
    """from the start of `trainer fit` to its first step"""
    looks_s: float = 0.0
    """at held-out documents, all of a run"""
    checkpoints_s: float = 0.0
    """that training stops for, and the last one until it is on disk"""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """How long a way to organise the work takes, and why."""

    name: str
    target_gpus: int
    trainer_gpus: int
    """equal to the number of GPUs on both sides where they take turns"""
    steps_s: float
    """packs of the target and steps of the drafter"""
    bottleneck: str
    start_s: float = 0.0
    looks_s: float = 0.0
    checkpoints_s: float = 0.0

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.start_s + self.steps_s + self.looks_s + self.checkpoints_s

    @property
    def days(self) -> float:
        """The same in days."""
        return self.seconds / DAY_S

    def with_pauses(self, pauses: Pauses) -> Estimate:
        """Add what the run takes beside its steps.

        Programs that run one after the other start one after the other, else at the same time.
        Looks and checkpoints stop the drafter only, but are added in full.
        """
        starts = (pauses.target_start_s, pauses.trainer_start_s)
        return dataclasses.replace(
            self,
            start_s=sum(starts) if self.name == CACHED else max(starts),
            looks_s=pauses.looks_s,
            checkpoints_s=pauses.checkpoints_s,
        )


def lock_step(work: Work, speeds: Speeds, num_gpus: int) -> Estimate:
    """Estimate online training in which target and drafter wait for each other.

    One GPU takes turns; several are split as well as can be.
    """
    tokens = work.num_tokens * work.passes

    def split(target_gpus: int, trainer_gpus: int) -> Estimate:
        target_s = tokens * work.target / (target_gpus * speeds.target)
        drafter_s = tokens * work.drafter / (trainer_gpus * speeds.trainer)
        return Estimate(
            name="lock step",
            target_gpus=target_gpus,
            trainer_gpus=trainer_gpus,
            steps_s=target_s + drafter_s,
            bottleneck="each side waits for the other",
        )

    return split(1, 1) if num_gpus == 1 else _best(split, num_gpus)


def online(work: Work, speeds: Speeds, num_gpus: int) -> Estimate:
    """Estimate online training with a queue in memory: both sides at once, nothing kept."""
    tokens = work.num_tokens * work.passes

    def split(target_gpus: int, trainer_gpus: int) -> Estimate:
        return _slowest(
            "asynchronous online", target_gpus, trainer_gpus,
            {
                "target": tokens * work.target / (target_gpus * speeds.target),
                "drafter": tokens * work.drafter / (trainer_gpus * speeds.trainer),
            },
        )  # fmt: skip

    if num_gpus == 1:
        return _in_turns("asynchronous online", work, speeds, 1, target_passes=work.passes)
    return _best(split, num_gpus)


def cached(work: Work, speeds: Speeds, num_gpus: int, token_bytes: float) -> Estimate:
    """Estimate the target once, over everything: all GPUs produce, then all of them train."""
    return _in_turns(CACHED, work, speeds, num_gpus, target_passes=1, token_bytes=token_bytes)


def windowed(work: Work, speeds: Speeds, num_gpus: int, token_bytes: float) -> Estimate | None:
    """Estimate producing and training at once through a window; None on one GPU, which can't."""
    if num_gpus == 1:
        return None

    def split(target_gpus: int, trainer_gpus: int) -> Estimate:
        tokens = work.num_tokens
        return _slowest(
            "window", target_gpus, trainer_gpus,
            {
                "target": tokens * work.target / (target_gpus * speeds.target),
                "drafter": tokens * work.passes * work.drafter / (trainer_gpus * speeds.trainer),
                "disk": tokens * token_bytes * (1 / speeds.write + work.passes / speeds.read),
            },
        )  # fmt: skip

    return _best(split, num_gpus)


def _in_turns(
    name: str,
    work: Work,
    speeds: Speeds,
    num_gpus: int,
    *,
    target_passes: int,
    token_bytes: float = 0.0,
) -> Estimate:
    tokens = work.num_tokens
    target_s = tokens * target_passes * work.target / (num_gpus * speeds.target)
    drafter_s = tokens * work.passes * work.drafter / (num_gpus * speeds.trainer)
    write_s = tokens * token_bytes / speeds.write
    read_s = tokens * work.passes * token_bytes / speeds.read
    produce_s = {
        "beside": max(target_s, write_s), "after": target_s + write_s, "included": target_s
    }[speeds.writing]  # fmt: skip
    seconds = produce_s + max(drafter_s, read_s)
    # The stage that would save most if it cost nothing.
    savings = {
        "target": produce_s if speeds.writing == "included" else produce_s - write_s,
        "drafter": max(drafter_s, read_s) - read_s,
        "disk (write)": produce_s - target_s,
        "disk (read)": max(drafter_s, read_s) - drafter_s,
    }
    worst = max(savings, key=lambda stage: savings[stage])
    share = {"target": target_s, "drafter": drafter_s}.get(worst, savings[worst]) / seconds
    return Estimate(
        name=name,
        target_gpus=num_gpus,
        trainer_gpus=num_gpus,
        steps_s=seconds,
        bottleneck=f"{worst}: {share:.0%} of the time",
    )


def _slowest(name: str, target_gpus: int, trainer_gpus: int, seconds: dict[str, float]) -> Estimate:
    worst = max(seconds, key=lambda stage: seconds[stage])
    others = max(value for stage, value in seconds.items() if stage != worst)
    return Estimate(
        name=name,
        target_gpus=target_gpus,
        trainer_gpus=trainer_gpus,
        steps_s=seconds[worst],
        bottleneck=f"{worst}: the other side is busy {others / seconds[worst]:.0%} of the time",
    )


def _best(split: Callable[[int, int], Estimate], num_gpus: int) -> Estimate:
    choices = [split(target, num_gpus - target) for target in range(1, num_gpus)]
    return min(choices, key=lambda estimate: estimate.seconds)


def fit_pauses(
    num_tokens: float,
    *,
    tokens_per_step: float,
    checkpoint_every: int,
    eval_every_tokens: int,
    first_look_s: float,
    look_s: float,
    copy_s: float,
    checkpoint_s: float,
) -> tuple[float, float]:
    """Return the seconds of all looks and of all checkpoints of a fit over so many tokens.

    A look comes every `eval_every_tokens` (0: never), at regular checkpoints and at the end.
    """
    steps = math.ceil(num_tokens / tokens_per_step)
    regular = (steps - 1) // checkpoint_every
    looks = regular + num_tokens // eval_every_tokens + 1 if eval_every_tokens else 0
    looks_s = first_look_s + (looks - 1) * look_s if looks else 0.0
    return looks_s, regular * copy_s + checkpoint_s


def limit_days(flop: float, num_gpus: int, flop_per_s: float) -> float:
    """Return the days that so much work takes at a rate: no pipeline can take less."""
    return flop / (num_gpus * flop_per_s) / DAY_S


@dataclass(frozen=True, kw_only=True)
class Lever:
    """One change to a run, applied after those before it."""

    name: str
    days: float
    """with this lever and all before it"""
    saved_days: float
    factor: float
    """against the lever before"""
    compound: float
    """against the first line: the product of all factors so far"""


def compound(steps: Sequence[tuple[str, float]]) -> list[Lever]:
    """Return what each of (name, days) saves against the one before, and all so far together."""
    levers = []
    before = first = steps[0][1]
    for name, days in steps:
        levers.append(
            Lever(
                name=name,
                days=days,
                saved_days=before - days,
                factor=before / days,
                compound=first / days,
            )
        )
        before = days
    return levers
