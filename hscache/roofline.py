"""`hscache roofline`: result files of benches of one GPU as one JSON and one picture.

Takes what `trainer bench --json`, `hscache bench forward` and `hscache bench gemm` wrote; shows
measured rates under the roofs of the card (dense peak, products at its power limit, memory), and
splits a step's time into what is useful at the dense peak and causes that were measured. Causes
that a file does not tell apart are one part. Needs matplotlib (`pip install "hscache[plot]"`).

    hscache roofline tools/bench/results/*.json --picture roofline.svg
"""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hscache import files
from hscache.config import RooflineConfig
from hscache.errors import ConfigError
from hscache.gpus import GPUS, Gpu, gpu_of_device
from hscache.progress import configure_logging
from hscache.report import format_table

_GEMM_KERNELS = ("nvjet", "gemm", "xmma", "cutlass_80", "cutlass3x")
_FORMATS = (".png", ".svg", ".pdf")

USEFUL = "useful, at the dense peak"
POWER = "the power limit: products below the dense peak"
SLOW_PRODUCTS = "products below their own sustained rate"
OTHER_KERNELS = "kernels other than products"
MIXED = "products below that rate, and other kernels"
OPTIMIZER = "optimizer"
DATA = "waiting for data"
IDLE = "no kernel runs"
_CAUSES = (USEFUL, POWER, SLOW_PRODUCTS, OTHER_KERNELS, MIXED, OPTIMIZER, DATA, IDLE)
_COLORS = ("#3b6fd4", "#e39b12", "#e2574c", "#8a5cd6", "#b5649b", "#2f9e8f", "#7f8a99", "#c9d0d9")


@dataclass(frozen=True, kw_only=True)
class Point:
    """A measured rate."""

    name: str
    flop_per_s: float
    intensity: float | None
    """FLOP over the bytes of the products' operands; None if the file has no shapes"""


@dataclass(frozen=True, kw_only=True)
class Split:
    """Where the time of one step, or one forward, goes."""

    name: str
    seconds: float
    parts: dict[str, float]
    """seconds by cause; they add up to all of it"""


@dataclass(kw_only=True)
class Roofline:
    """Everything that is drawn, of one kind of GPU."""

    gpu: Gpu
    sustained: float = 0.0
    """the best sustained rate of products in any file"""
    power_w: float | None = None
    clock_mhz: float | None = None
    points: list[Point] = field(default_factory=list)
    splits: list[Split] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    results: list[dict[str, Any]] = field(default_factory=list)


def run(config: RooflineConfig, *, dry_run: bool = False) -> int:
    """Print the tables, write picture and JSON; a dry run only prints."""
    configure_logging()
    require_drawable(config.picture)
    found = gather(config.results)
    print(describe(found))
    if dry_run:
        return 0
    for file, data in (
        (config.json, lambda: json.dumps(to_json(found), indent=2).encode() + b"\n"),
        (config.picture, lambda: draw(found, config.picture.suffix[1:])),  # type: ignore[union-attr]
    ):
        if file is not None:
            files.make_folder(file.parent)
            files.replace_atomically(file, data())
            print(file)
    return 0


def require_drawable(picture: Path | None) -> None:
    """Raise ConfigError if a picture is wanted whose format is unknown, or without matplotlib."""
    if picture is None:
        return
    if picture.suffix not in _FORMATS:
        raise ConfigError(
            f"--picture {picture}: found `{picture.suffix}`, expected a file name that ends in "
            f"{', '.join(_FORMATS)}."
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "the picture is drawn with matplotlib, which is not installed: "
            'pip install "hscache[plot]" (or matplotlib alone).'
        )


