"""Open a cache and read it: documents, shards, identity. numpy only; never writes.

    cache = hscache.open("/nvme/cache")
    document = cache.documents[0]
    document.input_ids, document.loss_mask, document.hidden_states(layer=16)
    document.torch()      # the same as torch tensors

Opening reads the root and the plan; a shard's metadata is read when one of its documents is.
"""

import itertools
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import ml_dtypes
import numpy as np
import numpy.typing as npt

from hscache import layout
from hscache.errors import CacheIncompleteError, CacheMismatchError, ConfigError, ShardCorruptError
from hscache.manifest import (
    Identity,
    ShardManifest,
    cache_fingerprint,
    read_group,
    require_arrays,
)
from hscache.plan import Plan
from hscache.planes import ARRAYS, Bits, decode_into
from hscache.scratch import scratch
from hscache.zarr_reader import ZarrArrayReader, cannot_read, is_there, refuse_link

if TYPE_CHECKING:
    import torch

_OPEN_SHARDS = 64
_PIECE_TOKENS = 4 * layout.CHUNK_TOKENS


def open_cache(path: str | os.PathLike[str]) -> "Cache":
    """Open the cache in a folder.

    Raises ConfigError when there is none, ShardCorruptError when its metadata is damaged, and
    CacheMismatchError when it was written by a newer hscache.
    """
    cache_dir = Path(path)
    root = layout.root_file(cache_dir)
    if not is_there(root):
        raise ConfigError(
            f"{cache_dir} is no hidden-state cache: {root} does not exist. Give the folder that "
            "`hscache produce --shard-dir` wrote."
        )
    return Cache(cache_dir, read_group(root, Identity))


class Cache:
    """A directory of shards, and the plan they follow."""

    def __init__(self, path: Path, identity: Identity) -> None:
        self.path = path
        self.identity = identity
        self.plan = Plan(path)
        plan, content = self.plan, identity.content
        if (
            plan.manifest.corpus_sha256 != content.corpus_sha256
            or plan.num_documents != content.num_documents
            or plan.num_tokens != content.num_tokens
            or plan.num_shards != content.num_shards
            or len(plan.held_out_shards) != content.num_held_out_shards
        ):
            raise ShardCorruptError(
                f"{path}: plan/ belongs to another corpus than the root says. Delete plan/ and run "
                "`hscache produce` again with the same settings."
            )
        self._fingerprint = cache_fingerprint(identity)
        self._shard = lru_cache(maxsize=_OPEN_SHARDS)(self._open_shard)

    def __repr__(self) -> str:
        content, states = self.identity.content, self.identity.states
        return (
            f"Cache({str(self.path)!r}: {content.num_documents:,} documents, "
            f"{content.num_tokens:,} tokens, {len(self.published_shards())}/{content.num_shards} "
            f"shards, layers {list(states.target_layer_ids)} x {states.hidden_size} of "
            f"{states.target})"
        )

    def _repr_html_(self) -> str:
        from hscache.notebook import cache_html

        return cache_html(self)

    @property
    def documents(self) -> "Documents":
        """All documents of the plan, held-out ones first."""
        return Documents(self, range(self.plan.num_documents))

    @property
    def held_out(self) -> "Documents":
        """The held-out documents."""
        return Documents(self, self._documents_of(self.plan.held_out_shards))

    @property
    def training(self) -> "Documents":
        """The documents to train on."""
        return Documents(self, self._documents_of(self.plan.training_shards))

    def document(self, row: int) -> "Document":
        """Return the document of a plan row; raises ConfigError when there is none."""
        if not 0 <= row < self.plan.num_documents:
            raise ConfigError(
                f"there is no document {row}: {self.path} has documents 0 to "
                f"{self.plan.num_documents - 1:,}; held-out ones come first."
            )
        return Document(self, row)

    def published_shards(self) -> list[int]:
        """Return the ids of the plan's shards on disk, freed ones (tombstones) included."""
        try:
            found = layout.list_shards(self.path)
        except OSError as error:
            raise cannot_read(layout.shards_dir(self.path), "its names", error) from error
        return [shard for shard in found if shard < self.plan.num_shards]

    def is_published(self, shard: int) -> bool:
        """Say whether a shard is on disk, or has been and was freed."""
        return is_there(layout.shard_dir(self.path, shard) / "zarr.json")

    def release_shards(self) -> None:
        """Let go of the open shards: the disk keeps a deleted file for as long as it is open."""
        self._shard.cache_clear()

    def shard_manifest(self, shard: int) -> ShardManifest:
        """Read a published shard's attributes and nothing else of it; raises as `shard` does."""
        where = layout.shard_dir(self.path, shard)
        if not self.is_published(shard):
            if where.exists():
                raise CacheIncompleteError(
                    f"{where} is no shard: it has no zarr.json. Run `hscache repair` on the cache, "
                    "then `hscache produce` again."
                )
            raise CacheIncompleteError(
                f"shard {shard} of {self.path} has not been published: "
                f"{len(self.published_shards())} of {self.plan.num_shards} shards are there. "
                "Run `hscache produce` again with the same settings to finish the cache."
            )
        for folder in (where.parent, where):
            refuse_link(folder)
        manifest = read_group(where / "zarr.json", ShardManifest)
        if manifest.cache != self._fingerprint or manifest.shard != shard:
            raise CacheMismatchError(
                f"{where} says it is shard {manifest.shard} of another cache. Run `hscache "
                "repair` on the cache, then `hscache produce` again."
            )
        if manifest.state != "freed":
            require_arrays(manifest.arrays, self._array_names(manifest), where / "zarr.json")
        return manifest

    def _array_names(self, manifest: ShardManifest) -> set[str]:
        names = set(ARRAYS[manifest.codec])
        if self.identity.states.last_hidden:
            names |= {layout.LAST_HIDDEN + name for name in names}
        return names | set(layout.SHARD_SIDE_ARRAYS)

    def shard(self, shard: int) -> "Shard":
        """Open a published shard.

        Raises CacheIncompleteError when it is not there, CacheMismatchError when it belongs to
        another cache, ShardCorruptError when its metadata is damaged.
        """
        return self._shard(shard)

    def _open_shard(self, shard: int) -> "Shard":
        return Shard(self, shard, self.shard_manifest(shard))

    def _documents_of(self, shards: range) -> range:
        if not shards:
            return range(0)
        first = self.plan.shard_documents(shards[0])
        last = self.plan.shard_documents(shards[-1])
        return range(first.start, last.stop)


