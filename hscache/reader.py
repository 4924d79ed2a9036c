"""Open a cache and read it: documents, shards, identity. numpy only; never writes.

    cache = hscache.open("/nvme/cache")
    document = cache.documents[0]
    document.input_ids, document.loss_mask, document.hidden_states(layer=16)
    document.torch()      # the same as torch tensors

Opening reads the root and the plan; a shard's metadata is read when one of its documents is.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import ml_dtypes
import numpy as np
import numpy.typing as npt

from hscache import layout
from hscache.errors import (
    CacheIncompleteError,
    CacheMismatchError,
    ConfigError,
    ShardCorruptError,
)
from hscache.manifest import (
    Identity,
    ShardManifest,
    cache_fingerprint,
    read_group,
    require_arrays,
)
from hscache.plan import Plan
from hscache.planes import ARRAYS
from hscache.shard import Shard
from hscache.zarr_reader import cannot_read, is_there, refuse_link

if TYPE_CHECKING:
    import torch

_OPEN_SHARDS = 64


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
        """Read a published shard's attributes and nothing else of it.

        Raises CacheIncompleteError when it is not there, CacheMismatchError when it belongs to
        another cache, ShardCorruptError when its attributes are damaged.
        """
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

    def shard(self, shard: int) -> Shard:
        """Open a published shard.

        Raises what `shard_manifest` does, and CacheIncompleteError when it was freed.
        """
        return self._shard(shard)

    def _open_shard(self, shard: int) -> Shard:
        return Shard(self, shard, self.shard_manifest(shard))

    def _documents_of(self, shards: range) -> range:
        if not shards:
            return range(0)
        first = self.plan.shard_documents(shards[0])
        last = self.plan.shard_documents(shards[-1])
        return range(first.start, last.stop)


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
        """Return ml_dtypes.bfloat16 [T, L, H], or [T, H] of the layer with that target_layer_id.

        Raises ConfigError when the cache has no such layer, CacheIncompleteError when the shard is
        not there or the document was quarantined.
        """
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
