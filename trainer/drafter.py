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

from typing import cast

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
from trainer.config import DrafterConfig

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
        run = _compiled_context_kv if backend == "flex" else _context_kv
        layers = [cast(DrafterLayer, layer).self_attn for layer in self.layers]
        return run(self, layers, features_SF, self._rotation(position_ids_S))

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
        slots. Slot k, returned at k - 1, has position end - start + k, the anchor's place in its
        document plus k. `block_size` is the drafter's unless a smaller one is asked for. What is
        equal for all masks is computed once (the first layer projects N + 1 rows), and what no one
        reads is not computed (the last layer ends with the slots to predict).

        `backend` None computes a call of any shape at once; "flex" compiles for these shapes.
        """
        config = self.config
        block_size = block_size or config.block_size
        backend = backend or eager_backend(context_start_N.device)
        slots_B = torch.arange(block_size, device=context_start_N.device)
        rotation = self._rotation((context_end_N - context_start_N)[:, None] + slots_B)
        plan = plan_attention(
            context_start_N,
            context_end_N,
            num_context=len(context_kv[0][0]),
            block_size=block_size,
            queries_per_key_head=config.num_attention_heads // config.num_key_value_heads,
            dtype=anchor_embeddings_NH.dtype,
            backend=backend,
        )
        run = _compiled_layer if backend == "flex" else DrafterLayer.forward
        hidden = torch.cat([anchor_embeddings_NH, mask_embedding_H[None]])
        last = len(self.layers) - 1
        for i, (layer, (k_SKD, v_SKD)) in enumerate(zip(self.layers, context_kv, strict=True)):
            final_norm = self.norm if i == last else None
            hidden = run(
                cast(DrafterLayer, layer), hidden, k_SKD, v_SKD, rotation, plan, final_norm
            )
        return hidden

    def _rotation(self, position_ids: torch.Tensor) -> Rotation:
        return rotary_tables(position_ids, self.config.head_dim, self.config.rope_theta)


def _context_kv(
    drafter: Drafter, layers: list[DrafterAttention], features_SF: torch.Tensor, rotation: Rotation
) -> ContextKV:
    context_SH = drafter.hidden_norm(drafter.fc(features_SF))
    weights = [proj.weight for layer in layers for proj in (layer.k_proj, layer.v_proj)]
    # One product for all layers: the context is the same tensor for each of them.
    kv_SC = F.linear(context_SH, torch.cat([w.to(context_SH.dtype) for w in weights]))
    parts = kv_SC.view(len(kv_SC), 2 * len(layers), -1, drafter.config.head_dim).unbind(1)
    return [
        (rotate(layer.k_norm.in_fp32(k_SKD), rotation).to(k_SKD.dtype), v_SKD)
        for layer, k_SKD, v_SKD in zip(layers, parts[0::2], parts[1::2], strict=True)
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
        k_context_SKD: torch.Tensor,
        v_context_SKD: torch.Tensor,
        rotation: Rotation,
        plan: AttentionPlan,
        final_norm: RMSNorm | None,
    ) -> torch.Tensor:
        """Return the residual stream [N, B, H] after this layer.

        The first layer is given [N + 1, H]: the anchors' embeddings and then the one of all masks.
        The last layer is given the final norm and returns [N, B - 1, H], the slots to predict.
        """
        block_size = rotation[0].shape[1]
        q, k, v = self.self_attn.project(self.input_layernorm(hidden))
        if hidden.ndim == 2:
            hidden, q, k, v = (lay_out_blocks(x, block_size) for x in (hidden, q, k, v))
        attended = self.self_attn.attend(q, k, v, k_context_SKD, v_context_SKD, rotation, plan)
        if final_norm is not None:
            hidden, attended = hidden[:, 1:], attended[:, 1:]
        hidden = hidden + self.self_attn.o_proj(attended)
        hidden = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return hidden if final_norm is None else final_norm(hidden)


def lay_out_blocks(rows: torch.Tensor, block_size: int) -> torch.Tensor:
    """Return blocks [N, B, ...] of [row n, last row, last row, ...] from [N + 1, ...]."""
    anchors, mask = rows[:-1, None], rows[-1:, None]
    return torch.cat([anchors, mask.expand(len(anchors), block_size - 1, *rows.shape[1:])], dim=1)


class DrafterAttention(nn.Module):
    """Grouped-query attention whose queries come from the block alone."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.q_proj = Linear(config.hidden_size, q_size)
        self.k_proj = Linear(config.hidden_size, kv_size)
        self.v_proj = Linear(config.hidden_size, kv_size)
        self.o_proj = Linear(q_size, config.hidden_size)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def project(self, normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries [..., h, D], keys and values [..., K, D] of [..., H], before any norm."""
        weights = [proj.weight for proj in (self.q_proj, self.k_proj, self.v_proj)]
        # One product for all three, so that its backward pass is one product too.
        qkv = F.linear(normed, torch.cat([weight.to(normed.dtype) for weight in weights]))
        q, k, v = (
            part.unflatten(-1, (-1, self.head_dim))
            for part in qkv.split([len(weight) for weight in weights], dim=-1)
        )
        return q, k, v

    def attend(
        self,
        q_NBhD: torch.Tensor,
        k_NBKD: torch.Tensor,
        v_NBKD: torch.Tensor,
        k_context_SKD: torch.Tensor,
        v_context_SKD: torch.Tensor,
        rotation: Rotation,
        plan: AttentionPlan,
    ) -> torch.Tensor:
        """Norm and turn queries and keys and attend; returns [N, B, h * D]."""
        dtype = q_NBhD.dtype
        out_NBhD = block_attention(
            rotate(self.q_norm.in_fp32(q_NBhD), rotation).to(dtype),
            k_context_SKD,
            v_context_SKD,
            rotate(self.k_norm.in_fp32(k_NBKD), rotation).to(dtype),
            v_NBKD,
            plan,
        )
        return out_NBhD.flatten(2)


class GatedMLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map [..., H] to [..., H]."""
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class Linear(nn.Module):
    """Product with a weight [out, in], computed in the dtype of the input; no bias."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=torch.float32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., in] to [..., out]."""
        return F.linear(x, self.weight.to(x.dtype))


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


# Compiling a layer rather than the model: all middle layers share one piece of code.
_compiled_layer = torch.compile(DrafterLayer.forward, fullgraph=True, dynamic=False)
_compiled_context_kv = torch.compile(_context_kv, fullgraph=True, dynamic=False)
