"""The forward of a packed target, block by block over merged weights.

Takes a decoder of transformers (Llama, Qwen2, Qwen3, or a hybrid of Qwen3.5 and 3.6) and runs
packs of documents through its own weights: the projections of a block's input are one product, the
residual is added inside the products, and what lies between is one pass over memory each
(hscache.packed_kernels; in plain PyTorch, hscache.packed_ops). Ends after the last captured block.

Axes: T tokens of a pack, L captured layers, H hidden, R rotated dims.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from hscache import packed_ops
from hscache.pack import Pack, make_pack, to_device
from hscache.pretrained import is_hybrid

_FAMILIES = {"llama", "qwen2", "qwen3"}
MLP_ROWS = 32_768
"""Tokens whose gate and up lie in memory at a time: 2.3 GB for the 27B target. Half as many are 1 %
slower there, twice as many no faster."""


def why_not(base: Any) -> str | None:
    """Return why a decoder cannot run here and must run as transformers wrote it, or None."""
    config = base.config
    if config.model_type not in _FAMILIES and not is_hybrid(config):
        return f"targets of type {config.model_type} have no fused forward"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}"
    for block in base.layers:
        mixer = _mixer(block)
        out = mixer.o_proj if hasattr(mixer, "o_proj") else mixer.out_proj
        mlp = (block.mlp.gate_proj, block.mlp.up_proj, block.mlp.down_proj)
        if any(linear.bias is not None for linear in (out, *mlp)):
            return "its output or MLP products have a bias"
        if hasattr(mixer, "conv1d"):
            dims = {mixer.head_k_dim, mixer.head_v_dim}
            if len(dims) > 1 or mixer.head_k_dim & (mixer.head_k_dim - 1):
                return f"its delta-net heads have {sorted(dims)} dims"
            if mixer.conv1d.bias is not None:
                return "its convolution has a bias"
        elif hasattr(mixer, "q_norm") and mixer.q_norm.weight.shape != (mixer.head_dim,):
            return "its head norms are not one for all heads"
    return None


def kernels() -> ModuleType | None:
    """Return the operations for CUDA, None where triton or fla are not installed."""
    if any(importlib.util.find_spec(name) is None for name in ("triton", "fla")):
        return None
    return importlib.import_module("hscache.packed_kernels")


def kernel_versions() -> dict[str, str]:
    """Return the versions of the libraries whose kernels may compute a state."""
    found = {}
    for name in ("triton", "fla-core", "flash-qla"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def place(base: Any, device: torch.device) -> None:
    """Move a decoder to a device, the products of one input side by side in one tensor.

    Its modules keep their weights, as views. Parameters on the meta device get memory and no
    values. Needs no second copy: one block's weights at a time are in both places.
    """
    for block in base.layers:
        for linears in _merged(block):
            weight = torch.empty(
                sum(linear.out_features for linear in linears),
                linears[0].in_features,
                dtype=linears[0].weight.dtype,
                device=device,
            )
            start = 0
            for linear in linears:
                part = weight[start : start + linear.out_features]
                start += linear.out_features
                if not linear.weight.is_meta:
                    part.copy_(linear.weight)
                linear.weight = nn.Parameter(part, requires_grad=False)
    for module in base.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                empty = torch.empty_like(parameter, device=device)
                setattr(module, name, nn.Parameter(empty, requires_grad=False))
    base.to(device)


@dataclass(frozen=True)
class _Attention:
    weight: torch.Tensor
    bias: torch.Tensor | None
    out: torch.Tensor
    num_queries: int
    num_keys: int
    head_dim: int
    gated: bool
    norms_2D: torch.Tensor | None
    scale: float

    def __call__(self, x_TH: torch.Tensor, run: _Run) -> torch.Tensor:
        ops = run.ops
        projected_TC = F.linear(x_TH, self.weight, self.bias)
        query, key = ops.rotate_heads(
            projected_TC,
            self.num_queries,
            self.num_keys,
            self.head_dim,
            gated=self.gated,
            weights_2D=self.norms_2D,
            eps=run.eps,
            cos_TR=run.cos_TR,
            sin_TR=run.sin_TR,
        )
        value_TC = projected_TC[:, -self.num_keys * self.head_dim :]
        value = value_TC.unflatten(-1, (self.num_keys, self.head_dim))
        out = ops.attention(query, key, value, run.pack, self.scale)
        return ops.output_gate(out, projected_TC) if self.gated else out.flatten(1)


@dataclass(frozen=True)
class _DeltaNet:
    weight: torch.Tensor
    out: torch.Tensor
    conv_CW: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    norm_D: torch.Tensor
    num_keys: int
    num_values: int
    head_dim: int

    def __call__(self, x_TH: torch.Tensor, run: _Run) -> torch.Tensor:
        ops, channels = run.ops, len(self.conv_CW)
        values = self.num_values * self.head_dim
        projected_TC = F.linear(x_TH, self.weight)
        mixed, gate, b, a = projected_TC.split(
            [channels, values, self.num_values, self.num_values], dim=1
        )
        heads = ops.conv_heads(
            mixed, self.conv_CW, run.pack, self.num_keys, self.num_values, self.head_dim
        )
        decay, beta = ops.gates(a, b, self.A_log, self.dt_bias)
        out = ops.scan(*heads, decay, beta, run.pack)
        return ops.gated_norm(out[0], gate, self.norm_D, run.eps)


@dataclass(frozen=True)
class _Block:
    norm_H: torch.Tensor
    mixer: _Attention | _DeltaNet
    mlp_norm_H: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True)
class _Run:
    """What all blocks of one pass share."""

    ops: ModuleType
    pack: Pack
    eps: float
    cos_TR: torch.Tensor
    sin_TR: torch.Tensor


class PackedForward:
    """Runs packs through the blocks of a decoder that `place` has put on its device."""

    def __init__(
        self, base: Any, captured_ids: Sequence[int], ops: ModuleType = packed_ops
    ) -> None:
        self._base = base
        self._ops = ops
        self._captured_ids = tuple(captured_ids)
        config = base.config
        self._eps = float(config.rms_norm_eps)
        self._one_plus = is_hybrid(config)
        self._blocks = [self._block(block) for block in base.layers[: captured_ids[-1] + 1]]
        self._device = base.embed_tokens.weight.device

    @torch.inference_mode()
    def __call__(
        self, ids_T: torch.Tensor, offsets: Sequence[int], dtype: torch.dtype = torch.bfloat16
    ) -> torch.Tensor:
        """Return the states of a pack, [T, L, H] on the device; see `Target.capture`."""
        if self._device.type == "cuda":
            with torch.cuda.device(self._device):  # triton launches on the current one
                return self._run(ids_T, offsets, dtype)
        return self._run(ids_T, offsets, dtype)

    def warm_up(self) -> None:
        """Compile and tune every kernel, on the calling thread: Triton's tuner is not thread-safe.

        On a pack large enough to fill the GPU: kernels are tuned once, by the first input they see.
        Then on few documents: FlashQLA has other kernels for packs of one or two.
        """
        for num_documents in (8, 2, 1):
            offsets = range(0, 2_048 * num_documents + 1, 2_048)
            self(torch.arange(offsets[-1]) % self._base.config.vocab_size, offsets)

    def _run(self, ids_T: torch.Tensor, offsets: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        if not ids_T.is_cuda:
            ids_T = to_device(ids_T.numpy(), self._device)
        run = self._start(offsets)
        ops, eps = self._ops, self._eps
        x_TH = self._base.embed_tokens(ids_T)
        states_TLH = torch.empty(
            (len(ids_T), len(self._captured_ids), x_TH.shape[1]), dtype=dtype, device=self._device
        )
        for index, block in enumerate(self._blocks):
            mixed = block.mixer(ops.rms_norm(x_TH, block.norm_H, eps), run)
            x_TH.addmm_(mixed, block.mixer.out.T)
            del mixed
            normed_TH = ops.rms_norm(x_TH, block.mlp_norm_H, eps)
            for rows_TH, out_TH in zip(
                normed_TH.split(MLP_ROWS), x_TH.split(MLP_ROWS), strict=True
            ):
                out_TH.addmm_(ops.swiglu(F.linear(rows_TH, block.gate_up)), block.down.T)
            del normed_TH
            if index in self._captured_ids:
                states_TLH[:, self._captured_ids.index(index)] = x_TH
        return states_TLH

    def _start(self, offsets: Sequence[int]) -> _Run:
        pack = make_pack(offsets, self._device)
        positions = pack.positions_T.long()[None]
        if is_hybrid(self._base.config):
            positions = positions[None].expand(3, -1, -1)  # text, height, width: equal for text
        # its dtype and device are all the embedding looks at; float32 keeps the angles exact
        like = torch.empty(1, dtype=torch.float32, device=self._device)
        cos, sin = (x[0, :, : x.shape[-1] // 2] for x in self._base.rotary_emb(like, positions))
        return _Run(self._ops, pack, self._eps, cos.contiguous(), sin.contiguous())

    def _block(self, block: Any) -> _Block:
        mixer = _mixer(block)
        merged = [_weight(linears) for linears in _merged(block)]
        found: _Attention | _DeltaNet
        if hasattr(mixer, "conv1d"):
            found = _DeltaNet(
                weight=merged[0],
                out=mixer.out_proj.weight,
                conv_CW=mixer.conv1d.weight.squeeze(1),
                A_log=mixer.A_log,
                dt_bias=mixer.dt_bias,
                norm_D=mixer.norm.weight,
                num_keys=mixer.num_k_heads,
                num_values=mixer.num_v_heads,
                head_dim=mixer.head_k_dim,
            )
        else:
            biases: list[Any] = [linear.bias for linear in _merged(block)[0]]
            head_dim = mixer.head_dim
            num_keys = mixer.k_proj.out_features // head_dim
            num_queries = mixer.o_proj.in_features // head_dim
            norms = None
            if hasattr(mixer, "q_norm"):
                norms = torch.stack([self._norm(mixer.q_norm), self._norm(mixer.k_norm)])
            found = _Attention(
                weight=merged[0],
                bias=None if biases[0] is None else torch.cat(biases),
                out=mixer.o_proj.weight,
                num_queries=num_queries,
                num_keys=num_keys,
                head_dim=head_dim,
                gated=mixer.q_proj.out_features == 2 * num_queries * head_dim,
                norms_2D=norms,
                scale=mixer.scaling,
            )
        return _Block(
            norm_H=self._norm(block.input_layernorm),
            mixer=found,
            mlp_norm_H=self._norm(block.post_attention_layernorm),
            gate_up=merged[1],
            down=block.mlp.down_proj.weight,
        )

    def _norm(self, module: Any) -> torch.Tensor:
        weight = module.weight.detach().float()
        return weight + 1 if self._one_plus else weight


def _mixer(block: Any) -> Any:
    return block.linear_attn if hasattr(block, "linear_attn") else block.self_attn


def _merged(block: Any) -> tuple[Sequence[nn.Linear], Sequence[nn.Linear]]:
    """Return the linear layers of a block that share an input, in the order they are merged."""
    mixer, mlp = _mixer(block), block.mlp
    first: Sequence[nn.Linear]
    if hasattr(mixer, "conv1d"):
        first = (mixer.in_proj_qkv, mixer.in_proj_z, mixer.in_proj_b, mixer.in_proj_a)
    else:
        first = (mixer.q_proj, mixer.k_proj, mixer.v_proj)
    return first, (mlp.gate_proj, mlp.up_proj)


def _weight(linears: Sequence[nn.Linear]) -> torch.Tensor:
    """Return the merged weight that `place` gave these layers."""
    first = linears[0].weight.detach()
    rows = sum(linear.out_features for linear in linears)
    merged = first.as_strided((rows, first.shape[1]), first.stride())
    for linear, part in zip(
        linears, merged.split([linear.out_features for linear in linears]), strict=True
    ):
        assert linear.weight.data_ptr() == part.data_ptr(), "weights that `place` did not merge"
    return merged
