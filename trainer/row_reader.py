"""Rows of a run in host memory: planned from the schedule, their states decoded by threads.

Takes a cache, a schedule and a position; hands on `ReadRow`s and the ends of steps in a fixed
order. Imports no torch: `trainer.batches` runs it in a thread or, beside a GPU, in processes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from hscache.errors import HscacheError
from hscache.planes import Codec
from hscache.reader import Cache
from trainer.anchors import sample_slots
from trainer.bad_shards import BadShards, OnBadShard, Skipped, without
from trainer.rows import FloatArray, Row, RowDocument, build_row, decayed_weights
from trainer.schedule import AnchorRule, Position, RowPlan, Schedule, Share, positions, tick_rows
from trainer.state_arrays import clear_from, rows_of

ROWS_DECODING = 3
"""Rows whose states are being decoded, at most."""

LOOK_S = 0.5
"""How often a reader looks for a shard that a producer has yet to make."""


@dataclass(frozen=True, kw_only=True)
class StepEnd:
    """The rows of an optimizer step, over all ranks, end here."""

    position: Position
    num_tokens: int
    num_anchors: int
    skipped: tuple[Skipped, ...] = ()
    """documents of this rank's rows that could not be read"""
    skipped_tokens: int = 0
    """in them; `num_tokens` counts them too, for the schedule goes by what was planned"""


@dataclass(frozen=True, kw_only=True)
class RowSettings:
    """Shape of a row and of its labels."""

    row_tokens: int
    anchors_per_row: int
    block_size: int
    gamma: float | None
    """slot k weighs exp(-(k - 1) / gamma), or 1"""
    sample_slots: bool = False
    """keep slots with that probability, at weight 1, instead of weighting all"""
    soft_labels: bool = False
    """read the last block's output too"""


@dataclass(frozen=True, kw_only=True)
class RowTask:
    """Which rows of a cache to read, in which order, and how."""

    schedule: Schedule
    rule: AnchorRule
    row: RowSettings
    start: Position
    """where the run is: the rows before are not read"""
    share: Share
    """this rank's rows"""
    threads: int
    """that decode"""
    on_bad_shard: OnBadShard = "stop"
    follow: bool = False
    """shards may be missing yet, and are waited for"""
    reader: int = 0
    num_readers: int = 1
    """this rank's rows are dealt to so many readers, one after another, and this one takes its"""


@dataclass(frozen=True, kw_only=True)
class RowSpace:
    """Host memory for the states of a row: stored arrays [tokens, ...], decoded."""

    arrays: dict[str, np.ndarray]
    slot: int = 0
    """which piece of a reused memory it is"""


@dataclass(frozen=True, kw_only=True)
class ReadRow:
    """A row and its states, as stored."""

    row: Row
    space: RowSpace
    codec: Codec
    position: Position
    """where the run is once this row is consumed"""


@dataclass(frozen=True, kw_only=True)
class _Decoding:
    plan: RowPlan
    read: ReadRow | None = None
    """None if none of its documents can be read"""
    pieces: Sequence[tuple[int, Future[None]]] = ()
    """each with its document's place in the row"""
    skipped: tuple[Skipped, ...] = ()


