"""A cache that fills memory and that nobody uses is found and explained, and nothing else is."""

import getpass
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from cache_maker import make_cache

from hscache.consumers import Progress, Registration
from hscache.left_behind import find_left_behind, memory_root
from hscache.producers import Producer


@pytest.fixture
def shm():
    if memory_root(Path("/dev/shm")) is None or not os.access("/dev/shm", os.W_OK):
        pytest.skip("needs a tmpfs at /dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="hscache-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


def found_in(shm):
    return [left for left in find_left_behind(shm / "new") if left.path.is_relative_to(shm)]


def test_a_cache_left_behind_in_memory_is_named_with_owner_age_and_remedy(shm):
    old = shm / "run 1" / "cache"
    make_cache(old)
    (shm / "other").mkdir()
    [left] = found_in(shm)
    assert left.path == old
    assert left.size_bytes > 10_000
    for words in (str(old), getpass.getuser(), "kB in memory", f"rm -r '{old}'", "ago"):
        assert words in str(left)


def test_one_that_is_in_use_or_ones_own_is_not_named(shm, tmp_path):
    make_cache(shm / "cache")
    with Producer(shm / "cache"):
        assert found_in(shm) == []
    progress = Progress(passes=1, stride=1, num_ticks=4)
    with Registration(shm / "cache", tmp_path, progress):
        assert found_in(shm) == []
    assert [p for p in find_left_behind(shm / "cache") if p.path.is_relative_to(shm)] == []


def test_on_a_disk_nobody_looks(tmp_path):
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/vda / ext4 rw 0 0\n/dev/vdb {tmp_path} xfs rw 0 0\n")
    make_cache(tmp_path / "cache")
    assert memory_root(tmp_path / "new", mounts) is None
    mounts.write_text(f"/dev/vda / ext4 rw 0 0\ntmpfs {tmp_path} tmpfs rw 0 0\n")
    assert memory_root(tmp_path / "new", mounts) == tmp_path
    assert [p.path for p in find_left_behind(tmp_path / "new", mounts)] == [tmp_path / "cache"]
