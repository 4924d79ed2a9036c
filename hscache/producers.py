"""Who is producing into a cache: heartbeats, claims on shards, and leftovers of the dead.

Takes the cache folder; each process keeps one file `producers/<host>-<pid>-<nonce>.json` fresh
while it works and deletes it on the way out. Claims only save work (where the filesystem has locks,
two producers never take the same shard); safety is the rename in `files.publish_folder` alone.
"""

import contextlib
import fcntl
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hscache import files, layout
from hscache.zarr_array import canonical_json

BEAT_S = 5.0
STALE_S = 120.0
"""A producer on another machine is given up after this much silence; a dead one here at once."""
_CLAIM_S = 2.0
"""How long a claim waits for another that is being made; a stopped process may hold its lock."""


class Producer:
    """This process's entry among the producers of a cache; a context manager."""

    def __init__(self, cache_dir: Path) -> None:
        self._cache_dir = cache_dir
        self._path = layout.producers_dir(cache_dir) / f"{files.process_name()}.json"
        self._record: dict[str, Any] = {
            "owner": this_process(),
            "claim": None,
            "started": False,
            "tokens": 0,
        }
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def __enter__(self) -> "Producer":
        files.make_folder(layout.producers_dir(self._cache_dir))
        self._write()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()
        self._path.unlink(missing_ok=True)

    def claim_next(self, num_shards: int) -> int | None:
        """Claim the lowest shard that nobody has published or is working on.

        Returns None when every shard is published or claimed by another live producer.
        """
        with _one_at_a_time(layout.producers_dir(self._cache_dir)):
            return self._claim_next(num_shards)

    def _claim_next(self, num_shards: int) -> int | None:
        # Claims first: a producer that publishes in between is then seen in one list or the other.
        others = set(self._live_claims())
        published = set(layout.list_shards(self._cache_dir))
        for shard in range(num_shards):
            if shard in published or shard in others:
                continue
            self._update(claim=shard, started=False)
            # Without locks, two that chose at one moment see it here; the smaller name keeps it.
            rivals = [name for s, name in self._live_claims().items() if s == shard]
            if not rivals or min(rivals) > self._path.name:
                return shard
        self._update(claim=None)
        return None

    def likely_next(self, num_shards: int) -> int | None:
        """Guess which shard will be claimed next, None if none is left: nobody is told.

        The lowest free one, and one later for each producer that will probably be ready earlier,
        which is one whose shard is lower.
        """
        published, others = set(layout.list_shards(self._cache_dir)), self._live_claims()
        mine = self._record["claim"]
        free = [
            s for s in range(num_shards) if s not in published and s not in others and s != mine
        ]
        earlier = sum(mine is not None and shard < mine for shard in others)
        return free[earlier] if earlier < len(free) else None

    def give_back(self) -> None:
        """Drop the claim: there is no room for its shard yet."""
        self._update(claim=None, started=False)

    def start(self) -> None:
        """Say that the claimed shard is being written: from now on it needs its room."""
        self._update(started=True)

    def being_written(self, below: int) -> dict[str, int]:
        """Return the shards that other live producers write or, if lower than `below`, are about
        to, by the producers' names."""
        found = {}
        for name, record in self._live_records():
            if record["claim"] is not None and (record.get("started") or record["claim"] < below):
                found[name.removesuffix(".json")] = int(record["claim"])
        return found

    def report(self, **figures: Any) -> None:
        """Publish progress figures at once."""
        self._update(**figures)

    def note(self, **figures: Any) -> None:
        """Publish figures with the next heartbeat."""
        with self._lock:
            self._record.update(figures)

    def claims_of_others(self) -> str:
        """Say which shards are in whose hands."""
        claims = sorted(self._live_claims().items())
        return ", ".join(f"shard {shard} ({name})" for shard, name in claims)

    def _live_claims(self) -> dict[int, str]:
        return live_claims(self._cache_dir, besides=self._path.name)

    def _live_records(self) -> Iterator[tuple[str, dict[str, Any]]]:
        return live_records(self._cache_dir, besides=self._path.name)

    def _update(self, **changes: Any) -> None:
        with self._lock:
            self._record.update(changes)
        self._write()

    def _write(self) -> None:
        temporary = self._path.with_name(files.temporary_name())
        # A heartbeat need not survive a power cut, so no fsync; and a full disk must not end the
        # run here: the writer that cannot store a shard says so properly. Locked, so that the
        # newer of two records wins.
        with self._lock, contextlib.suppress(OSError):
            try:
                temporary.write_bytes(canonical_json({**self._record, "time": time.time()}))
                os.replace(temporary, self._path)
            except OSError:
                os.utime(self._path)  # needs no room: others must not take this one for dead
            finally:
                temporary.unlink(missing_ok=True)

    def _beat(self) -> None:
        while not self._stopped.wait(BEAT_S):
            self._write()


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, if it is to be had: without it a shard may be made twice."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # gone, or on a filesystem without locks
            descriptor = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            until_s = time.monotonic() + _CLAIM_S
            while not _locked(descriptor) and time.monotonic() < until_s:
                time.sleep(0.01)
        yield


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def live_records(cache_dir: Path, *, besides: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the heartbeats of working producers, each with its file's name."""
    for path in sorted(layout.producers_dir(cache_dir).glob("*.json")):
        record = read_record(path) if path.name != besides else None
        if record is not None and "claim" in record and is_working(path, record):
            yield path.name, record


def live_claims(cache_dir: Path, *, besides: str = "") -> dict[int, str]:
    """Return the shards that working producers are making, each with its heartbeat's file name."""
    return {
        int(record["claim"]): name
        for name, record in live_records(cache_dir, besides=besides)
        if record["claim"] is not None
    }


def working_producers(cache_dir: Path) -> dict[str, dict[str, Any]]:
    """Return the records of the producers at work, by name."""
    return {name.removesuffix(".json"): record for name, record in live_records(cache_dir)}


def read_record(path: Path) -> dict[str, Any] | None:
    """Read a heartbeat file; None when it is gone or unreadable."""
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def is_working(path: Path, record: dict[str, Any]) -> bool:
    """Tell whether a claim still counts: its owner lives and has beaten lately.

    A process that is stopped, or stuck, keeps its pid; its shard is made by another meanwhile, and
    the rename decides if it ever wakes.
    """
    return is_alive(path, record) and _is_fresh(path)


def is_alive(path: Path, record: dict[str, Any]) -> bool:
    """Tell whether the process behind a heartbeat exists; on another host, has beaten lately."""
    owner, here = record.get("owner", {}), this_process()
    if all(owner.get(key) == here[key] for key in ("host", "boot", "pid_namespace")):
        return _start_ticks(int(owner.get("pid", -1))) == owner.get("start_ticks")
    return _is_fresh(path)


def _is_fresh(path: Path) -> bool:
    try:
        return _now_s(path.parent) - path.stat().st_mtime < STALE_S
    except FileNotFoundError:
        return False


def clean_leftovers(cache_dir: Path) -> list[str]:
    """Delete temporary folders and heartbeats whose owner is dead; return what was deleted."""
    removed = []
    now_s = _now_s(layout.producers_dir(cache_dir))
    live: set[str] = set()
    dead: set[str] = set()
    for path in layout.producers_dir(cache_dir).glob("*.json"):
        record = read_record(path)
        (live if record is not None and is_alive(path, record) else dead).add(path.stem)
    places = (layout.shards_dir, layout.producers_dir, layout.consumers_dir)
    for folder in (cache_dir, *(place(cache_dir) for place in places)):
        for path in _temporaries(folder):
            owner = owner_of(path)
            if owner in live or (owner not in dead and now_s - _mtime_s(path, now_s) < STALE_S):
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
            removed.append(path.name)
    for name in dead:
        (layout.producers_dir(cache_dir) / f"{name}.json").unlink(missing_ok=True)
    return removed


def owner_of(temporary: Path) -> str:
    """Return the name of the process that made a temporary file or folder."""
    return temporary.name.removeprefix(files.TEMPORARY_PREFIX).rsplit("-", 1)[0]


def _temporaries(folder: Path) -> Iterator[Path]:
    if folder.is_dir():
        yield from folder.glob(f"{files.TEMPORARY_PREFIX}*")


def _now_s(producers_dir: Path) -> float:
    """Return the time by the filesystem's clock, if this process has a fresh heartbeat to read it
    off; clocks of two machines may differ by more than `STALE_S`."""
    return _mtime_s(producers_dir / f"{files.process_name()}.json", time.time())


def _mtime_s(path: Path, default_s: float) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:
        return default_s


def this_process() -> dict[str, Any]:
    """Return who this process is: machine, boot, pid and when it started."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
        return {
            "host": os.uname().nodename,
            "boot": boot,
            "pid_namespace": namespace,
            "pid": os.getpid(),
            "start_ticks": _start_ticks(os.getpid()),
        }
    # Without /proc nobody can be proven dead; heartbeats then age out.
    return {"host": os.uname().nodename, "boot": files.process_name(), "pid_namespace": ""}


def _start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None if no such process runs.

    The pid alone is not enough: after a crash another program may have got it. A zombie, killed but
    not yet reaped (in a container perhaps never), does not run.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rsplit(")", 1)[1].split()
    return None if fields[0] in "ZX" else int(fields[19])
