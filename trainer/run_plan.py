"""Everything of a run that is decided before its first step: shards, schedule, shapes, coverage.

Takes a `FitConfig`, opens the cache and checks all that can be checked without training; hands on a
`RunPlan`.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from hscache.errors import CacheIncompleteError, ConfigError
from hscache.reader import Cache, Document
from hscache.window import visit_stride
from trainer.anchors import coverage
from trainer.bad_shards import manifest_or_none
from trainer.cache_set import CacheSet, folder_of, in_turns, open_caches
from trainer.config import FitConfig, LossConfig
from trainer.drafter_config import DrafterConfig
from trainer.frozen import drafter_config
from trainer.held_out import choose_documents
from trainer.mixture import MixedSchedule, mixed_rule, mixed_tokens
from trainer.row_reader import RowSettings, RowTask
from trainer.rows import decayed_weights
from trainer.schedule import AnchorRule, Position, Schedule, Share, anchor_rule, expected_tokens

log = logging.getLogger(__name__)

_GAMMA = {16: 7.0, 10: 5.0, 8: 4.0}
"""Published values, by block size."""
_COVERAGE_SAMPLE = 2000
"""Documents, about, that coverage is estimated from."""


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """What a run reads, in which order, and into which shapes."""

    config: FitConfig
    cache: Cache
    drafter: DrafterConfig
    schedule: Schedule
    rule: AnchorRule
    row: RowSettings
    total_tokens: int
    """context tokens over all passes, on average over the anchors' draws"""
    coverage: float
    """expected scorings of a supervised token in a pass"""
    held_out: tuple[Document, ...] = ()
    """documents to look at while training; none without `eval_every_tokens`"""

    def row_task(self, start: Position | None = None, share: Share | None = None) -> RowTask:
        """Return what a reader takes: all rows of this run, or a rank's share from `start` on."""
        return RowTask(
            schedule=self.schedule,
            rule=self.rule,
            row=self.row,
            start=start or Position(),
            share=share or Share(),
            threads=self.config.threads,
            on_bad_shard=self.config.on_bad_shard,
            follow=self.config.follow,
        )


