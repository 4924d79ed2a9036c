"""Read an array that `zarr_array` wrote, without going through zarr-python.

Takes an array's folder, layout and record; hands on numpy arrays of any rows, or of one chunk
column of them. What is damaged, cut or forged is refused by file and reason, and whoever asked for
its bytes gets an error and not them.
"""

import errno
import hashlib
import os
import stat
import sys
from pathlib import Path

import numcodecs.zstd
import numpy as np
import zstandard

from hscache.checksum import crc32c
from hscache.errors import CacheUnreadableError, HscacheError, ShardCorruptError
from hscache.mapped_file import MappedFile
from hscache.scratch import scratch
from hscache.zarr_array import (
    CHECKSUM_BYTES,
    ArrayLayout,
    ArrayRecord,
    canonical_json,
    checksum_hex,
)

_PIECE_BYTES = 1 << 19
_METADATA_BYTES = 1 << 26
"""No metadata file of ours is larger."""


class ZarrArrayReader:
    """Read rows of an array written by `ZarrArrayWriter`, checking every checksum on the way.

    Opening checks file size, metadata and index against the record of the group's attributes, so a
    truncated or foreign file is found before any payload is read.
    """

    def __init__(self, folder: Path, layout: ArrayLayout, record: ArrayRecord) -> None:
        self.path = folder / layout.file_name
        self.layout = layout
        self.num_rows = record.num_rows
        self._dtype = np.dtype(layout.dtype).newbyteorder("<")
        self._windows = [_column_window(layout, c) for c in range(layout.chunks_per_band)]
        refuse_link(folder)
        metadata = read_small_file(folder / "zarr.json")
        if checksum_hex(metadata) != record.metadata_crc32c:
            raise _corrupt(folder / "zarr.json", "its checksum is not the one in the group")
        if metadata != canonical_json(layout.metadata(record.num_rows)):
            raise _corrupt(folder / "zarr.json", "it does not describe the array expected here")
        self._descriptor = open_regular(self.path)
        try:
            found = os.fstat(self._descriptor).st_size
            if found != record.size_bytes:
                raise _corrupt(self.path, f"size {found:,} bytes, expected {record.size_bytes:,}")
            self._index, self._checksums = self._read_index(record)
            self._map = MappedFile(self._descriptor, record.size_bytes)
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
        """Fill `out` [n, ...] with the rows from `start` on; as `read`, without a new array.

        What `out` held is lost also when this raises. The GIL is free for nearly all of it.
        """
        layout, stop = self.layout, start + len(out)
        assert 0 <= start <= stop <= self.num_rows
        columns = range(layout.chunks_per_band) if column is None else [column]
        for band in range(start // layout.chunk_rows, layout.num_bands(stop)):
            first = band * layout.chunk_rows
            low, high = max(start, first), min(stop, first + layout.chunk_rows)
            for chunk_column in columns:
                window = self._windows[chunk_column] if column is None else ()
                self._read_chunk(
                    band * layout.chunks_per_band + chunk_column,
                    slice(low - first, high - first),
                    out[(slice(low - start, high - start), *window)],
                )

    def _read_index(self, record: ArrayRecord) -> tuple[np.ndarray, np.ndarray | None]:
        """Return offsets and sizes of the chunks, and their checksums if the file has a table."""
        index_bytes = self.layout.index_bytes(self.num_rows)
        table_bytes = CHECKSUM_BYTES * self.layout.num_chunks(self.num_rows)
        table_bytes *= record.chunks_crc32c != ""
        payload_bytes = record.size_bytes - index_bytes - table_bytes
        if payload_bytes < 0:
            what = f"{record.size_bytes} bytes cannot hold an index of {index_bytes}"
            raise _corrupt(self.path, what)
        raw = _pread(self._descriptor, table_bytes + index_bytes, payload_bytes, self.path)
        table, body = raw[:table_bytes], raw[table_bytes:-CHECKSUM_BYTES]
        if crc32c(body) != int.from_bytes(raw[-CHECKSUM_BYTES:], "little"):
            raise _corrupt(self.path, "the shard index fails its checksum")
        if record.chunks_crc32c and checksum_hex(table) != record.chunks_crc32c:
            raise _corrupt(self.path, "it is not the file that the group's attributes describe")
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
        return index, np.frombuffer(table, "<u4") if record.chunks_crc32c else None

    def _read_chunk(self, number: int, rows: slice, out: np.ndarray) -> None:
        """Read a chunk, check all of it, and put `rows` of it into `out`."""
        offset, size = (int(value) for value in self._index[number])
        expected = self.layout.chunk_bytes
        if not self.layout.compressed and size - CHECKSUM_BYTES != expected:
            found = size - CHECKSUM_BYTES
            raise _corrupt(self.path, f"inner chunk {number} has {found} bytes, not {expected}")
        if self.layout.compressed:
            self._decode_frame(number, offset, size, rows, out)
        else:
            self._copy_raw(number, offset, rows, out)

    def _decode_frame(
        self, number: int, offset: int, size: int, rows: slice, out: np.ndarray
    ) -> None:
        expected = self.layout.chunk_bytes
        if size > expected + expected // 128 + 1024:  # no frame of ours grows like that
            raise _corrupt(self.path, f"inner chunk {number} takes {size:,} bytes")
        raw = scratch("frame", size)
        _pread_into(self._descriptor, raw, offset, self.path)
        body = raw[:-CHECKSUM_BYTES].data
        self._check(number, crc32c(body), raw[-CHECKSUM_BYTES:])
        whole = out.flags.c_contiguous and out.nbytes == expected and sys.byteorder == "little"
        chunk = out.reshape(-1).view(np.uint8) if whole else scratch("chunk", expected)
        _decompress(body, chunk, self.path, number)
        if not whole:
            out[...] = self._as_rows(chunk)[rows]

    def _copy_raw(self, number: int, offset: int, rows: slice, out: np.ndarray) -> None:
        """Copy rows out of the file, and checksum all of the chunk; piece by piece, so that what is
        copied is still in the processor's cache."""
        layout = self.layout
        chunk_bytes = layout.chunk_bytes + CHECKSUM_BYTES
        mapped = self._map.bytes_in_memory(offset, chunk_bytes)
        row_bytes = layout.chunk_bytes // layout.chunk_rows
        step = max(1, _PIECE_BYTES // row_bytes)
        checksum = 0
        for first in range(0, layout.chunk_rows, step):
            last = min(first + step, layout.chunk_rows)
            piece = self._piece(mapped, offset, first * row_bytes, last * row_bytes)
            low, high = max(rows.start, first), min(rows.stop, last)
            if low < high:
                values = self._as_rows(piece)[low - first : high - first]
                out[low - rows.start : high - rows.start] = values
            checksum = crc32c(piece, checksum)
        self._check(number, checksum, self._piece(mapped, offset, layout.chunk_bytes, chunk_bytes))

    def _piece(self, mapped: np.ndarray | None, offset: int, first: int, last: int) -> np.ndarray:
        if mapped is not None:
            return mapped[first:last]
        piece = scratch("piece", last - first)
        _pread_into(self._descriptor, piece, offset + first, self.path)
        return piece

    def _check(self, number: int, found: int, stored: np.ndarray) -> None:
        checksum = int.from_bytes(stored.tobytes(), "little")
        if found != checksum:
            raise _corrupt(self.path, f"inner chunk {number} fails its checksum")
        if self._checksums is not None and checksum != self._checksums[number]:
            raise _corrupt(self.path, f"inner chunk {number} is another one, whole in itself")

    def _as_rows(self, raw: np.ndarray) -> np.ndarray:
        return raw.view(self._dtype).reshape(-1, *self.layout.chunk_row_shape)


def _column_window(layout: ArrayLayout, column: int) -> tuple[slice, ...]:
    counts = [s // c for s, c in zip(layout.row_shape, layout.chunk_row_shape, strict=True)]
    position = np.unravel_index(column, counts) if counts else ()
    return tuple(
        slice(int(p) * c, (int(p) + 1) * c)
        for p, c in zip(position, layout.chunk_row_shape, strict=True)
    )


def _decompress(frame: memoryview, out: np.ndarray, path: Path, number: int) -> None:
    try:
        claimed = zstandard.frame_content_size(frame)
    except zstandard.ZstdError as error:
        raise _corrupt(path, f"inner chunk {number} is no zstd frame") from error
    if claimed != len(out):  # nothing is done on the word of a forged frame
        raise _corrupt(path, f"inner chunk {number} claims {claimed} bytes, expected {len(out)}")
    try:
        numcodecs.zstd.decompress(frame, out)
    except (RuntimeError, ValueError) as error:
        raise _corrupt(path, f"inner chunk {number} does not decompress: {error}") from error


def refuse_link(path: Path) -> None:
    """Raise ShardCorruptError if a folder of the cache is a link: it may lead out of the cache."""
    if os.path.islink(path):  # unlike Path.is_symlink it is quiet about what may not be looked at
        raise _corrupt(path, "it is a link, and a cache has none; link to the whole cache instead")


def open_regular(path: Path) -> int:
    """Open a file for reading and return its descriptor; refuses links, pipes and folders.

    Raises ShardCorruptError, CacheUnreadableError.
    """
    try:
        # without O_NONBLOCK a pipe in a file's place would wait for a writer for ever
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise cannot_read(path, "it cannot be opened", error) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _corrupt(path, "it is no regular file")
    return descriptor


def regular_sha256(path: Path) -> str:
    """Hash a file's content; raises as `open_regular`."""
    with os.fdopen(open_regular(path), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_there(path: Path) -> bool:
    """Say whether a file exists; raises CacheUnreadableError where nobody may look."""
    try:
        path.stat()
    except OSError as error:
        if (failure := cannot_read(path, "", error)) and isinstance(failure, CacheUnreadableError):
            raise failure from error
        return False
    return True


def read_small_file(path: Path) -> bytes:
    """Return a metadata file's bytes; raise ShardCorruptError if it cannot be one of ours."""
    descriptor = open_regular(path)
    try:
        size = os.fstat(descriptor).st_size
        if size > _METADATA_BYTES:
            raise _corrupt(path, f"{size:,} bytes is too large for metadata")
        return _pread(descriptor, size, 0, path)
    finally:
        os.close(descriptor)


def _pread(descriptor: int, size: int, offset: int, path: Path) -> bytes:
    out = np.empty(size, np.uint8)
    _pread_into(descriptor, out, offset, path)
    return out.tobytes()


def _pread_into(descriptor: int, out: np.ndarray, offset: int, path: Path) -> None:
    left = out.data
    while len(left):
        try:
            read = os.preadv(descriptor, [left], offset)
        except OSError as error:
            raise cannot_read(path, f"reading at {offset:,} failed", error) from error
        if not read:
            raise _corrupt(path, f"it ends at {offset:,}, {len(left):,} bytes early")
        left = left[read:]
        offset += read


_HERE_AND_NOW = (
    errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE,
    errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENOTCONN,
)  # fmt: skip
"""What fails for reasons outside of the file: to take it for damage would cost sound shards."""


def cannot_read(path: Path, what: str, error: OSError) -> HscacheError:
    """Return the error to raise: a damaged file, or one that is not to be read here and now."""
    if error.errno not in _HERE_AND_NOW:
        return _corrupt(path, f"{what} ({error.strerror})")
    return CacheUnreadableError(
        f"{path} cannot be read here and now: {error.strerror}. That does not say that it is "
        "damaged: read it as a user who may, from a machine that can, with enough open files."
    )


def _corrupt(path: Path, what: str) -> ShardCorruptError:
    return ShardCorruptError(
        f"{path} is damaged: {what}. Run `hscache repair` on the cache (or delete plan/ or "
        "frozen/, if it lies there) and then `hscache produce` again with the same settings: it "
        "remakes what is missing and nothing else."
    )
