"""Write checkpoints while training goes on: one background thread, at most one under way.

Takes a job; whoever leaves the context has the job finished first, by whatever way. Where ranks
step alone, each adds its moments to the folder that rank 0 opens and publishes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from hscache.errors import HscacheError
from trainer.checkpoint import Snapshot, moments_file
from trainer.ranks import RankLostError, Ranks
from trainer.tensor_file import write_tensors

log = logging.getLogger(__name__)

_POLL_S = 0.02


class CheckpointWriter:
    """Run one job after the other in the background; a context manager."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._job: Future[None] | None = None
        self.abandoned = threading.Event()
        """Set when another rank is lost: nobody waits for its file any more."""

    def start(self, job: Callable[[], None]) -> None:
        """Begin a job once the one before has ended; raises what that one raised."""
        self.finish()
        self._job = self._pool.submit(job)

    def check(self) -> None:
        """Raise what the job raised, if it has ended."""
        if self._job is not None and self._job.done():
            self.finish()

    def finish(self) -> None:
        """Wait for the job; raises what it raised."""
        if self._job is not None:
            job, self._job = self._job, None
            job.result()

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(value, RankLostError):
            self.abandoned.set()
        try:
            self.finish()
        except Exception as error:
            if value is None:
                raise
            log.error("the last checkpoint was not written: %s", error)  # beside the first error
        finally:
            self._pool.shutdown()


def gather_moments(
    folder: Path, ranks: Ranks, step: int, abandoned: threading.Event
) -> dict[str, str]:
    """On rank 0: let the others write into the folder; return name and checksum of their files.

    Raises HscacheError when one cannot, or does not within the time-out.
    """
    ranks.leave_word(f"save-{step}", json.dumps({"folder": folder.name}))
    checksums = {}
    for rank in range(1, ranks.num_ranks):
        _await_word(ranks, f"saved-{step}", rank, abandoned)
        answer = json.loads(ranks.read_word(f"saved-{step}", rank))
        if "error" in answer:
            raise HscacheError(f"rank {rank} could not write its moments: {answer['error']}")
        checksums[moments_file(rank)] = answer["checksum"]
    return checksums


def write_moments(
    run_dir: Path, snapshot: Snapshot, ranks: Ranks, step: int, abandoned: threading.Event
) -> None:
    """On other ranks: write this rank's moments into the folder that rank 0 has opened.

    Raises HscacheError when rank 0 cannot write, or when its folder cannot be seen from here.
    """
    _await_word(ranks, f"save-{step}", 0, abandoned)
    opened = json.loads(ranks.read_word(f"save-{step}", 0))
    if "error" in opened:
        raise HscacheError(f"rank 0 could not write the checkpoint: {opened['error']}")
    folder = run_dir / opened["folder"]
    try:
        if not folder.is_dir():
            raise HscacheError(
                f"{folder}, which rank 0 has made, cannot be seen from rank {ranks.rank}. In local "
                "modes every rank writes its moments there: put run_dir on a file system that all "
                "nodes share, or use --sync.mode ddp."
            )
        answer = {"checksum": write_tensors(folder / moments_file(ranks.rank), snapshot.moments)}
    except Exception as error:
        ranks.leave_word(f"saved-{step}", json.dumps({"error": str(error)}))
        raise
    ranks.leave_word(f"saved-{step}", json.dumps(answer))


def cancel_moments(ranks: Ranks, step: int, reason: Exception) -> None:
    """On rank 0, when it cannot write: tell the others, so that none waits for its folder."""
    with contextlib.suppress(RankLostError):
        ranks.leave_word(f"save-{step}", json.dumps({"error": str(reason)}))


def _await_word(ranks: Ranks, name: str, rank: int, abandoned: threading.Event) -> None:
    deadline_s = time.monotonic() + ranks.timeout_s
    while not ranks.word(name, rank):
        if abandoned.wait(_POLL_S) or time.monotonic() > deadline_s:
            raise HscacheError(f"rank {rank} did not come to write the checkpoint with the others.")
