"""Batches from shards: a background thread decodes states and lays rows out, ahead of training.

Takes a cache and a schedule; hands on `Batch`es in a fixed order with the position after each. A
bounded queue keeps a few rows ahead; `wait_s` counts how long training stood still for data.

Axes: S row tokens, F = layers * hidden, N anchor slots, K predicted slots, M scored slots.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType

import numpy as np
import torch

from hscache.reader import Cache, Shard
from trainer.anchors import sample_slots
from trainer.rows import FloatArray, Row, RowDocument, build_row, decayed_weights
from trainer.schedule import AnchorRule, Position, RowPlan, Schedule, positions, tick_rows

_READ_TOKENS = 4096
_AHEAD = 4

States = dict[int, tuple[Shard, np.ndarray]]
"""Shards of a tick by number, with their decoded states, bf16 bits uint16 [T, L, H]."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """One row as tensors on the training device."""

    features_SF: torch.Tensor
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
class RowSettings:
    """Shape of a row and of its labels."""

    row_tokens: int
    anchors_per_row: int
    block_size: int
    gamma: float
    """slot k weighs exp(-(k - 1) / gamma)"""
    sample_slots: bool = False
    """keep slots with that probability, at weight 1, instead of weighting all"""


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
    ) -> None:
        self._cache, self._schedule = cache, schedule
        self._rule, self._row, self._start = rule, row, start
        self._device, self._dtype, self._threads = device, dtype, threads
        self._queue: queue.Queue[Batch | BaseException | None] = queue.Queue(maxsize=_AHEAD)
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
        while True:
            started = time.perf_counter()
            item = self._queue.get()
            self.wait_s += time.perf_counter() - started
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            yield item

    def _work(self) -> None:
        try:
            for batch in self._batches():
                if self._stopped.is_set():
                    return
                self._queue.put(batch)
            self._queue.put(None)
        except BaseException as error:
            self._queue.put(error)

    def _batches(self) -> Iterator[Batch]:
        position = self._start
        for tick in range(position.tick, self._schedule.num_ticks):
            if position.tick < tick:  # the tick before had no rows
                position = Position(rows=position.rows, tick=tick)
            for batch in self._tick(position):
                yield batch
                position = batch.position

    def _tick(self, start: Position) -> Iterator[Batch]:
        visits = self._schedule.visits(start.tick)
        shards = [self._cache.shard(visit.shard) for visit in visits]
        rows = tick_rows(
            self._cache.plan,
            visits,
            self._rule,
            tick=start.tick,
            row_tokens=self._row.row_tokens,
            skip=frozenset(q.document for shard in shards for q in shard.manifest.quarantined),
        )
        rows_left = rows[start.row_in_tick :]
        if not rows_left:  # nothing to decode shards for
            return
        states = {shard.number: (shard, read_shard(shard, self._threads)) for shard in shards}
        for row, position in zip(rows_left, positions(len(rows), start), strict=True):
            yield self._batch(row, states, position)

    def _batch(self, plan: RowPlan, states: States, position: Position) -> Batch:
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
        identity = self._cache.identity.states
        bits_SLH = np.zeros(
            (self._row.row_tokens, len(identity.target_layer_ids), identity.hidden_size), np.uint16
        )
        for document, (start, stop) in zip(
            plan.documents, itertools.pairwise(row.document_offsets), strict=True
        ):
            shard, bits_TLH = states[int(self._cache.plan.shards[document])]
            first = shard.start_of(document)
            assert first is not None, "tick_rows skips quarantined documents"
            bits_SLH[start:stop] = bits_TLH[first : first + stop - start]
        return to_batch(row, bits_SLH, position, self._device, self._dtype)

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


def read_shard(shard: Shard, threads: int) -> np.ndarray:
    """Decode a whole shard with several threads; bf16 bits, uint16 [T, L, H]."""
    num_tokens = shard.manifest.num_tokens
    starts = range(0, num_tokens, _READ_TOKENS)
    pieces = [(start, min(start + _READ_TOKENS, num_tokens)) for start in starts]
    states = shard.cache.identity.states
    bits_TLH = np.empty((num_tokens, len(states.target_layer_ids), states.hidden_size), np.uint16)

    def read(piece: tuple[int, int]) -> None:
        bits_TLH[piece[0] : piece[1]] = shard.read_bits(*piece)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, pieces))
    return bits_TLH


def to_batch(
    row: Row, bits_SLH: np.ndarray, position: Position, device: torch.device, dtype: torch.dtype
) -> Batch:
    """Turn a row and its states into tensors; on a CPU empty places are cut off, not computed.

    A GPU wants the same shapes in every step, a CPU only pays for them.
    """
    tokens = row.num_tokens if device.type == "cpu" else len(row.input_ids_S)
    anchors = row.num_anchors if device.type == "cpu" else len(row.anchor_ids_N)

    def tensor(array: np.ndarray) -> torch.Tensor:
        host = torch.from_numpy(np.ascontiguousarray(array))
        if device.type == "cuda":
            return host.pin_memory().to(device, non_blocking=True)
        return host

    scored_M = row.scored_M
    weights_M = row.weights_NK.reshape(-1)[scored_M]
    features = tensor(bits_SLH[:tokens].reshape(tokens, -1).view(np.int16))
    return Batch(
        features_SF=features.view(torch.bfloat16).to(dtype),
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