class Shard:
    """A published shard: `manifest`, and the states of its documents."""

    def __init__(self, cache: Cache, number: int, manifest: ShardManifest) -> None:
        self.cache = cache
        self.number = number
        self.manifest = manifest
        where = layout.shard_dir(cache.path, number)
        if manifest.state == "freed":
            raise CacheIncompleteError(f"{where} has been freed: its states are no longer on disk.")
        states = cache.identity.states
        self._hidden_size = states.hidden_size
        self._layouts = layout.state_layouts(
            manifest.codec,
            len(states.target_layer_ids),
            states.hidden_size,
            last_hidden=states.last_hidden,
        )
        side = {
            name: ZarrArrayReader(where / name, array_layout, manifest.arrays[name])
            for name, array_layout in layout.SHARD_SIDE_ARRAYS.items()
        }
        offsets, rows = (
            side[name].read(0, side[name].num_rows) for name in ("doc_offsets", "doc_rows")
        )
        planned = cache.plan.shard_documents(number)
        kept = np.isin(np.arange(planned.start, planned.stop), rows)
        lengths = cache.plan.lengths[planned.start : planned.stop][kept]
        expected = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        if (
            len(rows) != len(lengths)
            or not np.array_equal(offsets, expected)
            or offsets[-1] != manifest.num_tokens
        ):
            raise ShardCorruptError(f"{where}: document offsets disagree with the plan.")
        self.doc_rows: npt.NDArray[np.int64] = rows
        self._start = dict(zip(rows.tolist(), offsets[:-1].tolist(), strict=True))

    def __repr__(self) -> str:
        m = self.manifest
        return (
            f"Shard({self.number}: {m.num_documents} documents, {m.num_tokens:,} tokens, "
            f"{m.stored_bytes / 1e6:,.1f} MB, {m.raw_bytes / max(1, m.stored_bytes):.2f}x smaller)"
        )

    def _repr_html_(self) -> str:
        from hscache.notebook import shard_html

        return shard_html(self)

    @cached_property
    def _readers(self) -> dict[str, ZarrArrayReader]:
        where = layout.shard_dir(self.cache.path, self.number)
        return {
            name: ZarrArrayReader(where / name, array_layout, self.manifest.arrays[name])
            for name, array_layout in self._layouts.items()
        }

    def bits(self, document: int, layer_index: int | None = None) -> Bits:
        """Return a document's states as bf16 bits, uint16 [T, L, H] or [T, H] of one layer.

        Raises CacheIncompleteError when the document was quarantined.
        """
        start = self._start_or_raise(document)
        return self.read_bits(start, start + int(self.cache.plan.lengths[document]), layer_index)

    def read_bits(self, start: int, stop: int, layer_index: int | None = None) -> Bits:
        """Return states of the shard's tokens [start, stop) as bf16 bits."""
        num_layers = len(self.cache.identity.states.target_layer_ids)
        layers = range(num_layers) if layer_index is None else [layer_index]
        bits = np.empty((stop - start, len(layers), self._hidden_size), np.uint16)
        for index, layer in enumerate(layers):
            self._merge_into(bits[:, index], start, "", layer)
        return bits if layer_index is None else bits[:, 0]

    def _merge_into(self, out_TH: Bits, start: int, prefix: str, layer: int | None) -> None:
        """Fill `out_TH` with states of one layer, or of the last block (None), from a row on.

        Chunk by chunk: the planes are merged while the processor's cache holds them.
        """
        codec = self.manifest.codec
        readers = {name: self._readers[prefix + name] for name in ARRAYS[codec]}
        if codec == "none":
            readers["bits"].read_into(out_TH if layer is None else out_TH[:, None], start, layer)
            return
        stop = start + len(out_TH)
        first = start
        while first < stop:
            last = min(stop, (first // layout.CHUNK_TOKENS + 1) * layout.CHUNK_TOKENS)
            piece_TH = out_TH[first - start : last - start]
            arrays = {}
            for name, stored in ARRAYS[codec].items():
                shape = piece_TH.shape if stored.per_hidden else piece_TH.shape[:1]
                dtype = np.dtype(stored.dtype)
                held = scratch(name, dtype.itemsize * math.prod(shape)).view(dtype)
                arrays[name] = held.reshape(shape)
                rows = arrays[name] if layer is None else arrays[name][:, None]
                readers[name].read_into(rows, first, layer)
            decode_into(arrays, codec, piece_TH)
            first = last

    def last_hidden_bits(self, document: int) -> Bits:
        """Return the last block's output of a document as bf16 bits, uint16 [T, H].

        Raises ConfigError when the cache has none, CacheIncompleteError when the document was
        quarantined.
        """
        if not self.cache.identity.states.last_hidden:
            raise ConfigError(
                f"{self.cache.path} does not hold the target's last hidden states. Produce a cache "
                "with --target.last-hidden true to have them."
            )
        start = self._start_or_raise(document)
        stop = start + int(self.cache.plan.lengths[document])
        bits_TH = np.empty((stop - start, self._hidden_size), np.uint16)
        self._merge_into(bits_TH, start, layout.LAST_HIDDEN, None)
        return bits_TH

    def captured_bits(self, document: int) -> Bits:
        """Return all there is of a document, [T, L, H]; a stored last block is one more layer."""
        bits_TLH = self.bits(document)
        if not self.cache.identity.states.last_hidden:
            return bits_TLH
        return np.concatenate([bits_TLH, self.last_hidden_bits(document)[:, None]], axis=1)

    def pieces(self, document: int) -> list[tuple[int, int]]:
        """Return tokens [first, last) of a document to be read by one thread each.

        Cut where bands end, so that no two threads decode the same chunk.
        """
        start = self._start_or_raise(document)
        stop = start + int(self.cache.plan.lengths[document])
        cuts = [start, *range((start // _PIECE_TOKENS + 1) * _PIECE_TOKENS, stop, _PIECE_TOKENS)]
        return [(a - start, b - start) for a, b in itertools.pairwise([*cuts, stop])]

    def read_arrays(self, document: int, out: dict[str, np.ndarray], first: int = 0) -> None:
        """Fill the arrays of `out` with a document's, one row a token, without merging planes.

        `first` is the token to begin with. For loaders that merge on a GPU (`hscache.planes.decode`
        says how). Raises CacheIncompleteError when the document was quarantined, ShardCorruptError
        for a bad byte.
        """
        start = self._start_or_raise(document) + first
        for name, rows in out.items():
            self._readers[name].read_into(rows, start)

    def check_files(self) -> None:
        """Check sizes, metadata and indices of the states' files, without reading payload.

        Raises ShardCorruptError.
        """
        _ = self._readers

    def _start_or_raise(self, document: int) -> int:
        start = self._start.get(document)
        if start is None:
            reasons = {q.document: q.reason for q in self.manifest.quarantined}
            raise CacheIncompleteError(
                f"document {document} is not in shard {self.number} of {self.cache.path}: "
                f"{reasons.get(document, 'it belongs to another shard')}."
            )
        return start


@dataclass(frozen=True)
class TorchDocument:
    """A document as torch tensors: `input_ids` int64 [T], `loss_mask` bool [T], `hidden_states`
    bfloat16 [T, L, H]."""

    input_ids: "torch.Tensor"
    loss_mask: "torch.Tensor"
    hidden_states: "torch.Tensor"


class Document:
    """One document of the cache; arrays are read from disk when asked for."""

    def __init__(self, cache: Cache, row: int) -> None:
        self._cache = cache
        self.row = row

    def __repr__(self) -> str:
        supervised = int(self.loss_mask.sum())
        return (
            f"Document({self.row}: {self.num_tokens:,} tokens, {supervised:,} supervised, shard "
            f"{self.shard_number})"
        )

    def _repr_html_(self) -> str:
        from hscache.notebook import document_html

        return document_html(self)

    def __len__(self) -> int:
        return self.num_tokens

    @property
    def cache(self) -> Cache:
        """The cache it belongs to."""
        return self._cache

    @property
    def num_tokens(self) -> int:
        """Tokens in the document."""
        return int(self._cache.plan.lengths[self.row])

    @property
    def shard_number(self) -> int:
        """The shard that holds (or will hold) the document's states."""
        return int(self._cache.plan.shards[self.row])

    @property
    def key(self) -> int:
        """64-bit hash of ids and mask."""
        return int(self._cache.plan.keys[self.row])

    @property
    def source_row(self) -> int:
        """Row of the input the document came from, counted over all input files."""
        return int(self._cache.plan.source_rows[self.row])

    @property
    def input_ids(self) -> npt.NDArray[np.int32]:
        """Token ids, int32 [T]."""
        return self._cache.plan.input_ids(self.row)

    @property
    def loss_mask(self) -> npt.NDArray[np.bool_]:
        """True where the token is supervised, bool [T]."""
        return self._cache.plan.loss_mask(self.row).astype(bool)

    def hidden_states(self, layer: int | None = None) -> npt.NDArray[Any]:
        """Return ml_dtypes.bfloat16 [T, L, H], or [T, H] of the layer with that target_layer_id."""
        layer_ids = self._cache.identity.states.target_layer_ids
        if layer is not None and layer not in layer_ids:
            raise ConfigError(f"layer {layer} is not in this cache; it has {list(layer_ids)}.")
        index = None if layer is None else layer_ids.index(layer)
        bits = self._cache.shard(self.shard_number).bits(self.row, index)
        return bits.view(ml_dtypes.bfloat16)

    def last_hidden(self) -> npt.NDArray[Any]:
        """Return the last block's output before the final norm, ml_dtypes.bfloat16 [T, H].

        Raises ConfigError when the cache was made without `target.last_hidden`.
        """
        bits = self._cache.shard(self.shard_number).last_hidden_bits(self.row)
        return bits.view(ml_dtypes.bfloat16)

    def torch(self) -> TorchDocument:
        """Return everything as torch tensors (imports torch)."""
        import torch

        bits = self.hidden_states().view(np.int16)
        return TorchDocument(
            input_ids=torch.from_numpy(self.input_ids.astype(np.int64)),
            loss_mask=torch.from_numpy(self.loss_mask),
            hidden_states=torch.from_numpy(bits).view(torch.bfloat16),
        )


class Documents(Sequence[Document]):
    """A range of plan rows as a sequence of documents."""

    def __init__(self, cache: Cache, rows: range) -> None:
        self._cache = cache
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Document]:
        return (Document(self._cache, row) for row in self._rows)

    @overload
    def __getitem__(self, index: int) -> Document: ...
    @overload
    def __getitem__(self, index: slice) -> "Documents": ...
    def __getitem__(self, index: int | slice) -> "Document | Documents":
        if isinstance(index, slice):
            return Documents(self._cache, self._rows[index])
        return Document(self._cache, self._rows[index])

    def __repr__(self) -> str:
        return f"Documents({len(self)})"
