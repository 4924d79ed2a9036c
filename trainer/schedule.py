"""The order of training: which shard is visited when, and which documents fill which row.

Takes the plan, the seed and the number of passes; hands on ticks and row lists. Everything here is
a pure function, so a resumed run, a run on other ranks, and one that follows a producer see the
same rows in the same order (design.md section 5).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hscache.plan import Plan
from trainer.anchors import anchor_rate, sample_anchors, valid_anchors
from trainer.rows import IntArray, pack_rows


@dataclass(frozen=True, kw_only=True)
class Visit:
    """One consumption of a shard."""

    shard: int
    pass_index: int


def tick_visits(
    tick: int, *, num_shards: int, passes: int, stride: int, first_shard: int = 0
) -> list[Visit]:
    """Return the visits of a tick: shards k, k - s, ..., k - (P - 1) s, where they exist.

    `num_shards` counts training shards only and `first_shard` is the id of the first. With
    `stride` = num_shards these are ordinary epochs, one shard a tick.
    """
    visits = []
    for pass_index in range(passes):
        number = tick - pass_index * stride
        if 0 <= number < num_shards:
            visits.append(Visit(shard=first_shard + number, pass_index=pass_index))
    return visits


def num_ticks(*, num_shards: int, passes: int, stride: int) -> int:
    """Return how many ticks a run has."""
    return num_shards + (passes - 1) * stride


@dataclass(frozen=True, kw_only=True)
class AnchorRule:
    """How many anchors a document gets, and from which seed."""

    rate: float
    limit: int
    seed: int


def anchor_rule(
    plan: Plan, shards: list[int], *, row_tokens: int, anchors_per_row: int, seed: int
) -> AnchorRule:
    """Return the rule that fills the anchor slots of the given training shards."""
    documents = np.concatenate([list(plan.shard_documents(shard)) for shard in shards])
    rate = anchor_rate(
        total_tokens=int(plan.lengths[documents].sum()),
        total_valid_anchors=int(plan.valid_anchors[documents].sum()),
        row_tokens=row_tokens,
        anchors_per_row=anchors_per_row,
    )
    return AnchorRule(rate=rate, limit=anchors_per_row, seed=seed)


@dataclass(frozen=True, kw_only=True)
class RowPlan:
    """Documents and anchors of one row."""

    documents: tuple[int, ...]
    pass_indices: tuple[int, ...]
    anchors: tuple[IntArray, ...]


def tick_rows(
    plan: Plan,
    visits: list[Visit],
    rule: AnchorRule,
    *,
    tick: int,
    row_tokens: int,
    anchors_per_row: int,
    skip: frozenset[int] = frozenset(),
) -> list[RowPlan]:
    """Deal the documents of a tick's visits into rows, in an order seeded by (seed, tick).

    `skip` holds documents without states (quarantined). Raises ConfigError for a document longer
    than a row.
    """
    pairs = [
        (document, visit.pass_index)
        for visit in visits
        for document in plan.shard_documents(visit.shard)
        if document not in skip
    ]
    anchors = [
        sample_anchors(
            valid_anchors(plan.loss_mask(document) != 0),
            rate=rule.rate,
            limit=rule.limit,
            seed=rule.seed,
            pass_index=pass_index,
            document_id=document,
        )
        for document, pass_index in pairs
    ]
    order = np.random.default_rng([rule.seed, tick]).permutation(len(pairs))
    rows = pack_rows(
        [int(plan.lengths[document]) for document, _ in pairs],
        [len(positions) for positions in anchors],
        order.tolist(),
        row_tokens=row_tokens,
        anchors_per_row=anchors_per_row,
    )
    return [
        RowPlan(
            documents=tuple(pairs[i][0] for i in row),
            pass_indices=tuple(pairs[i][1] for i in row),
            anchors=tuple(anchors[i] for i in row),
        )
        for row in rows
    ]


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a run is: rows consumed in all, and the same as tick and row within it."""

    rows: int = 0
    tick: int = 0
    row_in_tick: int = 0


def positions(rows_per_tick: int, tick: int, start: Position) -> Iterator[Position]:
    """Yield the position after each of a tick's rows, from `start` (in that tick) on."""
    for row in range(start.row_in_tick, rows_per_tick):
        done = row + 1
        consumed = start.rows + done - start.row_in_tick
        if done == rows_per_tick:
            yield Position(rows=consumed, tick=tick + 1, row_in_tick=0)
        else:
            yield Position(rows=consumed, tick=tick, row_in_tick=done)
