"""Who is training from a cache that is being produced, and how far each is: `consumers/NAME.json`.

A trainer that follows registers, and later says which ticks of the schedule its last durable
checkpoint contains; the producer frees a shard when all registered consumers are done with it.
Nobody is dropped for being silent: a run that was stopped may go on next week.

    hscache consumers /nvme/cache
    hscache consumers /nvme/cache --drop run-a-3f9c01d2
"""

import hashlib
import json
import logging
import os
import re
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hscache import files, layout
from hscache.config import ConsumersConfig
from hscache.errors import ConfigError, DiskFullError, HscacheError, ShardCorruptError
from hscache.producers import BEAT_S, is_alive, this_process
from hscache.progress import configure_logging
from hscache.reader import Cache, open_cache
from hscache.report import format_seconds, format_table
from hscache.window import num_acknowledged
from hscache.zarr_array import canonical_json, checksum_hex

log = logging.getLogger(__name__)

NOT_RUNNING = "not running"


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What a consumer's last durable checkpoint contains."""

    passes: int
    stride: int
    num_ticks: int
    ticks: int = 0
    """the first ticks of the schedule, of which every row is in it"""
    step: int = 0
    checkpoint_bytes: int = 0
    """what its next checkpoints may still take on the cache's own filesystem"""


@dataclass(frozen=True, kw_only=True)
class Consumer:
    """A registered consumer, as others see it."""

    name: str
    run_dir: str
    progress: Progress
    alive: bool
    """its process exists; on another machine: has given a sign of life lately"""
    silent_s: float
    """since its last sign of life"""

    @property
    def finished(self) -> bool:
        """Whether it has made all of its passes."""
        return self.progress.ticks >= self.progress.num_ticks

    @property
    def state(self) -> str:
        """In words: finished, following or not running."""
        return "finished" if self.finished else "following" if self.alive else NOT_RUNNING

    def acknowledged(self, num_shards: int) -> int:
        """Return how many training shards, from the first, it is done with."""
        p = self.progress
        return num_acknowledged(p.ticks, num_shards, passes=p.passes, stride=p.stride)


def consumer_name(run_dir: Path) -> str:
    """Return the name that a run registers under: of its folder, so that a resume is the same."""
    path = run_dir.resolve()
    label = re.sub(r"[^A-Za-z0-9_.]+", "_", path.name).strip("._")[:40] or "run"
    return f"{label}-{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"


class Registration:
    """This process's entry among the consumers of a cache; a context manager, on rank 0 only.

    The entry stays behind: what was acknowledged holds until someone drops it.
    """

    def __init__(self, cache_dir: Path, run_dir: Path, progress: Progress) -> None:
        self.name = consumer_name(run_dir)
        self._path = layout.consumers_dir(cache_dir) / f"{self.name}.json"
        self._run_dir = str(run_dir.resolve())
        self.progress = progress
        self._untold = False
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="consumer", daemon=True)

    def __enter__(self) -> "Registration":
        self._write()
        self._thread.start()
        return self

    def __exit__(self, _kind: object, error_inside: object, _trace: object) -> None:
        self._stopped.set()
        self._thread.join()
        if self._untold:
            try:
                self._write()
            except DiskFullError as error:
                if error_inside is None:
                    raise
                log.error("the producer does not know of the last checkpoint: %s", error)

    def acknowledge(self, progress: Progress) -> None:
        """Say what a checkpoint contains, which is durable by now.

        A disk that is full just now does not end the run: it is said again with each sign of life,
        and leaving the context raises DiskFullError if that was in vain.
        """
        with self._lock:
            self.progress = progress
            self._tell()

    def _tell(self) -> None:
        try:
            self._write()
        except DiskFullError:
            if not self._untold:
                log.warning(
                    "the disk of %s is full (%s): the producer cannot be told of the last "
                    "checkpoint, and frees nothing until it is; training goes on, and this is "
                    "tried again", self._path.parent, files.free_space(self._path),
                )  # fmt: skip
            self._untold = True
        else:
            if self._untold:
                log.info("the producer knows of the last checkpoint now")
            self._untold = False

    def _write(self) -> None:
        record = {
            "owner": this_process(),
            "run_dir": self._run_dir,
            "progress": self.progress.__dict__,
        }
        sealed = {**record, "crc32c": checksum_hex(canonical_json(record))}
        folder = self._path.parent
        try:
            with files.disk_full_named(folder):
                folder.mkdir(exist_ok=True)
            files.replace_atomically(self._path, canonical_json(sealed))
        except DiskFullError:
            raise
        except OSError as error:
            raise HscacheError(
                f"cannot register in {folder}: {error.strerror}. A trainer that follows tells the "
                "producer there what it is done with; train without --follow on a cache that is "
                "read-only. If the cache was deleted, it must be made anew."
            ) from error

    def _beat(self) -> None:
        while not self._stopped.wait(BEAT_S):
            try:
                with self._lock:
                    if self._untold:
                        self._tell()
                    else:
                        os.utime(self._path)
            except FileNotFoundError:
                log.warning(
                    "%s is gone: somebody dropped this run, and shards it has not seen may be "
                    "freed; it registers again at its next checkpoint", self._path,
                )  # fmt: skip
                self._stopped.wait(60)
            except (OSError, HscacheError) as error:
                log.warning("no sign of life can be given at %s: %s", self._path, error)


