"""Without a GPU: kernels compute what their plain twins do, and compile for the GPUs we know."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")  # comes with PyTorch for CUDA; tools/install.sh adds it elsewhere

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hscache import packed_kernels

SHARED_BYTES = 99 * 1024
"""What a block may have on sm_120, the RTX PRO 6000 Blackwell."""
HEADS = {"num_rows": "i32", "num_heads": "i32"}
KERNELS = {
    "_rms_norm": (
        {"x": "*bf16", "weight": "*fp32", "out": "*bf16", "hidden": "i32", "eps": "fp32"},
        {"BLOCK": 8192},
        8,
    ),
    "_swiglu": (
        {"x": "*bf16", "out": "*bf16", "num_rows": "i32", "width": "i32", "num_blocks": "i32"},
        {"ROWS": 4, "COLUMNS": 1024},
        8,
    ),
    "_conv_heads": (
        {"x": "*bf16", "row_size": "i32", "weight": "*bf16", "position": "*i32", "out": "*bf16",
         "num_rows": "i32", "num_keys": "i32", "num_values": "i32", "eps": "fp32"},
        {"D": 128, "W": 4, "ROWS": 32},
        4,
    ),
    "_gates": (
        {"a": "*bf16", "b": "*bf16", "row_size": "i32", "A_log": "*bf16", "dt_bias": "*bf16",
         "decay": "*fp32", "beta": "*fp32", **HEADS},
        {"ROWS": 32, "COLUMNS": 64},
        4,
    ),
    "_gated_norm": (
        {"x": "*bf16", "gate": "*bf16", "gate_size": "i32", "weight": "*bf16", "out": "*bf16",
         **HEADS, "eps": "fp32"},
        {"D": 128, "ROWS": 16},
        4,
    ),
    "_rotate_heads": (
        {"x": "*bf16", "row_size": "i32", "weight": "*fp32", "cos": "*fp32", "sin": "*fp32",
         "out": "*bf16", "num_rows": "i32", "num_queries": "i32", "num_keys": "i32",
         "query_step": "i32", "eps": "fp32"},
        {"D": 256, "BLOCK": 256, "HALF": 32, "NORM": True, "ROWS": 8},
        4,
    ),
    "_output_gate": (
        {"x": "*bf16", "projected": "*bf16", "row_size": "i32", "out": "*bf16", **HEADS},
        {"D": 256, "BLOCK": 256, "ROWS": 8},
        4,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("capability", [80, 90, 120])
def test_a_kernel_compiles_within_the_shared_memory_of_a_workstation_card(name, capability):
    signature, constants, num_warps = KERNELS[name]
    source = ASTSource(
        getattr(packed_kernels, name),
        {**signature, **dict.fromkeys(constants, "constexpr")},
        constants,
    )
    compiled = triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"num_warps": num_warps}
    )
    assert compiled.metadata.shared <= SHARED_BYTES
    assert f".target sm_{capability}" in compiled.asm["ptx"]


def test_every_kernel_is_compiled_here():
    kernels = {
        name
        for name, value in vars(packed_kernels).items()
        if isinstance(value, triton.runtime.JITFunction)
    }
    assert kernels == set(KERNELS)


def test_interpreted_kernels_give_what_their_plain_twins_give():
    script = Path(__file__).with_name("interpreted_kernels.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    compared = {line.split()[0] for line in done.stdout.splitlines()}
    assert {f"_{name}" for name in compared} == set(KERNELS)
