"""The DFlash drafter (arXiv 2602.06036): a small decoder that fills a whole block in one forward.

Takes the target's captured states and the frozen embeddings of blocks; hands back hidden states for
the frozen head. Every layer's keys and values come from the same fused context (`context_kv`) and
from the block. Parameter names are those of the published checkpoints, so they load elsewhere.

Parameters start in fp32, and each product casts its weight to the dtype of the incoming features;
in training `trainer.masters` makes that cast once a step instead.

Axes: S context tokens, F = num_features * hidden_size, H hidden, N blocks, B block slots,
K key heads, D head_dim, C captured (context) width of one product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from trainer.attention import (
    AttentionPlan,
    Backend,
    block_attention,
    eager_backend,
    plan_attention,
)
from trainer.drafter_config import DrafterConfig
from trainer.products import product

ContextKV = list[tuple[torch.Tensor, torch.Tensor]]
Rotation = tuple[torch.Tensor, torch.Tensor]


class Drafter(nn.Module):
    """DFlash drafter without embedding and head: both are the target's and stay frozen.

    Linear weights start as normal(0, 0.02) from `generator` (seed 0 if none), norms as ones; the
    global random state is left alone.
    """

    def __init__(self, config: DrafterConfig, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config = config
        self.fc = Linear(config.num_features * config.hidden_size, config.hidden_size)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DrafterLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        generator = generator or torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02, generator=generator)

    def context_kv(
        self,
        features_SF: torch.Tensor,
        position_ids_S: torch.Tensor,
        *,
        backend: Backend | None = None,
    ) -> ContextKV:
        """Return each layer's context keys (normed, rotated) and values, both [S, K, D].

        Row s depends on features and position s alone, so pieces computed one after another and
        concatenated equal the whole: decoding appends to it.
        """
        backend = backend or eager_backend(features_SF.device)
        layers = [cast(DrafterLayer, layer).self_attn for layer in self.layers]
        context_SH = self.hidden_norm(product(features_SF, self.fc.weight))
        # One product for all layers: the context is the same tensor for each of them.
        weights = [proj.weight for layer in layers for proj in (layer.k_proj, layer.v_proj)]
        kv_SC = product(context_SH, *weights)
        k_norms = [layer.k_norm for layer in layers]
        rotation = self._rotation(position_ids_S)
        return _run(_split_context_kv, backend == "flex")(kv_SC, k_norms, rotation)

    def forward(
        self,
        anchor_embeddings_NH: torch.Tensor,
        mask_embedding_H: torch.Tensor,
        context_kv: ContextKV,
        context_start_N: torch.Tensor,
        context_end_N: torch.Tensor,
        *,
        block_size: int | None = None,
        backend: Backend | None = None,
    ) -> torch.Tensor:
        """Return the hidden states [N, B - 1, H] of the slots to predict, after the final norm.

        Block n is [anchor n, mask, mask, ...]; it sees context rows start <= s < end and its own
        slots, in sliding layers only the last of these (`DrafterConfig.window_of`). Slot k,
        returned at k - 1, has position end - start + k, the anchor's place in its document plus k.
        `block_size` is the drafter's unless a smaller one is asked for. What is equal for all masks
        is computed once (the first layer projects N + 1 rows), and what no one reads is not
        computed (the last layer ends with the slots to predict).

        `backend` None computes a call of any shape at once; "flex" compiles for these shapes.
        """
        config = self.config
        block_size = block_size or config.block_size
        backend = backend or eager_backend(context_start_N.device)
        slots_B = torch.arange(block_size, device=context_start_N.device)
        rotation = self._rotation((context_end_N - context_start_N)[:, None] + slots_B)
        windows = [config.window_of(i) for i in range(len(self.layers))]
        plans = {
            window: plan_attention(
                context_start_N,
                context_end_N,
                num_context=len(context_kv[0][0]),
                block_size=block_size,
                queries_per_key_head=config.num_attention_heads // config.num_key_value_heads,
                dtype=anchor_embeddings_NH.dtype,
                backend=backend,
                window=window,
            )
            for window in dict.fromkeys(windows)
        }
        hidden = torch.cat([anchor_embeddings_NH, mask_embedding_H[None]])
        layers = [cast(DrafterLayer, layer) for layer in self.layers]
        norms = [*(layer.input_layernorm for layer in layers[1:]), self.norm]
        normed = layers[0].input_layernorm(hidden)
        for layer, (k_SKD, v_SKD), window, next_norm in zip(
            layers, context_kv, windows, norms, strict=True
        ):
            is_last = layer is layers[-1]
            hidden, normed = layer(
                hidden, normed, k_SKD, v_SKD, rotation, plans[window], next_norm, is_last
            )
        return normed

    def _rotation(self, position_ids: torch.Tensor) -> Rotation:
        return rotary_tables(position_ids, self.config.head_dim, self.config.rope_theta)


def _split_context_kv(kv_SC: torch.Tensor, k_norms: list[RMSNorm], rotation: Rotation) -> ContextKV:
    head_dim = len(k_norms[0].weight)
    parts = kv_SC.view(len(kv_SC), 2 * len(k_norms), -1, head_dim).unbind(1)
    return [
        (rotate(k_norm.in_fp32(k_SKD), rotation).to(k_SKD.dtype), v_SKD)
        for k_norm, k_SKD, v_SKD in zip(k_norms, parts[0::2], parts[1::2], strict=True)
    ]


class DrafterLayer(nn.Module):
    """Pre-norm decoder layer: block attention over context and block, then a gated MLP."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = DrafterAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config)

    def forward(
        self,
        hidden: torch.Tensor,
        normed: torch.Tensor,
        k_context_SKD: torch.Tensor,
        v_context_SKD: torch.Tensor,
        rotation: Rotation,
        plan: AttentionPlan,
        next_norm: RMSNorm,
        is_last: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the residual stream [N, B, H] after this layer, and its norm by `next_norm`.

        `normed` is `hidden` after this layer's input norm. The first layer is given [N + 1, H]: the
        anchors' embeddings and then the one of all masks. The last layer returns [N, B - 1, H], the
        slots to predict.
        """
        attn, mlp, compiled = self.self_attn, self.mlp, plan.mask is not None
        qkv = product(normed, attn.q_proj.weight, attn.k_proj.weight, attn.v_proj.weight)
        if hidden.ndim == 2:
            block_size = rotation[0].shape[1]
            hidden, qkv = lay_out_blocks(hidden, block_size), lay_out_blocks(qkv, block_size)
            if compiled and torch.is_grad_enabled():
                hidden.requires_grad_()  # as in later layers: else compiled once more for this one
        attended = _run(attend, compiled)(
            qkv, attn.q_norm, attn.k_norm, k_context_SKD, v_context_SKD, rotation, plan
        )
        if is_last:
            # contiguous: other strides would be compiled for anew
            hidden, attended = hidden[:, 1:].contiguous(), attended[:, 1:].contiguous()
        residual = product(attended, attn.o_proj.weight)
        hidden, normed = _run(add_and_norm, compiled)(
            hidden, residual, self.post_attention_layernorm
        )
        gate, up = product(normed, mlp.gate_proj.weight), product(normed, mlp.up_proj.weight)
        # flat: one graph serves any number of slots
        gated = _run(swiglu, compiled)(gate.flatten(), up.flatten()).view_as(gate)
        residual = product(gated, mlp.down_proj.weight)
        return _run(add_and_norm, compiled)(hidden, residual, next_norm)


def lay_out_blocks(rows: torch.Tensor, block_size: int) -> torch.Tensor:
    """Return blocks [N, B, ...] of [row n, last row, last row, ...] from [N + 1, ...]."""
    anchors, mask = rows[:-1, None], rows[-1:, None]
    return torch.cat([anchors, mask.expand(len(anchors), block_size - 1, *rows.shape[1:])], dim=1)


class DrafterAttention(nn.Module):
    """Weights of grouped-query attention whose queries come from the block alone."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.q_proj = Linear(config.hidden_size, q_size)
        self.k_proj = Linear(config.hidden_size, kv_size)
        self.v_proj = Linear(config.hidden_size, kv_size)
        self.o_proj = Linear(q_size, config.hidden_size)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)


