"""Our Zarr arrays against zarr-python and tensorstore, and against every way of being damaged."""

import dataclasses
import os
import resource
import shutil

import crc32c
import numpy as np
import pytest
import tensorstore
import zarr
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hscache.errors import DiskFullError, ShardCorruptError
from hscache.layout import flat_layout, state_layouts
from hscache.zarr_array import (
    ArrayLayout,
    ZarrArrayWriter,
    canonical_json,
    checksum_hex,
)
from hscache.zarr_reader import ZarrArrayReader

SMALL = ArrayLayout(
    dtype="uint8",
    row_shape=(3, 4),
    chunk_rows=4,
    chunk_row_shape=(1, 4),
    compressed=True,
    axes=("token", "layer", "hidden"),
)
DTYPES = ["uint8", "uint16", "int32", "int64", "uint64", "float32"]


def write(folder, layout, *pieces):
    with ZarrArrayWriter(folder, layout) as writer:
        for piece in pieces:
            writer.append(piece)
        return writer.close()


def numbers(layout, num_rows, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 100, (num_rows, *layout.row_shape)).astype(layout.dtype)


def open_tensorstore(folder):
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{folder}/"}}
    return tensorstore.open(spec).result()


def every_layout():
    for codec in ("lossless", "none", "bitround4", "fp8"):
        for name, layout in state_layouts(codec, 3, 8, last_hidden=True).items():
            yield pytest.param(layout, id=f"{codec}-{name}")
    for dtype in DTYPES:
        yield pytest.param(flat_layout(dtype, "token"), id=f"flat-{dtype}")


@pytest.mark.parametrize("layout", list(every_layout()))
@pytest.mark.parametrize("num_rows", [0, 1, 700])
def test_zarr_python_and_tensorstore_read_what_was_written(tmp_path, layout, num_rows):
    rows = numbers(layout, num_rows)
    record = write(tmp_path / "a", layout, rows)
    ours = ZarrArrayReader(tmp_path / "a", layout, record).read(0, num_rows)
    array = zarr.open_array(tmp_path / "a", mode="r")
    native = open_tensorstore(tmp_path / "a")
    assert array.metadata.dimension_names == layout.axes
    for found in (ours, array[:], native.read().result()):
        assert found.dtype == layout.dtype
        np.testing.assert_array_equal(found, rows)


@pytest.fixture(scope="module")
def arrays_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("arrays")


