"""Caches that nobody uses any more on a filesystem in memory: found, named, never deleted.

Takes the folder that a producer is about to fill. On a tmpfs such as /dev/shm a cache keeps main
memory until it is deleted or the machine restarts, whoever made it; so what lies there is listed
with its size, owner, age and the command that frees it.
"""

import os
import pwd
import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hscache import budget, layout
from hscache.consumers import read_consumers
from hscache.errors import ShardCorruptError
from hscache.producers import working_producers
from hscache.report import format_bytes, format_seconds

_DEPTH = 3


@dataclass(frozen=True, kw_only=True)
class LeftBehind:
    """A cache on a filesystem in memory without a producer or a consumer at work."""

    path: Path
    size_bytes: int
    owner: str
    silent_s: float
    """since anything in it was written"""

    def __str__(self) -> str:
        return (
            f"{self.path} holds a cache of {format_bytes(self.size_bytes)} in memory that nobody "
            f"produces or follows; it is {self.owner}'s, last written "
            f"{format_seconds(self.silent_s)} ago. If it is no longer needed: "
            f"rm -r {shlex.quote(str(self.path))}"
        )


def find_left_behind(shard_dir: Path, mounts: Path = Path("/proc/mounts")) -> list[LeftBehind]:
    """Return the caches beside `shard_dir` on the same filesystem in memory; none on a disk."""
    root = memory_root(shard_dir, mounts)
    if root is None:
        return []
    own = shard_dir.resolve()
    return [_describe(path) for path in _caches(root, _DEPTH) if path != own and not _in_use(path)]


def memory_root(path: Path, mounts: Path = Path("/proc/mounts")) -> Path | None:
    """Return where the tmpfs that will hold `path` is mounted; None if it is no tmpfs."""
    path = path.resolve()
    best, kind = Path("/"), ""
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, where, filesystem, *_ = line.split(" ")
        mounted = Path(where.replace("\\040", " "))
        if path.is_relative_to(mounted) and mounted.is_relative_to(best):
            best, kind = mounted, filesystem
    return best if kind in ("tmpfs", "ramfs") else None


def _caches(folder: Path, depth: int) -> Iterator[Path]:
    try:
        entries = [Path(e.path) for e in os.scandir(folder) if e.is_dir(follow_symlinks=False)]
    except OSError:  # another user's
        return
    for path in sorted(entries):
        # A start that died early has no root yet, and may hold a corpus all the same.
        known = layout.shards_dir(path).is_dir() and (
            layout.producers_dir(path).is_dir() or layout.root_file(path).is_file()
        )
        if known:
            yield path
        elif depth > 1:
            yield from _caches(path, depth - 1)


def _in_use(path: Path) -> bool:
    try:
        return bool(working_producers(path)) or any(c.alive for c in read_consumers(path))
    except ShardCorruptError:
        return False


def _describe(path: Path) -> LeftBehind:
    places = (path, layout.shards_dir(path), layout.producers_dir(path), layout.consumers_dir(path))
    written_s = max(place.stat().st_mtime for place in places if place.exists())
    uid = path.stat().st_uid
    try:
        owner = pwd.getpwuid(uid).pw_name
    except KeyError:
        owner = f"user {uid}"
    return LeftBehind(
        path=path,
        size_bytes=budget.used_bytes(path),
        owner=owner,
        silent_s=max(0.0, time.time() - written_s),
    )
