"""Every own kernel in Triton's interpreter against its plain twin, in float32; a program.

Run by test_packed_kernels in a process of its own: Triton must be told to interpret before it is
imported. In bfloat16 the interpreter rounds otherwise than a GPU.
"""

import itertools
import os

os.environ["TRITON_INTERPRET"] = "1"

import torch

from hscache import packed_kernels, packed_ops
from hscache.pack import make_pack

OFFSETS = list(itertools.accumulate([0, 1, 37, 2, 3, 64, 5]))
TOKENS = OFFSETS[-1]


def compare(name, *arguments, **options):
    found = getattr(packed_kernels, name)(*arguments, **options)
    expected = getattr(packed_ops, name)(*arguments, **options)
    parts = zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]
    for ours, plain in parts:
        assert ours.shape == plain.shape, (name, ours.shape, plain.shape)
        assert ours.dtype == plain.dtype, (name, ours.dtype, plain.dtype)
        error = (ours - plain).norm() / plain.norm()
        assert error < 2e-6, f"{name} {tuple(ours.shape)}: {error:.1e}"
    print(name, "agrees")


def norms_and_gates():
    for hidden in (64, 96, 576):
        compare("rms_norm", torch.randn(TOKENS, hidden), torch.randn(hidden), 1e-6)
    for width in (96, 1024, 1536):
        compare("swiglu", torch.randn(TOKENS, 2 * width))


def delta_net(head_dim, num_keys, num_values):
    pack = make_pack(OFFSETS, torch.device("cpu"))
    channels, values = (2 * num_keys + num_values) * head_dim, num_values * head_dim
    projected_TC = torch.randn(TOKENS, channels + values + 2 * num_values)
    mixed, gate, b, a = projected_TC.split([channels, values, num_values, num_values], dim=1)
    sizes = (num_keys, num_values, head_dim)
    compare("conv_heads", mixed, torch.randn(channels, 4), pack, *sizes)
    compare("gates", a, b, torch.randn(num_values), torch.randn(num_values))
    heads = torch.randn(TOKENS, num_values, head_dim)
    compare("gated_norm", heads, gate, torch.randn(head_dim), 1e-6)


def attention_heads(head_dim, num_queries, num_keys, gated, normed, rotated):
    width = num_queries * head_dim * (1 + gated) + 2 * num_keys * head_dim
    projected_TC = torch.randn(TOKENS, width)
    compare(
        "rotate_heads",
        projected_TC,
        num_queries,
        num_keys,
        head_dim,
        gated=gated,
        weights_2D=torch.randn(2, head_dim) if normed else None,
        eps=1e-6,
        cos_TR=torch.randn(TOKENS, rotated),
        sin_TR=torch.randn(TOKENS, rotated),
    )
    if gated:
        compare("output_gate", torch.randn(TOKENS, num_queries, head_dim), projected_TC)


if __name__ == "__main__":
    torch.manual_seed(0)
    norms_and_gates()
    for sizes in ((16, 2, 6), (128, 2, 2), (128, 1, 3)):
        delta_net(*sizes)
    for shape in (
        (16, 4, 2, False, False, 8),
        (32, 4, 2, True, True, 4),
        (128, 3, 1, False, True, 64),
        (256, 4, 2, True, True, 32),
        (80, 2, 1, False, True, 40),
        (96, 2, 1, True, True, 16),
    ):
        attention_heads(*shape)
