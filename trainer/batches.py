"""Batches from shards: the next rows are read and decoded while training works on this one.

Takes a cache and a `RowTask`; hands on `Batch`es in a fixed order with the position after each. A
bounded queue keeps a few rows ahead; `wait_s` counts how long training stood still for data. For a
GPU processes decode into pinned memory, from where planes are copied on a stream of their own and
merged on the device.

Axes: S row tokens, F = layers * hidden, N anchor slots, K predicted slots, M scored slots, T tokens
of one document.
"""

from __future__ import annotations

import contextlib
import mmap
import queue
import threading
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, fields

import numpy as np
import torch

from hscache.errors import HscacheError
from hscache.reader import Cache
from trainer.row_processes import RowProcesses
from trainer.row_reader import LOOK_S, ReadRow, RowReader, RowSpace, RowTask, StepEnd
from trainer.rows import Row
from trainer.schedule import Position
from trainer.state_arrays import row_arrays, rows_of, stored_shapes
from trainer.states import merge_last_hidden, merge_planes

_READY = 3
"""Rows and ends of steps that wait for training, at most."""


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


class Loader:
    """Iterate over the rows of a run from a position on; a context manager that ends its thread.

    What goes wrong in the thread (a damaged or vanished shard) is raised where rows are taken.
    """

    def __init__(
        self,
        cache: Cache,
        task: RowTask,
        *,
        device: torch.device,
        dtype: torch.dtype,
        separate: bool | None = None,
    ) -> None:
        """States come as `dtype` on `device`.

        `separate` has rows read by processes of their own; if not given, beside a GPU.
        """
        self._cache, self._task = cache, task
        self._device, self._dtype = device, dtype
        self._separate = device.type == "cuda" if separate is None else separate
        self._queue: queue.Queue[
            tuple[Batch | StepEnd, torch.cuda.Event | None] | BaseException | None
        ] = queue.Queue(maxsize=_READY)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._work, name="loader", daemon=True)
        self.wait_s = 0.0
        """Seconds the consumer has waited for rows."""

    def __enter__(self) -> Loader:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
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
            part, copied = item
            if isinstance(part, StepEnd):
                yield rows, part
                rows = []
                continue
            if copied is not None:
                _use_on_current_stream(part, copied)
            rows.append(part)

    def _work(self) -> None:
        try:
            stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
            with torch.cuda.stream(stream), contextlib.closing(self._parts()) as parts:
                for part in parts:
                    copied = stream.record_event() if stream else None
                    self._queue.put((part, copied))
                    if self._stopped.is_set():
                        return
            self._queue.put(None)
        except BaseException as error:
            self._queue.put(error)

    def _parts(self) -> Generator[Batch | StepEnd, None, None]:
        """Yield this rank's rows, and the ends of steps."""
        if self._separate:
            yield from self._parts_of_processes()
            return
        shapes = stored_shapes(self._cache, last_hidden=self._task.row.soft_labels)
        reader = RowReader(self._cache, self._task, static=self._device.type == "cuda")
        for part in reader.parts(
            lambda n: RowSpace(arrays=row_arrays(shapes, n)),
            lambda: not self._stopped.wait(LOOK_S),
        ):
            if part is not None:
                yield part if isinstance(part, StepEnd) else self._to_device(part)

    def _parts_of_processes(self) -> Iterator[Batch | StepEnd]:
        with RowProcesses(self._cache, self._task) as processes, contextlib.ExitStack() as pins:
            for memory in processes.memories:
                pins.enter_context(_pinned(memory, self._device))
            for part in processes.parts(lambda: not self._stopped.is_set()):
                if isinstance(part, StepEnd):
                    yield part
                elif part is not None:
                    batch = self._to_device(part)
                    if self._device.type == "cuda":
                        torch.cuda.current_stream(self._device).synchronize()  # of this thread
                    processes.release(part)
                    yield batch

    def _to_device(self, read: ReadRow) -> Batch:
        codec = read.codec
        arrays = rows_of(read.space.arrays, 0, row_size(read.row, self._device)[0])
        if self._separate and self._device.type == "cpu":  # its memory will be filled again
            arrays = {name: array.copy() for name, array in arrays.items()}
        features_SF = merge_planes(arrays, codec, self._device).to(self._dtype)
        last_hidden_SH = (
            merge_last_hidden(arrays, codec, self._device) if self._task.row.soft_labels else None
        )
        return to_batch(read.row, features_SF, read.position, self._device, last_hidden_SH)


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


@contextlib.contextmanager
def _pinned(memory: mmap.mmap, device: torch.device) -> Iterator[None]:
    # Copies from pinned memory run beside the host and at the link's full rate.
    if device.type != "cuda":
        yield
        return
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    cudart = torch.cuda.cudart()
    if code := int(cudart.cudaHostRegister(address, len(memory), 0)):
        raise HscacheError(
            f"{len(memory) / 1e9:.2f} GB of host memory for rows cannot be pinned (CUDA error "
            f"{code}). Free memory, or train with smaller row_tokens."
        )
    try:
        yield
    finally:
        torch.cuda.synchronize(device)
        cudart.cudaHostUnregister(address)
