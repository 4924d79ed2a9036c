"""Block attention on a GPU: torch's FlexAttention over [row context | all blocks].

Takes the blocks' context intervals on the device; makes a `BlockMask` from them without looking at
a single value on the host, so no step waits for the GPU. Shapes depend on the row's settings alone:
everything here is compiled once.

Axes: N blocks, B block slots, S context tokens, h query heads, K key heads, d head width,
I tiles of queries, J tiles of keys.
"""

from __future__ import annotations

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

Tiles = tuple[torch.Tensor, torch.Tensor]
"""int32: how many tiles are set in each row, [1, 1, I], and the tiles' numbers, [1, 1, I, J],
those that are set first."""

TILE = 128
"""Queries, and keys, of one tile of the sparse mask: FlexAttention's own default."""


def flex_mask(
    context_start_N: torch.Tensor,
    context_end_N: torch.Tensor,
    *,
    num_context: int,
    block_size: int,
    window: int | None = None,
    compiled: bool = True,
) -> BlockMask:
    """Return the mask: query n * B + k sees keys start[n] <= s < end[n], and S + n * B + (0..B-1).

    With a `window` W, of these keys only those whose position, end[n] + slot for slots, is one of
    the W up to its own, end[n] + k.

    `compiled=False` runs the same tensor operations one by one (for a CPU).
    """

    def visible(
        _batch: torch.Tensor, _head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        n, own = query // block_size, key - num_context
        in_context = (key >= context_start_N[n]) & (key < context_end_N[n]) & (own < 0)
        return in_context | ((own >= 0) & (own // block_size == n))

    width = window or 0

    def visible_in_window(
        _batch: torch.Tensor, _head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        # no call of `visible`: a compiler may take a function in a closure for a new one each row
        n, slot, own = query // block_size, query % block_size, key - num_context
        anchor = context_end_N[n]
        in_context = (key >= context_start_N[n]) & (key < anchor) & (own < 0)
        in_context = in_context & (key > anchor + slot - width)
        back = slot - own % block_size
        in_own = (own >= 0) & (own // block_size == n) & (back >= 0) & (back < width)
        return in_context | in_own

    make = _compiled_tiles if compiled else visible_tiles
    partial, full, partial_by_key, full_by_key = make(
        context_start_N, context_end_N, num_context, block_size, window
    )
    num_queries = len(context_start_N) * block_size
    return BlockMask(
        seq_lengths=(num_queries, num_context + num_queries),
        kv_num_blocks=partial[0],
        kv_indices=partial[1],
        full_kv_num_blocks=full[0],
        full_kv_indices=full[1],
        q_num_blocks=partial_by_key[0],
        q_indices=partial_by_key[1],
        full_q_num_blocks=full_by_key[0],
        full_q_indices=full_by_key[1],
        BLOCK_SIZE=(TILE, TILE),
        mask_mod=visible if window is None else visible_in_window,
    )


def visible_tiles(
    context_start_N: torch.Tensor,
    context_end_N: torch.Tensor,
    num_context: int,
    block_size: int,
    window: int | None = None,
) -> tuple[Tiles, Tiles, Tiles, Tiles]:
    """Return partly and fully visible tiles for each tile of queries, then for each of keys."""
    device = context_start_N.device
    num_queries = len(context_start_N) * block_size
    num_keys = num_context + num_queries
    query_Q = torch.arange(-(-num_queries // TILE) * TILE, device=device)
    n_Q, slot_Q1 = query_Q // block_size, (query_Q % block_size)[:, None]
    used_Q1 = (n_Q < len(context_start_N))[:, None]
    n_Q = n_Q.clamp(max=len(context_start_N) - 1)
    start_Q1, end_Q1 = context_start_N[n_Q, None], context_end_N[n_Q, None].clamp(max=num_context)
    own_Q1 = (num_context + n_Q * block_size)[:, None]
    own_end_Q1 = own_Q1 + block_size
    if window is not None:
        start_Q1 = torch.maximum(start_Q1, context_end_N[n_Q, None] + slot_Q1 - (window - 1))
        own_end_Q1 = own_Q1 + slot_Q1 + 1
        own_Q1 = own_Q1 + (slot_Q1 - (window - 1)).clamp(min=0)
    first_J = torch.arange(-(-num_keys // TILE), device=device) * TILE
    last_J = (first_J + TILE).clamp(max=num_keys)
    # Visible keys of a query are two intervals; how many of a tile's keys lie in them decides.
    in_context_QJ = torch.minimum(end_Q1, last_J) - torch.maximum(start_Q1, first_J)
    in_own_QJ = torch.minimum(own_end_Q1, last_J) - torch.maximum(own_Q1, first_J)
    seen_QJ = (in_context_QJ.clamp(min=0) + in_own_QJ.clamp(min=0)) * used_Q1
    seen_IQJ = seen_QJ.view(-1, TILE, len(first_J))
    any_IJ = (seen_IQJ > 0).any(1)
    full_IJ = (seen_IQJ == TILE).all(1)
    partial_IJ = any_IJ & ~full_IJ
    return _ordered(partial_IJ), _ordered(full_IJ), _ordered(partial_IJ.T), _ordered(full_IJ.T)


def _ordered(tiles_IJ: torch.Tensor) -> Tiles:
    order_IJ = tiles_IJ.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    counts_I = tiles_IJ.sum(1, dtype=torch.int32)
    return counts_I[None, None], order_IJ.to(torch.int32)[None, None].contiguous()


_compiled_tiles = torch.compile(visible_tiles, fullgraph=True, dynamic=False)


def flex_block_attention(
    q_NBhd: torch.Tensor,
    k_context_SKd: torch.Tensor,
    v_context_SKd: torch.Tensor,
    k_block_NBKd: torch.Tensor,
    v_block_NBKd: torch.Tensor,
    mask: BlockMask,
) -> torch.Tensor:
    """Attend from each block to its context and its own slots; [N, B, h, d].

    Called from compiled code only: outside of it FlexAttention writes all scores down.
    """
    k_1KLd = torch.cat([k_context_SKd, k_block_NBKd.flatten(0, 1)]).transpose(0, 1)[None]
    v_1KLd = torch.cat([v_context_SKd, v_block_NBKd.flatten(0, 1)]).transpose(0, 1)[None]
    q_1hQd = q_NBhd.flatten(0, 1).transpose(0, 1)[None]
    out_1hQd = flex_attention(q_1hQd, k_1KLd, v_1KLd, block_mask=mask, enable_gqa=True)
    return out_1hQd[0].transpose(0, 1).view(q_NBhd.shape)
