"""The sparse mask of FlexAttention says what the dense one says, and rows share compiled code."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer import drafter as drafter_module
from trainer import flex
from trainer.drafter import Drafter
from trainer.drafter_config import DrafterConfig
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
    window = draw(st.one_of(st.none(), st.integers(1, 320)))
    return starts + empty, ends + empty, offset + padding, block_size, window


def dense(starts, ends, num_context, block_size, window):
    num_queries = len(starts) * block_size
    allow = torch.zeros(num_queries, num_context + num_queries, dtype=torch.bool)
    for n, (start, end) in enumerate(zip(starts, ends, strict=True)):
        queries = slice(n * block_size, (n + 1) * block_size)
        allow[queries, start:end] = True
        allow[queries, num_context + n * block_size : num_context + (n + 1) * block_size] = True
        if window is None:
            continue
        for slot in range(block_size):
            query, own = n * block_size + slot, num_context + n * block_size
            allow[query, : max(0, min(end, end + slot - (window - 1)))] = False
            allow[query, own : own + max(0, slot - (window - 1))] = False
            allow[query, own + slot + 1 :] = False
    return allow


@settings(max_examples=40, deadline=None)
@given(rows())
def test_tiles_and_rule_equal_the_dense_mask(row):
    starts, ends, num_context, block_size, window = row
    allow = dense(*row)
    mask = flex_mask(
        torch.tensor(starts), torch.tensor(ends), num_context=num_context, block_size=block_size,
        window=window, compiled=False,
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


def test_rows_of_one_shape_share_compiled_code_and_equal_the_cpu_path(monkeypatch):
    """Traced by the compiler but run op by op: FlexAttention on a CPU has no backward pass."""

    def compiled(function):
        return torch.compile(function, fullgraph=True, dynamic=False, backend="aot_eager")

    for function in list(drafter_module._COMPILED):
        monkeypatch.setitem(drafter_module._COMPILED, function, compiled(function))
    monkeypatch.setattr(flex, "_compiled_tiles", compiled(flex.visible_tiles))
    config = DrafterConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, rms_norm_eps=1e-6, rope_theta=1e4,
        max_position_embeddings=128, vocab_size=30, block_size=4, mask_token_id=3,
        target_layer_ids=(1, 4), num_target_layers=8, sliding_window=6,
        layer_types=("sliding_attention",) * 3 + ("full_attention",),
    )  # fmt: skip
    drafter, generator = Drafter(config), torch.Generator().manual_seed(0)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    num_graphs = []
    for _row in range(3):
        features = torch.randn(64, 32, generator=generator)
        ends = torch.randint(0, 64, (40,), generator=generator).sort().values
        starts = torch.minimum(ends, torch.tensor(20)) * (ends > 30)  # two documents
        embeddings = torch.randn(40, 16, generator=generator)
        outs = []
        for backend in ("flex", "split"):
            with torch.no_grad():
                kv = drafter.context_kv(features, torch.arange(64), backend=backend)
                outs.append(drafter(embeddings, embeddings[0], kv, starts, ends, backend=backend))
        torch.testing.assert_close(*outs, rtol=1e-5, atol=1e-5)
        num_graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    # context; tiles of two masks; attention under each; norms and MLP of 4 and of 3 slots
    assert num_graphs == [9, 9, 9]
