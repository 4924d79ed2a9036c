"""Write one Zarr v3 array as a single Zarr shard file, without going through zarr-python.

Takes numpy arrays and a folder; leaves `zarr.json` and one `c.0...` file in it that every Zarr v3
reader opens (core codecs only: bytes, zstd, crc32c, sharding_indexed). Each array is one Zarr
shard; its inner chunks end in a crc32c, and an index of (offset, nbytes) pairs with its own crc32c
closes the file. Before the index, where other readers see a gap, lie the chunks' checksums once
more: their own checksum is in the group's attributes, so that a sound chunk or file in the wrong
place is noticed. The writer streams: rows are appended, the shape is known only at the end.
`zarr_reader` reads it back.

Zarr v3 core spec and sharding_indexed v1.0: https://zarr-specs.readthedocs.io
"""

import contextlib
import json
import math
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import zstandard

from hscache.checksum import crc32c
from hscache.files import disk_full_named, fsync_folder, write_durable

CHECKSUM_BYTES = 4

_MOST_BUFFERS = 1000
"""for one call of writev, which takes 1024"""
_local = threading.local()


def canonical_json(value: object) -> bytes:
    """Serialise to the one byte string that checksums and comparisons use."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def checksum_hex(data: bytes) -> str:
    """Return the crc32c of `data` as 8 hex digits."""
    return f"{crc32c(data):08x}"


def huffman_compressor() -> zstandard.ZstdCompressor:
    """Return a zstd compressor that in effect only Huffman-codes: noise has no matches to find.

    A long minimum match and a tiny hash table all but switch off the match search, which on
    exponent planes costs ratio and speed; the frames are ordinary zstd. One per thread and use.
    """
    parameters = zstandard.ZstdCompressionParameters.from_level(
        1, strategy=1, min_match=7, hash_log=6, window_log=17, target_length=0
    )
    return zstandard.ZstdCompressor(compression_params=parameters)


@dataclass(frozen=True, kw_only=True)
class ArrayLayout:
    """What an array looks like on disk; axis 0 grows, the others are fixed."""

    dtype: str
    """numpy name: uint8, uint16, int32, int64, uint64 or float32"""
    row_shape: tuple[int, ...]
    """shape of one row, () for a flat array"""
    chunk_rows: int
    """rows in an inner chunk"""
    chunk_row_shape: tuple[int, ...]
    """extent of an inner chunk along the other axes; must divide row_shape"""
    compressed: bool
    """inner chunks are zstd frames"""
    axes: tuple[str, ...]
    """dimension names"""

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        """Shape of an inner chunk."""
        return (self.chunk_rows, *self.chunk_row_shape)

    @property
    def chunks_per_band(self) -> int:
        """Inner chunks that share the same rows."""
        return math.prod(
            size // chunk for size, chunk in zip(self.row_shape, self.chunk_row_shape, strict=True)
        )

    @property
    def chunk_bytes(self) -> int:
        """Decoded size of an inner chunk."""
        return math.prod(self.chunk_shape) * np.dtype(self.dtype).itemsize

    @property
    def file_name(self) -> str:
        """Name of the one Zarr shard file."""
        return ".".join(["c", *(["0"] * (1 + len(self.row_shape)))])

    def num_bands(self, num_rows: int) -> int:
        """Return how many bands of `chunk_rows` rows hold `num_rows` rows."""
        return -(-num_rows // self.chunk_rows)

    def index_bytes(self, num_rows: int) -> int:
        """Return the size of the shard index, its checksum included."""
        return 16 * self.num_chunks(num_rows) + CHECKSUM_BYTES

    def num_chunks(self, num_rows: int) -> int:
        """Return how many inner chunks hold `num_rows` rows."""
        return self.num_bands(num_rows) * self.chunks_per_band

    def metadata(self, num_rows: int) -> dict[str, object]:
        """Return the content of `zarr.json` for an array of `num_rows` rows."""
        padded_rows = max(1, self.num_bands(num_rows)) * self.chunk_rows
        one_byte = np.dtype(self.dtype).itemsize == 1
        to_bytes: dict[str, object] = {"name": "bytes"}
        if not one_byte:
            to_bytes["configuration"] = {"endian": "little"}
        codecs = [to_bytes]
        if self.compressed:
            codecs.append({"name": "zstd", "configuration": {"level": 1, "checksum": False}})
        codecs.append({"name": "crc32c"})
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": [num_rows, *self.row_shape],
            "data_type": self.dtype,
            "chunk_grid": {
                "name": "regular",
                "configuration": {"chunk_shape": [padded_rows, *self.row_shape]},
            },
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
            "fill_value": 0,
            "codecs": [
                {
                    "name": "sharding_indexed",
                    "configuration": {
                        "chunk_shape": list(self.chunk_shape),
                        "codecs": codecs,
                        "index_codecs": [
                            {"name": "bytes", "configuration": {"endian": "little"}},
                            {"name": "crc32c"},
                        ],
                        "index_location": "end",
                    },
                }
            ],
            "attributes": {},
            "dimension_names": list(self.axes),
        }


@dataclass(frozen=True, kw_only=True)
class ArrayRecord:
    """What a group's attributes remember of one of its arrays."""

    num_rows: int
    size_bytes: int
    """of the Zarr shard file"""
    metadata_crc32c: str
    """of the array's zarr.json"""
    chunks_crc32c: str = ""
    """of the table of the chunks' checksums before the index; "" if there is none (schema 1)"""


