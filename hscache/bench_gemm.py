"""`hscache bench gemm`: the rate of a target's matrix products alone, in a burst and sustained.

Takes a target's config; measures each product of its blocks, and all in their proportions, on
random data. A power-limited card slows down after the first moments: `sustained` is the denominator
of every share.

    hscache bench gemm --target Qwen/Qwen3.6-27B --json gemm.json
"""

from __future__ import annotations

import datetime
import logging
import platform
import statistics
import sys
import time
from typing import Any

import torch

from hscache import __version__
from hscache.bench_target_config import BenchGemmConfig
from hscache.clock import Clock, gpu_monitor
from hscache.config import TargetConfig
from hscache.device import DTYPES, choose_device
from hscache.forward_flops import Product, products
from hscache.gpus import GPUS, gpu_of_device
from hscache.pretrained import library_versions, load_config
from hscache.progress import configure_logging
from hscache.report import format_table
from hscache.result_file import require_writable, write_json

log = logging.getLogger(__name__)


def run(config: BenchGemmConfig, *, dry_run: bool = False) -> int:
    """Run the command; with `dry_run` say what would be measured."""
    configure_logging()
    device = choose_device(config.device)
    model, _ = load_config(TargetConfig(path=config.target))
    found = products(model, config.blocks or int(model.num_hidden_layers))
    if dry_run:
        print(f"would measure {len(found)} products of {len(config.rows)} sizes on {device}")
        return 0
    require_writable(config.json)
    figures = measure(config, found, device)
    print(format_figures(figures))
    write_json(config.json, figures)
    return 0


def measure(config: BenchGemmConfig, found: list[Product], device: torch.device) -> dict[str, Any]:
    """Return the rates, in FLOP/s, of each product and of all in their proportions."""
    dtype = DTYPES[config.dtype]
    shapes = []
    for product in found:
        for rows in config.rows:
            log.info("%s, %s rows", product.name, f"{rows:,}")
            rate = product_rate([product], rows, config.seconds, device, dtype)
            shapes.append({"product": product.name, **_sizes(product), **rate})
    mixed = [product_rate(found, rows, config.seconds, device, dtype) for rows in config.rows]
    best = max(mixed, key=lambda rate: rate["sustained_flop_per_s"])
    return {
        "what": "hscache bench gemm",
        "date": datetime.date.today().isoformat(),
        "machine": machine(device),
        "target": config.target,
        "shapes": shapes,
        "all": mixed,
        "best": best,
        "dense_flop_per_s": dense_rate(device),
    }


def product_rate(
    found: list[Product],
    rows: int,
    seconds: float,
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Return the rate of products back to back, each as often as it occurs (at most 16 times)."""
    clock = Clock(device)
    scale = max(1.0, max(product.count for product in found) / 16)
    flop, work = 0.0, []
    for product in found:
        a = torch.randn(rows, product.inputs, device=device, dtype=dtype)
        b = torch.randn(product.outputs, product.inputs, device=device, dtype=dtype)
        out = torch.empty(rows, product.outputs, device=device, dtype=dtype)
        times = max(1, round(product.count / scale)) if len(found) > 1 else 1
        work += [(a, b.T, out)] * times
        flop += 2.0 * rows * product.outputs * product.inputs * times

    def multiply() -> None:
        for a, b, out in work:
            torch.mm(a, b, out=out)

    multiply()
    clock.finish()
    measured: list[float] = []
    with gpu_monitor(device) as gpu:
        ends = time.perf_counter() + seconds
        while time.perf_counter() < ends or len(measured) < 4:
            measured.append(clock.seconds(multiply))
    return {
        "rows": rows,
        "burst_flop_per_s": flop / min(measured[:2]),
        "sustained_flop_per_s": flop / statistics.median(measured[len(measured) // 2 :]),
        "seconds": sum(measured),
        **gpu,
    }


def dense_rate(device: torch.device) -> float | None:
    """Return the vendor's dense bf16 rate of a card, None where we do not know it."""
    if device.type != "cuda":
        return None
    gpu = gpu_of_device(torch.cuda.get_device_name(device))
    return None if gpu is None else GPUS[gpu].bf16


def machine(device: torch.device) -> dict[str, Any]:
    """Return what a figure was measured on and with."""
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else platform.processor() or "CPU",
        "kind": device.type,
        "hscache": __version__,
        "python": platform.python_version(),
        **library_versions(),
        "command": ["hscache", *sys.argv[1:]],
    }


def format_figures(figures: dict[str, Any]) -> str:
    """Return the figures as a table."""
    rows = []
    for shape in [*figures["shapes"], *({"product": "all", **rate} for rate in figures["all"])]:
        size = f"{shape['inputs']:,} x {shape['outputs']:,}" if "inputs" in shape else "as they are"
        rows.append(
            [
                f"{shape['product']}, {shape['rows']:,} rows",
                f"{size}: {shape['sustained_flop_per_s'] / 1e12:,.1f} TFLOP/s sustained, "
                f"{shape['burst_flop_per_s'] / 1e12:,.1f} at first{power_words(shape)}",
            ]
        )
    best = figures["best"]
    share = ""
    if figures["dense_flop_per_s"]:
        share = (
            f", {best['sustained_flop_per_s'] / figures['dense_flop_per_s']:.1%} of the vendor's "
            "dense rate"
        )
    rows.append(["ceiling", f"{best['sustained_flop_per_s'] / 1e12:,.1f} TFLOP/s{share}"])
    return format_table(["bench gemm", figures["machine"]["device"]], rows)


def power_words(figures: dict[str, Any]) -> str:
    """Say at what power and clock, and what held the clock down."""
    if figures.get("power_w") is None:
        return ""
    text = f"; {figures['power_w']:.0f} W, {figures['clock_mhz']:.0f} MHz"
    if figures["power_capped_share"] > 0.5:
        return f"{text}, held down by its power limit"
    return f"{text}, held down by heat" if figures["heat_capped_share"] > 0.5 else text


def _sizes(product: Product) -> dict[str, int]:
    return {"inputs": product.inputs, "outputs": product.outputs, "count": product.count}