@given(
    pieces=st.lists(st.integers(0, 11), max_size=6),
    window=st.tuples(st.integers(0, 66), st.integers(0, 66)),
    column=st.one_of(st.none(), st.integers(0, 2)),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_pieces_and_any_window_agree_with_numpy(arrays_dir, pieces, window, column):
    folder = arrays_dir / "hypothesis"
    shutil.rmtree(folder, ignore_errors=True)
    rows = numbers(SMALL, sum(pieces))
    record = write(folder, SMALL, *np.split(rows, np.cumsum(pieces)[:-1] if pieces else []))
    start, stop = sorted(min(edge, len(rows)) for edge in window)
    found = ZarrArrayReader(folder, SMALL, record).read(start, stop, column)
    expected = rows[start:stop]
    if column is not None:
        expected = expected[:, column : column + 1]
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(zarr.open_array(folder, mode="r")[:], rows)


def test_reading_one_layer_touches_only_that_layer(tmp_path):
    rows = numbers(SMALL, 10)
    record = write(tmp_path / "a", SMALL, rows)
    reader = ZarrArrayReader(tmp_path / "a", SMALL, record)
    raw = bytearray(reader.path.read_bytes())
    index = np.frombuffer(raw[-SMALL.index_bytes(10) : -4], "<u8").reshape(-1, 2)
    for number, (offset, size) in enumerate(index.tolist()):
        if number % 3 != 1:
            raw[offset : offset + size] = bytes(size)
    reader.path.write_bytes(raw)
    reader = ZarrArrayReader(tmp_path / "a", SMALL, record)
    np.testing.assert_array_equal(reader.read(0, 10, 1), rows[:, 1:2])
    with pytest.raises(ShardCorruptError, match="checksum"):
        reader.read(0, 10)


@pytest.mark.parametrize("left", ["all but one byte", "half", "nothing"])
def test_a_truncated_file_is_found_when_opened(tmp_path, left):
    record = write(tmp_path / "a", SMALL, numbers(SMALL, 10))
    path = tmp_path / "a" / SMALL.file_name
    size = record.size_bytes
    os.truncate(path, {"all but one byte": size - 1, "half": size // 2, "nothing": 0}[left])
    with pytest.raises(ShardCorruptError, match=rf"{path} is damaged: size"):
        ZarrArrayReader(tmp_path / "a", SMALL, record)


@pytest.mark.parametrize("compressed", [True, False])
def test_a_file_that_is_cut_while_it_is_open_is_refused_and_not_fatal(tmp_path, compressed):
    layout = dataclasses.replace(SMALL, compressed=compressed)
    record = write(tmp_path / "a", layout, numbers(layout, 10))
    reader = ZarrArrayReader(tmp_path / "a", layout, record)
    reader.read(0, 10)
    os.truncate(reader.path, 0)
    with pytest.raises(ShardCorruptError, match="is damaged"):
        reader.read(0, 10)


@pytest.mark.parametrize("name", [SMALL.file_name, "zarr.json"])
def test_a_flipped_bit_anywhere_is_found(tmp_path, name):
    record = write(tmp_path / "a", SMALL, numbers(SMALL, 6))
    path = tmp_path / "a" / name
    sound = path.read_bytes()
    for position in range(len(sound)):
        damaged = bytearray(sound)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        with pytest.raises(ShardCorruptError, match=f"{path} is damaged"):
            ZarrArrayReader(tmp_path / "a", SMALL, record).read(0, 6)
    path.write_bytes(sound)
    np.testing.assert_array_equal(
        ZarrArrayReader(tmp_path / "a", SMALL, record).read(0, 6), numbers(SMALL, 6)
    )


@pytest.mark.parametrize("compressed", [False, True])
def test_a_sound_file_or_chunk_in_the_wrong_place_is_found(tmp_path, compressed):
    """What a misdirected write leaves: every checksum in the file is right."""
    layout = dataclasses.replace(SMALL, compressed=compressed)
    values = numbers(layout, 8)
    record = write(tmp_path / "a", layout, values)
    other = write(tmp_path / "b", layout, values[::-1])
    path = tmp_path / "a" / layout.file_name
    if not compressed:
        assert record.size_bytes == other.size_bytes
        raw = path.read_bytes()
        path.write_bytes((tmp_path / "b" / layout.file_name).read_bytes())
        with pytest.raises(ShardCorruptError, match="not the file that the group's attributes"):
            ZarrArrayReader(tmp_path / "a", layout, record)
        size = layout.chunk_bytes + 4
        path.write_bytes(raw[size : 2 * size] + raw[:size] + raw[2 * size :])
        reader = ZarrArrayReader(tmp_path / "a", layout, record)
        with pytest.raises(ShardCorruptError, match="inner chunk 0 is another one"):
            reader.read(0, 8)
        np.testing.assert_array_equal(reader.read(4, 8), values[4:])
        path.write_bytes(raw)
    np.testing.assert_array_equal(
        ZarrArrayReader(tmp_path / "a", layout, record).read(0, 8), values
    )


def forge_index(path, change):
    """Rewrite a file's index with a right checksum."""
    raw = bytearray(path.read_bytes())
    start = len(raw) - SMALL.index_bytes(6)
    index = np.frombuffer(raw[start:-4], "<u8").reshape(-1, 2).copy()
    change(index)
    body = index.astype("<u8").tobytes()
    raw[start:] = body + crc32c.crc32c(body).to_bytes(4, "little")
    path.write_bytes(raw)


def point_outside(index):
    index[1, 0] = 1 << 40


def swap_two_chunks(index):
    index[[0, 1]] = index[[1, 0]]


def wrap_around(index):
    index[0, 1] += np.uint64(1 << 63)
    index[1, 0] += np.uint64(1 << 63)
    index[1, 1] += np.uint64(1 << 63)


def leave_a_chunk_out(index):
    index[-1] = (1 << 64) - 1


@pytest.mark.parametrize("forge", [point_outside, swap_two_chunks, wrap_around, leave_a_chunk_out])
def test_a_forged_index_is_refused(tmp_path, forge):
    record = write(tmp_path / "a", SMALL, numbers(SMALL, 6))
    forge_index(tmp_path / "a" / SMALL.file_name, forge)
    with pytest.raises(ShardCorruptError, match="does not tile the file"):
        ZarrArrayReader(tmp_path / "a", SMALL, record)


def forged_frames():
    # magic, then: a single segment whose size takes 8 bytes
    header = (0xFD2FB528).to_bytes(4, "little") + bytes([0b1110_0000])
    yield "claims 2^60 bytes", header + (1 << 60).to_bytes(8, "little") + bytes(12)
    yield "claims the right size", header + (16).to_bytes(8, "little") + bytes(12)
    bomb = zstandard.ZstdCompressor(level=3).compress(bytes(1 << 28))
    assert len(bomb) < 40_000
    yield "a bomb of 256 MB", bomb
    yield "a bomb that lies", header + (16).to_bytes(8, "little") + bomb[12:]
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(16))
    yield "does not say its size", unsized
    yield "no frame", b"nothing like zstd"
    yield "empty", b""


@pytest.mark.parametrize("frame", [pytest.param(f, id=name) for name, f in forged_frames()])
def test_a_forged_frame_is_refused_in_flat_memory(tmp_path, frame):
    layout = ArrayLayout(
        dtype="uint8",
        row_shape=(),
        chunk_rows=16,
        chunk_row_shape=(),
        compressed=True,
        axes=("token",),
    )
    record = write(tmp_path / "a", layout, np.arange(16, dtype=np.uint8))
    chunk = frame + crc32c.crc32c(frame).to_bytes(4, "little")
    index = np.array([0, len(chunk)], "<u8").tobytes()
    data = chunk + chunk[-4:] + index + crc32c.crc32c(index).to_bytes(4, "little")
    (tmp_path / "a" / layout.file_name).write_bytes(data)
    table = checksum_hex(chunk[-4:])
    record = dataclasses.replace(record, size_bytes=len(data), chunks_crc32c=table)
    reader = ZarrArrayReader(tmp_path / "a", layout, record)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ShardCorruptError, match="inner chunk 0"):
        reader.read(0, 16)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # kB


def test_metadata_of_another_array_is_refused_even_with_its_checksum(tmp_path):
    record = write(tmp_path / "a", SMALL, numbers(SMALL, 6))
    other = canonical_json(SMALL.metadata(7))
    (tmp_path / "a" / "zarr.json").write_bytes(other)
    record = type(record)(
        num_rows=6, size_bytes=record.size_bytes, metadata_crc32c=checksum_hex(other)
    )
    with pytest.raises(ShardCorruptError, match="does not describe the array expected"):
        ZarrArrayReader(tmp_path / "a", SMALL, record)


def make_symlink(path):
    os.symlink("/etc/passwd", path)


def make_pipe(path):
    os.mkfifo(path)


def make_folder(path):
    path.mkdir()


def make_nothing(path):
    pass


@pytest.mark.parametrize("name", [SMALL.file_name, "zarr.json"])
@pytest.mark.parametrize("put", [make_symlink, make_pipe, make_folder, make_nothing])
def test_what_is_no_regular_file_is_refused(tmp_path, name, put):
    record = write(tmp_path / "a", SMALL, numbers(SMALL, 6))
    path = tmp_path / "a" / name
    path.unlink()
    put(path)
    with pytest.raises(ShardCorruptError, match=f"{path} is damaged"):
        ZarrArrayReader(tmp_path / "a", SMALL, record)


def test_a_full_disk_is_named_and_not_hidden_by_the_close(tmp_path):
    if not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    layout = flat_layout("uint8", "token")

    def write_to_full_disk():
        with ZarrArrayWriter(tmp_path / "a", layout) as writer:
            writer._file.close()
            writer._file = open("/dev/full", "wb")  # noqa: SIM115
            writer.append(np.zeros(100, np.uint8))
            writer.close()

    with pytest.raises(DiskFullError, match="disk full while writing"):
        write_to_full_disk()
