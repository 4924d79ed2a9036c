"""Several caches of one target as one: documents and shards are numbered through.

Takes open caches whose states mean the same; hands on a `CacheSet` that the rest of the trainer
takes for a cache: first the held-out shards of all caches, then the training shards of all, each
cache's in its own order. A training document that another cache holds out is left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hscache.errors import CacheMismatchError, ConfigError
from hscache.layout import LAST_HIDDEN
from hscache.manifest import Quarantined, ShardManifest, cache_fingerprint, identity_diff
from hscache.plan import Plan, PlanManifest
from hscache.planes import Bits
from hscache.reader import Cache, Document, open_cache
from hscache.settings import to_dict
from hscache.shard import Shard

_OPEN_SHARDS = 64


@dataclass(frozen=True, kw_only=True)
class _Side:
    """The held-out or the training part of one cache, and where it lies in the set."""

    cache: int
    documents: range
    """numbers in the set"""
    shards: range
    first_document: int
    """its number in the cache"""
    first_shard: int


def open_caches(paths: Sequence[Path]) -> Cache:
    """Open one cache, or several as a `CacheSet`.

    Raises as `open_cache`; ConfigError for a cache that is named twice, CacheMismatchError with a
    field-by-field diff when the states of two do not mean the same.
    """
    caches = [open_cache(path) for path in paths]
    if len(caches) == 1:
        return caches[0]
    for (i, a), (j, b) in itertools.combinations(enumerate(caches), 2):
        if cache_fingerprint(a.identity) == cache_fingerprint(b.identity):
            raise ConfigError(
                f"--shards: {paths[i]} and {paths[j]} are the same cache. To read one more often, "
                "name it once and give it a larger weight with --weights."
            )
    first = caches[0].identity.states
    for path, other in zip(paths[1:], caches[1:], strict=True):
        if lines := identity_diff(other.identity.states, first, "states.", who=str(path)):
            text = "\n".join(lines).replace("this run", str(paths[0]))
            raise CacheMismatchError(
                f"--shards: the states of {path} and {paths[0]} do not mean the same, so no "
                f"drafter can learn from both:\n{text}\nTrain on caches of one target, made with "
                "one setting."
            )
    return CacheSet(caches)


class CacheSet(Cache):
    """Several caches, numbered through.

    `identity` is the first one's; that of the states is all's. Where codecs differ, states come as
    those of codec `none`, merged on the host.
    """

    def __init__(self, caches: Sequence[Cache]) -> None:
        self.caches = tuple(caches)
        self.path, self.identity = caches[0].path, caches[0].identity
        if len({cache.identity.encoding.codec for cache in caches}) > 1:
            encoding = replace(self.identity.encoding, codec="none")
            self.identity = replace(self.identity, encoding=encoding)
        self._sides = _sides([cache.plan for cache in caches])
        self.plan = _JoinedPlan(self.caches, self._sides)
        self._shard = lru_cache(maxsize=_OPEN_SHARDS)(self._open_shard)
        plan = self.plan
        training = range(
            int(plan.shard_documents(len(plan.held_out_shards)).start), plan.num_documents
        )
        held_out = plan.keys[: training.start]
        leaking = np.flatnonzero(np.isin(plan.keys[training.start :], held_out)) + training.start
        self._leaking = frozenset(leaking.tolist())

    def __repr__(self) -> str:
        return f"CacheSet({', '.join(map(repr, self.caches))})"

    @property
    def num_leaking(self) -> int:
        """Training documents that another cache holds out: they are left out."""
        return len(self._leaking)

    def published_shards(self) -> list[int]:
        """Return the shards on disk, by their numbers in the set."""
        published = [set(cache.published_shards()) for cache in self.caches]
        return [
            number
            for side in self._sides
            for number in side.shards
            if side.first_shard + number - side.shards.start in published[side.cache]
        ]

    def is_published(self, shard: int) -> bool:
        """Say whether a shard is on disk, or has been and was freed."""
        cache, number, _ = self._place(shard)
        return cache.is_published(number)

    def release_shards(self) -> None:
        """Let go of the open shards, of each cache too."""
        super().release_shards()
        for cache in self.caches:
            cache.release_shards()

    def shard_manifest(self, shard: int) -> ShardManifest:
        """Read a shard's attributes; documents that another cache holds out count as left out."""
        cache, number, shift = self._place(shard)
        return self._renumbered(cache.shard_manifest(number), shard, shift)

    def training_shards_of(self, index: int) -> range:
        """Return the training shards of one cache, by their numbers in the set."""
        return self._sides[len(self.caches) + index].shards

    def whose(self, document: int) -> tuple[Cache, int]:
        """Return a document's cache, and its number there."""
        side = next(side for side in self._sides if document in side.documents)
        return self.caches[side.cache], side.first_document + document - side.documents.start

    def identities(self) -> dict[str, Any]:
        """Return the identities as a checkpoint records them: the first, and `more`."""
        first, *others = (_recorded(cache) for cache in self.caches)
        return {**first, "more": {str(i): other for i, other in enumerate(others, start=1)}}

    def _place(self, shard: int) -> tuple[Cache, int, int]:
        """Return a shard's cache, its number there, and what to add to its documents' numbers."""
        side = next(side for side in self._sides if shard in side.shards)
        number = side.first_shard + shard - side.shards.start
        return self.caches[side.cache], number, side.documents.start - side.first_document

    def _open_shard(self, shard: int) -> Shard:
        cache, number, shift = self._place(shard)
        opened = cache.shard(number)
        return _JoinedShard(
            self, shard, opened, self._renumbered(opened.manifest, shard, shift), shift
        )

    def _renumbered(self, manifest: ShardManifest, shard: int, shift: int) -> ShardManifest:
        quarantined = [replace(q, document=q.document + shift) for q in manifest.quarantined]
        known = {q.document for q in quarantined}
        leaking = self._leaking & set(self.plan.shard_documents(shard)) - known
        reason = "held out in another cache"
        quarantined += [Quarantined(document=d, reason=reason) for d in sorted(leaking)]
        return replace(
            manifest,
            shard=shard,
            quarantined=tuple(quarantined),
            num_documents=manifest.num_documents - len(quarantined) + len(known),
        )