def plan_run(config: FitConfig, *, recorded_shards: Collection[int] | None = None) -> RunPlan:
    """Open the cache, check everything that can be checked, and fix the schedule.

    `recorded_shards` are those of a checkpoint to be resumed: with `allow_partial` the run stays
    with them, whatever has been published since. Raises CacheIncompleteError for an unfinished
    cache without `allow_partial`, DataError when nothing is supervised, ConfigError and
    CacheMismatchError for settings that cannot work.
    """
    cache = open_caches(config.shards)
    drafter = drafter_config(config.drafter, cache)
    gamma = _gamma(config.loss, drafter.block_size)
    if config.loss.labels == "soft" and not cache.identity.states.last_hidden:
        raise ConfigError(
            f"loss.labels soft needs the target's last hidden states, which {cache.path} does not "
            "hold. Produce a cache with --target.last-hidden true, or train with hard labels."
        )
    if isinstance(cache, CacheSet):
        for one in cache.caches:  # so that a message names the cache
            _training_documents(one, config, None)
        if cache.num_leaking:  # said here, for each process that reads rows opens the caches too
            log.warning(
                "%d training documents of one cache are held out in another: they are left out of "
                "training", cache.num_leaking,
            )  # fmt: skip
    documents = _training_documents(cache, config, recorded_shards)
    shards = tuple(documents)
    rows = [row for shard in shards for row in documents[shard]]
    plan = cache.plan
    longest = max(rows, key=lambda row: int(plan.lengths[row]))
    if plan.lengths[longest] > config.row_tokens:
        raise ConfigError(
            f"row_tokens is {config.row_tokens} and the longest document of "
            f"{folder_of(cache, longest)} has {plan.lengths[longest]} tokens. "
            "Set row_tokens to at least that."
        )
    schedule, rule, total_tokens = _schedule(config, cache, documents)
    sample = rows[:: max(1, len(rows) // _COVERAGE_SAMPLE)]
    weights_K = decayed_weights(drafter.block_size, gamma)
    return RunPlan(
        config=config,
        cache=cache,
        drafter=drafter,
        schedule=schedule,
        rule=rule,
        row=RowSettings(
            row_tokens=config.row_tokens,
            anchors_per_row=config.anchors_per_row,
            block_size=drafter.block_size,
            gamma=gamma,
            sample_slots=config.loss.sample_slots,
            soft_labels=config.loss.labels == "soft",
        ),
        total_tokens=total_tokens,
        coverage=coverage(
            (plan.loss_mask(row) != 0 for row in sample),
            rate=rule.rate,
            limit=rule.limit,
            keep_K=weights_K if config.loss.sample_slots else np.ones_like(weights_K),
        ),
        held_out=_held_out(cache, config),
    )


def _schedule(
    config: FitConfig, cache: Cache, documents: dict[int, Sequence[int]]
) -> tuple[Schedule, AnchorRule, int]:
    """Return the order of shards, the rule of anchors, and the tokens of the run."""
    plan, shards = cache.plan, tuple(documents)
    shape = {
        "row_tokens": config.row_tokens,
        "anchors_per_row": config.anchors_per_row,
        "seed": config.seed,
    }
    if isinstance(cache, CacheSet):
        parts = [cache.training_shards_of(index) for index in range(len(cache.caches))]
        mixed = MixedSchedule(
            shards=shards,
            passes=config.passes,
            stride=len(shards),
            parts=tuple(tuple(shard for shard in part if shard in documents) for part in parts),
            weights=config.weights or (1.0,) * len(parts),
        )
        rule = mixed_rule(plan, mixed, documents, **shape)
        return mixed, rule, mixed_tokens(plan, mixed, documents, rule)
    rows = [row for shard in shards for row in documents[shard]]
    rule = anchor_rule(plan, rows, **shape)
    schedule = Schedule(
        shards=shards, passes=config.passes, stride=_stride(cache, config, len(shards))
    )
    return schedule, rule, round(expected_tokens(plan, rows, rule) * config.passes)


def _gamma(loss: LossConfig, block_size: int) -> float | None:
    if loss.weighting == "dpace":
        return None
    gamma = loss.gamma or _GAMMA.get(block_size)
    if gamma is None:
        raise ConfigError(
            f"loss.gamma has no default for block_size {block_size}; published values are 7 for "
            "16, 5 for 10 and 4 for 8."
        )
    return gamma


def _held_out(cache: Cache, config: FitConfig) -> tuple[Document, ...]:
    if not config.eval_every_tokens:
        return ()
    limit = cache.plan.num_documents if isinstance(cache, CacheSet) else config.eval_documents
    found = choose_documents(cache, limit, config.row_tokens)
    chosen = tuple(in_turns(cache, found)[: config.eval_documents])
    if not chosen:
        log.warning(
            "%s has no held-out document with states, two supervised tokens in a row and at most "
            "row_tokens (%d) tokens: training goes on without evaluation. `hscache produce "
            "--data.held-out-fraction` makes some in a new cache.",
            cache.path, config.row_tokens,
        )  # fmt: skip
    return chosen


def _stride(cache: Cache, config: FitConfig, num_shards: int) -> int:
    """Return how many ticks lie between two visits of a shard."""
    window = cache.identity.window
    if config.allow_partial:
        return num_shards
    if window.shards:
        if config.passes != window.passes:
            raise ConfigError(
                f"passes: found {config.passes}, and {cache.path} frees its shards after "
                f"{window.passes} (--passes of `hscache produce`). Set passes to {window.passes}."
            )
        if config.window not in (None, window.shards):
            raise ConfigError(
                f"window: found {config.window}, and {cache.path} was made with a window of "
                f"{window.shards} shards. Leave window out."
            )
        return visit_stride(window.shards, num_shards, window.passes)
    if config.window is None:
        return num_shards
    if config.window < min(config.passes, num_shards):
        raise ConfigError(
            f"window: found {config.window}, expected at least {config.passes}, one shard a pass."
        )
    return visit_stride(config.window, num_shards, config.passes)


def _training_documents(
    cache: Cache, config: FitConfig, recorded_shards: Collection[int] | None
) -> dict[int, Sequence[int]]:
    """Return the plan rows of each training shard; shards ascend.

    All of the plan's, whatever was quarantined, so that a run that follows plans the same. Of a
    partial cache, or of several, only those with states.
    """
    wanted = cache.plan.training_shards
    if config.follow:
        return {shard: cache.plan.shard_documents(shard) for shard in wanted}
    published = set(cache.published_shards())
    manifests = {
        shard: manifest_or_none(cache, shard, config.on_bad_shard)
        for shard in wanted
        if shard in published
    }
    present = {shard: m for shard, m in manifests.items() if m is None or m.state != "freed"}
    missing = [shard for shard in wanted if shard not in present]
    num_freed = len(manifests) - len(present)
    counts = f"{len(present)} of {len(wanted)} training shards are there"
    if num_freed:
        counts += f", {num_freed} were freed"
    if missing and not config.allow_partial:
        finish = "Finish it with `hscache produce`"
        if cache.identity.window.shards:
            finish = "It keeps a window of shards only: train with --follow while it is produced"
        raise CacheIncompleteError(
            f"{cache.path} is unfinished: {counts}. {finish}, or train on what is there with "
            "--allow-partial."
        )
    if config.allow_partial and recorded_shards is not None:
        present = {shard: m for shard, m in present.items() if shard in recorded_shards}
    usable = {shard: m for shard, m in present.items() if m is None or m.num_documents > 0}
    if not usable:
        raise CacheIncompleteError(
            f"{cache.path} has nothing to train on: {counts}, none with a document in it. Let "
            "`hscache produce` finish at least one."
        )
    if missing:
        log.warning(
            "training on %d of %d shards (%.0f %%), as allow_partial asks; the checkpoint records "
            "which",
            len(usable), len(wanted), 100 * len(usable) / len(wanted),
        )  # fmt: skip
    quarantined = {
        shard: {q.document for q in m.quarantined} if m else set() for shard, m in present.items()
    }
    if not config.allow_partial and not isinstance(cache, CacheSet):
        if lost := sorted(itertools.chain(*quarantined.values())):
            log.info(
                "%d quarantined documents have no states: the %d tokens of each pass over them are "
                "planned, as in a run that follows, and left out of rows",
                len(lost), cache.plan.lengths[lost].sum(),
            )  # fmt: skip
        return {shard: cache.plan.shard_documents(shard) for shard in wanted}
    return {
        shard: [row for row in cache.plan.shard_documents(shard) if row not in quarantined[shard]]
        for shard in usable
    }
