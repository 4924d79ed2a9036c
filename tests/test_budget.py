"""No shard is larger than its bound, and bytes are counted as a disk loses them."""

import os

import numpy as np
import pytest
from cache_maker import make_identity
from hypothesis import given, settings
from hypothesis import strategies as st

from hscache import budget, layout
from hscache.errors import ConfigError
from hscache.planes import ARRAYS
from hscache.sizes import parse_size
from hscache.writer import ShardWriter


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2TB", 2 * 10**12), ("1.5 TiB", 3 * 2**39), ("500gb", 5 * 10**11), ("4096", 4096),
        ("10B", 10), ("4e12", 4 * 10**12), ("80%", 800), ("100 %", 1000),
    ],
)  # fmt: skip
def test_sizes_are_read_as_people_write_them(text, size):
    assert parse_size(text, "max_disk", 1000) == size


@pytest.mark.parametrize("text", ["", "TB", "2 TX", "-1GB", "0", "0%", "120%", "1e", "2TB!", "1_0"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ConfigError, match="max_disk is"):
        parse_size(text, "max_disk", 1000)


def test_a_share_is_of_a_filesystem_only():
    with pytest.raises(ConfigError, match="gpu_memory is '80%'"):
        parse_size("80%", "gpu_memory")


@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=6),
    codec=st.sampled_from(sorted(ARRAYS)),
    last_hidden=st.booleans(),
)
def test_a_shard_of_noise_stays_below_its_bound(tmp_path_factory, lengths, codec, last_hidden):
    folder = tmp_path_factory.mktemp("bound")
    layout.shards_dir(folder).mkdir()
    identity = make_identity([], [], codec=codec, hidden_size=48, last_hidden=last_hidden)
    rng = np.random.default_rng(len(lengths))
    with ShardWriter(folder, 0, identity) as writer:
        for document, length in enumerate(lengths):  # next to nothing to compress
            size = (length, 2 + last_hidden, 48)
            bits = rng.integers(64, 160, size) << 7 | rng.integers(0, 128, size)
            writer.add(document, bits.astype(np.uint16))
        writer.publish({"settings": "x" * 3000})
    found, shape = budget.used_bytes(layout.shard_dir(folder, 0)), budget.ShardShape.of(identity)
    bound = budget.shard_bound(shape, sum(lengths), len(lengths))
    assert found <= bound
    if codec == "none":  # and it is no wild guess
        assert bound < found + 40_000
    entries = sum(len(d) + len(f) for _, d, f in os.walk(layout.shards_dir(folder)))
    assert entries == budget.shard_inodes(shape)


def test_used_bytes_count_blocks_and_leave_out_what_is_named(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "one").write_bytes(b"x")
    (tmp_path / "two").write_bytes(b"x" * 5000)
    (tmp_path / ".tmp-me").mkdir()
    (tmp_path / ".tmp-me" / "three").write_bytes(b"x")
    assert budget.used_bytes(tmp_path) == (2 + 2 + 1 + 2) * 4096
    assert budget.used_bytes(tmp_path, skip={".tmp-me"}) == 5 * 4096
    assert budget.used_bytes(tmp_path / "gone") == 0
