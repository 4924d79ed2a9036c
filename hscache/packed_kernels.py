"""The operations of a packed forward on CUDA: fused Triton kernels, FLA's scan, flash attention.

The functions of hscache.packed_ops, with the same arguments and results. Everything between two
products is read and written once. Kernels keep to registers and a few kilobytes of shared memory,
so that they run on every GPU since sm_80. Importing this module needs triton; the scan needs fla.

Axes: as in hscache.packed_ops.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from types import ModuleType

import torch
import triton
import triton.language as tl

from hscache.pack import Pack
from hscache.packed_ops import L2_EPS

log = logging.getLogger(__name__)


def rms_norm(x_TH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
    """See packed_ops.rms_norm."""
    num_rows, hidden = x_TH.shape
    out_TH = torch.empty_like(x_TH)
    block = triton.next_power_of_2(hidden)
    _rms_norm[(num_rows,)](
        x_TH, weight_H, out_TH, hidden, eps, BLOCK=block, num_warps=8 if block >= 4096 else 4
    )
    return out_TH


def swiglu(gate_up_TI2: torch.Tensor) -> torch.Tensor:
    """See packed_ops.swiglu."""
    num_rows, width = gate_up_TI2.shape
    out_TI = gate_up_TI2.new_empty(num_rows, width // 2)
    rows, columns = 4, 1024
    num_blocks = triton.cdiv(width // 2, columns)
    _swiglu[(num_blocks * triton.cdiv(num_rows, rows),)](
        gate_up_TI2, out_TI, num_rows, width // 2, num_blocks, ROWS=rows, COLUMNS=columns,
        num_warps=8,
    )  # fmt: skip
    return out_TI


def conv_heads(
    projected_TC: torch.Tensor,
    weight_CW: torch.Tensor,
    pack: Pack,
    num_keys: int,
    num_values: int,
    head_dim: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See packed_ops.conv_heads."""
    num_rows, num_heads = len(projected_TC), 2 * num_keys + num_values
    out = projected_TC.new_empty(num_rows * num_heads * head_dim)
    rows = 32
    _conv_heads[(num_heads * triton.cdiv(num_rows, rows),)](
        projected_TC, projected_TC.stride(0), weight_CW, pack.positions_T, out, num_rows,
        num_keys, num_values, L2_EPS, D=head_dim, W=weight_CW.shape[1], ROWS=rows, num_warps=4,
    )  # fmt: skip
    keys = num_rows * num_keys * head_dim
    query, key, value = out.split([keys, keys, num_rows * num_values * head_dim])
    return (
        query.view(1, num_rows, num_keys, head_dim),
        key.view(1, num_rows, num_keys, head_dim),
        value.view(1, num_rows, num_values, head_dim),
    )