class GatedMLP(nn.Module):
    """Weights of a SwiGLU MLP: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)


class Linear(nn.Module):
    """A weight [out, in] without bias, for `trainer.products.product`."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=torch.float32))


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis, computed in fp32 and returned in x's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=torch.float32))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last axis of x."""
        return self.in_fp32(x).to(x.dtype)

    def in_fp32(self, x: torch.Tensor) -> torch.Tensor:
        """Return the norm before the cast back, for a caller that goes on in fp32."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


def attend(
    qkv_NBC: torch.Tensor,
    q_norm: RMSNorm,
    k_norm: RMSNorm,
    k_context_SKD: torch.Tensor,
    v_context_SKD: torch.Tensor,
    rotation: Rotation,
    plan: AttentionPlan,
) -> torch.Tensor:
    """Norm and turn queries and keys, side by side with values, and attend; [N, B, h * D]."""
    dtype, num_key_heads, head_dim = qkv_NBC.dtype, *k_context_SKD.shape[1:]
    heads = qkv_NBC.unflatten(-1, (-1, head_dim))
    num_heads = heads.shape[2] - 2 * num_key_heads
    q_NBhD, k_NBKD, v_NBKD = heads.split([num_heads, num_key_heads, num_key_heads], dim=2)
    out_NBhD = block_attention(
        rotate(q_norm.in_fp32(q_NBhD), rotation).to(dtype),
        k_context_SKD,
        v_context_SKD,
        rotate(k_norm.in_fp32(k_NBKD), rotation).to(dtype),
        v_NBKD,
        plan,
    )
    return out_NBhD.flatten(2)


def add_and_norm(
    hidden: torch.Tensor, residual: torch.Tensor, norm: RMSNorm
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum and its norm, [..., H] both."""
    hidden = hidden + residual
    return hidden, norm(hidden)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up."""
    return F.silu(gate) * up


def rotary_tables(position_ids: torch.Tensor, head_dim: int, theta: float) -> Rotation:
    """Return fp32 cosines and sines [..., 1, head_dim]; component i pairs with i + head_dim / 2."""
    exponents = torch.arange(0, head_dim, 2, device=position_ids.device, dtype=torch.float32)
    frequencies = theta ** -(exponents / head_dim)
    angles = position_ids[..., None, None].float() * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Turn each component pair of fp32 x [..., heads, head_dim] by its position's angles."""
    cos, sin = rotation
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


# What lies between the products is compiled, and the products are not: so they can sum gradients
# where autograd cannot see it, and all layers share a few pieces of compiled code.
_COMPILED: dict[Callable[..., Any], Callable[..., Any]] = {
    function: torch.compile(function, fullgraph=True, dynamic=function is swiglu)
    for function in (attend, add_and_norm, swiglu, _split_context_kv)
}


def _run(function: Callable[..., Any], compiled: bool) -> Callable[..., Any]:
    return _COMPILED[function] if compiled else function
