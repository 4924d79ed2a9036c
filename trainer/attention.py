"""Attention of DFlash blocks: each block sees an interval of the row's context and itself.

Takes queries, keys and values that are already normed and rotated; hands back one vector per query
head. `plan_attention` turns the intervals into masks, once per forward and kind of layer;
`block_attention` runs one layer. Three ways give the same result: `flex` is for GPUs
(`trainer.flex`); `split` is twice as fast as `sdpa` on a CPU; `sdpa` runs anywhere, needs no
compiler and is slow. The last two work document by document, so their cost follows the documents'
lengths, not the row's.

In a full layer a slot sees its whole interval and block. In a sliding layer slot k, at position
anchor + k, sees the last W positions up to its own: context from anchor + k - (W - 1) on, and the
slots of its block that are not behind it (z-lab's code, SpecForge and engines; speculators starts
the context of every slot at anchor - W).

Axes: N blocks, B block slots, S context tokens, h query heads, K key heads, G = h / K, d head
width, R = N * B * G query rows of one key head; of one document: n blocks, C context tokens.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask

from hscache.errors import ConfigError
from trainer.flex import flex_block_attention, flex_mask

Backend = Literal["flex", "split", "sdpa"]


@dataclass(frozen=True, kw_only=True, eq=False)
class DocumentBlocks:
    """Consecutive blocks that start from the same context position: those of one document."""

    first_block: int
    last_block: int
    """One past the group's last block."""
    context_start: int
    context_end: int
    """One past the last context position that any of them sees."""
    bias: torch.Tensor
    """0 where visible, -inf elsewhere. For `split` of the context alone, [n, 1, C], or if sliding
    [n, B * G, C]; [n * B * G, C + n * B] for `sdpa`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionPlan:
    """What all layers of a kind share in one forward."""

    backend: Backend
    documents: tuple[DocumentBlocks, ...] = ()
    own_bias: torch.Tensor | None = None
    """0 or -inf between slots of a block, [B * G, B], if sliding; for `split`"""
    mask: BlockMask | None = None
    """for `flex`"""


def eager_backend(device: torch.device) -> Backend:
    """Return the backend for a few blocks of any shape: nothing is compiled for them."""
    return "split" if device.type == "cpu" else "sdpa"


def training_backend(asked: Literal["auto", "sdpa"], device: torch.device) -> Backend:
    """Return the backend for rows of one shape: flex on a GPU unless sdpa is asked for.

    Raises ConfigError on a GPU without triton: the uncompiled FlexAttention, which torch would fall
    back to, writes all scores down.
    """
    if asked == "sdpa":
        return "sdpa"
    if device.type == "cpu":
        return "split"
    if importlib.util.find_spec("triton") is None:
        raise ConfigError(
            "attention: training on a GPU compiles FlexAttention with triton, which is not "
            "installed (it comes with torch's CUDA builds). Install it, or ask for the slow "
            "reference with --attention sdpa."
        )
    return "flex"


def plan_attention(
    context_start_N: torch.Tensor,
    context_end_N: torch.Tensor,
    *,
    num_context: int,
    block_size: int,
    queries_per_key_head: int,
    dtype: torch.dtype,
    backend: Backend,
    window: int | None = None,
) -> AttentionPlan:
    """Group the blocks by document and build the masks; N >= 1, int64 intervals start <= s < end.

    `window` is for sliding layers, None for full ones; the anchor stands at `end`. An empty
    interval is allowed: the block then sees only itself, so the output stays finite. `split` and
    `sdpa` copy the intervals to the host, once per forward; `flex` never waits for the device.
    """
    if backend == "flex":
        mask = flex_mask(
            context_start_N,
            context_end_N,
            num_context=num_context,
            block_size=block_size,
            window=window,
        )
        return AttentionPlan(backend=backend, mask=mask)
    device = context_start_N.device
    starts, ends = context_start_N.tolist(), context_end_N.tolist()
    edges = [n for n in range(1, len(starts)) if starts[n] != starts[n - 1]]
    own_BB = _visible_slots(block_size, window).to(device)

    def bias(visible: torch.Tensor) -> torch.Tensor:
        zeros = torch.zeros(visible.shape, dtype=dtype, device=device)
        return zeros.masked_fill_(~visible, float("-inf"))

    documents = []
    for first, last in zip([0, *edges], [*edges, len(starts)], strict=True):
        start, end = starts[first], max(ends[first:last])
        if window is not None:
            start = max(start, min(ends[first:last]) - window + 1)
        visible_nBC = _visible_context(
            context_end_N[first:last], torch.arange(start, end, device=device), block_size, window
        )
        if backend == "split":
            repeats = 1 if window is None else queries_per_key_head
            visible = visible_nBC.repeat_interleave(repeats, dim=1)
        else:
            n = last - first
            context_nBC = visible_nBC.expand(n, block_size, -1)
            own_qk = torch.block_diag(*[own_BB] * n)
            visible_qk = torch.cat([context_nBC.flatten(0, 1), own_qk], dim=1)
            visible = visible_qk.repeat_interleave(queries_per_key_head, dim=0)
        documents.append(
            DocumentBlocks(
                first_block=first,
                last_block=last,
                context_start=start,
                context_end=end,
                bias=bias(visible),
            )
        )
    own_bias = bias(own_BB.repeat_interleave(queries_per_key_head, dim=0))
    return AttentionPlan(
        backend=backend,
        documents=tuple(documents),
        own_bias=own_bias if window is not None and backend == "split" else None,
    )


def _visible_context(
    end_n: torch.Tensor, position_C: torch.Tensor, block_size: int, window: int | None
) -> torch.Tensor:
    """Tell which context positions a slot sees, [n, B, C]; [n, 1, C] if it is the same for all."""
    visible_n1C = (position_C < end_n[:, None])[:, None]
    if window is None:
        return visible_n1C
    slot_B = torch.arange(block_size, device=end_n.device)
    first_nB = end_n[:, None] + slot_B - (window - 1)
    return visible_n1C & (position_C >= first_nB[:, :, None])


def _visible_slots(block_size: int, window: int | None) -> torch.Tensor:
    """Tell which slots of its block a slot sees, [B, B]."""
    if window is None:
        return torch.ones(block_size, block_size, dtype=torch.bool)
    slot_B = torch.arange(block_size)
    back_BB = slot_B[:, None] - slot_B
    return (back_BB >= 0) & (back_BB < window)


def block_attention(
    q_NBhd: torch.Tensor,
    k_context_SKd: torch.Tensor,
    v_context_SKd: torch.Tensor,
    k_block_NBKd: torch.Tensor,
    v_block_NBKd: torch.Tensor,
    plan: AttentionPlan,
) -> torch.Tensor:
    """Attend from each block to its context and its own slots, as planned; [N, B, h, d].

    Scores are scaled by d ** -0.5. Other blocks and positions outside the interval have weight
    exactly 0, so they change neither the output nor any gradient.
    """
    if plan.mask is not None:
        return flex_block_attention(
            q_NBhd, k_context_SKd, v_context_SKd, k_block_NBKd, v_block_NBKd, plan.mask
        )
    num_blocks, block_size, num_heads, head_dim = q_NBhd.shape
    num_key_heads = k_context_SKd.shape[1]
    group_size = num_heads // num_key_heads
    # The query heads of one key head become more rows of the same product: K is never repeated.
    q_KRd = (
        q_NBhd.view(num_blocks, block_size, num_key_heads, group_size, head_dim)
        .permute(2, 0, 1, 3, 4)
        .reshape(num_key_heads, num_blocks * block_size * group_size, head_dim)
    )
    attend = _split_attention if plan.backend == "split" else _sdpa_attention
    out_KRd = attend(q_KRd, k_context_SKd, v_context_SKd, k_block_NBKd, v_block_NBKd, plan)
    return (
        out_KRd.view(num_key_heads, num_blocks, block_size, group_size, head_dim)
        .permute(1, 2, 0, 3, 4)
        .reshape(num_blocks, block_size, num_heads, head_dim)
    )


def _split_attention(
    q_KRd: torch.Tensor,
    k_context_SKd: torch.Tensor,
    v_context_SKd: torch.Tensor,
    k_block_NBKd: torch.Tensor,
    v_block_NBKd: torch.Tensor,
    plan: AttentionPlan,
) -> torch.Tensor:
    # Own-block scores of all blocks in one product, context scores per document, one softmax over
    # both: no score between two blocks is ever computed.
    num_blocks, block_size, num_key_heads, head_dim = k_block_NBKd.shape
    block_shape = (num_key_heads, num_blocks, -1, head_dim)
    q_KRd = q_KRd * head_dim**-0.5
    k_KdS, v_KSd = k_context_SKd.permute(1, 2, 0), v_context_SKd.transpose(0, 1)
    v_KNBd = v_block_NBKd.permute(2, 0, 1, 3)
    own_KNrB = q_KRd.view(block_shape) @ k_block_NBKd.permute(2, 0, 3, 1)
    if plan.own_bias is not None:
        own_KNrB = own_KNrB + plan.own_bias
    rows = own_KNrB.shape[2]  # B * G query rows of one block
    outs = []
    for doc in plan.documents:
        blocks = slice(doc.first_block, doc.last_block)
        context = slice(doc.context_start, doc.context_end)
        n, num_context = doc.last_block - doc.first_block, doc.context_end - doc.context_start
        q_Krd = q_KRd[:, doc.first_block * rows : doc.last_block * rows]
        scores_Knrc = (q_Krd @ k_KdS[:, :, context]).view(num_key_heads, n, rows, num_context)
        scores_Knrk = torch.cat([scores_Knrc + doc.bias, own_KNrB[:, blocks]], dim=-1)
        context_weights, own_weights = scores_Knrk.softmax(-1).split([num_context, block_size], -1)
        context_weights = context_weights.reshape(num_key_heads, n * rows, num_context)
        context_Krd = context_weights @ v_KSd[:, context]
        own_Knrd = own_weights @ v_KNBd[:, blocks]
        outs.append(context_Krd.view(num_key_heads, n, rows, head_dim) + own_Knrd)
    return torch.cat(outs, dim=1)


def _sdpa_attention(
    q_KRd: torch.Tensor,
    k_context_SKd: torch.Tensor,
    v_context_SKd: torch.Tensor,
    k_block_NBKd: torch.Tensor,
    v_block_NBKd: torch.Tensor,
    plan: AttentionPlan,
) -> torch.Tensor:
    rows = q_KRd.shape[1] // len(k_block_NBKd)  # B * G query rows of one block
    outs = []
    for doc in plan.documents:
        blocks = slice(doc.first_block, doc.last_block)
        context = slice(doc.context_start, doc.context_end)
        k_kKd = torch.cat([k_context_SKd[context], k_block_NBKd[blocks].flatten(0, 1)])
        v_kKd = torch.cat([v_context_SKd[context], v_block_NBKd[blocks].flatten(0, 1)])
        out_1Krd = F.scaled_dot_product_attention(
            q_KRd[None, :, doc.first_block * rows : doc.last_block * rows],
            k_kKd.transpose(0, 1)[None],
            v_kKd.transpose(0, 1)[None],
            attn_mask=doc.bias,
        )
        outs.append(out_1Krd[0])
    return torch.cat(outs, dim=1)