class RowReader:
    """Read this rank's rows of a run from a position on."""

    def __init__(self, cache: Cache, task: RowTask, *, static: bool) -> None:
        """`static` gives all rows the memory of a full one, cleared behind the last token."""
        self._cache, self._task, self._static = cache, task, static
        self._row = task.row
        self._ahead = frozenset(task.start.ahead)
        self._bad = BadShards(cache, task.on_bad_shard)
        self._skipped: list[Skipped] = []
        self._spare: list[RowSpace] = []

    def parts(
        self, space: Callable[[int], RowSpace], idle: Callable[[], bool] = lambda: True
    ) -> Iterator[ReadRow | StepEnd | None]:
        """Yield this reader's rows, None for one of which nothing can be read, and all step ends.

        `space` gives memory for the states of so many tokens; when it is asked, at most
        `ROWS_DECODING` rows before are still being decoded. While a shard is missing `idle` is
        called, which sleeps a little; False ends the rows. Raises ShardCorruptError,
        or CacheIncompleteError for a shard that is gone, unless such documents are skipped: then a
        row comes without them, and the end of its step names them.
        """
        coming: deque[_Decoding | StepEnd] = deque()
        with ThreadPoolExecutor(self._task.threads) as pool:
            for part in self._own_rows(idle):
                if part is None:  # what is here must not wait for what may be long in coming
                    while coming:
                        yield self._take(coming.popleft(), pool)
                elif isinstance(part, StepEnd):
                    coming.append(part)
                else:
                    coming.append(self._start_decoding(*part, pool, space))
                while coming and (
                    isinstance(coming[0], StepEnd)
                    or sum(isinstance(one, _Decoding) for one in coming) > ROWS_DECODING
                ):
                    yield self._take(coming.popleft(), pool)
            while coming:
                yield self._take(coming.popleft(), pool)

    def _own_rows(
        self, idle: Callable[[], bool]
    ) -> Iterator[tuple[RowPlan, Position] | StepEnd | None]:
        """Yield this reader's rows, and the end of every step that has rows of any rank.

        None comes before a wait.
        """
        position, num_tokens, num_anchors = self._task.start, 0, 0
        num_rows = 0  # of this rank

        def end() -> StepEnd:
            return StepEnd(position=position, num_tokens=num_tokens, num_anchors=num_anchors)

        for planned in self._rows(idle):
            if planned is None:
                yield None
                continue
            plan, position = planned
            number = position.rows - 1
            if number not in self._ahead:
                if self._task.share.takes(number):
                    if num_rows % self._task.num_readers == self._task.reader:
                        yield plan, position
                    num_rows += 1
                num_tokens += int(self._cache.plan.lengths[list(plan.documents)].sum())
                num_anchors += sum(len(anchors_A) for anchors_A in plan.anchors)
            if num_tokens and self._task.share.ends_step(number):
                yield end()
                num_tokens = num_anchors = 0
        if num_tokens:
            yield end()

    def _rows(self, idle: Callable[[], bool]) -> Iterator[tuple[RowPlan, Position] | None]:
        """Yield every row that is left, and the position after it; None before a wait."""
        task, start = self._task, self._task.start
        for tick in range(start.tick, task.schedule.num_ticks):
            if start.tick < tick:  # the tick before had no rows
                start = Position(rows=start.rows, tick=tick)
            visits = task.schedule.visits(tick)
            if task.follow:
                # Those of earlier ticks may be freed, and open files would keep their disk.
                self._cache.release_shards()
                missing = {v.shard for v in visits if not self._cache.is_published(v.shard)}
                if missing:
                    yield None
                while missing := {s for s in missing if not self._cache.is_published(s)}:
                    if not idle():
                        return
            quarantined = [self._bad.quarantined(visit.shard) for visit in visits]
            rows = tick_rows(
                self._cache.plan,
                visits,
                task.rule,
                tick=tick,
                row_tokens=self._row.row_tokens,
                skip=frozenset().union(*quarantined),
            )
            after = positions(len(rows), start)
            for row, position in zip(rows[start.row_in_tick :], after, strict=True):
                yield row, position
                start = position

    def _start_decoding(
        self,
        plan: RowPlan,
        position: Position,
        pool: ThreadPoolExecutor,
        space: Callable[[int], RowSpace],
    ) -> _Decoding:
        plan, skipped = self._bad.openable(plan)
        if not plan.documents:
            return _Decoding(plan=plan, skipped=skipped)
        if self._spare:
            own = self._spare.pop()
        else:
            num_tokens = int(self._cache.plan.lengths[list(plan.documents)].sum())
            own = space(self._row.row_tokens if self._static else num_tokens)
        return self._decode(plan, position, pool, own, skipped)

    def _decode(
        self,
        plan: RowPlan,
        position: Position,
        pool: ThreadPoolExecutor,
        own: RowSpace,
        skipped: tuple[Skipped, ...],
    ) -> _Decoding:
        documents = [
            RowDocument(
                document_id=document,
                input_ids_T=self._cache.plan.input_ids(document),
                loss_mask_T=self._cache.plan.loss_mask(document) != 0,
            )
            for document in plan.documents
        ]
        row = build_row(
            documents,
            plan.anchors,
            row_tokens=self._row.row_tokens,
            anchors_per_row=self._row.anchors_per_row,
            block_size=self._row.block_size,
            slot_weights=self._slot_weights(plan),
        )
        shard_of = [self._cache.shard(int(self._cache.plan.shards[d])) for d in plan.documents]
        clear_from(own.arrays, row.num_tokens)
        pieces = [
            (
                place,
                pool.submit(
                    shard.read_arrays, document, rows_of(own.arrays, start + a, start + b), a
                ),
            )
            for place, (shard, document, start) in enumerate(
                zip(shard_of, plan.documents, row.document_offsets[:-1], strict=True)
            )
            for a, b in shard.pieces(document)
        ]
        codec = self._cache.identity.encoding.codec
        read = ReadRow(row=row, space=own, codec=codec, position=position)
        return _Decoding(plan=plan, read=read, pieces=pieces, skipped=skipped)

    def _take(
        self, first: _Decoding | StepEnd, pool: ThreadPoolExecutor
    ) -> ReadRow | StepEnd | None:
        if isinstance(first, _Decoding):
            return self._finish(first, pool)
        if not self._skipped:
            return first
        lost = self._cache.plan.lengths[[document for document, _ in self._skipped]].sum()
        skipped, self._skipped = tuple(self._skipped), []
        return replace(first, skipped=skipped, skipped_tokens=int(lost))

    def _finish(self, decoding: _Decoding, pool: ThreadPoolExecutor) -> ReadRow | None:
        """Wait for a row's states; what cannot be read is left out, and the rest is read again."""
        self._skipped += decoding.skipped
        while (read := decoding.read) is not None:
            errors = {}
            for place, piece in decoding.pieces:
                try:
                    piece.result()
                except HscacheError as error:
                    errors[place] = error
            if not errors:
                break
            self._skipped += self._bad.lose(decoding.plan, errors)
            rest = without(decoding.plan, errors)
            if not rest.documents:
                self._spare += [read.space] if self._static else []
                return None
            decoding = self._decode(rest, read.position, pool, read.space, ())
        return read

    def _slot_weights(self, plan: RowPlan) -> list[FloatArray]:
        weights_K = decayed_weights(self._row.block_size, self._row.gamma)
        if not self._row.sample_slots:
            return [weights_K] * len(plan.documents)
        return [
            sample_slots(
                weights_K,
                len(anchors_A),
                seed=self._task.rule.seed,
                pass_index=pass_index,
                document_id=document,
            )
            for document, pass_index, anchors_A in zip(
                plan.documents, plan.pass_indices, plan.anchors, strict=True
            )
        ]
