"""Planes of a row, merged by torch, are the bits that the reader gives."""

import numpy as np
import pytest
import torch
from trainer_cache import documents, make_cache, random_bits

from hscache.reader import open_cache
from trainer.state_arrays import (
    arrays_in,
    clear_from,
    row_arrays,
    row_bytes,
    rows_of,
    stored_shapes,
)
from trainer.states import merge_planes

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
    arrays = row_arrays(stored_shapes(cache), num_tokens + 5)
    for array in arrays.values():
        array.fill(255)  # what an earlier row may have left
    start = 0
    for row in reversed(rows):
        stop = start + int(cache.plan.lengths[row])
        shard.read_arrays(row, rows_of(arrays, start, stop))
        start = stop
    clear_from(arrays, num_tokens)
    found = merge_planes(arrays, codec, CPU)
    expected = np.concatenate([shard.bits(row) for row in reversed(rows)])
    assert found.dtype == torch.bfloat16
    np.testing.assert_array_equal(
        found[:num_tokens].view(torch.int16).numpy().view(np.uint16), expected.reshape(stop, -1)
    )
    assert found[num_tokens:].count_nonzero() == 0


@pytest.mark.parametrize("codec", ["lossless", "none", "bitround4", "fp8"])
def test_arrays_in_one_memory_do_not_overlap(tmp_path, codec):
    cache = open_cache(make_cache(tmp_path / "cache", documents((9, 30), prompt=1), codec=codec))
    shapes = stored_shapes(cache)
    memory = bytearray(row_bytes(shapes, 7))
    arrays = arrays_in(memoryview(memory), shapes, 7)
    alone = row_arrays(shapes, 7)
    assert arrays.keys() == alone.keys()
    for number, (name, array) in enumerate(arrays.items(), 1):
        assert (array.shape, array.dtype) == (alone[name].shape, alone[name].dtype)
        array.fill(number)
    for number, array in enumerate(arrays.values(), 1):
        assert (array == number).all()