def gates(
    a_TN: torch.Tensor, b_TN: torch.Tensor, A_log_N: torch.Tensor, dt_bias_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See packed_ops.gates."""
    num_rows, num_heads = a_TN.shape
    decay, beta = (
        torch.empty(1, num_rows, num_heads, dtype=torch.float32, device=a_TN.device)
        for _ in range(2)
    )
    rows = 32
    _gates[(triton.cdiv(num_rows, rows),)](
        a_TN, b_TN, a_TN.stride(0), A_log_N, dt_bias_N, decay, beta, num_rows, num_heads,
        ROWS=rows, COLUMNS=triton.next_power_of_2(num_heads), num_warps=4,
    )  # fmt: skip
    return decay, beta


def scan(
    query_1TKD: torch.Tensor,
    key_1TKD: torch.Tensor,
    value_1TND: torch.Tensor,
    decay_1TN: torch.Tensor,
    beta_1TN: torch.Tensor,
    pack: Pack,
) -> torch.Tensor:
    """See packed_ops.scan; FlashQLA's where it is installed and takes these heads, else FLA's."""
    flash_qla = _flash_qla()
    head_dims = {query_1TKD.shape[-1], value_1TND.shape[-1]}
    if flash_qla is not None and head_dims == {128} and query_1TKD.dtype == torch.bfloat16:
        # Called here and not by FLA, which lets it ask the device for the boundaries and split long
        # documents: each waits for all work that the host has given the device before.
        inputs = (query_1TKD, key_1TKD, value_1TND, decay_1TN, beta_1TN)
        boundaries = _with_chunks(pack)
        return flash_qla.chunk_gated_delta_rule(*inputs, cu_seqlens=boundaries, auto_cp=False)[0]
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # it looks for a GPU at import

    return chunk_gated_delta_rule(
        query_1TKD,
        key_1TKD,
        value_1TND,
        decay_1TN,
        beta_1TN,
        cu_seqlens=pack.cumulative,
        chunk_indices=pack.chunks,
    )[0]


@functools.cache
def _flash_qla() -> ModuleType | None:
    """https://github.com/QwenLM/FlashQLA, where it is installed and knows this GPU."""
    if importlib.util.find_spec("flash_qla") is None:
        return None
    try:
        return importlib.import_module("flash_qla")
    except (ImportError, OSError, ValueError) as error:  # ValueError: a GPU it has no kernels for
        log.warning("flash-qla is installed and not used: %s", error)
        return None


def _with_chunks(pack: Pack) -> torch.Tensor:
    """Return the boundaries with FlashQLA's own notes of the chunks between them, made once."""
    if not hasattr(pack.cumulative, "_flash_qla_prepared_varlen"):
        from flash_qla.utils.index import prepare_varlen_metadata

        prepare_varlen_metadata(pack.cumulative, torch.tensor(pack.offsets))
    return pack.cumulative


def gated_norm(
    x_TND: torch.Tensor, gate_TC: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> torch.Tensor:
    """See packed_ops.gated_norm."""
    num_rows, num_heads, head_dim = x_TND.shape
    out_TC = x_TND.new_empty(num_rows, num_heads * head_dim)
    rows = max(1, 2048 // head_dim)
    _gated_norm[(triton.cdiv(num_rows * num_heads, rows),)](
        x_TND, gate_TC, gate_TC.stride(0), weight_D, out_TC, num_rows * num_heads, num_heads, eps,
        D=head_dim, ROWS=rows, num_warps=4,
    )  # fmt: skip
    return out_TC


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
    """See packed_ops.rotate_heads."""
    num_rows, num_heads = len(projected_TC), num_queries + num_keys
    out = projected_TC.new_empty(num_rows * num_heads * head_dim)
    block = triton.next_power_of_2(head_dim)
    rows = max(1, 2048 // block)
    _rotate_heads[(num_heads * triton.cdiv(num_rows, rows),)](
        projected_TC, projected_TC.stride(0), projected_TC if weights_2D is None else weights_2D,
        cos_TR, sin_TR, out, num_rows, num_queries, num_keys, 2 * head_dim if gated else head_dim,
        eps, D=head_dim, BLOCK=block, HALF=cos_TR.shape[1], NORM=weights_2D is not None, ROWS=rows,
        num_warps=4,
    )  # fmt: skip
    query, key = out.split([num_rows * n * head_dim for n in (num_queries, num_keys)])
    return (
        query.view(num_rows, num_queries, head_dim),
        key.view(num_rows, num_keys, head_dim),
    )


def attention(
    query_TND: torch.Tensor,
    key_TKD: torch.Tensor,
    value_TKD: torch.Tensor,
    pack: Pack,
    scale: float,
) -> torch.Tensor:
    """See packed_ops.attention; PyTorch's flash attention of variable length, grouped heads."""
    return torch.ops.aten._flash_attention_forward(
        query_TND,
        key_TKD,
        value_TKD.contiguous(),
        pack.cumulative,
        pack.cumulative,
        pack.longest,
        pack.longest,
        0.0,
        True,
        False,
        scale=scale,
    )[0]


def output_gate(x_TND: torch.Tensor, projected_TC: torch.Tensor) -> torch.Tensor:
    """See packed_ops.output_gate."""
    num_rows, num_heads, head_dim = x_TND.shape
    out_TC = x_TND.new_empty(num_rows, num_heads * head_dim)
    block = triton.next_power_of_2(head_dim)
    rows = max(1, 2048 // block)
    _output_gate[(triton.cdiv(num_rows * num_heads, rows),)](
        x_TND, projected_TC, projected_TC.stride(0), out_TC, num_rows * num_heads, num_heads,
        D=head_dim, BLOCK=block, ROWS=rows, num_warps=4,
    )  # fmt: skip
    return out_TC


@triton.jit
def _rms_norm(x, weight, out, hidden, eps, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * hidden
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    value = tl.load(x + start + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / hidden + eps)
    value = value * scale * tl.load(weight + column, mask=inside, other=0.0)
    tl.store(out + start + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _swiglu(x, out, num_rows, width, num_blocks, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    program = tl.program_id(0)
    row = (program // num_blocks * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = (program % num_blocks * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside = (row < num_rows) & (column < width)
    gate = tl.load(x + row * (2 * width) + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * (2 * width) + width + column, mask=inside, other=0.0).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _conv_heads(
    x, row_size, weight, position, out, num_rows, num_keys, num_values, eps,
    D: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    # heads of the same tokens lie side by side in memory, so they are neighbours in the grid
    num_heads = 2 * num_keys + num_values
    program = tl.program_id(0)
    head = program % num_heads
    row = (program // num_heads * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, D)
    channel = head * D + column
    inside = row < num_rows
    place = tl.load(position + row, mask=inside, other=0)
    value = tl.zeros((ROWS, D), dtype=tl.float32)
    for back in tl.static_range(W):
        factor = tl.load(weight + channel * W + (W - 1 - back)).to(tl.float32)
        keep = inside & (place >= back)
        taken = tl.load(
            x + (row - back)[:, None] * row_size + channel[None, :], mask=keep[:, None], other=0.0
        )
        value += factor[None, :] * taken.to(tl.float32)
    value = value * tl.sigmoid(value)
    length = tl.rsqrt(tl.sum(value * value, axis=1) + eps)
    is_value = head >= 2 * num_keys
    value = value * tl.where(is_value, 1.0, length)[:, None]
    # queries of all tokens, then keys, then values
    part = tl.where(is_value, 2, head // num_keys).to(tl.int64)
    in_part = head - part * num_keys
    out_size = tl.where(is_value, num_values, num_keys).to(tl.int64)
    start = part * num_keys * num_rows * D
    place_out = start + row[:, None] * (out_size * D) + in_part * D + column[None, :]
    tl.store(out + place_out, value.to(out.dtype.element_ty), mask=inside[:, None])


@triton.jit(do_not_specialize=["num_rows"])
def _gates(
    a, b, row_size, A_log, dt_bias, decay, beta, num_rows, num_heads,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.arange(0, COLUMNS)
    known = column < num_heads
    inside = (row < num_rows) & known[None, :]
    rate = -tl.exp(tl.load(A_log + column, mask=known, other=0.0).to(tl.float32))
    bias = tl.load(dt_bias + column, mask=known, other=0.0).to(tl.float32)
    step = tl.load(a + row * row_size + column[None, :], mask=inside, other=0.0).to(tl.float32)
    step += bias[None, :]
    step = tl.where(step > 20.0, step, tl.log(1.0 + tl.exp(tl.minimum(step, 20.0))))
    share = tl.load(b + row * row_size + column[None, :], mask=inside, other=0.0).to(tl.float32)
    place = row * num_heads + column[None, :]
    tl.store(decay + place, rate[None, :] * step, mask=inside)
    tl.store(beta + place, tl.sigmoid(share), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _gated_norm(
    x, gate, gate_size, weight, out, num_rows, num_heads, eps, D: tl.constexpr, ROWS: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = (row < num_rows)[:, None]
    column = tl.arange(0, D)
    place = row.to(tl.int64)[:, None] * D + column[None, :]
    token = (row // num_heads).to(tl.int64)
    gate_place = (token * gate_size + row % num_heads * D)[:, None] + column[None, :]
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    value = value * tl.rsqrt(tl.sum(value * value, axis=1) / D + eps)[:, None]
    value = value * tl.load(weight + column).to(tl.float32)[None, :]
    opened = tl.load(gate + gate_place, mask=inside, other=0.0).to(tl.float32)
    value = value * opened * tl.sigmoid(opened)
    tl.store(out + place, value.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _rotate_heads(
    x, row_size, weight, cos, sin, out, num_rows, num_queries, num_keys, query_step, eps,
    D: tl.constexpr, BLOCK: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    num_heads = num_queries + num_keys
    program = tl.program_id(0)
    head = program % num_heads
    row = (program // num_heads * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK)
    is_query = head < num_queries
    start = tl.where(is_query, head * query_step, num_queries * (query_step - D) + head * D)
    other = tl.where(column < HALF, column + HALF, column - HALF)
    other = tl.where(column < 2 * HALF, other, column)
    live = (column < D)[None, :]
    inside = (row < num_rows) & live
    from_row = x + row * row_size + start
    value = tl.load(from_row + column[None, :], mask=inside, other=0.0).to(tl.float32)
    partner = tl.load(from_row + other[None, :], mask=inside, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(value * value, axis=1) / D + eps)[:, None]
        factors = weight + tl.where(is_query, 0, D)
        value = value * scale * tl.load(factors + column, mask=column < D, other=0.0)[None, :]
        partner = partner * scale * tl.load(factors + other, mask=column < D, other=0.0)[None, :]
    turned = inside & (column < 2 * HALF)[None, :]
    angle = row * HALF + (column % HALF)[None, :]
    sign = tl.where(column < HALF, -1.0, 1.0)[None, :]
    value = value * tl.load(cos + angle, mask=turned, other=1.0)
    value += sign * partner * tl.load(sin + angle, mask=turned, other=0.0)
    size = tl.where(is_query, num_queries, num_keys).to(tl.int64)
    first = tl.where(is_query, 0, num_queries).to(tl.int64)
    place = first * num_rows * D + row * (size * D) + (head - first) * D + column[None, :]
    tl.store(out + place, value.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _output_gate(
    x, projected, row_size, out, num_rows, num_heads,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < num_rows)[:, None] & (column < D)[None, :]
    place = row.to(tl.int64)[:, None] * D + column[None, :]
    token = (row // num_heads).to(tl.int64)
    gate_place = (token * row_size + row % num_heads * (2 * D) + D)[:, None] + column[None, :]
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    opened = tl.load(projected + gate_place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, (value * tl.sigmoid(opened)).to(out.dtype.element_ty), mask=inside)
