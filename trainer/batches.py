"""Batches from shards: threads decode states of the next rows while training works on this one.

Takes a cache and a schedule; hands on `Batch`es in a fixed order with the position after each. A
bounded queue keeps a few rows ahead; `wait_s` counts how long training stood still for data. For a
GPU the stored planes are decoded into pinned memory, copied on a stream of their own, and merged
there.

Axes: S row tokens, F = layers * hidden, N anchor slots, K predicted slots, M scored slots, T tokens
of one document.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields
from types import TracebackType

import numpy as np
import torch

from hscache.reader import Cache
from trainer.anchors import sample_slots
from trainer.rows import FloatArray, Row, RowDocument, build_row, decayed_weights
from trainer.schedule import (
    AnchorRule,
    Position,
    RowPlan,
    Schedule,
    Share,
    positions,
    tick_rows,
)
from trainer.states import StatePlanes, merge_last_hidden, merge_planes

_DECODING, _READY = 3, 2
"""Rows whose states are being decoded, and rows that wait for training, at most."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """One row as tensors on the training device."""

    features_SF: torch.Tensor
    last_hidden_SH: torch.Tensor | None = None
    """outputs of the target's last block, before its final norm; for soft labels"""
    position_ids_S: torch.Tensor
    anchor_ids_N: torch.Tensor
    context_start_N: torch.Tensor
    context_end_N: torch.Tensor
    labels_M: torch.Tensor
    weights_M: torch.Tensor
    scored_M: torch.Tensor
    """indices of the scored slots into [N * K]"""
    weight_sum: float
    """sum of weights_M, known on the host: no synchronisation to divide by it"""
    num_tokens: int
    num_anchors: int
    document_ids: tuple[int, ...]
    position: Position
    """where the run is once this row is consumed"""


@dataclass(frozen=True, kw_only=True)
class StepEnd:
    """The rows of an optimizer step, over all ranks, end here."""

    position: Position
    num_tokens: int
    num_anchors: int


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


