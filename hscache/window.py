"""The arithmetic of a bounded window: how many shards it has, which may be started, which freed.

Takes counts and bytes, gives numbers; no disk. Training shards are numbered from 0 here. W shards
are what the schedule needs at a time, `reserve` more are for those in flight and those consumed
since the last checkpoint, P passes are made over each (design.md section 5).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from hscache.errors import ConfigError
from hscache.manifest import WindowIdentity
from hscache.report import format_bytes


@dataclass(frozen=True, kw_only=True)
class DiskNeeds:
    """What a plan takes on disk at the worst, in bytes."""

    fixed_bytes: int
    """plan, frozen parts, heartbeats, and the tombstones of all training shards"""
    held_out_bytes: int
    shard_bytes: int
    """the largest training shard, nothing saved by its codec"""
    num_shards: int
    """training shards"""
    shard_tokens: int
    """the setting they were dealt with"""

    @property
    def all_bytes(self) -> int:
        """Everything at once."""
        return self.with_shards(self.num_shards)

    def with_shards(self, shards: int) -> int:
        """Bytes with that many training shards on disk."""
        return self.fixed_bytes + self.held_out_bytes + shards * self.shard_bytes


def visit_stride(shards: int, num_shards: int, passes: int) -> int:
    """Return s: at tick k the shards k, k - s, ..., k - (P - 1) s are visited, in a window of W."""
    return max(1, min(shards, num_shards) // passes)


def choose_window(
    max_disk_bytes: int, needs: DiskNeeds, *, passes: int, reserve: int
) -> WindowIdentity:
    """Return the largest window that fits into `max_disk_bytes` beside held-out and reserve.

    A plan of fewer shards gives a window of all of them. Raises ConfigError naming the least disk,
    or smaller shards, when less than P shards fit.
    """
    slots = max(0, max_disk_bytes - needs.with_shards(0)) // needs.shard_bytes
    shards = min(slots - reserve, needs.num_shards)
    least = min(passes, needs.num_shards)
    if shards < least:
        wanted = least + reserve
        room = max_disk_bytes - needs.with_shards(0)
        tokens = int(needs.shard_tokens * max(0, room) / (needs.shard_bytes * wanted))
        smaller = f", or store.shard_tokens of at most {tokens:,} in a new cache" if tokens else ""
        raise ConfigError(
            f"max_disk {format_bytes(max_disk_bytes)} holds a window of {max(0, shards)} shards "
            f"beside {format_bytes(needs.with_shards(0))} that always stay and a reserve of "
            f"{reserve}; {passes} passes need at least {least}. A shard takes up to "
            f"{format_bytes(needs.shard_bytes)}: give --max-disk "
            f"{needs.with_shards(wanted)} ({format_bytes(needs.with_shards(wanted))}){smaller}."
        )
    return WindowIdentity(shards=shards, passes=passes, reserve=reserve)


def num_acknowledged(ticks: int, num_shards: int, *, passes: int, stride: int) -> int:
    """Return how many shards, from the first, have had all P visits in the first `ticks` ticks.

    Shard j has its last visit at tick j + (P - 1) s.
    """
    return max(0, min(num_shards, ticks - (passes - 1) * stride))


def num_freeable(acknowledged: Iterable[int]) -> int:
    """Return how many shards, from the first, may be freed: all consumers are done with them.

    `acknowledged` has a number for each registered consumer; without any, nothing may be freed.
    """
    return min(acknowledged, default=0)


def first_closed(lowest_unfreed: int, window: WindowIdentity) -> int:
    """Return the first shard that may not be started yet: j may while j < f + W + reserve."""
    return lowest_unfreed + window.shards + window.reserve


def slots_needed(
    rows_per_tick: Sequence[int], rows_behind: int, window: WindowIdentity, num_shards: int
) -> int:
    """Return the W + reserve with which a consumer never waits for its own acknowledgement.

    Up to `rows_behind` of the rows it has consumed are in no checkpoint yet. If the first of them
    is the last row of tick T, then f is T - (P - 1) s, and it may want any shard k that those rows
    lead up to; that one needs k < f + W + reserve.
    """
    last_visit = (window.passes - 1) * visit_stride(window.shards, num_shards, window.passes)
    ticks_T = np.arange(num_shards)
    freed_T = np.maximum(0, ticks_T - last_visit)
    wanted_T = ticks_T
    if rows_behind:
        before_T = np.concatenate([[0], np.cumsum(rows_per_tick[:num_shards])])  # and one more
        wanted_T = before_T.searchsorted(before_T[1:] + rows_behind - 1, side="right") - 1
    return int((np.minimum(wanted_T, num_shards - 1) - freed_T).max()) + 1
