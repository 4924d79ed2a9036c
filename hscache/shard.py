"""One published shard, opened for reading: the states of its documents. numpy only; never writes.

Takes a cache and the shard's manifest; hands on bf16 bits, or the stored arrays for who merges them
on a GPU. Its files are opened when a state is asked for.

Axes: T tokens, L captured layers, H hidden.
"""

import itertools
import math
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hscache import layout
from hscache.errors import CacheIncompleteError, ConfigError, ShardCorruptError, ShardFreedError
from hscache.manifest import ShardManifest
from hscache.planes import ARRAYS, Bits, decode_into
from hscache.scratch import scratch
from hscache.zarr_reader import ZarrArrayReader

if TYPE_CHECKING:
    from hscache.reader import Cache

_PIECE_TOKENS = 4 * layout.CHUNK_TOKENS


class Shard:
    """A published shard: `manifest`, and the states of its documents."""

    def __init__(self, cache: "Cache", number: int, manifest: ShardManifest) -> None:
        self.cache = cache
        self.number = number
        self.manifest = manifest
        where = layout.shard_dir(cache.path, number)
        if manifest.state == "freed":
            raise ShardFreedError(
                f"{where} has been freed: its states are no longer on disk, for all who had "
                "registered were done with it (`hscache consumers`). To read it, make the cache "
                "anew and follow from the start."
            )
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
        """Return states of the shard's tokens [start, stop) as bf16 bits, [n, L, H] or [n, H]."""
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
        """Fill the arrays of `out` with a document's, [n, ...] by name, without merging planes.

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
