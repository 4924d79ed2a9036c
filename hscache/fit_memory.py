"""Peak memory of a training run, predicted from its shapes before anything is allocated.

Takes a drafter's sizes and a row's; hands on a `RunMemory`, to `trainer fit` and to `hscache plan`.
Rows have one shape on a GPU, so the first row needs what every other one needs. What a compiled
layer keeps was chosen to agree with the one shape that was measured (tests/test_memory.py: an H200,
1.73 B parameters); a second one on a GPU would show whether it holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hscache.drafter_sizes import DrafterSizes, num_parameters
from hscache.report import format_bytes

_ROWS_AHEAD = 3
"""Rows on the device beside those of a step: two in the loader's queue, one that waits for room."""


@dataclass(frozen=True, kw_only=True)
class RunMemory:
    """Bytes on the training device, by what they hold; all of it is there at the peak."""

    masters: int
    """fp32 weights"""
    copy: int
    """matrices in the compute dtype; 0 where that is fp32"""
    moments: int
    """of the optimizer, fp32, there from the first step's end; and diloco's anchors and momentum"""
    gradients: int
    """fp32, accumulated over the rows of a step"""
    frozen: int
    """the target's embedding and head"""
    features: int
    """states of the rows on the device"""
    activations: int
    """what the forward pass of one row keeps for the backward pass"""
    scratch: int
    """logits of a chunk of slots; or, where that is more, the gradients of one MLP"""

    @property
    def before_first_step(self) -> int:
        """Bytes before any row is trained on."""
        return self.masters + self.copy + self.frozen + self.features

    @property
    def peak(self) -> int:
        """The most bytes at any time, in the forward or backward pass of a row."""
        lasting = self.before_first_step + self.moments + self.gradients
        return lasting + self.activations + self.scratch


def predict_memory(
    config: DrafterSizes,
    *,
    row_tokens: int,
    anchors_per_row: int,
    rows_per_step: int,
    chunk_size: int,
    dtype_bytes: int,
    optimizer: Literal["adamw", "muon"],
    outer_step: bool = False,
    tied_head: bool,
    soft_labels: bool = False,
    backend: Literal["flex", "split", "sdpa"],
) -> RunMemory:
    """Add up a run's tensors; an upper bound on a CPU, whose rows end with their last token.

    `dtype_bytes` are those of a value in the products: 2 (bfloat16) or 4; `backend` is the way to
    attend. Compiled (`flex`) the sum was fitted to the shape that was measured. Without a compiler
    activations are within a fifth of what autograd keeps for a row that is one document, the worst
    case (a test); temporary tensors of a single operation are not counted.
    """
    hidden, layers = config.hidden_size, config.num_hidden_layers
    q = config.num_attention_heads * config.head_dim
    kv = config.num_key_value_heads * config.head_dim
    wide = config.intermediate_size
    all_parameters = num_parameters(config)
    norms = layers * (2 * hidden + 2 * config.head_dim) + 2 * hidden
    matrices = all_parameters - norms
    size = dtype_bytes
    slots = anchors_per_row * config.block_size
    scored = anchors_per_row * (config.block_size - 1)

    # Of a layer and slot: residual stream and its norm, twice; q, k, v as projected and as turned;
    # what was attended; gate, up and their product.
    layer_bytes = size * (4 * hidden + 2 * (q + 2 * kv) + q + 3 * wide)
    # [context | blocks] keys and values of a layer, and its joined q, k, v weights
    joined_bytes = size * ((row_tokens + slots) * 2 * kv + (q + 2 * kv) * hidden)
    mask_bytes = 0
    if backend != "flex":  # norms and turns in fp32, and one tensor more in the MLP
        layer_bytes += 4 * (2 * hidden + 3 * (q + kv)) + size * wide
    if backend == "split":  # the scores of a row that is one document
        layer_bytes += size * config.num_attention_heads * (row_tokens + config.block_size)
    if backend == "sdpa":  # a mask over context and all blocks, for each query of a key head
        group = config.num_attention_heads // config.num_key_value_heads
        mask_bytes = size * slots * group * (row_tokens + slots)
    context_bytes = size * (row_tokens * (2 * hidden + 3 * kv * layers) + 2 * kv * layers * hidden)
    # the last residual stream, its norm, the scored slots of it, and their gradient
    end_bytes = 4 * size * scored * hidden
    chunk = min(chunk_size, scored)
    logits_bytes = chunk * config.vocab_size * (size + 4 if backend == "sdpa" else size)
    row_states = row_tokens * config.num_features * hidden
    if soft_labels:  # the target's last states and the teacher's logits
        row_states += row_tokens * hidden
        end_bytes += size * scored * hidden
        logits_bytes *= 2
    mlp_gradient_bytes = size * (slots * (3 * wide + 2 * hidden) + wide * hidden)
    return RunMemory(
        masters=4 * all_parameters,
        copy=0 if dtype_bytes == 4 else size * matrices,
        moments=(8 * all_parameters if optimizer == "adamw" else 4 * matrices + 8 * norms)
        + (8 * all_parameters if outer_step else 0),
        gradients=4 * all_parameters,
        frozen=(1 if tied_head else 2) * size * config.vocab_size * hidden,
        features=(rows_per_step + _ROWS_AHEAD) * size * row_states,
        activations=layers * (slots * layer_bytes + joined_bytes)
        + context_bytes
        + end_bytes
        + mask_bytes,
        scratch=max(logits_bytes, mlp_gradient_bytes),
    )


def describe_memory(memory: RunMemory, where: str = "") -> list[list[str]]:
    """Return rows of a table: what is always there, what a row adds, and the sum (and where)."""
    copy = f", compute copy {format_bytes(memory.copy)}" if memory.copy else ""
    return [
        [
            "weights",
            f"masters {format_bytes(memory.masters)}{copy}, gradients "
            f"{format_bytes(memory.gradients)}, moments {format_bytes(memory.moments)}, frozen "
            f"{format_bytes(memory.frozen)}",
        ],
        [
            "rows",
            f"states {format_bytes(memory.features)}, activations "
            f"{format_bytes(memory.activations)}, logits {format_bytes(memory.scratch)}",
        ],
        ["peak memory", f"about {format_bytes(memory.peak)}{where}"],
    ]
