"""`trainer fit --follow`: train while a producer works, and tell it what may be freed.

Takes the run's plan; waits for shards as they are needed, on every rank, without a busy loop. Rank
0 registers as a consumer of the cache, and once a checkpoint is durable says which ticks are in it;
it asks for a checkpoint of its own accord when the producer may be waiting for that.
"""

from __future__ import annotations

import logging
import math
import os
import time
from pathlib import Path

import numpy as np

from hscache import layout
from hscache.consumers import Progress, Registration
from hscache.errors import CacheIncompleteError, ConfigError
from hscache.freeing import freed_shards
from hscache.producers import working_producers
from hscache.reader import Cache, open_cache
from hscache.report import format_seconds
from hscache.window import num_acknowledged, slots_needed
from trainer.bad_shards import manifest_or_none
from trainer.config import FitConfig
from trainer.row_reader import LOOK_S
from trainer.run_arithmetic import checkpoint_size
from trainer.run_folder import list_checkpoints
from trainer.run_plan import RunPlan
from trainer.schedule import Position, tick_rows

log = logging.getLogger(__name__)

SAY_AGAIN_S = 60.0
PATIENCE_S = 1.0
"""How long rank 0 waits for rows before it counts as starving."""
_LAST_RESORT_S = 30.0
"""After that long a starving trainer saves even if the producer seems to have room: its disk may be
full for another reason."""


def wait_for_cache(config: FitConfig) -> None:
    """Wait until a producer has begun the cache, and made the held-out shards if they are wanted.

    Raises ConfigError at once when not even the folder around it is there.
    """
    (folder,) = config.shards
    if not folder.absolute().parent.is_dir():
        raise ConfigError(f"{folder} cannot be followed: {folder.absolute().parent} is not there.")
    said_s = -math.inf
    while missing := _missing_at_start(config):
        if time.monotonic() - said_s > SAY_AGAIN_S:
            log.info("waiting for `hscache produce` to make %s", missing)
            said_s = time.monotonic()
        time.sleep(LOOK_S)


def _missing_at_start(config: FitConfig) -> str:
    (folder,) = config.shards
    if not layout.root_file(folder).is_file():
        return f"{folder}, which has no plan yet"
    if not config.eval_every_tokens:
        return ""
    cache = open_cache(folder)
    missing = [shard for shard in cache.plan.held_out_shards if not cache.is_published(shard)]
    return f"held-out shards {missing} of {folder}" if missing else ""


def first_ticks(run: RunPlan, position: Position) -> int:
    """Return how many ticks, from the first, a position is past; ones without rows never hold."""
    ticks = position.tick
    while position.row_in_tick == 0 and ticks < run.schedule.num_ticks and _is_empty(run, ticks):
        ticks += 1
    return ticks


def _is_empty(run: RunPlan, tick: int) -> bool:
    """Say whether a tick has no rows, as far as it can be known by now."""
    plan, visits = run.cache.plan, run.schedule.visits(tick)
    skip: set[int] = set()
    for visit in visits:
        if not run.cache.is_published(visit.shard):
            return False
        manifest = manifest_or_none(run.cache, visit.shard, run.config.on_bad_shard)
        skip |= {q.document for q in manifest.quarantined} if manifest else set()
        documents = set(plan.shard_documents(visit.shard)) - skip
        if any(run.rule.rate * plan.valid_anchors[document] >= 1 for document in documents):
            return False  # drawn for sure
    row_tokens = run.config.row_tokens
    rows = tick_rows(plan, visits, run.rule, tick=tick, row_tokens=row_tokens, skip=frozenset(skip))
    return not rows


def acknowledged_by(run: RunPlan, ticks: int) -> int:
    """Return how many shards of the run have had all their visits in its first `ticks` ticks."""
    schedule = run.schedule
    return num_acknowledged(
        ticks, len(schedule.shards), passes=schedule.passes, stride=schedule.stride
    )


