"""Floating-point operations of training the drafter on a row (hscache.forward_flops: the target).

Takes the drafter's sizes and those of a row; hands on FLOPs. Only useful work counts: no
recomputation, no padding. A multiply and an add are two.
"""

from __future__ import annotations

from dataclasses import dataclass

from hscache.drafter_sizes import DrafterSizes

_ATTENTION_PASSES = 3.5
"""Products of attention in forward and backward over those of forward, scores recomputed once as
every fused attention does."""


@dataclass(frozen=True, kw_only=True)
class RowFlops:
    """FLOPs of one row, forward and backward."""

    blocks: float
    """products of the layers over all slots of the blocks"""
    head: float
    """logits of the slots to predict, and their gradients; the head is frozen"""
    context: float
    """`fc`, whose input needs no gradient, and each layer's context keys and values"""
    attention: float

    @property
    def total(self) -> float:
        """FLOPs of the row."""
        return self.blocks + self.head + self.context + self.attention


def row_flops(
    config: DrafterSizes,
    *,
    num_tokens: int,
    num_anchors: int,
    mean_context: float,
    num_scored: int | None = None,
) -> RowFlops:
    """Count a row of `num_tokens` context tokens whose blocks see `mean_context` of them each.

    `num_scored` slots go through the head: all slots but the first of each block if not given.
    """
    hidden, block, layers = config.hidden_size, config.block_size, config.num_hidden_layers
    q_size = config.num_attention_heads * config.head_dim
    kv_size = config.num_key_value_heads * config.head_dim
    queries = num_anchors * block
    layer_weights = hidden * (2 * q_size + 2 * kv_size + 3 * config.intermediate_size)
    scored = num_anchors * (block - 1) if num_scored is None else num_scored
    fusion_weights = config.num_features * hidden * hidden
    scores = 2 * 2 * queries * mean_context * q_size
    return RowFlops(
        blocks=6.0 * queries * layer_weights * layers,
        head=4.0 * scored * hidden * config.vocab_size,
        context=4.0 * num_tokens * fusion_weights
        + 6.0 * num_tokens * 2 * hidden * kv_size * layers,
        attention=_ATTENTION_PASSES * scores * layers,
    )
