"""Floating-point operations of a run: of the target's forward, and of training the drafter.

Takes the shapes of both models and the size of a row; hands on FLOPs. Only useful work counts: no
recomputation, no padding. A multiply and an add are two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from hscache.target_shape import DeltaNet, TargetShape

_ATTENTION_PASSES = 3.5
"""Products of attention in forward and backward over those of forward, scores recomputed once as
every fused attention does."""
_SCAN_CHUNK = 64
"""Tokens that a chunked gated delta rule solves at once (flash-linear-attention's choice)."""


class DrafterSizes(Protocol):
    """What the count needs of a drafter; `trainer.config.DrafterConfig` has it."""

    @property
    def hidden_size(self) -> int: ...  # noqa: D102
    @property
    def intermediate_size(self) -> int: ...  # noqa: D102
    @property
    def num_hidden_layers(self) -> int: ...  # noqa: D102
    @property
    def num_attention_heads(self) -> int: ...  # noqa: D102
    @property
    def num_key_value_heads(self) -> int: ...  # noqa: D102
    @property
    def head_dim(self) -> int: ...  # noqa: D102
    @property
    def vocab_size(self) -> int: ...  # noqa: D102
    @property
    def block_size(self) -> int: ...  # noqa: D102
    @property
    def num_features(self) -> int: ...  # noqa: D102


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


@dataclass(frozen=True, kw_only=True)
class TokenFlops:
    """FLOPs of the target's forward, a token."""

    products: float
    """of the blocks that run with their weights"""
    attention: float
    """scores and sums of the attention blocks over a token's context"""
    scan: float
    """of the delta-net blocks, in chunks of 64 tokens"""

    @property
    def total(self) -> float:
        """FLOPs of the token."""
        return self.products + self.attention + self.scan


def target_flops(target: TargetShape, *, num_blocks: int, mean_context: float) -> TokenFlops:
    """Count the first `num_blocks` blocks; no head and no embedding product is part of capture.

    `mean_context` is what a token sees on average, itself included: half of a document's length,
    documents weighed by their tokens.
    """
    kinds = target.block_kinds[:num_blocks]
    delta, num_delta = target.delta_net, kinds.count("linear_attention")
    attended = 2.0 * 2 * mean_context * target.num_attention_heads * target.head_dim
    return TokenFlops(
        products=2.0 * sum(target.block_weights(kind) for kind in kinds),
        attention=attended * (len(kinds) - num_delta),
        scan=num_delta * _scan_flops(delta) if delta else 0.0,
    )


def _scan_flops(delta: DeltaNet) -> float:
    # Per token and head: q k and k k inside of a chunk, their product with v, the triangular solve
    # applied to k and v, and three products with the state (read, correct, write).
    key, value = delta.key_dim, delta.value_dim
    within = _SCAN_CHUNK * (6 * key + 4 * value)
    return float(delta.value_heads * (within + 6 * key * value))