def require_unseen_kept(run: RunPlan, position: Position) -> None:
    """Raise CacheIncompleteError, with ids, when a shard was freed that the run still has to read.

    It happens to one that starts after others have been done with the first shards.
    """
    first = acknowledged_by(run, first_ticks(run, position))
    freed = freed_shards(run.cache)
    if lost := [shard for shard in freed if shard in set(run.schedule.shards[first:])]:
        manifest = run.cache.shard_manifest(lost[-1])
        who = ", ".join(manifest.provenance.get("freed", {}).get("acknowledged_by", ())) or "nobody"
        raise CacheIncompleteError(
            f"{run.cache.path}: {len(lost)} shards this run still has to read were freed, ids "
            f"{lost[0]} to {lost[-1]}, when {who} had acknowledged them. A run must register "
            "before the first shard is freed: start all followers together with `hscache produce`, "
            "or make the cache anew."
        )


def require_window(run: RunPlan, num_ranks: int) -> None:
    """Raise ConfigError, naming the least, when the window cannot hold what a checkpoint lags.

    Shards are freed when a checkpoint contains all their visits: until the next one is due, the
    producer needs other slots to go on.
    """
    window, num_shards = run.cache.identity.window, len(run.schedule.shards)
    slots = window.shards + window.reserve
    if not window.shards or num_shards <= slots:
        return
    config, rows = run.config, least_rows(run)
    local = num_ranks > 1 and config.sync.mode != "ddp"
    unit = config.sync.local_steps if local else 1

    def needed(steps: int) -> int:
        steps = -(-steps // unit) * unit  # ranks that step alone save when they meet
        return slots_needed(rows, steps * config.global_batch_rows - 1, window, num_shards)

    if needed(config.checkpoint_every) <= slots:
        return
    fitting = 0
    while needed(fitting + 1) <= slots:
        fitting += 1
    start = (
        f"{run.cache.path} keeps a window of {window.shards} shards and {window.reserve} in "
        f"reserve; with a checkpoint every {config.checkpoint_every:,} steps of "
        f"{config.global_batch_rows} rows this run needs {needed(config.checkpoint_every)} shards."
    )
    if fitting:
        raise ConfigError(f"{start} Set checkpoint_every to at most {fitting}.")
    step = f"sync.local_steps is {unit}" if local else "checkpoint_every is 1"
    raise ConfigError(
        f"{start} Even where {step} it needs {needed(1)}: lower "
        f"{'sync.local_steps or ' if local else ''}global_batch_rows, or make the cache anew with "
        f"--reserve {needed(1) - window.shards} (or smaller shards)."
    )


def least_rows(run: RunPlan) -> list[int]:
    """Return how many rows each tick has at least, as far as the plan tells."""
    plan, schedule, rule = run.cache.plan, run.schedule, run.rule
    tokens, anchors = {}, {}
    for shard in schedule.shards:
        documents = plan.shard_documents(shard)
        drawn_D = np.floor(rule.rate * plan.valid_anchors[documents.start : documents.stop])
        lengths_D = plan.lengths[documents.start : documents.stop]
        tokens[shard] = int(lengths_D[drawn_D >= 1].sum())
        anchors[shard] = int(np.minimum(drawn_D, rule.limit).sum())
    rows = []
    for tick in range(schedule.num_ticks):
        shards = [visit.shard for visit in schedule.visits(tick)]
        by_tokens = sum(tokens[shard] for shard in shards) / run.config.row_tokens
        by_anchors = sum(anchors[shard] for shard in shards) / rule.limit
        rows.append(math.ceil(max(by_tokens, by_anchors)))
    return rows


class Follower:
    """Rank 0's side towards the producer; a context manager that is registered from the start."""

    def __init__(self, run: RunPlan, position: Position, num_ranks: int) -> None:
        self._run = run
        self._checkpoint_bytes = checkpoint_size(run, num_ranks)
        self._saved_ticks = first_ticks(run, position)
        self._said_s = -math.inf
        schedule = run.schedule
        progress = Progress(
            passes=schedule.passes,
            stride=schedule.stride,
            num_ticks=schedule.num_ticks,
            ticks=self._saved_ticks,
            checkpoint_bytes=self._bytes_to_come(),
        )
        self._registration = Registration(run.cache.path, run.config.run_dir, progress)
        log.info("following %s as consumer %s", run.cache.path, self._registration.name)

    def __enter__(self) -> Follower:
        self._registration.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._registration.__exit__(*error)

    def why_save(self, position: Position, starved_s: float) -> str:
        """Return why a starving run should save at once, "" if it need not; say what it waits for.

        Saving helps if it acknowledges shards, and if the producer has no room for the missing one
        or is about to have none: it is then working in the reserve.
        """
        run, window = self._run, self._run.cache.identity.window
        saved = acknowledged_by(run, self._saved_ticks)
        wanted = run.schedule.shards[saved:]
        missing = next((s for s in wanted if not run.cache.is_published(s)), None)
        if missing is None:
            return ""
        if time.monotonic() - self._said_s > SAY_AGAIN_S:
            log.info("waiting for shard %d: %s", missing, _who_is_slow(run.cache, missing))
            self._said_s = time.monotonic()
        gained = acknowledged_by(run, first_ticks(run, position)) - saved
        number = missing - run.schedule.shards[0]
        near = number >= saved + window.shards or starved_s > _LAST_RESORT_S
        if not window.shards or gained <= 0 or not near:
            return ""
        return f"shard {missing} is missing, and {gained} shards can be freed when this is saved"

    def fed(self, starved_s: float) -> None:
        """Note that rows came again."""
        if starved_s > PATIENCE_S and self._said_s > 0:
            log.info("going on after %s of waiting", format_seconds(starved_s))
            self._said_s = -math.inf

    def saving(self, position: Position, step: int) -> Progress:
        """Note that a checkpoint is being written; return what to acknowledge once it is."""
        self._saved_ticks = first_ticks(self._run, position)
        return self._progress(self._saved_ticks, step)

    def acknowledge(self, progress: Progress) -> None:
        """Tell the producer: the checkpoint is durable."""
        self._registration.acknowledge(progress)

    def finish(self, step: int) -> None:
        """Acknowledge everything, the last checkpoint being durable."""
        self.acknowledge(self._progress(self._run.schedule.num_ticks, step))

    def _progress(self, ticks: int, step: int) -> Progress:
        schedule = self._run.schedule
        return Progress(
            passes=schedule.passes,
            stride=schedule.stride,
            num_ticks=schedule.num_ticks,
            ticks=ticks,
            step=step,
            checkpoint_bytes=self._bytes_to_come() if ticks < schedule.num_ticks else 0,
        )

    def _bytes_to_come(self) -> int:
        """Return what checkpoints may still take on the cache's filesystem; 0 if not there."""
        config = self._run.config
        if _device(config.run_dir) != _device(self._run.cache.path):
            return 0
        most = config.keep_checkpoints + 1 + (config.keep_best and config.eval_every_tokens > 0)
        to_come = max(1, most - len(list_checkpoints(config.run_dir)))
        return to_come * self._checkpoint_bytes


def _who_is_slow(cache: Cache, shard: int) -> str:
    working = working_producers(cache.path)
    if not working:
        return f"no producer is at work on {cache.path}"
    if makers := [name for name, record in working.items() if record.get("claim") == shard]:
        return f"{makers[0]} is making it, the producer is the limit"
    reasons = [str(record["waiting"]) for record in working.values() if record.get("waiting")]
    return f"the producer waits too: {reasons[0]}" if reasons else "it has not been begun"


def _device(path: Path) -> int:
    return os.stat(path).st_dev