def _sides(plans: Sequence[Plan]) -> list[_Side]:
    sides: list[_Side] = []
    document = shard = 0
    for held_out in (True, False):
        for index, plan in enumerate(plans):
            shards = plan.held_out_shards if held_out else plan.training_shards
            first = plan.shard_documents(shards.start).start if shards else 0
            last = plan.shard_documents(shards[-1]).stop if shards else 0
            sides.append(
                _Side(
                    cache=index,
                    documents=range(document, document + last - first),
                    shards=range(shard, shard + len(shards)),
                    first_document=first,
                    first_shard=shards.start,
                )
            )
            document, shard = sides[-1].documents.stop, sides[-1].shards.stop
    return sides


class _JoinedPlan(Plan):
    """The plans of several caches as one."""

    def __init__(self, caches: Sequence[Cache], sides: Sequence[_Side]) -> None:
        self._caches, self._sides = caches, sides

        def column(name: str) -> npt.NDArray[Any]:
            parts = []
            for side in sides:
                start = side.first_document
                values = getattr(caches[side.cache].plan, name)
                parts.append(values[start : start + len(side.documents)])
            return np.concatenate(parts)

        self.lengths, self.keys = column("lengths"), column("keys")
        self.source_rows, self.valid_anchors = column("source_rows"), column("valid_anchors")
        shifts = [
            np.full(len(s.documents), s.shards.start - s.first_shard, np.int32) for s in sides
        ]
        self.shards = column("shards") + np.concatenate(shifts)
        self.manifest = PlanManifest(
            corpus_sha256="",
            num_shards=sides[-1].shards.stop,
            num_held_out_shards=sides[len(caches)].shards.start,
            arrays={},
        )
        self.offsets = np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])
        self._shard_starts = np.searchsorted(self.shards, np.arange(self.num_shards + 1))

    def input_ids(self, document: int) -> npt.NDArray[np.int32]:
        plan, number = self._place(document)
        return plan.input_ids(number)

    def loss_mask(self, document: int) -> npt.NDArray[np.uint8]:
        plan, number = self._place(document)
        return plan.loss_mask(number)

    def _place(self, document: int) -> tuple[Plan, int]:
        side = next(side for side in self._sides if document in side.documents)
        number = side.first_document + document - side.documents.start
        return self._caches[side.cache].plan, number


