"""The sparse mask of FlexAttention says what the dense one says."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.flex import TILE, flex_mask


@st.composite
def rows(draw):
    """Documents end to end, sorted anchors in them, and empty slots; any block size."""
    lengths = draw(st.lists(st.integers(1, 300), min_size=1, max_size=4))
    block_size = draw(st.sampled_from([2, 7, 8, 10, 16]))
    starts, ends, offset = [], [], 0
    for length in lengths:
        anchors = draw(st.lists(st.integers(0, length - 1), unique=True, max_size=12))
        starts += [offset] * len(anchors)
        ends += [offset + anchor for anchor in sorted(anchors)]
        offset += length
    empty = [0] * draw(st.integers(1, 20))
    padding = draw(st.integers(0, 200))
    return starts + empty, ends + empty, offset + padding, block_size


def dense(starts, ends, num_context, block_size):
    num_queries = len(starts) * block_size
    allow = torch.zeros(num_queries, num_context + num_queries, dtype=torch.bool)
    for n, (start, end) in enumerate(zip(starts, ends, strict=True)):
        queries = slice(n * block_size, (n + 1) * block_size)
        allow[queries, start:end] = True
        allow[queries, num_context + n * block_size : num_context + (n + 1) * block_size] = True
    return allow


@settings(max_examples=30, deadline=None)
@given(rows())
def test_tiles_and_rule_equal_the_dense_mask(row):
    starts, ends, num_context, block_size = row
    allow = dense(*row)
    mask = flex_mask(
        torch.tensor(starts), torch.tensor(ends), num_context=num_context, block_size=block_size,
        compiled=False,
    )  # fmt: skip
    queries, keys = torch.arange(allow.shape[0])[:, None], torch.arange(allow.shape[1])
    zero = torch.tensor(0)
    assert torch.equal(mask.mask_mod(zero, zero, queries, keys), allow)

    tiles = torch.zeros(-(-allow.shape[0] // TILE) * TILE, -(-allow.shape[1] // TILE) * TILE)
    tiles[: allow.shape[0], : allow.shape[1]] = allow.float()
    seen = tiles.view(len(tiles) // TILE, TILE, -1, TILE).sum((1, 3))
    full, partial = seen == TILE * TILE, (seen > 0) & (seen < TILE * TILE)
    for counts, indices, expected in (
        (mask.kv_num_blocks, mask.kv_indices, partial),
        (mask.full_kv_num_blocks, mask.full_kv_indices, full),
        (mask.q_num_blocks, mask.q_indices, partial.T),
        (mask.full_q_num_blocks, mask.full_q_indices, full.T),
    ):
        assert counts.dtype == indices.dtype == torch.int32
        for i, row in enumerate(expected):
            count = int(counts[0, 0, i])
            assert indices[0, 0, i, :count].tolist() == row.nonzero()[:, 0].tolist()
            assert sorted(indices[0, 0, i].tolist()) == list(range(len(row)))
