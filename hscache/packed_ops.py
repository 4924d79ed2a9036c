"""The operations of a packed forward in plain PyTorch: what the kernels must compute.

One function per operation between the products of a decoder block, in the dtype of its input with
float32 inside. They run anywhere and are the reference of hscache.packed_kernels, which has the
same functions for CUDA.

Axes: T tokens of a pack, H hidden, I intermediate, N value or query heads, K key heads, D head dim,
R rotated dims, C channels of the convolution, W its width.
"""

from __future__ import annotations

import itertools

import torch
from torch.nn import functional as F

from hscache.pack import Pack

L2_EPS = 1e-6
"""What is added to the square of a query's or key's length, as in FLA and transformers."""


def rms_norm(x_TH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the rows divided by their root mean square, times a float32 weight; rounded once."""
    x = x_TH.float()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight_H).to(x_TH.dtype)


def swiglu(gate_up_TI2: torch.Tensor) -> torch.Tensor:
    """Return silu(first half) times second half, [T, I]."""
    gate, up = gate_up_TI2.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up_TI2.dtype)


def conv_heads(
    projected_TC: torch.Tensor,
    weight_CW: torch.Tensor,
    pack: Pack,
    num_keys: int,
    num_values: int,
    head_dim: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Convolve each document's channels causally, apply silu, cut into heads.

    Returns queries and keys [1, T, K, D] of length 1, and values [1, T, N, D].
    """
    x_TC = projected_TC.float()
    width = weight_CW.shape[1]
    out_TC = torch.zeros_like(x_TC)
    for back in range(width):
        shifted_TC = x_TC.roll(back, 0) * (pack.positions_T >= back)[:, None]
        out_TC += weight_CW[:, width - 1 - back].float() * shifted_TC
    out_TC = F.silu(out_TC)
    sizes = [num_keys * head_dim, num_keys * head_dim, num_values * head_dim]
    query, key, value = (part.unflatten(-1, (-1, head_dim)) for part in out_TC.split(sizes, dim=-1))
    query, key = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS) for x in (query, key))
    dtype = projected_TC.dtype
    return query[None].to(dtype), key[None].to(dtype), value[None].to(dtype)


def gates(
    a_TN: torch.Tensor, b_TN: torch.Tensor, A_log_N: torch.Tensor, dt_bias_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log of a step's decay and the share of its update, float32 [1, T, N] each."""
    decay = -A_log_N.float().exp() * F.softplus(a_TN.float() + dt_bias_N.float())
    return decay[None], b_TN.float().sigmoid()[None]


def scan(
    query_1TKD: torch.Tensor,
    key_1TKD: torch.Tensor,
    value_1TND: torch.Tensor,
    decay_1TN: torch.Tensor,
    beta_1TN: torch.Tensor,
    pack: Pack,
) -> torch.Tensor:
    """Run the gated delta rule over each document, token by token; returns [1, T, N, D].

    S <- exp(g) S; S <- S + k (beta (v - k S)); o = q S / sqrt(D) (Yang et al., arXiv:2412.06464).
    """
    _, _, num_values, dim = value_1TND.shape
    repeats = num_values // query_1TKD.shape[2]
    query, key = (x[0].float().repeat_interleave(repeats, dim=1) for x in (query_1TKD, key_1TKD))
    value, decay, beta = value_1TND[0].float(), decay_1TN[0].exp(), beta_1TN[0]
    out = torch.empty_like(value)
    for start, stop in itertools.pairwise(pack.offsets):
        state = value.new_zeros(num_values, query.shape[-1], dim)
        for t in range(start, stop):
            state = state * decay[t, :, None, None]
            error = value[t] - torch.einsum("nk,nkd->nd", key[t], state)
            state = state + torch.einsum("nk,nd->nkd", key[t], error * beta[t, :, None])
            out[t] = torch.einsum("nk,nkd->nd", query[t], state)
    return (out * query.shape[-1] ** -0.5).to(value_1TND.dtype)[None]


def gated_norm(
    x_TND: torch.Tensor, gate_TC: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> torch.Tensor:
    """Return each head's RMS norm times silu(gate), [T, N D]."""
    x = x_TND.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight_D.float()
    return (x.flatten(1) * F.silu(gate_TC.float())).to(x_TND.dtype)


def rotate_heads(
    projected_TC: torch.Tensor,
    num_queries: int,
    num_keys: int,
    head_dim: int,
    *,
    gated: bool,
    weights_2D: torch.Tensor | None,
    eps: float,
    cos_TR: torch.Tensor,
    sin_TR: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Take queries and keys from a merged projection, norm and rotate them; [T, N, D], [T, K, D].

    `projected_TC` holds queries (each followed by its gate if `gated`), keys, then values.
    `weights_2D` are the float32 weights of the query's and the key's RMS norm, None for neither.
    `cos_TR`, `sin_TR` are float32, one half of the angles: dims d and d + R are a pair.
    """
    step = 2 * head_dim if gated else head_dim
    queries = projected_TC[:, : num_queries * step].unflatten(-1, (num_queries, step))
    keys = projected_TC[:, num_queries * step :][:, : num_keys * head_dim]
    rotated = []
    for index, part in enumerate((queries[..., :head_dim], keys.unflatten(-1, (num_keys, -1)))):
        x = part.float()
        if weights_2D is not None:
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weights_2D[index]
        half = cos_TR.shape[1]
        first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        cos, sin = cos_TR[:, None], sin_TR[:, None]
        x = torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
        rotated.append(x.to(projected_TC.dtype))
    return rotated[0], rotated[1]


def attention(
    query_TND: torch.Tensor,
    key_TKD: torch.Tensor,
    value_TKD: torch.Tensor,
    pack: Pack,
    scale: float,
) -> torch.Tensor:
    """Return causal attention inside each document, [T, N, D]; a key head serves a group."""
    out_TND = torch.empty_like(query_TND)
    for start, stop in itertools.pairwise(pack.offsets):
        query, key, value = (
            x[None, start:stop].transpose(1, 2) for x in (query_TND, key_TKD, value_TKD)
        )
        part = F.scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=True,
            scale=scale,
            enable_gqa=True,
        )
        out_TND[start:stop] = part[0].transpose(0, 1)
    return out_TND


def output_gate(x_TND: torch.Tensor, projected_TC: torch.Tensor) -> torch.Tensor:
    """Return attention times the sigmoid of the gates beside its queries, [T, N D]."""
    num_heads, head_dim = x_TND.shape[1:]
    queries_TN = projected_TC[:, : 2 * num_heads * head_dim].unflatten(-1, (num_heads, -1))
    gate_TND = queries_TN[..., head_dim:].float().sigmoid()
    return (x_TND.float() * gate_TND).to(x_TND.dtype).flatten(1)