def gather(paths: Sequence[Path], *, any_device: bool = False) -> Roofline:
    """Read result files; those that say nothing of rates are left out and named.

    With `any_device` a device without a known peak, such as a CPU, has its best sustained products
    for one. Raises ConfigError for a file that is no result, for two kinds of GPU, and for none.
    """
    results, left_out = [], []
    keys: dict[str, str] = {}
    for path in paths:
        try:
            figures = json.loads(path.read_text())
            what, device = figures["what"], figures["machine"].get("device", "")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{path} is no result file of a bench: expected JSON with `what` and `machine`."
            ) from error
        if what not in _READERS:
            left_out.append(f"{path}: {what}")
            continue
        key = gpu_of_device(device)
        if key is None and any_device:
            key = device or "CPU"
        if key is None:
            raise ConfigError(
                f"{path} was measured on {device or 'an unnamed device'}, whose peak is not in "
                "hscache/gpus.py; expected one of a GPU that is."
            )
        keys.setdefault(key, f"{path} ({device})")
        results.append((path, figures))
    if len(keys) != 1:
        found = "; ".join(keys.values()) or "none with a rate"
        raise ConfigError(f"expected results of one kind of GPU, found {found}.")
    key = next(iter(keys))
    roofline = Roofline(gpu=GPUS.get(key) or _unknown(key), left_out=left_out)
    for path, figures in results:
        gemm = figures.get("gemm") or figures["best"]
        if gemm["sustained_flop_per_s"] > roofline.sustained:
            roofline.sustained = gemm["sustained_flop_per_s"]
            roofline.power_w, roofline.clock_mhz = gemm.get("power_w"), gemm.get("clock_mhz")
        roofline.results.append({"file": path.name, **figures})
    if not roofline.gpu.bf16:
        roofline.gpu = dataclasses.replace(roofline.gpu, bf16=roofline.sustained)
    for path, figures in results:
        _READERS[figures["what"]](roofline, path.stem, figures)
    return roofline


def _unknown(device: str) -> Gpu:
    return Gpu(
        name=device, bf16=0.0, fp8=None, fp4=None, sparse_bf16=None, memory_bytes=0,
        bandwidth=None, power_w=None,
        source="no peak is known: the best sustained products stand in for it",
    )  # fmt: skip


def _read_trainer(found: Roofline, name: str, figures: dict[str, Any]) -> None:
    intensity = intensity_of(figures["gemm"].get("shapes", []))
    step, both = figures["step"], figures["forward_backward"]
    found.points += [
        Point(name=f"{name}: products", intensity=intensity,
              flop_per_s=figures["gemm"]["sustained_flop_per_s"]),
        Point(name=f"{name}: step", intensity=intensity, flop_per_s=step["flop_per_s"]),
    ]  # fmt: skip
    seconds = step["seconds"]["median"]
    flop = step["flop_per_s"] * seconds
    optimizer = figures["optimizer_s"]["median"]
    rows = flop / both["flop_per_s"]  # seconds of the step's rows, forward and backward
    sustained = figures["gemm"]["sustained_flop_per_s"]
    wait = figures["from_shards"]["data_wait"]
    whole = seconds / (1 - wait)
    found.splits.append(
        Split(
            name=f"{name}: a step",
            seconds=whole,
            parts=_filled(
                whole,
                {
                    USEFUL: flop / found.gpu.bf16,
                    POWER: flop / sustained - flop / found.gpu.bf16,
                    MIXED: rows - flop / sustained,
                    OPTIMIZER: optimizer,
                    DATA: whole * wait,
                },
            ),
        )
    )


def _read_forward(found: Roofline, name: str, figures: dict[str, Any]) -> None:
    forward, sustained = figures["budgets"][0], figures["gemm"]["sustained_flop_per_s"]
    flop, seconds = forward["flop"]["total"], forward["seconds"]["median"]
    intensity = intensity_of(figures["gemm"].get("shapes", []))
    found.points += [
        Point(name=f"{name}: products", intensity=intensity, flop_per_s=sustained),
        Point(name=f"{name}: forward", intensity=intensity, flop_per_s=forward["flop_per_s"]),
    ]
    parts = {
        USEFUL: flop / found.gpu.bf16,
        POWER: flop / sustained - flop / found.gpu.bf16,
    }
    kernels = figures.get("milliseconds_by_kernel")
    if kernels is None:
        parts[MIXED] = seconds - flop / sustained
    else:
        products = sum(k["ms"] for k in kernels if _is_product(k["kernel"])) / 1e3
        others = sum(k["ms"] for k in kernels) / 1e3 - products
        # Attention and scans are useful work too, done in kernels of their own: the products' own
        # time is compared with what all useful work takes at their rate, and may fall below it.
        parts[SLOW_PRODUCTS] = max(0.0, products - flop / sustained)
        parts[OTHER_KERNELS] = others - max(0.0, flop / sustained - products)
    parts[IDLE] = max(0.0, seconds - sum(parts.values()))
    found.splits.append(
        Split(name=f"{name}: a forward", seconds=seconds, parts=_filled(seconds, parts))
    )


