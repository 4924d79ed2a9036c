"""A mapping gives bytes that are in memory, and none that a disk would have to be asked for."""

import os

import numpy as np
import pytest

from hscache import mapped_file
from hscache.bench_store import drop_from_memory
from hscache.mapped_file import MappedFile

SIZE = 50_001


@pytest.fixture
def opened(tmp_path):
    data = np.random.default_rng(0).integers(0, 256, SIZE).astype(np.uint8)
    path = tmp_path / "data"
    path.write_bytes(data.tobytes())
    with path.open("rb") as file:
        os.fsync(file.fileno())
        yield path, file.fileno(), data


@pytest.mark.parametrize(("offset", "size"), [(0, SIZE), (4095, 2), (8192, 4096), (SIZE - 1, 1)])
def test_bytes_in_memory_are_the_files(opened, offset, size):
    _, descriptor, data = opened
    found = MappedFile(descriptor, SIZE).bytes_in_memory(offset, size)
    assert found is not None
    np.testing.assert_array_equal(found, data[offset : offset + size])


def test_what_the_kernel_has_forgotten_is_not_touched(opened):
    path, descriptor, data = opened
    mapped = MappedFile(descriptor, SIZE)
    if not drop_from_memory([path]):
        pytest.skip("this filesystem keeps its files in memory")
    assert mapped.bytes_in_memory(0, SIZE) is None
    assert os.pread(descriptor, SIZE, 0) == data.tobytes()
    assert mapped.bytes_in_memory(0, SIZE) is not None


def test_a_file_that_was_cut_is_not_touched(opened):
    path, descriptor, _ = opened
    mapped = MappedFile(descriptor, SIZE)
    assert mapped.bytes_in_memory(0, 10) is not None
    os.truncate(path, 100)
    assert mapped.bytes_in_memory(0, 10) is None


def test_without_the_system_call_nothing_is_mapped(opened, monkeypatch):
    monkeypatch.setattr(mapped_file, "_mincore", lambda: None)
    assert MappedFile(opened[1], SIZE).bytes_in_memory(0, 10) is None
