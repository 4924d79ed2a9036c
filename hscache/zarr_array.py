"""Write and read one Zarr v3 array as a single Zarr shard file, without going through zarr-python.

Takes numpy arrays and a folder; leaves `zarr.json` and one `c.0...` file in it that every Zarr v3
reader opens (core codecs only: bytes, zstd, crc32c, sharding_indexed). Each array is one Zarr
shard; its inner chunks end in a crc32c, and an index of (offset, nbytes) pairs with its own crc32c
closes the file. The writer streams: rows are appended, the shape is known only at the end.

Zarr v3 core spec and sharding_indexed v1.0: https://zarr-specs.readthedocs.io
"""

import contextlib
import json
import math
import os
import stat
from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import crc32c
import numcodecs.zstd
import numpy as np
import zstandard

from hscache.errors import ShardCorruptError
from hscache.files import disk_full_named, fsync_folder, write_durable

CHECKSUM_BYTES = 4


def canonical_json(value: object) -> bytes:
    """Serialise to the one byte string that checksums and comparisons use."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def checksum_hex(data: bytes) -> str:
    """Return the crc32c of `data` as 8 hex digits."""
    return f"{crc32c.crc32c(data):08x}"


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
        return 16 * self.num_bands(num_rows) * self.chunks_per_band + CHECKSUM_BYTES

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


class ZarrArrayWriter:
    """Append rows to a new array; use as a context manager and call `close` when all is in."""

    def __init__(self, folder: Path, layout: ArrayLayout, executor: Executor | None = None) -> None:
        self.folder = folder
        self.layout = layout
        self._executor = executor
        self._index: list[tuple[int, int]] = []
        self._offset = 0
        self._num_rows = 0
        self._band = np.zeros((layout.chunk_rows, *layout.row_shape), layout.dtype)
        self._band_rows = 0
        with disk_full_named(folder):
            folder.mkdir()
            self._file = (folder / layout.file_name).open("wb")

    def __enter__(self) -> "ZarrArrayWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # What matters was flushed by `close`; after a full disk this flush fails again, and must
        # not replace the error that says so.
        with contextlib.suppress(OSError):
            self._file.close()

    def append(self, rows: np.ndarray) -> None:
        """Append `rows` [n, *row_shape] of the layout's dtype."""
        assert (rows.dtype, rows.shape[1:]) == (self.layout.dtype, self.layout.row_shape)
        start = 0
        while start < len(rows):
            take = min(len(rows) - start, self.layout.chunk_rows - self._band_rows)
            self._band[self._band_rows : self._band_rows + take] = rows[start : start + take]
            self._band_rows += take
            start += take
            if self._band_rows == self.layout.chunk_rows:
                self._flush_band()
        self._num_rows += len(rows)

    def close(self) -> ArrayRecord:
        """Write the last band, the index and `zarr.json`, all fsynced; return the record."""
        if self._band_rows:
            self._band[self._band_rows :] = 0
            self._flush_band()
        index = np.array(self._index, "<u8").reshape(-1, 2).tobytes()
        with disk_full_named(self.folder):
            self._file.write(index + crc32c.crc32c(index).to_bytes(CHECKSUM_BYTES, "little"))
            self._file.flush()
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
        )

    def _flush_band(self) -> None:
        chunks = _band_chunks(self._band, self.layout)
        run = self._executor.map if self._executor is not None else map
        with disk_full_named(self.folder):
            for payload in run(self._encode, chunks):
                checksum = crc32c.crc32c(payload).to_bytes(CHECKSUM_BYTES, "little")
                self._file.write(payload)
                self._file.write(checksum)
                size = len(payload) + CHECKSUM_BYTES
                self._index.append((self._offset, size))
                self._offset += size
        self._band_rows = 0

    def _encode(self, chunk: np.ndarray) -> bytes:
        data = chunk.astype(chunk.dtype.newbyteorder("<"), copy=False).tobytes()
        return huffman_compressor().compress(data) if self.layout.compressed else data