class _JoinedShard(Shard):
    """A shard whose documents are numbered as in the set."""

    def __init__(
        self, cache: CacheSet, number: int, shard: Shard, manifest: ShardManifest, shift: int
    ) -> None:
        self.cache, self.number, self.manifest = cache, number, manifest
        self.doc_rows = shard.doc_rows + shift
        self._of, self._shift = shard, shift

    def bits(self, document: int, layer_index: int | None = None) -> Bits:
        return self._of.bits(document - self._shift, layer_index)

    def read_bits(self, start: int, stop: int, layer_index: int | None = None) -> Bits:
        return self._of.read_bits(start, stop, layer_index)

    def last_hidden_bits(self, document: int) -> Bits:
        return self._of.last_hidden_bits(document - self._shift)

    def captured_bits(self, document: int) -> Bits:
        return self._of.captured_bits(document - self._shift)

    def pieces(self, document: int) -> list[tuple[int, int]]:
        pieces = self._of.pieces(document - self._shift)
        return pieces if self._is_read_as_it_is() else [(0, pieces[-1][1])]

    def read_arrays(self, document: int, out: dict[str, np.ndarray], first: int = 0) -> None:
        if self._is_read_as_it_is():
            self._of.read_arrays(document - self._shift, out, first)
            return
        assert first == 0
        out["bits"][...] = self.bits(document)
        if (last := out.get(f"{LAST_HIDDEN}bits")) is not None:
            last[...] = self.last_hidden_bits(document)

    def check_files(self) -> None:
        self._of.check_files()

    def _is_read_as_it_is(self) -> bool:
        return self._of.manifest.codec == self.cache.identity.encoding.codec


def identities_of(cache: Cache) -> dict[str, Any]:
    """Return the identity that a checkpoint records, of one cache or of several."""
    return cache.identities() if isinstance(cache, CacheSet) else _recorded(cache)


def _recorded(cache: Cache) -> dict[str, Any]:
    identity = to_dict(cache.identity)
    if not cache.identity.window.shards:
        del identity["window"]  # checkpoints of whole caches have none, of any version
    return identity


def paths_of(cache: Cache) -> tuple[Path, ...]:
    """Return what `open_caches` opens again."""
    return tuple(c.path for c in cache.caches) if isinstance(cache, CacheSet) else (cache.path,)


def folder_of(cache: Cache, document: int) -> Path:
    """Return the folder of a document's cache."""
    return cache.whose(document)[0].path if isinstance(cache, CacheSet) else cache.path


def document_name(cache: Cache, document: int) -> str:
    """Return a document's number, and in a set its cache's folder and its number there."""
    if not isinstance(cache, CacheSet):
        return str(document)
    one, row = cache.whose(document)
    return f"{one.path} {row}"


def in_turns(cache: Cache, documents: Sequence[Document]) -> list[Document]:
    """Return documents so that the caches of a set take turns; each cache's keep their order.

    Of a document that several caches hold, the first is taken.
    """
    if not isinstance(cache, CacheSet):
        return list(documents)
    by_cache: dict[Path, list[Document]] = {}
    for document in {document.key: document for document in reversed(documents)}.values():
        by_cache.setdefault(folder_of(cache, document.row), []).insert(0, document)
    turns = itertools.zip_longest(*by_cache.values())
    return [document for turn in turns for document in turn if document is not None]