class Loader:
    """Iterate over the rows of a run from a position on; a context manager that ends its thread.

    What goes wrong in the thread (a damaged or vanished shard) is raised where rows are taken.
    """

    def __init__(
        self,
        cache: Cache,
        schedule: Schedule,
        *,
        rule: AnchorRule,
        row: RowSettings,
        device: torch.device,
        dtype: torch.dtype,
        threads: int,
        start: Position,
        share: Share | None = None,
    ) -> None:
        self._cache, self._schedule = cache, schedule
        self._rule, self._row, self._start = rule, row, start
        self._share, self._ahead = share or Share(), frozenset(start.ahead)
        self._device, self._dtype, self._threads = device, dtype, threads
        self._queue: queue.Queue[
            tuple[Batch | None, StepEnd | None, torch.cuda.Event | None] | BaseException | None
        ] = queue.Queue(maxsize=_READY)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._work, name="loader", daemon=True)
        self.wait_s = 0.0
        """Seconds the consumer has waited for rows."""

    def __enter__(self) -> Loader:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stopped.set()
        while self._thread.is_alive():  # it may be blocked on a full queue
            with contextlib.suppress(queue.Empty):
                self._queue.get(timeout=0.05)

    def __iter__(self) -> Iterator[Batch]:
        for step in self.steps():
            assert step is not None, "without patience there is always a step"
            yield from step[0]

    def steps(
        self, patience_s: float | None = None
    ) -> Iterator[tuple[list[Batch], StepEnd] | None]:
        """Yield this rank's rows of each optimizer step, maybe none; None while rows are late."""
        rows: list[Batch] = []
        while True:
            started = time.perf_counter()
            try:
                item = self._queue.get(timeout=patience_s)
            except queue.Empty:
                yield None
                continue
            finally:
                self.wait_s += time.perf_counter() - started
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            row, end, copied = item
            if row is not None:
                if copied is not None:
                    _use_on_current_stream(row, copied)
                rows.append(row)
            if end is not None:
                yield rows, end
                rows = []

    def _work(self) -> None:
        try:
            stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
            with ThreadPoolExecutor(self._threads) as pool, torch.cuda.stream(stream):
                for row, end in self._parts(pool):
                    if self._stopped.is_set():
                        return
                    self._queue.put((row, end, stream.record_event() if stream else None))
            self._queue.put(None)
        except BaseException as error:
            self._queue.put(error)

    def _parts(self, pool: ThreadPoolExecutor) -> Iterator[tuple[Batch | None, StepEnd | None]]:
        """Yield this rank's rows, each with the end of its step if that follows, and lone ends."""
        coming: deque[_Decoding | StepEnd] = deque()
        for part in self._own_rows():
            if isinstance(part, StepEnd):
                coming.append(part)
            else:
                coming.append(self._start_decoding(*part, pool))
            while coming and (
                isinstance(coming[0], StepEnd)
                or sum(isinstance(one, _Decoding) for one in coming) > _DECODING
            ):
                yield self._take(coming)
        while coming:
            yield self._take(coming)

    def _own_rows(self) -> Iterator[tuple[RowPlan, Position] | StepEnd]:
        """Yield this rank's rows, and the end of every step that has rows of any rank."""
        position, num_tokens, num_anchors = self._start, 0, 0

        def end() -> StepEnd:
            return StepEnd(position=position, num_tokens=num_tokens, num_anchors=num_anchors)

        for plan, position in self._rows():
            number = position.rows - 1
            if number not in self._ahead:
                if self._share.takes(number):
                    yield plan, position
                num_tokens += int(self._cache.plan.lengths[list(plan.documents)].sum())
                num_anchors += sum(len(anchors_A) for anchors_A in plan.anchors)
            if num_tokens and self._share.ends_step(number):
                yield end()
                num_tokens = num_anchors = 0
        if num_tokens:
            yield end()

    def _rows(self) -> Iterator[tuple[RowPlan, Position]]:
        """Yield every row that is left, and the position after it."""
        start = self._start
        for tick in range(start.tick, self._schedule.num_ticks):
            if start.tick < tick:  # the tick before had no rows
                start = Position(rows=start.rows, tick=tick)
            visits = self._schedule.visits(tick)
            shards = [self._cache.shard(visit.shard) for visit in visits]
            rows = tick_rows(
                self._cache.plan,
                visits,
                self._rule,
                tick=tick,
                row_tokens=self._row.row_tokens,
                skip=frozenset(q.document for shard in shards for q in shard.manifest.quarantined),
            )
            after = positions(len(rows), start)
            for row, position in zip(rows[start.row_in_tick :], after, strict=True):
                yield row, position
                start = position

    def _start_decoding(
        self, plan: RowPlan, position: Position, pool: ThreadPoolExecutor
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
        planes = StatePlanes.empty(
            shard_of[0],
            row_size(row, self._device)[0],
            self._device,
            last_hidden=self._row.soft_labels,
        )
        planes.clear_from(row.num_tokens)
        pieces = [
            pool.submit(shard.read_arrays, document, planes.rows(start, stop))
            for shard, document, (start, stop) in zip(
                shard_of, plan.documents, itertools.pairwise(row.document_offsets), strict=True
            )
        ]
        return _Decoding(row=row, planes=planes, pieces=pieces, position=position)

    def _take(self, coming: deque[_Decoding | StepEnd]) -> tuple[Batch | None, StepEnd | None]:
        first = coming.popleft()
        if isinstance(first, StepEnd):
            return None, first
        # An end follows its last row at once, so it is here already if there is one.
        end = coming[0] if coming and isinstance(coming[0], StepEnd) else None
        if end is not None:
            coming.popleft()
        return self._finish(first), end

    def _finish(self, decoding: _Decoding) -> Batch:
        for piece in decoding.pieces:
            piece.result()
        features_SF = merge_planes(decoding.planes, self._device).to(self._dtype)
        last_hidden_SH = (
            merge_last_hidden(decoding.planes, self._device) if self._row.soft_labels else None
        )
        return to_batch(decoding.row, features_SF, decoding.position, self._device, last_hidden_SH)

    def _slot_weights(self, plan: RowPlan) -> list[FloatArray]:
        weights_K = decayed_weights(self._row.block_size, self._row.gamma)
        if not self._row.sample_slots:
            return [weights_K] * len(plan.documents)
        return [
            sample_slots(
                weights_K,
                len(anchors_A),
                seed=self._rule.seed,
                pass_index=pass_index,
                document_id=document,
            )
            for document, pass_index, anchors_A in zip(
                plan.documents, plan.pass_indices, plan.anchors, strict=True
            )
        ]


@dataclass(frozen=True, kw_only=True)
class _Decoding:
    row: Row
    planes: StatePlanes
    pieces: list[Future[None]]
    position: Position


def row_size(row: Row, device: torch.device) -> tuple[int, int]:
    """Return the tokens and anchor slots that a row takes on a device.

    A GPU wants the same shapes in every step, a CPU only pays for empty places.
    """
    if device.type == "cpu":
        return row.num_tokens, row.num_anchors
    return len(row.input_ids_S), len(row.anchor_ids_N)


def to_batch(
    row: Row,
    features_SF: torch.Tensor,
    position: Position,
    device: torch.device,
    last_hidden_SH: torch.Tensor | None = None,
) -> Batch:
    """Bring a row to the device of its states, whose rows `row_size` counts."""
    tokens, anchors = row_size(row, device)
    assert len(features_SF) == tokens

    def tensor(array: np.ndarray) -> torch.Tensor:
        host = torch.from_numpy(np.ascontiguousarray(array))
        if device.type == "cuda":
            return host.pin_memory().to(device, non_blocking=True)
        return host

    scored_M = row.scored_M
    weights_M = row.weights_NK.reshape(-1)[scored_M]
    return Batch(
        features_SF=features_SF,
        last_hidden_SH=last_hidden_SH,
        position_ids_S=tensor(row.position_ids_S[:tokens]),
        anchor_ids_N=tensor(row.anchor_ids_N[:anchors]),
        context_start_N=tensor(row.context_start_N[:anchors]),
        context_end_N=tensor(row.context_end_N[:anchors]),
        labels_M=tensor(row.labels_NK.reshape(-1)[scored_M]),
        weights_M=tensor(weights_M),
        scored_M=tensor(scored_M),
        weight_sum=float(weights_M.sum(dtype=np.float64)),
        num_tokens=row.num_tokens,
        num_anchors=row.num_anchors,
        document_ids=row.document_ids,
        position=position,
    )


def _use_on_current_stream(batch: Batch, copied: torch.cuda.Event) -> None:
    # The copies ran on the loader's stream: wait for them there, not on the host, and keep their
    # memory from being given to the loader again before this stream is done with it.
    stream = torch.cuda.current_stream(batch.features_SF.device)
    stream.wait_event(copied)
    for field in fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, torch.Tensor):
            value.record_stream(stream)
