"""`trainer status`: how far a run is, from its files alone, with the cache that it trains from.

Takes a run folder; reads the ends of its metrics, its checkpoints and who holds its lock. Nothing
is written, no torch.

    trainer status runs/a --watch
"""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

from hscache import run_files
from hscache.errors import ConfigError, HscacheError
from hscache.progress import configure_logging
from hscache.reader import open_cache
from hscache.report import format_number, format_seconds, format_table
from hscache.status import Status, bar, status_of, watch
from trainer.config import StatusConfig
from trainer.mixture import MixedSchedule
from trainer.schedule import Schedule

_WAITING = 0.05
_SILENT_S = 600.0
"""A run without a line of metrics for so long, and without a process here, is called stopped."""


def run(config: StatusConfig, *, dry_run: bool = False) -> int:
    """Print the status, again and again with `watch`; a dry run prints it once."""
    configure_logging()
    if not (config.run / "config.json").is_file():
        raise ConfigError(
            f"{config.run} is no run folder: it has no config.json. Give the run_dir of a "
            "`trainer fit`."
        )
    if dry_run or not config.watch:
        print(describe(config.run)[0])
        return 0
    watch(lambda: describe(config.run), config.every_s)
    return 0


def describe(run_dir: Path) -> tuple[str, bool]:
    """Return the table, and whether the run has come to its end or stopped."""
    config = run_files.read_json(run_dir / "config.json")
    step, look = run_files.last_metrics(run_dir)
    age_s = run_files.metrics_age_s(run_dir, time.time())
    pid = run_files.writer_pid(run_dir)
    finished = _is_finished(run_dir)
    running = pid is not None or (not finished and age_s is not None and age_s < _SILENT_S)
    shards = config.get("shards", "")
    folders = [Path(folder) for folder in (shards if isinstance(shards, list) else [shards])]
    caches = [status_of(folder) for folder in folders]
    total = _total_tokens(folders, config)
    tokens = step.get("train/tokens", 0)
    rows = [["state", _state(pid, finished, age_s)]]
    share = f"{bar(tokens / total)} {min(1.0, tokens / total):.1%}: " if total else ""
    of_total = f" of about {total:,}" if total else ""
    rows.append(["trained", f"{share}{tokens:,}{of_total} tokens, step {step.get('step', 0):,}"])
    rate = step.get("perf/tokens_per_s")
    if rate:
        left = ""
        if running and not finished and total > tokens:
            left = f", about {format_seconds((total - tokens) / rate)} left"
        rows.append(["speed", f"{format_number(round(rate))} tokens/s{left}"])
    if step:
        rows.append(["last line", _figures(step)])
    if look:
        rows.append(
            ["held out", f"acceptance {look.get('eval/sequential', 0):.3f} sequential, "
             f"{look.get('eval/dense', 0):.3f} dense, at step {look['step']:,}"]
        )  # fmt: skip
    saved = run_files.checkpoints(run_dir)
    rows.append(["checkpoints", ", ".join(path.name for path in saved) or "none yet"])
    if step and running:
        rows.append(["limit", _limit(step, caches)])
    rows += [
        ["cache", _cache(folder, cache)] for folder, cache in zip(folders, caches, strict=True)
    ]
    return format_table(["run", str(run_dir)], rows), not running


def _state(pid: int | None, finished: bool, age_s: float | None) -> str:
    last = "" if age_s is None else f", last line {format_seconds(age_s)} ago"
    if pid is not None:
        return f"running, process {pid}{last}"
    if finished:
        return f"finished{last}"
    if age_s is None:
        return "not started: no line of metrics"
    if age_s < _SILENT_S:
        return f"not running on this machine{last}: elsewhere, or dead"
    return f"STOPPED{last}; continue with --resume"


def _total_tokens(folders: list[Path], config: dict[str, Any]) -> int:
    """Return the tokens of all passes, 0 if a cache cannot be read from here."""
    total = 0.0
    weights = config.get("weights") or [1.0] * len(folders)
    for folder, weight in zip(folders, weights, strict=True):
        try:
            plan = open_cache(folder).plan
        except (HscacheError, OSError):
            return 0
        held_out = plan.shard_documents(plan.training_shards.start).start
        total += weight * int(plan.offsets[-1] - plan.offsets[held_out])
    return round(total * int(config.get("passes", 1)))


def _is_finished(run_dir: Path) -> bool:
    """Say whether the last checkpoint lies at the end of the schedule."""
    found = run_files.checkpoints(run_dir)
    state = run_files.read_json(found[-1] / "trainer_state.json") if found else {}
    if not state.get("schedule") or not state.get("position"):
        return False
    return bool(state["position"]["tick"] >= _schedule_of(state["schedule"]).num_ticks)


def _schedule_of(recorded: dict[str, Any]) -> Schedule:
    """Return the schedule that a checkpoint records."""
    shards, passes = tuple(recorded["shards"]), recorded["passes"]
    if "weights" not in recorded:
        return Schedule(shards=shards, passes=passes, stride=recorded["stride"])
    ends = itertools.accumulate(recorded["parts"], initial=0)
    return MixedSchedule(
        shards=shards,
        passes=passes,
        stride=recorded["stride"],
        parts=tuple(shards[begin:end] for begin, end in itertools.pairwise(ends)),
        weights=tuple(recorded["weights"]),
    )


def _figures(step: dict[str, Any]) -> str:
    parts = []
    for name, label, form in (
        ("train/loss", "loss", ".3f"),
        ("train/accuracy", "accuracy", ".1%"),
        ("train/lr", "lr", ".1e"),
        ("train/grad_norm_max", "gradient norm", ".2f"),
        ("perf/data_wait", "waiting for data", ".1%"),
    ):
        value = step.get(name)
        parts.append(f"{label} {'-' if value is None else format(value, form)}")
    return ", ".join(parts)


def _limit(step: dict[str, Any], caches: list[Status | None]) -> str:
    wait = step.get("perf/data_wait") or 0.0
    if wait <= _WAITING:
        return "this side: it does not wait for data"
    if any(cache is not None and not cache.complete for cache in caches):
        return f"the target: {wait:.0%} of the time there is no shard to read"
    return f"reading: {wait:.0%} of the time is spent waiting for shards; more threads or disk"


def _cache(shards: Path, cache: Status | None) -> str:
    if cache is None:
        return f"{shards} cannot be read from here"
    making = sum(process.alive for process in cache.producers)
    dead = len(cache.producers) - making
    state = "complete" if cache.complete else f"{making} producing" if making else "nobody produces"
    lost = f", {dead} DEAD" if dead else ""
    return f"{shards}: {cache.published:,} of {cache.num_shards:,} shards, {state}{lost}"