def _band_chunks(band: np.ndarray, layout: ArrayLayout) -> Iterator[np.ndarray]:
    counts = [s // c for s, c in zip(layout.row_shape, layout.chunk_row_shape, strict=True)]
    for position in np.ndindex(*counts):
        window = tuple(
            slice(p * c, (p + 1) * c) for p, c in zip(position, layout.chunk_row_shape, strict=True)
        )
        yield band[(slice(None), *window)]


class ZarrArrayReader:
    """Read rows of an array written by `ZarrArrayWriter`, checking every checksum on the way.

    Opening checks file size, metadata and index against the record of the group's attributes, so a
    truncated or foreign file is found before any payload is read.
    """

    def __init__(self, folder: Path, layout: ArrayLayout, record: ArrayRecord) -> None:
        self.path = folder / layout.file_name
        self.layout = layout
        self.num_rows = record.num_rows
        metadata = read_small_file(folder / "zarr.json")
        if checksum_hex(metadata) != record.metadata_crc32c:
            raise _corrupt(folder / "zarr.json", "its checksum is not the one in the group")
        if metadata != canonical_json(layout.metadata(record.num_rows)):
            raise _corrupt(folder / "zarr.json", "it does not describe the array expected here")
        self._descriptor = _open_regular(self.path)
        try:
            found = os.fstat(self._descriptor).st_size
            if found != record.size_bytes:
                raise _corrupt(self.path, f"size {found:,} bytes, expected {record.size_bytes:,}")
            self._index = self._read_index(record.size_bytes)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file; reading afterwards is an error."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        if getattr(self, "_descriptor", -1) >= 0:
            self.close()

    def read(self, start: int, stop: int, column: int | None = None) -> np.ndarray:
        """Return rows [start, stop) as a new array [n, *row_shape].

        `column` reads one chunk column only (one layer of [tokens, layers, hidden]) and gives
        [n, *chunk_row_shape]; the other columns are not touched.

        Raises ShardCorruptError when a checksum or a frame is wrong.
        """
        row_shape = self.layout.row_shape if column is None else self.layout.chunk_row_shape
        out = np.empty((stop - start, *row_shape), self.layout.dtype)
        self.read_into(out, start, column)
        return out

    def read_into(self, out: np.ndarray, start: int, column: int | None = None) -> None:
        """Fill `out` with the rows from `start` on; as `read`, without a new array."""
        layout, stop = self.layout, start + len(out)
        assert 0 <= start <= stop <= self.num_rows
        columns = range(layout.chunks_per_band) if column is None else [column]
        for band in range(start // layout.chunk_rows, layout.num_bands(stop)):
            first = band * layout.chunk_rows
            low, high = max(start, first), min(stop, first + layout.chunk_rows)
            for chunk_column in columns:
                chunk = self._read_chunk(band * layout.chunks_per_band + chunk_column)
                window = _column_window(layout, chunk_column) if column is None else ()
                out[(slice(low - start, high - start), *window)] = chunk[low - first : high - first]

    def _read_index(self, size_bytes: int) -> np.ndarray:
        index_bytes = self.layout.index_bytes(self.num_rows)
        if size_bytes < index_bytes:
            raise _corrupt(self.path, f"{size_bytes} bytes cannot hold an index of {index_bytes}")
        payload_bytes = size_bytes - index_bytes
        raw = _pread(self._descriptor, index_bytes, payload_bytes, self.path)
        body, checksum = raw[:-CHECKSUM_BYTES], raw[-CHECKSUM_BYTES:]
        if crc32c.crc32c(body) != int.from_bytes(checksum, "little"):
            raise _corrupt(self.path, "the shard index fails its checksum")
        index = np.frombuffer(body, "<u8").reshape(-1, 2)
        # We write chunks back to back, so anything else is forged or damaged. The first test keeps
        # the sums below from wrapping around.
        offsets, sizes = index[:, 0], index[:, 1]
        ends = np.cumsum(sizes)
        tiles = (
            bool((sizes <= payload_bytes).all())
            and np.array_equal(offsets, ends - sizes)
            and (int(ends[-1]) if len(ends) else 0) == payload_bytes
        )
        if not tiles:
            raise _corrupt(self.path, "the shard index does not tile the file")
        return index

    def _read_chunk(self, number: int) -> np.ndarray:
        offset, size = (int(value) for value in self._index[number])
        raw = _pread(self._descriptor, size, offset, self.path)
        body = memoryview(raw)[:-CHECKSUM_BYTES]
        if crc32c.crc32c(body) != int.from_bytes(raw[-CHECKSUM_BYTES:], "little"):
            raise _corrupt(self.path, f"inner chunk {number} fails its checksum")
        expected = self.layout.chunk_bytes
        if self.layout.compressed:
            body = _decompress(body, expected, self.path, number)
        if len(body) != expected:
            raise _corrupt(self.path, f"inner chunk {number} has {len(body)} bytes, not {expected}")
        dtype = np.dtype(self.layout.dtype).newbyteorder("<")
        return np.frombuffer(body, dtype).reshape(self.layout.chunk_shape)


def _column_window(layout: ArrayLayout, column: int) -> tuple[slice, ...]:
    counts = [s // c for s, c in zip(layout.row_shape, layout.chunk_row_shape, strict=True)]
    position = np.unravel_index(column, counts) if counts else ()
    return tuple(
        slice(int(p) * c, (int(p) + 1) * c)
        for p, c in zip(position, layout.chunk_row_shape, strict=True)
    )


def _decompress(frame: memoryview, expected: int, path: Path, number: int) -> memoryview:
    try:
        claimed = zstandard.frame_content_size(frame)
    except zstandard.ZstdError as error:
        raise _corrupt(path, f"inner chunk {number} is no zstd frame") from error
    if claimed != expected:  # nothing is allocated on the word of a forged frame
        raise _corrupt(path, f"inner chunk {number} claims {claimed} bytes, expected {expected}")
    out = np.empty(expected, np.uint8)
    try:
        numcodecs.zstd.decompress(frame, out)
    except (RuntimeError, ValueError) as error:
        raise _corrupt(path, f"inner chunk {number} does not decompress: {error}") from error
    return out.data


def _open_regular(path: Path) -> int:
    try:
        # without O_NONBLOCK a pipe in a file's place would wait for a writer for ever
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise _corrupt(path, f"it cannot be opened ({error.strerror})") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _corrupt(path, "it is no regular file")
    return descriptor


def read_small_file(path: Path, limit_bytes: int = 1 << 26) -> bytes:
    """Return a metadata file's bytes; raise ShardCorruptError if it cannot be one of ours."""
    descriptor = _open_regular(path)
    try:
        size = os.fstat(descriptor).st_size
        if size > limit_bytes:
            raise _corrupt(path, f"{size:,} bytes is too large for metadata")
        return _pread(descriptor, size, 0, path)
    finally:
        os.close(descriptor)


def _pread(descriptor: int, size: int, offset: int, path: Path) -> bytes:
    parts: list[bytes] = []
    while size > 0:
        try:
            part = os.pread(descriptor, size, offset)
        except OSError as error:
            raise _corrupt(path, f"reading at {offset:,} failed ({error.strerror})") from error
        if not part:
            raise _corrupt(path, f"it ends at {offset:,}, {size:,} bytes early")
        parts.append(part)
        size -= len(part)
        offset += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _corrupt(path: Path, what: str) -> ShardCorruptError:
    return ShardCorruptError(
        f"{path} is damaged: {what}. Delete the shard's folder (or plan/, if it lies there) and "
        "run `hscache produce` again with the same settings: it remakes what is missing and "
        "nothing else."
    )
