"""`hscache status`: how far producing and training are right now, from files alone.

Takes a cache folder; prints what is produced, consumed and on disk, the speed of both sides, which
of them is the limit, the time left, and processes that died. Nothing is written or locked, so it
may run anywhere that sees the folder. `--watch` repeats it until nothing is left to do.

    hscache status /nvme/cache --watch
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hscache import budget, layout, producers, run_files
from hscache.config import StatusConfig
from hscache.errors import HscacheError
from hscache.progress import configure_logging
from hscache.reader import Cache, open_cache
from hscache.report import format_bytes, format_number, format_seconds, format_table

_RECENT_SHARDS = 16
"""The rate of producing is that of the latest shards."""
_WORDS_WIDTH = 100
_WAITING = 0.05
"""Share of the time without data above which a trainer is said to wait."""


@dataclass(frozen=True, kw_only=True)
class Process:
    """A producer or a consumer, by its file."""

    name: str
    alive: bool
    silent_s: float
    record: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Status:
    """What the files say; tokens count held-out documents too."""

    num_shards: int
    published: int
    """shards made so far, freed ones included"""
    freed: int
    produced_tokens: int
    total_tokens: int
    tokens_per_s: float | None
    """of the latest shards, all producers together; None where fewer than two are known"""
    stopped_s: float | None
    """since the last shard that is on disk was published"""
    disk_bytes: int
    free_bytes: int
    window_shards: int | None
    """training shards that may be on disk; None where all are kept"""
    on_disk: int
    """training shards that are"""
    producers: list[Process]
    consumers: list[Process]

    @property
    def complete(self) -> bool:
        """Whether all shards have been produced."""
        return self.published == self.num_shards

    @property
    def left_s(self) -> float | None:
        """Seconds until the last shard, at the rate of the latest ones."""
        if self.complete or not self.tokens_per_s:
            return None
        return (self.total_tokens - self.produced_tokens) / self.tokens_per_s


def run(config: StatusConfig, *, dry_run: bool = False) -> int:
    """Print the status, again and again with `watch`; a dry run prints it once."""
    configure_logging()
    cache = open_cache(config.cache)

    def show() -> tuple[str, bool]:
        status = look(cache)
        return describe(cache, status), status.complete and not any(
            process.alive for process in [*status.producers, *status.consumers]
        )

    if dry_run or not config.watch:
        print(show()[0])
        return 0
    watch(show, config.every_s)
    return 0


def watch(show: Callable[[], tuple[str, bool]], every_s: float) -> None:
    """Print what `show` returns until it says that nothing more will happen, or Ctrl-C comes.

    On a terminal each text replaces the one before.
    """
    try:
        while True:
            text, done = show()
            if sys.stdout.isatty():
                # To the top, then clear what is left of each line and of the screen: no flicker.
                lines = [f"{line}\033[K" for line in text.splitlines()]
                print("\033[H" + "\n".join(lines) + "\033[J", flush=True)
            else:
                print(f"{text}\n", flush=True)
            if done:
                return
            time.sleep(every_s)
    except KeyboardInterrupt:
        return


def look(cache: Cache) -> Status:
    """Read what is in the folder now; attributes of the latest shards only."""
    plan = cache.plan
    published = cache.published_shards()
    sizes = np.diff(plan.offsets[[plan.shard_documents(s).start for s in range(plan.num_shards)]
                                 + [plan.num_documents]])  # fmt: skip
    modified, freed, on_disk = {}, 0, 0
    for shard in published:
        folder = layout.shard_dir(cache.path, shard)
        if not (folder / "doc_rows").exists():
            freed += 1  # and its attributes are as old as that, not as the shard
            continue
        try:
            modified[shard] = (folder / "zarr.json").stat().st_mtime
        except OSError:
            continue
        on_disk += shard in plan.training_shards
    now_s = time.time()
    latest = sorted(modified, key=lambda shard: modified[shard])[-_RECENT_SHARDS:]
    recent = [m for m in map(cache.shard_manifest, latest) if m.state == "published"]
    token_bytes = [m.stored_bytes / m.num_tokens for m in recent if m.num_tokens]
    here = sizes[list(modified)].sum() if modified else 0
    return Status(
        num_shards=plan.num_shards,
        published=len(published),
        freed=freed,
        produced_tokens=int(sizes[published].sum()) if published else 0,
        total_tokens=plan.num_tokens,
        tokens_per_s=_rate(recent),
        stopped_s=now_s - max(modified.values()) if modified else None,
        disk_bytes=int(np.mean(token_bytes) * here) if token_bytes else 0,
        free_bytes=shutil.disk_usage(cache.path).free,
        window_shards=budget.slots(cache.identity.window) or None,
        on_disk=on_disk,
        producers=_processes(layout.producers_dir(cache.path), now_s),
        consumers=_processes(layout.consumers_dir(cache.path), now_s),
    )


def _rate(manifests: list[Any]) -> float | None:
    """Return tokens/s of the latest shards, by when each was begun and finished."""
    spans = []
    for m in manifests:
        seconds, finished = m.provenance.get("seconds"), m.provenance.get("finished")
        if not isinstance(seconds, int | float) or not isinstance(finished, str):
            continue
        end_s = np.datetime64(finished.removesuffix("Z"), "s").astype(np.int64)
        spans.append((float(end_s) - seconds, float(end_s), m.num_tokens))
    if not spans:
        return None
    elapsed_s = max(end for _, end, _ in spans) - min(start for start, _, _ in spans)
    return sum(tokens for _, _, tokens in spans) / max(elapsed_s, 1e-3)


def _processes(folder: Path, now_s: float) -> list[Process]:
    found = []
    for path in sorted(folder.glob("*.json")):
        record = producers.read_record(path)
        if record is None or path.name.startswith("."):
            continue
        try:
            modified_s = path.stat().st_mtime
        except OSError:  # it has just left
            continue
        alive = producers.is_alive(path, record)
        silent_s = max(0.0, now_s - modified_s)
        found.append(Process(name=path.stem, alive=alive, silent_s=silent_s, record=record))
    return found


def describe(cache: Cache, status: Status) -> str:
    """Return the tables."""
    share = status.produced_tokens / max(1, status.total_tokens)
    rows = [
        ["produced", f"{bar(share)} {share:.1%}: {status.produced_tokens:,} of "
         f"{status.total_tokens:,} tokens, {status.published:,} of {status.num_shards:,} shards"],
        ["speed", _speed(status)],
        ["disk", f"about {format_bytes(status.disk_bytes)} of states, "
         f"{format_bytes(status.free_bytes)} free"],
    ]  # fmt: skip
    if status.window_shards:
        fill = status.on_disk / status.window_shards
        rows.append(
            ["window", f"{bar(fill)} {status.on_disk:,} of {status.window_shards:,} training "
             f"shards on disk, {status.freed:,} freed"]
        )  # fmt: skip
    lines = textwrap.wrap(limit_in_words(status), _WORDS_WIDTH)
    rows += [["" if number else "limit", line] for number, line in enumerate(lines)]
    tables = [format_table(["status", str(cache.path)], rows)]
    if status.producers:
        tables.append(_producers(status.producers))
    if status.consumers:
        tables.append(_consumers(status.consumers))
    return "\n\n".join(tables)


def bar(share: float, width: int = 24) -> str:
    """Draw a share of a whole."""
    filled = round(max(0.0, min(1.0, share)) * width)
    return "█" * filled + "░" * (width - filled)


def _speed(status: Status) -> str:
    if status.complete:
        return "all is produced"
    if not any(process.alive for process in status.producers):
        since = "" if status.stopped_s is None else f", {format_seconds(status.stopped_s)} ago"
        return f"nobody produces: the last shard was published{since}" if since else "not started"
    if status.tokens_per_s is None:
        return "no shard yet"
    left = f", about {format_seconds(status.left_s)} left" if status.left_s else ""
    return f"{format_number(round(status.tokens_per_s))} tokens/s{left}"


def limit_in_words(status: Status) -> str:
    """Say which side the other one waits for."""
    producing = [process for process in status.producers if process.alive]
    following = [process for process in status.consumers if process.alive]
    waits = [
        wait
        for process in following
        if isinstance(wait := _metrics_of(process).get("perf/data_wait"), int | float)
    ]
    waiting = max(waits, default=0.0)
    reasons = [str(process.record.get("waiting") or "") for process in producing]
    if reasons and all(reasons):
        return f"the producer waits: {reasons[0]}"
    if status.window_shards and status.on_disk >= status.window_shards and not status.complete:
        if not following:
            gone = ", ".join(p.name for p in status.consumers if not _is_finished(p))
            resume = f"resume {gone}, or " if gone else ""
            return f"the window is full and nobody trains: {resume}start `trainer fit --follow`"
        return "the trainer: the window is full, and producers wait for shards to be freed"
    if following and waiting > _WAITING:
        if not producing and not status.complete:
            return f"nobody produces, and training waits {waiting:.0%} of the time"
        return f"the target: training waits {waiting:.0%} of the time for shards"
    if producing:
        return "the target" if not following else "the trainer, which never waits for shards"
    if following:
        return "the trainer"
    return "nobody works on it" if not status.complete else "nothing is left to produce"


def _producers(found: list[Process]) -> str:
    rows = []
    for process in found:
        record = process.record
        state = "waiting" if record.get("waiting") else "producing"
        if not process.alive:
            state = "DEAD"
        if process.alive and process.silent_s > producers.STALE_S:
            state = "STUCK"
        rows.append(
            [process.name, state, record.get("claim"), record.get("shards"), record.get("tokens"),
             f"{format_seconds(process.silent_s)} ago"]
        )  # fmt: skip
    headers = ["producer", "state", "at shard", "shards made", "tokens", "last sign of life"]
    table = format_table(headers, rows)
    if any(not process.alive for process in found):
        table += "\na dead producer's shard is made by another, or by the next start of `produce`"
    return table


def _consumers(found: list[Process]) -> str:
    rows = []
    for process in found:
        progress = process.record.get("progress") or {}
        ticks, num_ticks = progress.get("ticks", 0), progress.get("num_ticks") or 0
        metrics = _metrics_of(process)
        state = (
            "finished" if _is_finished(process) else "training" if process.alive else "not running"
        )
        rate = metrics.get("perf/tokens_per_s")
        wait = metrics.get("perf/data_wait")
        rows.append(
            [process.name, state, f"{ticks} of {num_ticks}", metrics.get("step"),
             format_number(round(rate)) if rate else None,
             f"{wait:.1%}" if wait is not None else None,
             f"{format_seconds(process.silent_s)} ago"]
        )  # fmt: skip
    headers = ["consumer", "state", "ticks saved", "step", "tokens/s", "waits", "last sign of life"]
    return format_table(headers, rows)


def _is_finished(process: Process) -> bool:
    progress = process.record.get("progress") or {}
    num_ticks = progress.get("num_ticks") or 0
    return bool(num_ticks) and progress.get("ticks", 0) >= num_ticks


def _metrics_of(process: Process) -> dict[str, Any]:
    run_dir = process.record.get("run_dir")
    if not isinstance(run_dir, str) or not os.path.isabs(run_dir):
        return {}
    return run_files.last_metrics(Path(run_dir))[0]


def status_of(cache_dir: Path) -> Status | None:
    """Return the status of a cache, None where there is none to be read from here."""
    try:
        return look(open_cache(cache_dir))
    except (HscacheError, OSError):
        return None
