"""Planes of a row, merged by torch, are the bits that the reader gives."""

import numpy as np
import pytest
import torch
from trainer_cache import documents, make_cache, random_bits

from hscache.reader import open_cache
from trainer.states import StatePlanes, merge_planes

CPU = torch.device("cpu")


def strange_bits(row, num_tokens):
    """Normal values, and zeros, subnormal and large ones of both signs."""
    bits = random_bits(num_tokens, row)
    bits[0].flat[:6] = [0x0000, 0x8000, 0x0001, 0x807F, 0x5D7F, 0xDDFF]
    return bits


@pytest.mark.parametrize("codec", ["lossless", "none", "bitround4", "fp8"])
def test_merged_planes_equal_the_reader(tmp_path, codec):
    corpus = documents((9, 30, 17, 24), prompt=1)
    bits = random_bits if codec == "fp8" else strange_bits
    make = (lambda row, n: bits(n, row)) if codec == "fp8" else bits
    cache = open_cache(make_cache(tmp_path / "cache", corpus, bits=make, codec=codec))
    shard = cache.shard(0)
    rows = [int(row) for row in shard.doc_rows]
    num_tokens = shard.manifest.num_tokens
    planes = StatePlanes.empty(shard, num_tokens + 5, CPU)
    for array in planes.arrays.values():
        array.fill(255)  # what an earlier row may have left
    start = 0
    for row in reversed(rows):
        stop = start + int(cache.plan.lengths[row])
        shard.read_arrays(row, planes.rows(start, stop))
        start = stop
    planes.clear_from(num_tokens)
    found = merge_planes(planes, CPU)
    expected = np.concatenate([shard.bits(row) for row in reversed(rows)])
    assert found.dtype == torch.bfloat16
    np.testing.assert_array_equal(
        found[:num_tokens].view(torch.int16).numpy().view(np.uint16), expected.reshape(stop, -1)
    )
    assert found[num_tokens:].count_nonzero() == 0
