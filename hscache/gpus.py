"""GPUs for `hscache plan`: what their matrix units can do at best, memory, bandwidth and power.

Rates are of *dense* products that accumulate in fp32. Headlines such as "1 PFLOP bf16" of an RTX
PRO 6000 assume that half of the weights are zero in a 2:4 pattern; no model here is, so that column
(`sparse_bf16`) is only there to say that it is no peak. `sustained` is the bf16 GEMM rate somebody
measured over seconds, where power limits the clock; it is None where we know of none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TERA = 1e12

GpuName = Literal[
    "rtx-pro-6000",
    "rtx-pro-6000-server",
    "rtx-pro-6000-max-q",
    "h100-sxm",
    "h100-pcie",
    "h200",
    "b200",
    "rtx-5090",
    "a100",
    "l40s",
    "other",
]


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU; rates in FLOP/s, dense unless the name says otherwise."""

    name: str
    bf16: float
    fp8: float | None
    fp4: float | None
    sparse_bf16: float | None
    memory_bytes: float
    bandwidth: float | None
    """bytes/s; None if it is not known"""
    power_w: float | None
    source: str
    devices: tuple[str, ...] = ()
    """beginnings of the name that torch reports"""
    sustained: float | None = None
    sustained_source: str = ""


def _gb(size: float) -> float:
    return size * 1e9


GPUS: dict[str, Gpu] = {
    "rtx-pro-6000": Gpu(
        name="RTX PRO 6000 Blackwell Workstation",
        bf16=503.8 * TERA, fp8=1007.6 * TERA, fp4=2015.2 * TERA, sparse_bf16=1007.6 * TERA,
        memory_bytes=_gb(96), bandwidth=1.792e12, power_w=600,
        source="NVIDIA RTX Blackwell PRO architecture paper, as quoted by hmc-tech.com; 188 SMs",
        devices=("NVIDIA RTX PRO 6000 Blackwell Workstation",),
        sustained=425.6 * TERA,
        sustained_source="reported: one 8192x5120x5120 product, duration unknown",
    ),
    "rtx-pro-6000-server": Gpu(
        name="RTX PRO 6000 Blackwell Server",
        bf16=503.8 * TERA, fp8=1007.6 * TERA, fp4=2015.2 * TERA, sparse_bf16=1007.6 * TERA,
        memory_bytes=_gb(96), bandwidth=1.597e12, power_w=600,
        source="NVIDIA data sheet: 1 / 2 / 4 PFLOP, all sparse; halves of the Workstation's",
        devices=("NVIDIA RTX PRO 6000 Blackwell Server",),
    ),
    "rtx-pro-6000-max-q": Gpu(
        name="RTX PRO 6000 Blackwell Max-Q",
        bf16=438.9 * TERA, fp8=877.8 * TERA, fp4=1755.5 * TERA, sparse_bf16=877.8 * TERA,
        memory_bytes=_gb(96), bandwidth=1.792e12, power_w=300,
        source="NVIDIA data sheet: 3,511 AI TOPS (sparse FP4) / 8; boost clock 2,288 MHz agrees",
        devices=("NVIDIA RTX PRO 6000 Blackwell Max-Q",),
        sustained=229 * TERA,
        sustained_source="reported: cuBLAS fp16, 8192^3 (waynehacking8)",
    ),
    "h100-sxm": Gpu(
        name="H100 SXM",
        bf16=989.4 * TERA, fp8=1978.9 * TERA, fp4=None, sparse_bf16=1978.9 * TERA,
        memory_bytes=_gb(80), bandwidth=3.35e12, power_w=700,
        source="NVIDIA Hopper architecture paper, as quoted by glennklockwood.com",
        devices=("NVIDIA H100 80GB HBM3",),
    ),
    "h100-pcie": Gpu(
        name="H100 PCIe",
        bf16=756 * TERA, fp8=1513 * TERA, fp4=None, sparse_bf16=1513 * TERA,
        memory_bytes=_gb(80), bandwidth=2.0e12, power_w=350,
        source="NVIDIA data sheet (1,513 sparse, half without), as quoted by hpctech.co.jp",
        devices=("NVIDIA H100 PCIe",),
    ),
    "h200": Gpu(
        name="H200 SXM",
        bf16=989.4 * TERA, fp8=1978.9 * TERA, fp4=None, sparse_bf16=1978.9 * TERA,
        memory_bytes=_gb(141), bandwidth=4.8e12, power_w=700,
        source="the same chip as the H100 SXM; NVIDIA data sheet for memory",
        devices=("NVIDIA H200",),
        sustained=665 * TERA,
        sustained_source="measured for this project: 655 to 671 over 5 s at 1,430 MHz, 700 W",
    ),
    "b200": Gpu(
        name="B200 (HGX)",
        bf16=2250 * TERA, fp8=4500 * TERA, fp4=9000 * TERA, sparse_bf16=4500 * TERA,
        memory_bytes=_gb(180), bandwidth=8.0e12, power_w=1000,
        source="NVIDIA Blackwell data sheet at 1,000 W, as quoted by glennklockwood.com",
        devices=("NVIDIA B200",),
    ),
    "rtx-5090": Gpu(
        name="GeForce RTX 5090",
        bf16=209.5 * TERA, fp8=419 * TERA, fp4=1676 * TERA, sparse_bf16=419 * TERA,
        memory_bytes=_gb(32), bandwidth=1.792e12, power_w=575,
        source="NVIDIA RTX Blackwell paper, quoted by main-horse.github.io; fp32 sums, half rate",
        devices=("NVIDIA GeForce RTX 5090",),
    ),
    "a100": Gpu(
        name="A100 SXM 80GB",
        bf16=312 * TERA, fp8=None, fp4=None, sparse_bf16=624 * TERA,
        memory_bytes=_gb(80), bandwidth=2.039e12, power_w=400,
        source="NVIDIA data sheet, as quoted by glennklockwood.com",
        devices=("NVIDIA A100-SXM4-80GB",),
    ),
    "l40s": Gpu(
        name="L40S",
        bf16=362.05 * TERA, fp8=733 * TERA, fp4=None, sparse_bf16=733 * TERA,
        memory_bytes=_gb(48), bandwidth=0.864e12, power_w=350,
        source="NVIDIA data sheet, as quoted by mullet.se",
        devices=("NVIDIA L40S",),
    ),
}  # fmt: skip
"""The dense column is half of the sparse one everywhere but where a source gives both."""


def gpu_of_device(device_name: str) -> str | None:
    """Return the key of the GPU that torch calls so, None if it is not in the table."""
    for key, gpu in GPUS.items():
        if any(device_name.startswith(name) for name in gpu.devices):
            return key
    return None