def read_consumers(cache_dir: Path) -> list[Consumer]:
    """Return all registered consumers, by name; raises ShardCorruptError for a damaged entry."""
    consumers, damaged = read_sound_consumers(cache_dir)
    for error in damaged:
        raise error
    return consumers


def read_sound_consumers(cache_dir: Path) -> tuple[list[Consumer], list[ShardCorruptError]]:
    """Return the consumers whose entries are sound, by name, and what is wrong with the others."""
    consumers, damaged = [], []
    for path in sorted(layout.consumers_dir(cache_dir).glob("*.json")):
        if path.name.startswith(files.TEMPORARY_PREFIX):
            continue
        try:
            if (consumer := _read(path)) is not None:
                consumers.append(consumer)
        except ShardCorruptError as error:
            damaged.append(error)
    return consumers, damaged


def _read(path: Path) -> Consumer | None:
    try:
        raw, modified_s = path.read_bytes(), path.stat().st_mtime
    except FileNotFoundError:  # dropped under our eyes
        return None
    try:
        record: dict[str, Any] = json.loads(raw)
        if record.pop("crc32c") != checksum_hex(canonical_json(record)):
            raise ValueError("its checksum does not match")
        return Consumer(
            name=path.stem,
            run_dir=record["run_dir"],
            progress=Progress(**record["progress"]),
            alive=is_alive(path, record),
            silent_s=max(0.0, time.time() - modified_s),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ShardCorruptError(
            f"{path} is damaged ({error}): what that run has acknowledged is not known, so nothing "
            "is freed. A run writes it anew with its next checkpoint: resume it, if it has ended, "
            "or delete the file to drop it."
        ) from error


def describe_consumer(consumer: Consumer, num_shards: int) -> str:
    """Say in words who it is, how far, and when it was last seen."""
    seen = format_seconds(consumer.silent_s)
    return (
        f"{consumer.name} ({consumer.acknowledged(num_shards)} of {num_shards} shards "
        f"acknowledged, {consumer.state}, last sign of life {seen} ago)"
    )


def run(config: ConsumersConfig, *, dry_run: bool = False) -> int:
    """Run the command: drop what is asked for, then print who is left."""
    configure_logging()
    cache = open_cache(config.cache)
    consumers = {} if not config.drop else {c.name: c for c in read_consumers(cache.path)}
    for name in config.drop:
        _require_droppable(name, consumers, cache)
    for name in config.drop:
        if dry_run:
            print(f"would drop {name}")
        else:
            _drop(layout.consumers_dir(cache.path) / f"{name}.json")
            print(f"dropped {name}: no shard waits for it any more")
    print(describe_consumers(cache))
    return 0


def _drop(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise HscacheError(
            f"cannot delete {path}: {error.strerror}. Drop it as a user who may write there, on a "
            "disk that is not mounted read-only."
        ) from error


def _require_droppable(name: str, consumers: dict[str, Consumer], cache: Cache) -> None:
    if name not in consumers:
        known = ", ".join(consumers) or "none"
        raise ConfigError(f"{cache.path} has no consumer {name!r}; registered: {known}.")
    if consumers[name].alive and not consumers[name].finished:
        raise ConfigError(
            f"consumer {name} is running ({consumers[name].run_dir}); stop it before dropping it, "
            "or it will miss shards."
        )


def describe_consumers(cache: Cache) -> str:
    """Return who is registered and how far each is, as a table."""
    consumers = read_consumers(cache.path)
    if not consumers:
        return f"{cache.path}: nobody is registered. `trainer fit --follow` does it by itself."
    num_shards = len(cache.plan.training_shards)
    rows = []
    for c in consumers:
        done = f"{c.acknowledged(num_shards)} of {num_shards}"
        p, seen = c.progress, f"{format_seconds(c.silent_s)} ago"
        rows.append([c.name, c.state, done, f"{p.ticks} of {p.num_ticks}", p.step, seen, c.run_dir])
    headers = ["consumer", "state", "shards done", "ticks", "step", "last seen", "run"]
    table = format_table(headers, rows)
    if any(not c.alive and not c.finished for c in consumers):
        table += (
            "\none that is not running still keeps its shards: resume it, or give "
            "--drop NAME if it will never come back"
        )
    return table
