"""Floating-point operations of a packed target forward, from its config and its documents.

Takes a text config of transformers, or a `TargetShape`, which names its sizes alike; hands on the
products of its blocks and FLOPs. Only useful work counts: no padding, attention below its diagonal,
no head. A multiply and an add are two.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

SCAN_CHUNK = 64
"""Tokens that a chunked gated delta rule solves at once (flash-linear-attention's choice)."""


@dataclass(frozen=True)
class Product:
    """A product of every token with one weight, and in how many blocks it occurs."""

    name: str
    outputs: int
    inputs: int
    count: int

    @property
    def flop(self) -> float:
        """FLOPs a token, all blocks."""
        return 2.0 * self.outputs * self.inputs * self.count


@dataclass(frozen=True, kw_only=True)
class ForwardFlops:
    """FLOPs of one pass."""

    products: float
    """of every token with the weights of the blocks that run"""
    scan: float
    """of the delta-net blocks, in chunks of 64 tokens"""
    attention: float
    """scores and sums of the attention blocks over each token's own past"""

    @property
    def total(self) -> float:
        """FLOPs of the pass."""
        return self.products + self.scan + self.attention


def block_types(config: Any, num_blocks: int) -> list[str]:
    """Return the type of each of the first blocks: full_attention or linear_attention."""
    types = getattr(config, "layer_types", None) or ["full_attention"] * num_blocks
    return list(types[:num_blocks])


def products(config: Any, num_blocks: int) -> list[Product]:
    """Return the products of the first `num_blocks` blocks, those of one input merged."""
    types = block_types(config, num_blocks)
    linear = types.count("linear_attention")
    full = num_blocks - linear
    hidden, inner = config.hidden_size, config.intermediate_size
    found = []
    if linear:
        values = config.linear_num_value_heads * config.linear_value_head_dim
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        outputs = 2 * keys + 2 * values + 2 * config.linear_num_value_heads
        found += [
            Product("delta-net in", outputs, hidden, linear),
            Product("delta-net out", hidden, values, linear),
        ]
    if full:
        heads, key_heads, head_dim = _heads(config)
        # the hybrids gate their attention, as wide as its queries
        gate = 2 if linear or getattr(config, "attn_output_gate", False) else 1
        outputs = (gate * heads + 2 * key_heads) * head_dim
        found += [
            Product("attention in", outputs, hidden, full),
            Product("attention out", hidden, heads * head_dim, full),
        ]
    return [
        *found,
        Product("gate and up", 2 * inner, hidden, num_blocks),
        Product("down", hidden, inner, num_blocks),
    ]


def forward_flops(
    config: Any, num_blocks: int, *, num_tokens: int, mean_context: float
) -> ForwardFlops:
    """Count a pass of so many tokens through the first `num_blocks` blocks.

    `mean_context` is what a token sees on average, itself included (`mean_context_of`). The scan is
    counted as its chunked form does it: in a chunk q k and k k, their product with v, the
    triangular solve applied to k and v; and three products with the state (read, correct, write).
    """
    linear = block_types(config, num_blocks).count("linear_attention")
    heads, _, head_dim = _heads(config)
    scan = 0.0
    if linear:
        key, value = config.linear_key_head_dim, config.linear_value_head_dim
        per_head = 6 * key * value + SCAN_CHUNK * (6 * key + 4 * value)
        scan = float(num_tokens * linear * config.linear_num_value_heads * per_head)
    return ForwardFlops(
        products=num_tokens * sum(product.flop for product in products(config, num_blocks)),
        scan=scan,
        attention=4.0 * num_tokens * mean_context * heads * head_dim * (num_blocks - linear),
    )


def mean_context_of(lengths: Sequence[int]) -> float:
    """Return the tokens that a token of these documents sees on average, itself included."""
    return sum(length * (length + 1) / 2 for length in lengths) / sum(lengths)


def document_lengths(
    budget: int, seed: int, *, mean: int = 1_700, shortest: int = 64, longest: int = 8_191
) -> list[int]:
    """Return lengths of documents that fill a pack exactly: log-normal, as conversations are."""
    draw = random.Random(seed)
    lengths: list[int] = []
    left = budget
    while True:
        length = round(draw.lognormvariate(0.0, 0.8) * mean / 1.377)  # e^(0.8^2 / 2)
        length = min(max(length, shortest), longest, left)
        left -= length
        if left < shortest:
            lengths.append(length + left)
            return lengths
        lengths.append(length)


def _heads(config: Any) -> tuple[int, int, int]:
    heads = config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return heads, key_heads, head_dim