def _read_gemm(found: Roofline, name: str, figures: dict[str, Any]) -> None:
    found.points.append(
        Point(
            name=f"{name}: products",
            intensity=None,
            flop_per_s=figures["best"]["sustained_flop_per_s"],
        )
    )


_READERS = {
    "trainer bench": _read_trainer,
    "hscache bench forward": _read_forward,
    "hscache bench gemm": _read_gemm,
}


def _is_product(kernel: str) -> bool:
    return any(part in kernel.lower() for part in _GEMM_KERNELS) and "flash" not in kernel.lower()


def _filled(seconds: float, parts: dict[str, float]) -> dict[str, float]:
    """Let the parts add up: each was measured apart, so a percent or two is left or too much."""
    rest = seconds - sum(parts.values())
    last = MIXED if MIXED in parts else IDLE
    return {**parts, last: max(0.0, parts.get(last, 0.0) + rest)}


def intensity_of(shapes: Sequence[Sequence[int]]) -> float | None:
    """Return FLOP over bytes of bf16 operands and results of products [m, k, n]; None of none."""
    if not shapes:
        return None
    flop = sum(2.0 * m * k * n for m, k, n in shapes)
    return flop / sum(2.0 * (m * k + k * n + m * n) for m, k, n in shapes)


def to_json(found: Roofline) -> dict[str, Any]:
    """Return roofs, points, splits and the results themselves as plain values."""
    return {"what": "hscache roofline", **asdict(found)}


def describe(found: Roofline) -> str:
    """Return the figures of the picture as tables."""
    dense = found.gpu.bf16
    power = f", at {found.power_w:,.0f} W" if found.power_w else ""
    rows: list[list[Any]] = [
        ["dense peak", _tera(dense), "100%", found.gpu.source],
        ["products, sustained", _tera(found.sustained),
         f"{found.sustained / dense:.1%}", f"measured{power}"],
    ]  # fmt: skip
    rows += [
        [p.name, _tera(p.flop_per_s), f"{p.flop_per_s / dense:.1%}",
         f"{p.flop_per_s / found.sustained:.1%} of the best sustained products"]
        for p in found.points
    ]  # fmt: skip
    tables = [format_table([found.gpu.name, "TFLOP/s", "of dense", ""], rows)]
    for split in found.splits:
        parts = [
            [cause, f"{1e3 * seconds:,.1f} ms", f"{seconds / split.seconds:.1%}"]
            for cause, seconds in split.parts.items()
        ]
        tables.append(format_table([split.name, "time", "share"], parts))
    if found.left_out:
        tables.append("left out: " + "; ".join(found.left_out))
    return "\n\n".join(tables)


def _tera(rate: float) -> str:
    return f"{rate / 1e12:,.0f}" if rate >= 1e13 else f"{rate / 1e12:.2g}"


