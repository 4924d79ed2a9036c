"""A row reader in a process of its own: decoding never holds the lock of training's Python.

Takes what `RowReader` takes; hands on the same parts. States arrive in memory that both processes
map, in a few slots that are used again; the small arrays of a row go through a socket.
"""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import mmap
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from types import TracebackType

from hscache.errors import HscacheError
from hscache.planes import Codec
from hscache.reader import Cache
from trainer.cache_set import open_caches, paths_of
from trainer.row_reader import (
    LOOK_S,
    ROWS_DECODING,
    ReadRow,
    RowReader,
    RowSpace,
    RowTask,
    StepEnd,
)
from trainer.rows import Row
from trainer.schedule import Position
from trainer.state_arrays import Shapes, arrays_in, row_bytes, stored_shapes

SLOTS = ROWS_DECODING + 2
"""Those being decoded, one decoded, one being copied."""

_COMMAND = "from trainer.row_process import main; main()"
"""Not `-m`, which would give what is sent another module's name."""

_WANTED_S = 0.2
"""How often a reader that waits for a row looks whether it is still wanted."""

_DONE = "no more rows"


@dataclass(frozen=True, kw_only=True)
class _SentRow:
    row: Row
    slot: int
    codec: Codec
    position: Position


class RowProcess:
    """A context manager that starts and ends the process."""

    def __init__(self, cache: Cache, task: RowTask) -> None:
        row = task.row
        self._shapes = stored_shapes(cache, last_hidden=row.soft_labels)
        self.slot_bytes = row_bytes(self._shapes, row.row_tokens)
        file = os.memfd_create("rows")  # not /dev/shm, which containers make small
        try:
            os.ftruncate(file, SLOTS * self.slot_bytes)
            self.memory = mmap.mmap(file, SLOTS * self.slot_bytes)
            """all slots, one after another; for pinning"""
            self._start(file)
            self._connection.send((paths_of(cache), task))
        finally:
            os.close(file)
        self._slots = _slots(self.memory, self._shapes, row.row_tokens)

    def _start(self, file: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _COMMAND, str(theirs.fileno()), str(file)],
                pass_fds=(theirs.fileno(), file),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # signals to the job are training's to answer
                env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            )
        self._connection = Connection(ours.detach())

    def __enter__(self) -> RowProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._connection.close()
        self._process.kill()
        self._process.wait()

    def parts(
        self, wanted: Callable[[], bool] = lambda: True
    ) -> Iterator[ReadRow | StepEnd | None]:
        """Yield what `RowReader.parts` does, and raise what it raises; end when not `wanted`.

        A row's states stay as they are until `release`. Raises HscacheError if the process dies.
        """
        while True:
            while not wait([self._connection], _WANTED_S):
                if not wanted():
                    return
            try:
                message = self._connection.recv()
            except (EOFError, ConnectionResetError) as error:
                code = self._process.wait()
                how = f"signal {-code}" if code < 0 else f"exit code {code}"
                why = "maybe because memory ran out"
                if code == -signal.SIGBUS:  # of a mapped file: what pread gives an error for
                    why = "because the disk failed, or a shard was cut while it was read"
                raise HscacheError(
                    f"the process that reads shards ended by {how}, {why}. Look at `hscache verify "
                    "--deep`, continue with --resume, maybe with fewer --threads or smaller "
                    "--row_tokens."
                ) from error
            if message == _DONE:
                return
            if isinstance(message, BaseException):
                raise message
            if isinstance(message, logging.LogRecord):
                logging.getLogger(message.name).handle(message)
                continue
            yield self._read_row(message) if isinstance(message, _SentRow) else message

    def owns(self, read: ReadRow) -> bool:
        """Whether a row's states are in this process's memory."""
        return any(read.space is slot for slot in self._slots)

    def release(self, read: ReadRow) -> None:
        """Let the memory of a row's states be filled with another's."""
        with contextlib.suppress(BrokenPipeError):  # `parts` will say what happened
            self._connection.send(read.space.slot)

    def _read_row(self, sent: _SentRow) -> ReadRow:
        return ReadRow(
            row=sent.row, space=self._slots[sent.slot], codec=sent.codec, position=sent.position
        )


def _slots(memory: mmap.mmap, shapes: Shapes, row_tokens: int) -> list[RowSpace]:
    size = row_bytes(shapes, row_tokens)
    whole = memoryview(memory)
    return [
        RowSpace(slot=slot, arrays=arrays_in(whole[slot * size :], shapes, row_tokens))
        for slot in range(SLOTS)
    ]


def serve(connection: Connection, file: int) -> None:
    """Read rows for the process at the other end until it is gone; raises EOFError then."""
    paths, task = connection.recv()
    cache = open_caches(paths)
    shapes = stored_shapes(cache, last_hidden=task.row.soft_labels)
    size = SLOTS * row_bytes(shapes, task.row.row_tokens)
    free = _slots(mmap.mmap(file, size), shapes, task.row.row_tokens)
    slots = dict(enumerate(free))

    def space(num_tokens: int) -> RowSpace:
        assert num_tokens == task.row.row_tokens
        while connection.poll() or not free:
            free.append(slots[connection.recv()])
        return free.pop()

    reader = RowReader(cache, task, static=True)

    def idle() -> bool:
        if connection.poll(LOOK_S):  # also when the other end is gone
            free.append(slots[connection.recv()])
        return True

    for part in reader.parts(space, idle):
        if isinstance(part, ReadRow):
            connection.send(
                _SentRow(
                    row=part.row, slot=part.space.slot, codec=part.codec, position=part.position
                )
            )
        else:
            connection.send(part)
    connection.send(_DONE)
    while True:  # the last slots come back, and then the end
        connection.recv()


class _Sender(logging.handlers.QueueHandler):
    """Sends what is logged, to be logged in the other process; only the main thread logs."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(None)  # type: ignore[arg-type]
        self._connection = connection

    def enqueue(self, record: logging.LogRecord) -> None:
        self._connection.send(record)


def main() -> None:
    """Run in the new process; what goes wrong is sent to be raised in the other."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(int(sys.argv[1]))
    logging.getLogger().addHandler(_Sender(connection))
    try:
        serve(connection, int(sys.argv[2]))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)  # training has ended, and threads may still be decoding
    except BaseException as error:
        connection.send(_sendable(error))
        os._exit(1)


def _sendable(error: BaseException) -> BaseException:
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return HscacheError(f"the process that reads shards failed: {error!r}")
