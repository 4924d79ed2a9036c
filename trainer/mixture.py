"""The order of training on several caches: how often each is read, and how their shards mix.

Takes the shards of each cache, passes and weights; hands on a schedule. A weight multiplies the
passes: with 6 passes and weights 1 and 0.5 the first cache is read 6 times and the second 3 times.
Each cache's visits are spread evenly over the run, one shard a tick. Pure, and without a seed.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from hscache.plan import Plan
from trainer.anchors import anchor_rate
from trainer.schedule import AnchorRule, Schedule, Visit, expected_tokens


@dataclass(frozen=True, kw_only=True)
class MixedSchedule(Schedule):
    """Visits of the shards of several caches; `shards` are those of all, `stride` is not used."""

    parts: tuple[tuple[int, ...], ...]
    """the shards of each cache"""
    weights: tuple[float, ...]

    @cached_property
    def _order(self) -> list[Visit]:
        # The k-th of V visits lies at (k + 1/2) / V of the run; the sort is exact in fractions of
        # integers up to 2**53 and stable, so ties go to the cache that was named first.
        timed = [
            ((k + 0.5) / count, Visit(shard=part[k % len(part)], pass_index=k // len(part)))
            for part, count in zip(self.parts, self.visits_of_parts(), strict=True)
            for k in range(count)
        ]
        return [visit for _, visit in sorted(timed, key=lambda pair: pair[0])]

    def visits_of_parts(self) -> list[int]:
        """Return how often shards of each cache are visited; a part of a pass takes the first."""
        return [
            max(1, round(self.passes * weight * len(part)))
            for part, weight in zip(self.parts, self.weights, strict=True)
        ]

    @property
    def num_ticks(self) -> int:
        """One tick for every visit."""
        return len(self._order)

    def visits(self, tick: int) -> list[Visit]:
        """Return the visit of a tick."""
        return [self._order[tick]]


def mixed_rule(
    plan: Plan,
    schedule: MixedSchedule,
    documents: dict[int, Sequence[int]],
    *,
    row_tokens: int,
    anchors_per_row: int,
    seed: int,
) -> AnchorRule:
    """Return the rule that fills the anchor slots over the whole run; `documents` by shard."""
    tokens = anchors = 0
    for visit in itertools.chain.from_iterable(map(schedule.visits, range(schedule.num_ticks))):
        rows = documents[visit.shard]
        tokens += int(plan.lengths[rows].sum())
        anchors += int(plan.valid_anchors[rows].sum())
    rate = anchor_rate(
        total_tokens=tokens,
        total_valid_anchors=anchors,
        row_tokens=row_tokens,
        anchors_per_row=anchors_per_row,
    )
    return AnchorRule(rate=rate, limit=anchors_per_row, seed=seed)


def mixed_tokens(
    plan: Plan, schedule: MixedSchedule, documents: dict[int, Sequence[int]], rule: AnchorRule
) -> int:
    """Return the context tokens of the run, on average over the anchors' draws."""
    of_shard = {s: expected_tokens(plan, rows, rule) for s, rows in documents.items()}
    ticks = range(schedule.num_ticks)
    return round(sum(of_shard[visit.shard] for tick in ticks for visit in schedule.visits(tick)))


def describe_mixture(schedule: MixedSchedule, names: Sequence[str]) -> list[list[str]]:
    """Return rows for the table of a run: what is read of each cache."""
    counts = zip(names, schedule.parts, schedule.visits_of_parts(), strict=True)
    return [
        ["shards", f"{len(part)} x {visits / len(part):.4g} passes of {name}"]
        for name, part, visits in counts
    ]
