"""Gather documents' rows into bands of the stored arrays; compress and write whole bands.

Takes rows, as bf16 bits or encoded; hands bands to the array writers in order. Threads encode the
layers of what is added, and compress full bands while more is added; one more thread writes them,
so that who adds does not wait for the disk. Few bands are on their way at a time, in memory that is
used again: a slow disk holds the producer up in the end, and nothing grows.

Axes: T tokens, L captured layers (the last block's output is one more), H hidden, R a band's rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from hscache.layout import CHUNK_TOKENS, LAST_HIDDEN
from hscache.planes import ARRAYS, LOSSY, Bits, Codec, blocks, decode, empty_arrays, encode_into
from hscache.sums import StateSums
from hscache.zarr_array import EncodedChunk, ZarrArrayWriter, encode_chunk

_ON_THEIR_WAY = 8
"""Full bands that are compressed or wait for the disk, at most; 13 MB each at 5 x 5120."""


@dataclass
class _Band:
    arrays: dict[str, np.ndarray]
    """[L, R, H] or [L, R]: a chunk's rows lie side by side"""
    num_rows: int = 0


class BandWriter:
    """Append documents; `finish` when all are in."""

    def __init__(
        self,
        writers: dict[str, ZarrArrayWriter],
        codec: Codec,
        *,
        num_layers: int,
        hidden_size: int,
        last_hidden: bool,
        executor: Executor | None,
    ) -> None:
        self._writers = writers
        self._codec = codec
        self._num_layers = num_layers
        self._captured = num_layers + last_hidden
        self._hidden_size = hidden_size
        self._executor = executor
        self._free: list[_Band] = []
        self._band = self._new_band()
        self._full: deque[tuple[_Band, Future[None]]] = deque()
        self._disk = ThreadPoolExecutor(1) if executor else None

    def add(self, bits_TLH: Bits) -> StateSums:
        """Encode and append a document; it is not looked at any more after the return."""
        lossy = self._codec in LOSSY
        sums = StateSums.zeros(*bits_TLH.shape, lossy=lossy)
        for tokens, rows in self._places(len(bits_TLH)):

            def encode_layer(layer: int, tokens: slice = tokens, rows: slice = rows) -> None:
                states_TH = bits_TLH[tokens, layer]
                out = {name: array[layer, rows] for name, array in self._band.arrays.items()}
                for part in blocks(states_TH):
                    bits_TH = np.ascontiguousarray(states_TH[part])  # read from memory once
                    arrays = {name: array[part] for name, array in out.items()}
                    encode_into(bits_TH, self._codec, arrays)
                    stored_TH = decode(arrays, self._codec) if lossy else None
                    sums.add_layer(layer, bits_TH, stored_TH)

            for _ in self._each(encode_layer, range(self._captured)):
                pass
            self._close_rows(rows)
        return sums

    def add_encoded(self, arrays: dict[str, np.ndarray]) -> None:
        """Append the stored arrays [T, L, H] or [T, L] of a document, by copying them."""
        num_tokens = len(next(iter(arrays.values())))
        for tokens, rows in self._places(num_tokens):
            for name, band in self._band.arrays.items():
                band[:, rows] = arrays[name][tokens].swapaxes(0, 1)
            self._close_rows(rows)

    def finish(self) -> None:
        """Write what is left."""
        if self._band.num_rows:
            for array in self._band.arrays.values():
                array[:, self._band.num_rows :] = 0
            self._start_compressing()
        self._write_all_but(0)

    def cancel(self) -> None:
        """Drop what has not been started; what is being written ends first."""
        if self._disk:
            self._disk.shutdown(cancel_futures=True)

    def _places(self, num_tokens: int) -> Iterator[tuple[slice, slice]]:
        """Yield which tokens go to which rows of `self._band`, which changes in between."""
        first = 0
        while first < num_tokens:
            row = self._band.num_rows
            take = min(num_tokens - first, CHUNK_TOKENS - row)
            yield slice(first, first + take), slice(row, row + take)
            first += take

    def _close_rows(self, rows: slice) -> None:
        self._band.num_rows = rows.stop
        if rows.stop == CHUNK_TOKENS:
            self._start_compressing()
            self._write_all_but(_ON_THEIR_WAY)

    def _new_band(self) -> _Band:
        if self._free:
            band = self._free.pop()
            band.num_rows = 0
            return band
        shape = (self._captured, CHUNK_TOKENS, self._hidden_size)
        return _Band(empty_arrays(shape, self._codec))

    def _start_compressing(self) -> None:
        band = self._band

        def compress(layer: int) -> dict[str, EncodedChunk]:
            return {
                name: encode_chunk(array[layer], compressed=ARRAYS[self._codec][name].compressed)
                for name, array in band.arrays.items()
            }

        if self._executor and self._disk:
            futures = [self._executor.submit(compress, layer) for layer in range(self._captured)]
            written = self._disk.submit(self._write, band, futures)
        else:
            self._write_chunks([compress(layer) for layer in range(self._captured)], band.num_rows)
            written = Future()
            written.set_result(None)
        self._full.append((band, written))
        self._band = self._new_band()

    def _write(self, band: _Band, futures: list[Future[dict[str, EncodedChunk]]]) -> None:
        self._write_chunks([future.result() for future in futures], band.num_rows)

    def _write_chunks(self, chunks_L: list[dict[str, EncodedChunk]], num_rows: int) -> None:
        for name in ARRAYS[self._codec]:
            chunks = [chunks[name] for chunks in chunks_L]
            self._writers[name].append_band(chunks[: self._num_layers], num_rows)
            if self._captured > self._num_layers:
                self._writers[LAST_HIDDEN + name].append_band(chunks[-1:], num_rows)

    def _write_all_but(self, num_bands: int) -> None:
        while len(self._full) > num_bands:
            band, written = self._full[0]
            written.result()
            self._full.popleft()
            self._free.append(band)

    def _each(self, work: Callable[[int], Any], items: Iterable[int]) -> Iterator[Any]:
        return self._executor.map(work, items) if self._executor else map(work, items)
