"""Wait for the shards of a tick, which a producer has yet to make, and say who is slow.

Takes the cache and visits; the loader's thread sleeps in here, on every rank, and looks at the disk
twice a second.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Sequence

from hscache.producers import working_producers
from hscache.reader import Cache
from hscache.report import format_seconds
from trainer.schedule import Visit

log = logging.getLogger(__name__)

LOOK_S = 0.5
SAY_AGAIN_S = 60.0
PATIENCE_S = 1.0
"""How long a rank waits for rows before it counts as starving."""


class ShardWait:
    """Lets the loader's thread wait until all shards of a tick are there; on every rank."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self.missing: int | None = None
        """the shard it is waiting for"""
        self.empty_ticks: set[int] = set()

    def next_tick(self, visits: Sequence[Visit]) -> bool:
        """Let go of the shards of the tick before; say whether all of this tick are published."""
        self._cache.release_shards()  # a producer may free them, and open files would keep the disk
        return all(self._cache.is_published(visit.shard) for visit in visits)

    def until_ready(self, visits: Sequence[Visit], stopped: threading.Event) -> bool:
        """Return True once all are published, False when the run is ending before."""
        said_s, started_s = -math.inf, time.monotonic()
        for shard in sorted({visit.shard for visit in visits}):
            while not self._cache.is_published(shard):
                self.missing = shard
                now_s = time.monotonic()
                if now_s - started_s > PATIENCE_S and now_s - said_s > SAY_AGAIN_S:
                    log.info("waiting for shard %d: %s", shard, self._why(shard))
                    said_s = now_s
                if stopped.wait(LOOK_S):
                    return False
        self.missing = None
        if said_s > 0:
            log.info("going on after %s", format_seconds(time.monotonic() - started_s))
        return True

    def _why(self, shard: int) -> str:
        working = working_producers(self._cache.path)
        if not working:
            return f"no producer is at work on {self._cache.path}"
        if makers := [name for name, record in working.items() if record.get("claim") == shard]:
            return f"{makers[0]} is making it, the producer is the limit"
        reasons = [str(record["waiting"]) for record in working.values() if record.get("waiting")]
        return (
            f"the producer waits too: {reasons[0]}" if reasons else "the producer is not there yet"
        )
