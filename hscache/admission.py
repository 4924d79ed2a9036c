"""Which shard a producer may start now: claims, the window, and room for bytes and inodes.

Takes the open cache, this process's entry among its producers and the budget; hands on shard ids,
or none for now and a reason in words. Frees what all consumers are done with on the way. A budget
is kept by asking before each shard for all that it may take, for all shards in flight.
"""

import logging
import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hscache import budget, files, layout, producers
from hscache.consumers import NOT_RUNNING, Consumer, describe_consumer, read_sound_consumers
from hscache.errors import (
    CacheIncompleteError,
    CacheUnreadableError,
    DiskFullError,
    HscacheError,
)
from hscache.freeing import delete_arrays, free_shard, freed_shards, has_arrays, is_freed
from hscache.reader import Cache
from hscache.report import format_bytes
from hscache.window import first_closed, num_freeable
from hscache.zarr_reader import is_there

log = logging.getLogger(__name__)

_WAIT_S = 1.0
_SAY_AGAIN_S = 60.0
_LOOK_S = 1.0
_SPARE_INODES = 32


class Admission:
    """Hands out shards to this producer; `max_disk_bytes` bounds the folder, if it is given."""

    def __init__(
        self,
        cache: Cache,
        producer: producers.Producer,
        poll: Callable[[], None],
        max_disk_bytes: int | None = None,
    ) -> None:
        self._cache, self._producer, self._stop = cache, producer, poll
        self._max_disk_bytes = max_disk_bytes
        self._window = cache.identity.window
        self._reason, self._last_said, self._said_s, self._paused = "", "", 0.0, False
        self._looked_s = 0.0
        self._damaged: set[int] = set()
        self._unknown: list[str] = []  # what is wrong with entries of consumers
        self._lowest = cache.plan.training_shards.start  # of the shards that are not freed
        self.num_freed = 0
        """shards freed by this process"""
        if self._window.shards:
            for shard in freed_shards(cache):
                delete_arrays(cache, shard)  # of a producer killed while it did

    def next_shard(self) -> int | None:
        """Claim the next shard that may be started; None if there is none now, see `wait`.

        Raises HscacheError when the cache was deleted: what is made without a root is lost.
        """
        plan = self._cache.plan
        root = layout.root_file(self._cache.path)
        if not is_there(root):
            raise HscacheError(
                f"{root} is gone: somebody deleted or moved this cache while it was produced. To "
                "make it anew, run the same command again with an empty --shard-dir."
            )
        limit = plan.num_shards
        consumers: list[Consumer] = []
        if self._window.shards:
            consumers = self._consumers()
            try:
                self._free(consumers)
            except DiskFullError:
                self._reason = self._no_tombstone()
                return None
            first = plan.training_shards.start
            limit = min(limit, first + first_closed(self._lowest - first, self._window))
        shard = self._producer.claim_next(limit)
        if shard is None:
            self._reason = self._why_none(limit, consumers)
            return None
        if self._max_disk_bytes is not None and (why := self._lacks_room(shard, consumers)):
            self._producer.give_back()
            self._reason = why
            return None
        if shard in plan.training_shards:  # a lower one has been requeued by `hscache repair`
            self._lowest = min(self._lowest, shard)
        self._producer.start()
        if self._paused:
            log.info("there is room again: going on with shard %d", shard)
            self._producer.report(waiting="")
            self._paused = False
        return shard

    def free_what_is_done(self) -> None:
        """Free what the consumers are done with, at the end; the rest waits for the next start."""
        if self._window.shards:
            try:
                self._free(self._consumers())
            except DiskFullError:
                log.warning("%s and `hscache produce` is run once more", self._no_tombstone())

    def wait(self) -> None:
        """Say why there is no shard, once and then now and again, and sleep a little."""
        self._stop()
        self._say(self._reason)
        time.sleep(_WAIT_S)

    def poll(self) -> None:
        """Call between packs: raises when the run is to stop, pauses while the disk is full.

        Room was there when the shard began; another program may have taken it since.
        """
        self._stop()
        if self._max_disk_bytes is None or time.monotonic() - self._looked_s < _LOOK_S:
            return
        while why := self._other_program_took_room():
            self._say(why)
            time.sleep(_WAIT_S)
            self._stop()
        self._looked_s = time.monotonic()

    def _say(self, reason: str) -> None:
        # Figures in a reason change all the time; its first words tell reasons apart, and whether
        # somebody has vanished who was there.
        kind, now_s = reason.split(":")[0].split("(")[0], time.monotonic()
        kind += f", {reason.count(NOT_RUNNING)} {NOT_RUNNING}"
        if kind != self._last_said or now_s - self._said_s > _SAY_AGAIN_S:
            log.info("waiting: %s", reason)
            self._producer.report(waiting=reason)
            self._last_said, self._said_s, self._paused = kind, now_s, True
        else:
            self._producer.note(waiting=reason)

    def _consumers(self) -> list[Consumer]:
        """Return those that are known; a run that is going on writes a damaged entry anew."""
        consumers, damaged = read_sound_consumers(self._cache.path)
        unknown = [str(error) for error in damaged]
        for text in unknown:
            if text not in self._unknown:
                log.warning("%s", text)
        self._unknown = unknown
        return consumers

    def _free(self, consumers: Sequence[Consumer]) -> None:
        training = self._cache.plan.training_shards
        done = num_freeable(c.acknowledged(len(training)) for c in consumers)
        if self._unknown:  # nobody knows what such a run still needs
            done = 0
        names = [c.name for c in consumers]
        while self._lowest < training.stop:
            if not self._cache.is_published(self._lowest):
                return
            if self._lowest < training.start + done:
                try:
                    free_shard(self._cache, self._lowest, names)
                except CacheIncompleteError:  # `hscache repair` was faster
                    return
                self.num_freed += 1
            elif not self._is_freed(self._lowest):
                return
            self._lowest += 1

    def _is_freed(self, shard: int) -> bool:
        """Of damaged attributes nobody knows: such a shard stays until it is acknowledged, by who
        skips it, or repaired."""
        try:
            return is_freed(self._cache, shard)
        except CacheUnreadableError:
            raise
        except HscacheError as error:
            if shard not in self._damaged:
                log.warning("shard %d is in the way of its window until it is repaired, or "
                            "skipped by all who follow: %s", shard, error)  # fmt: skip
                self._damaged.add(shard)
            return False

    def _why_none(self, limit: int, consumers: Sequence[Consumer]) -> str:
        if limit == self._cache.plan.num_shards:
            return f"other producers work on what is left: {self._producer.claims_of_others()}"
        held = f"shards {self._lowest} to {limit - 1} are made or being made"
        return f"the window is full ({held}, shard {limit} has no room): {self._who(consumers)}"

    def _who(self, consumers: Sequence[Consumer]) -> str:
        folder = shlex.quote(str(self._cache.path))
        if self._unknown:
            return self._unknown[0]
        if not consumers:
            return (
                "nobody has registered to read them; start "
                f"`trainer fit --follow --shards {folder}`"
            )
        num_shards = len(self._cache.plan.training_shards)
        done = {c.name: c.acknowledged(num_shards) for c in consumers}
        behind = [c for c in consumers if done[c.name] == min(done.values())]
        text = ", ".join(describe_consumer(c, num_shards) for c in behind)
        if any(not c.alive and not c.finished for c in behind):
            text += f"; `hscache consumers {folder} --drop NAME` forgets one for good"
        return f"it waits for {text}"

    def _lacks_room(self, shard: int, consumers: Sequence[Consumer]) -> str:
        """Return why a shard cannot be written now, "" if it can."""
        assert self._max_disk_bytes is not None
        cache = self._cache
        others = self._producer.being_written(shard)
        asked = budget.plan_shard_bound(cache.plan, cache.identity, shard)
        in_flight = sum(
            budget.plan_shard_bound(cache.plan, cache.identity, other)
            for other in others.values()
            if not layout.shard_dir(cache.path, other).exists()
        )
        used = self._used_bytes(others)
        if used + in_flight + asked > self._max_disk_bytes:
            self._clean()
            used = self._used_bytes(others)
        if used + in_flight + asked > self._max_disk_bytes:
            return (
                f"max_disk is reached: {format_bytes(used)} of "
                f"{format_bytes(self._max_disk_bytes)} are on disk, shard {shard} may take "
                f"{format_bytes(asked)} and those in other hands {format_bytes(in_flight)}; "
                f"{self._who(consumers) if self._window.shards else 'nothing here is ever freed'}"
            )
        written = sum(budget.used_bytes(path) for path in self._temporaries_of(others))
        kept = sum(c.progress.checkpoint_bytes for c in consumers)
        free = budget.free_bytes(cache.path) + written
        if free < asked + in_flight + kept:
            kept_words = f" and checkpoints {format_bytes(kept)}" if kept else ""
            return (
                f"the disk is full: {format_bytes(free)} are free on the filesystem of "
                f"{cache.path}, shard {shard} may take {format_bytes(asked)}, those in other hands "
                f"{format_bytes(in_flight)}{kept_words}. It goes on when something is deleted"
            )
        wanted = (
            budget.shard_inodes(budget.ShardShape.of(cache.identity)) * (1 + len(others))
            + _SPARE_INODES
        )
        inodes = budget.free_inodes(cache.path)
        if inodes is not None and inodes < wanted:
            return (
                f"the disk is full: {inodes} inodes are free on the filesystem of {cache.path}, "
                f"shard {shard} and those in other hands take {wanted}. It goes on when files are "
                "deleted"
            )
        return ""

    def _temporaries_of(self, others: dict[str, int]) -> list[Path]:
        temporaries = layout.shards_dir(self._cache.path).glob(f"{files.TEMPORARY_PREFIX}*")
        return [path for path in temporaries if producers.owner_of(path) in others]

    def _used_bytes(self, others: dict[str, int]) -> int:
        """Return what is on disk, but for shards in flight: their bounds count."""
        return budget.used_bytes(
            self._cache.path, skip={path.name for path in self._temporaries_of(others)}
        )

    def _clean(self) -> None:
        """Delete what dead producers left, or it would take the room of what is missing."""
        removed = producers.clean_leftovers(self._cache.path)
        if removed:
            log.info("removed %d leftovers of producers that died", len(removed))
        if self._window.shards:
            for shard in range(self._cache.plan.training_shards.start, self._lowest):
                if has_arrays(self._cache, shard) and self._is_freed(shard):
                    delete_arrays(self._cache, shard)

    def _no_tombstone(self) -> str:
        return (
            f"the disk is full: shard {self._lowest} is done with, and its place cannot be freed, "
            f"for the note that stays needs a few kB of the filesystem of {self._cache.path} "
            f"({files.free_space(self._cache.path)}). It goes on when something is deleted"
        )

    def _other_program_took_room(self) -> str:
        kept = 0
        if self._window.shards:
            kept = sum(c.progress.checkpoint_bytes for c in self._consumers())
        if (free := budget.free_bytes(self._cache.path)) <= kept:
            return (
                f"the disk is full: {format_bytes(free)} are free on the filesystem of "
                f"{self._cache.path}, and {format_bytes(kept)} are kept for checkpoints. It goes "
                "on when something is deleted"
            )
        return ""