class EncodedChunk(NamedTuple):
    """An inner chunk as it goes to the file: its bytes, then their crc32c."""

    payload: bytes | memoryview
    checksum: bytes


def encode_chunk(chunk: np.ndarray, *, compressed: bool) -> EncodedChunk:
    """Compress (or not) and checksum a chunk; the GIL is free meanwhile.

    An uncompressed payload is a view of `chunk`'s own memory if that is contiguous.
    """
    chunk = np.ascontiguousarray(chunk, chunk.dtype.newbyteorder("<"))
    payload: bytes | memoryview = chunk.reshape(-1).view(np.uint8).data
    if compressed:
        if not hasattr(_local, "compressor"):
            _local.compressor = huffman_compressor()
        payload = _local.compressor.compress(payload)
    return EncodedChunk(payload, crc32c(payload).to_bytes(CHECKSUM_BYTES, "little"))


class ZarrArrayWriter:
    """Write a new array; use as a context manager and call `close` when all is in.

    `append` takes rows, `append_band` whole bands that other threads have encoded.
    """

    def __init__(self, folder: Path, layout: ArrayLayout) -> None:
        self.folder = folder
        self.layout = layout
        self._index: list[tuple[int, int]] = []
        self._checksums: list[bytes] = []
        self._offset = 0
        self._num_rows = 0
        self._band: np.ndarray | None = None
        self._band_rows = 0
        with disk_full_named(folder):
            folder.mkdir()
            self._file = (folder / layout.file_name).open("wb", buffering=0)

    def __enter__(self) -> "ZarrArrayWriter":
        return self

    def __exit__(self, *_: object) -> None:
        # What matters was flushed by `close`, which has said so if it failed.
        with contextlib.suppress(OSError):
            self._file.close()

    def append(self, rows: np.ndarray) -> None:
        """Append `rows` [n, *row_shape] of the layout's dtype."""
        layout = self.layout
        assert (rows.dtype, rows.shape[1:]) == (layout.dtype, layout.row_shape)
        if self._band is None:
            self._band = np.zeros((layout.chunk_rows, *layout.row_shape), layout.dtype)
        start = 0
        while start < len(rows):
            take = min(len(rows) - start, layout.chunk_rows - self._band_rows)
            self._band[self._band_rows : self._band_rows + take] = rows[start : start + take]
            self._band_rows += take
            start += take
            if self._band_rows == layout.chunk_rows:
                self._flush_band()

    def append_band(self, chunks: Sequence[EncodedChunk], num_rows: int) -> None:
        """Append the chunks of one band, which holds `num_rows` rows; only the last has fewer than
        `chunk_rows`, and zeros after them."""
        assert len(chunks) == self.layout.chunks_per_band
        assert self._band_rows == 0
        assert self._num_rows % self.layout.chunk_rows == 0, "a band after the last"
        with disk_full_named(self.folder):
            _write_all(self._file.fileno(), [part for chunk in chunks for part in chunk])
        for payload, checksum in chunks:
            size = len(payload) + CHECKSUM_BYTES
            self._index.append((self._offset, size))
            self._checksums.append(checksum)
            self._offset += size
        self._num_rows += num_rows

    def close(self) -> ArrayRecord:
        """Write the last band, the index and `zarr.json`, all fsynced; return the record."""
        if self._band_rows:
            assert self._band is not None
            self._band[self._band_rows :] = 0
            self._flush_band()
        table = b"".join(self._checksums)
        index = np.array(self._index, "<u8").reshape(-1, 2).tobytes()
        with disk_full_named(self.folder):
            checksum = crc32c(index).to_bytes(CHECKSUM_BYTES, "little")
            _write_all(self._file.fileno(), [table, index, checksum])
            os.fsync(self._file.fileno())
            size_bytes = self._file.tell()
            self._file.close()
        metadata = canonical_json(self.layout.metadata(self._num_rows))
        write_durable(self.folder / "zarr.json", metadata)
        fsync_folder(self.folder)
        return ArrayRecord(
            num_rows=self._num_rows,
            size_bytes=size_bytes,
            metadata_crc32c=checksum_hex(metadata),
            chunks_crc32c=checksum_hex(table),
        )

    def _flush_band(self) -> None:
        assert self._band is not None
        num_rows, self._band_rows = self._band_rows, 0
        compressed = self.layout.compressed
        chunks = _band_chunks(self._band, self.layout)
        self.append_band([encode_chunk(one, compressed=compressed) for one in chunks], num_rows)


def _write_all(descriptor: int, buffers: Sequence[bytes | memoryview]) -> None:
    """Write buffers one after the other, with as few calls as the system allows."""
    left = [memoryview(buffer) for buffer in buffers if len(buffer)]
    while left:
        written = os.writev(descriptor, left[:_MOST_BUFFERS])
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if written:
            left[0] = left[0][written:]


def _band_chunks(band: np.ndarray, layout: ArrayLayout) -> Iterator[np.ndarray]:
    counts = [s // c for s, c in zip(layout.row_shape, layout.chunk_row_shape, strict=True)]
    for position in np.ndindex(*counts):
        window = tuple(
            slice(p * c, (p + 1) * c) for p, c in zip(position, layout.chunk_row_shape, strict=True)
        )
        yield band[(slice(None), *window)]
