"""What a run does about documents whose states cannot be read: stop, or go on without them.

Takes the plan of a row and the errors of reading; hands on the row without what is lost. Rows,
steps, positions and the learning rate follow from the plan alone, so a rank that loses documents
stays in step with the others, and a run that is resumed skips what the first one skipped.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from hscache.content import count_seen
from hscache.errors import CacheUnreadableError, HscacheError, ShardFreedError
from hscache.manifest import ShardManifest
from hscache.reader import Cache
from trainer.cache_set import CacheSet, document_name
from trainer.schedule import RowPlan

if TYPE_CHECKING:
    from trainer.ranks import Ranks

log = logging.getLogger(__name__)

OnBadShard = Literal["stop", "skip"]
Skipped = tuple[int, int]
"""A document that was left out of a row, and the index of the pass."""

_NEVER_SKIPPED = (CacheUnreadableError, ShardFreedError)
_MOST_LOST = 0.5
"""Share of the documents that may be lost: beyond it a disk is gone, not a shard."""


class BadShards:
    """Counts what one rank loses; says each damaged shard once, with its documents."""

    def __init__(self, cache: Cache, policy: OnBadShard) -> None:
        self._cache, self._policy = cache, policy
        self._num_seen = self._num_lost = 0
        self._named: set[int] = set()

    def quarantined(self, shard: int) -> frozenset[int]:
        """Return the documents of a shard that have no states; raises unless bad ones are skipped.

        Of a shard whose attributes cannot be read none is known, and all its documents are lost.
        """
        try:
            return frozenset(q.document for q in self._cache.shard(shard).manifest.quarantined)
        except CacheUnreadableError:
            raise
        except HscacheError:
            if self._policy == "stop":
                raise
        manifest = manifest_or_none(self._cache, shard, self._policy)
        return frozenset(q.document for q in manifest.quarantined) if manifest else frozenset()

    def openable(self, plan: RowPlan) -> tuple[RowPlan, tuple[Skipped, ...]]:
        """Return a row without documents whose shards cannot be opened, and these; see `lose`."""
        self._num_seen += len(plan.documents)
        errors: dict[int, HscacheError] = {}
        for place, document in enumerate(plan.documents):
            try:
                self._cache.shard(int(self._cache.plan.shards[document])).check_files()
            except HscacheError as error:
                errors[place] = error
        if not errors:
            return plan, ()
        return without(plan, errors), tuple(self.lose(plan, errors))

    def lose(self, plan: RowPlan, errors: dict[int, HscacheError]) -> list[Skipped]:
        """Take note of documents that cannot be read; `errors` has their places in the row.

        Raises the first error when the run is to stop at bad shards, when a file could be sound but
        not be read now, or when a shard was freed before this run saw it, and HscacheError when so
        much is lost that going on would be no training.
        """
        for place in sorted(errors):
            if self._policy == "stop" or isinstance(errors[place], _NEVER_SKIPPED):
                raise errors[place]
        lost: dict[int, list[int]] = {}
        for place in sorted(errors):
            shard = int(self._cache.plan.shards[plan.documents[place]])
            lost.setdefault(shard, []).append(place)
        for shard, places in lost.items():
            names = [document_name(self._cache, plan.documents[place]) for place in places]
            documents = ", ".join(names)
            if shard in self._named:
                log.warning("skipping documents %s, of a shard named before", documents)
            else:
                self._named.add(shard)
                log.warning("skipping documents %s: %s", documents, errors[places[0]])
        self._num_lost += len(errors)
        limit = _MOST_LOST * count_seen(self._num_seen, self._cache.plan.num_documents)
        if self._num_lost > limit:
            folder = shlex.quote(str(self._cache.path))
            raise HscacheError(
                f"{self._num_lost:,} documents could not be read, more than half of those seen: "
                "skipping them is no training any more. Look at the disk and at `hscache verify "
                f"{folder} --deep`, and continue with --resume. The last: "
                f"{errors[max(errors)]}"
            )
        return [(plan.documents[place], plan.pass_indices[place]) for place in sorted(errors)]


def without(plan: RowPlan, places: Collection[int]) -> RowPlan:
    """Return a row without the documents at some places; the others keep their order."""
    kept = [i for i in range(len(plan.documents)) if i not in places]
    return replace(
        plan,
        documents=tuple(plan.documents[i] for i in kept),
        pass_indices=tuple(plan.pass_indices[i] for i in kept),
        anchors=tuple(plan.anchors[i] for i in kept),
    )


def manifest_or_none(cache: Cache, shard: int, policy: OnBadShard) -> ShardManifest | None:
    """Read a shard's attributes; None, and a warning, if they are damaged and may be skipped."""
    try:
        return cache.shard_manifest(shard)
    except CacheUnreadableError:
        raise
    except HscacheError as error:
        if policy == "stop":
            raise
        log.warning("the documents of a shard will be skipped: %s", error)
        return None


def gather_skipped(own: Sequence[Skipped], ranks: Ranks) -> list[Skipped]:
    """Return what all ranks have skipped; all must come."""
    longest = max(int(count) for (count,) in ranks.gather([len(own)]))
    if not longest:
        return []
    flat = [number for pair in own for number in pair]
    found = ranks.gather([*flat, *[-1] * (2 * longest - len(flat))])
    return sorted(
        (int(document), int(pass_index))
        for numbers in found
        for document, pass_index in zip(numbers[::2], numbers[1::2], strict=True)
        if document >= 0
    )


def describe_skipped(cache: Cache, skipped: Iterable[Skipped]) -> str:
    """Say in the table at the end what was skipped."""
    documents = sorted({document for document, _ in skipped})
    if not documents:
        return "none"
    shards: set[str] = set()
    names = []
    for document in documents:
        one, row = cache.whose(document) if isinstance(cache, CacheSet) else (cache, document)
        folder = f"{one.path} " if isinstance(cache, CacheSet) else ""
        shards.add(f"{folder}{one.plan.shards[row]}")
        names.append(document_name(cache, document))
    text = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
    return (
        f"{len(documents):,} documents of damaged shards {', '.join(sorted(shards)[:12])}: {text}"
    )
