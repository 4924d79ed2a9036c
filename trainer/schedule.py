"""The order of training: which shard is visited when, and which documents fill which row.

Takes the plan, the seed and the number of passes; hands on ticks and row lists. Everything here is
a pure function, so a resumed run, a run on other ranks, and one that follows a producer see the
same rows in the same order (design.md section 5).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hscache.plan import Plan
from trainer.anchors import anchor_rate, sample_anchors, valid_anchors
from trainer.rows import IntArray, pack_rows


@dataclass(frozen=True, kw_only=True)
class Visit:
    """One consumption of a shard."""

    shard: int
    pass_index: int


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Ticks of a run: at tick k the shards number k, k - s, ..., k - (P - 1) s are visited.

    Numbers count the training shards in use, P is `passes` and s is `stride`. With s = the number
    of shards these are ordinary epochs, one shard a tick; a smaller s keeps a shard's P visits
    close together, so that a bounded window of shards is enough.
    """

    shards: tuple[int, ...]
    """Ids of the training shards in use, ascending."""
    passes: int
    stride: int

    @property
    def num_ticks(self) -> int:
        """Ticks until every shard has been visited `passes` times."""
        return len(self.shards) + (self.passes - 1) * self.stride

    def visits(self, tick: int) -> list[Visit]:
        """Return a tick's visits; numbers outside the shards are skipped."""
        numbers = [tick - pass_index * self.stride for pass_index in range(self.passes)]
        return [
            Visit(shard=self.shards[number], pass_index=pass_index)
            for pass_index, number in enumerate(numbers)
            if 0 <= number < len(self.shards)
        ]


@dataclass(frozen=True, kw_only=True)
class AnchorRule:
    """How many anchors a document gets, and from which seed."""

    rate: float
    """Anchors per valid anchor of a document."""
    limit: int
    """Anchor slots of a row."""
    seed: int


def anchor_rule(
    plan: Plan, documents: Sequence[int], *, row_tokens: int, anchors_per_row: int, seed: int
) -> AnchorRule:
    """Return the rule that fills the anchor slots of a pass over these documents.

    Raises DataError when none of them has a valid anchor.
    """
    rate = anchor_rate(
        total_tokens=int(plan.lengths[documents].sum()),
        total_valid_anchors=int(plan.valid_anchors[documents].sum()),
        row_tokens=row_tokens,
        anchors_per_row=anchors_per_row,
    )
    return AnchorRule(rate=rate, limit=anchors_per_row, seed=seed)


def expected_tokens(plan: Plan, documents: Sequence[int], rule: AnchorRule) -> float:
    """Return the context tokens of a pass, on average: a document that draws no anchor is left out.

    n = floor(rate * V + u) is at least 1 with probability min(1, rate * V).
    """
    drawn_D = np.minimum(1.0, rule.rate * plan.valid_anchors[documents])
    return float((drawn_D * plan.lengths[documents]).sum())


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
    rows = pack_rows(
        [int(plan.lengths[document]) for document, _ in pairs],
        [len(positions) for positions in anchors],
        _shuffled(len(pairs), rule.seed, tick),
        row_tokens=row_tokens,
        anchors_per_row=rule.limit,
    )
    return [
        RowPlan(
            documents=tuple(pairs[i][0] for i in row),
            pass_indices=tuple(pairs[i][1] for i in row),
            anchors=tuple(anchors[i] for i in row),
        )
        for row in rows
    ]


def _shuffled(count: int, seed: int, tick: int) -> list[int]:
    # Raw Philox output for the reason given at `sample_anchors`; the third counter word keeps the
    # order apart from anchors and slots, whose keys look alike and which have 0 and 1 there.
    bits = np.random.Philox(
        key=np.array([seed, tick], np.uint64), counter=np.array([0, 0, 2, 0], np.uint64)
    )
    return np.argsort(bits.random_raw(count), kind="stable").tolist()


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a run is: rows are numbered over all ticks, and the first `rows` of them are consumed.

    `tick` and `row_in_tick` say the same without counting. `ahead` are the numbers of later rows
    that are consumed too: ranks that do not wait for each other are rarely stopped at one row.
    """

    rows: int = 0
    tick: int = 0
    row_in_tick: int = 0
    ahead: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "ahead", tuple(self.ahead))  # JSON has lists


def positions(rows_in_tick: int, start: Position) -> Iterator[Position]:
    """Yield the position after each row that is left of the tick of `start`."""
    for done in range(start.row_in_tick + 1, rows_in_tick + 1):
        rows = start.rows + done - start.row_in_tick
        if done == rows_in_tick:
            yield Position(rows=rows, tick=start.tick + 1)
        else:
            yield Position(rows=rows, tick=start.tick, row_in_tick=done)


@dataclass(frozen=True, kw_only=True)
class Share:
    """Which rows a rank takes, and after which rows an optimizer step ends; for every sync mode.

    Row n belongs to rank n mod `num_ranks` and to step n // `rows_per_step`: nothing but the number
    of the row decides, so any number of ranks may continue what any other number began.
    """

    rank: int = 0
    num_ranks: int = 1
    rows_per_step: int = 1

    def takes(self, row: int) -> bool:
        """Say whether the row of that number is this rank's."""
        return row % self.num_ranks == self.rank

    def ends_step(self, row: int) -> bool:
        """Say whether an optimizer step ends with the row of that number."""
        return (row + 1) % self.rows_per_step == 0


def joint_position(reached: Sequence[Position], before: Position) -> Position:
    """Return where a run is whose rank r has consumed its rows up to `reached[r]`.

    `before` is where these ranks started: what was ahead there is consumed as well.
    """
    first = min(reached, key=lambda position: position.rows)
    ahead = {
        row
        for row in range(first.rows, max(position.rows for position in reached))
        if row < reached[row % len(reached)].rows
    }
    ahead.update(row for row in before.ahead if row >= first.rows)
    return replace(first, ahead=tuple(sorted(ahead)))
