"""Several row readers, each in a process of its own, as one: their rows in the order of the run.

Takes what `RowReader` takes; hands on the same parts. A process decodes whole rows, dealt one after
another; the ends of steps come from every one. Threads alone do not do it: of small documents
decoding is much Python, and on a slow host eight threads of a process gave a row in 52 ms, two in
44, eight processes in 10 (rows of 8,192 tokens x 5 x 576 beside one H200). Where rows are large
there are fewer processes, for each has memory for a few, and more threads in each.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import TracebackType

from hscache.reader import Cache
from trainer.row_process import SLOTS, RowProcess
from trainer.row_reader import ReadRow, RowTask, StepEnd
from trainer.state_arrays import row_bytes, stored_shapes

_MEMORY_BYTES = 2 << 30
"""Of the rows of all processes; one process takes what it needs."""


class RowProcesses:
    """A context manager that starts and ends the processes."""

    def __init__(self, cache: Cache, task: RowTask) -> None:
        self._cache, self._task = cache, task
        self._processes: list[RowProcess] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> RowProcesses:
        task = self._task
        shapes = stored_shapes(self._cache, last_hidden=task.row.soft_labels)
        threads = threads_of_processes(task.threads, row_bytes(shapes, task.row.row_tokens))
        with contextlib.ExitStack() as stack:
            for reader, share in enumerate(threads):
                own = replace(task, threads=share, reader=reader, num_readers=len(threads))
                self._processes.append(stack.enter_context(RowProcess(self._cache, own)))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    @property
    def memories(self) -> list[mmap.mmap]:
        """Where states arrive; for pinning."""
        return [process.memory for process in self._processes]

    def parts(
        self, wanted: Callable[[], bool] = lambda: True
    ) -> Iterator[ReadRow | StepEnd | None]:
        """Yield what `RowReader.parts` does, and raise what it raises; end when not `wanted`.

        A row's states stay as they are until `release`. Raises HscacheError if a process dies.
        """
        streams = [process.parts(wanted) for process in self._processes]
        turn = 0
        while True:
            try:
                part = next(streams[turn])
            except StopIteration:
                return
            if not isinstance(part, StepEnd):
                turn = (turn + 1) % len(streams)
                yield part
                continue
            others = [next(stream, None) for stream in streams if stream is not streams[turn]]
            ends = [part, *(end for end in others if isinstance(end, StepEnd))]
            if len(ends) < len(streams):  # no longer wanted
                return
            yield joint_end(ends)

    def release(self, read: ReadRow) -> None:
        """Let the memory of a row's states be filled with another's."""
        next(process for process in self._processes if process.owns(read)).release(read)


def threads_of_processes(threads: int, bytes_of_row: int) -> list[int]:
    """Return how many threads each process has, of `threads` in all, for rows of so many bytes."""
    count = min(threads, max(1, _MEMORY_BYTES // (SLOTS * bytes_of_row)))
    return [threads // count + (i < threads % count) for i in range(count)]


def joint_end(ends: Sequence[StepEnd]) -> StepEnd:
    """Return the end of a step with what any reader had to skip in it."""
    assert all(end.position == ends[0].position for end in ends), "readers out of step"
    return replace(
        ends[0],
        skipped=tuple(skipped for end in ends for skipped in end.skipped),
        skipped_tokens=sum(end.skipped_tokens for end in ends),
    )