def draw(found: Roofline, file_format: str) -> bytes:
    """Return the picture: roofs and points above, one bar for each split below."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    style: Any = {
        "font.size": 9, "axes.spines.top": False, "axes.spines.right": False,
        "axes.titleweight": "bold", "axes.titlelocation": "left", "legend.frameon": False,
        "svg.hashsalt": "hscache",
    }  # fmt: skip
    with rc_context(style):
        figure = Figure(figsize=(9.5, 5.2 + 0.5 * len(found.splits)), layout="constrained")
        heights = [3.4, 0.6 + 0.45 * max(1, len(found.splits))]
        top, bottom = figure.subplots(2, 1, height_ratios=heights)
        _draw_roofs(top, found)
        _draw_splits(bottom, found.splits)
        target = io.BytesIO()
        figure.savefig(target, format=file_format, dpi=140)
    return target.getvalue()


def _draw_roofs(axis: Any, found: Roofline) -> None:
    tera, low, high = 1e12, 30.0, 30_000.0
    dense, sustained = found.gpu.bf16 / tera, found.sustained / tera
    axis.set(xscale="log", yscale="log", xlim=(low, high), ylim=(dense / 12, dense * 1.35),
             xlabel="FLOP per byte of operands", ylabel="TFLOP/s, bf16")  # fmt: skip
    axis.set_title(found.gpu.name)
    axis.grid(color="#e6e9ee", which="both", linewidth=0.6)
    if found.gpu.bandwidth:
        ridge = found.gpu.bf16 / found.gpu.bandwidth
        axis.plot([low, ridge], [low * found.gpu.bandwidth / tera, dense], color="#5d6878")
        axis.plot([ridge, high], [dense, dense], color="#5d6878")
        axis.annotate(
            f"memory, {found.gpu.bandwidth / tera:.1f} TB/s",
            (low * 1.1, low * 1.1 * found.gpu.bandwidth / tera), rotation=38, fontsize=8,
            textcoords="offset points", xytext=(16, -4), color="#5d6878",
        )  # fmt: skip
    axis.annotate(f"dense peak {dense:,.0f}", (high, dense), textcoords="offset points",
                  xytext=(-4, 4), ha="right", fontsize=8, color="#5d6878")  # fmt: skip
    power = f" at {found.power_w:,.0f} W" if found.power_w else ""
    clock = f", {found.clock_mhz:,.0f} MHz" if found.clock_mhz else ""
    axis.axhline(sustained, color="#e39b12", linestyle="--", linewidth=1.2)
    axis.annotate(
        f"sustained products {sustained:,.0f}{power}{clock}", (low * 8, sustained),
        textcoords="offset points", xytext=(0, 4), fontsize=8, color="#b37708",
    )  # fmt: skip
    for number, point in enumerate(found.points):
        color = ("#3b6fd4", "#2f9e8f", "#e2574c", "#8a5cd6", "#4a9c3d")[number % 5]
        label = f"{point.name}, {point.flop_per_s / tera:,.0f}"
        if point.intensity is None:  # only its height is known
            axis.axhline(point.flop_per_s / tera, xmin=0.72, color=color, linestyle=":",
                         label=f"{label} (no shapes)")  # fmt: skip
        else:
            axis.plot([point.intensity], [point.flop_per_s / tera], "o", color=color, label=label)
    axis.legend(loc="lower right", fontsize=8)


def _draw_splits(axis: Any, splits: Sequence[Split]) -> None:
    axis.set(xlim=(0, 100), xlabel="% of the time")
    axis.set_yticks(range(len(splits)), [split.name for split in splits])
    axis.invert_yaxis()
    axis.spines["left"].set_visible(False)
    axis.tick_params(axis="y", length=0)
    for row, split in enumerate(splits):
        left = 0.0
        for cause, color in zip(_CAUSES, _COLORS, strict=True):
            share = 100 * split.parts.get(cause, 0.0) / split.seconds
            first = all(cause not in before.parts for before in splits[:row])
            shown = cause in split.parts and first
            axis.barh(row, share, left=left, color=color, height=0.62,
                      label=cause if shown else None)  # fmt: skip
            if share > 4:
                axis.text(left + share / 2, row, f"{share:.0f}", ha="center", va="center",
                          color="white", fontsize=8)  # fmt: skip
            left += share
    axis.legend(loc="upper center", bbox_to_anchor=(0.45, -0.42), ncols=2, fontsize=8)
