"""`trainer plot`: curves of one or more runs from their metrics.jsonl alone, as one picture.

Takes run folders, also of runs that are still going; leaves a PNG (or SVG, PDF). Needs matplotlib
(`pip install "hscache[plot]"`), which nothing else imports.

    trainer plot runs/a runs/b --output curves.png
"""

from __future__ import annotations

import importlib.util
import io
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hscache import files
from hscache.errors import ConfigError
from hscache.progress import configure_logging
from trainer.config import PlotConfig
from trainer.metrics import is_evaluation, read_metrics

Line = dict[str, Any]
_FORMATS = (".png", ".svg", ".pdf")
_SMOOTHED_POINTS = 60
"""A curve with more points than this also gets a moving mean over one in so many of them."""


@dataclass(frozen=True, kw_only=True)
class RunCurves:
    """What a metrics.jsonl holds, lines of steps and lines about held-out documents apart."""

    label: str
    steps: list[Line]
    looks: list[Line]


def run(config: PlotConfig, *, dry_run: bool = False) -> int:
    """Draw the picture; with `dry_run` only read the runs.

    Raises ConfigError without matplotlib, and for a name or a run that it cannot draw.
    """
    configure_logging()
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "trainer plot draws with matplotlib, which is not installed: "
            'pip install "hscache[plot]" (or matplotlib alone).'
        )
    if config.output.suffix not in _FORMATS:
        raise ConfigError(
            f"--output {config.output}: found `{config.output.suffix}`, expected a file name that "
            f"ends in {', '.join(_FORMATS)}."
        )
    runs = read_runs(config.runs)
    found = ", ".join(f"{r.label}: {len(r.steps)} + {len(r.looks)} lines" for r in runs)
    if dry_run:
        print(f"would draw {found} into {config.output}")
        return 0
    files.make_folder(config.output.parent)
    files.replace_atomically(config.output, draw(runs, config.output.suffix[1:]))
    print(f"{config.output} ({found})")
    return 0


def read_runs(folders: Sequence[Path]) -> list[RunCurves]:
    """Read each run's metrics; raises ConfigError for a folder without any line."""
    common = os.path.commonpath([path.absolute().parent for path in folders])
    runs = []
    for folder in folders:
        lines = read_metrics(folder / "metrics.jsonl")
        if not lines:
            raise ConfigError(
                f"{folder} has no metrics.jsonl with a line in it. Give the run_dir of a "
                "`trainer fit`, once it has logged its first step (log_every)."
            )
        runs.append(
            RunCurves(
                label=os.path.relpath(folder.absolute(), common),
                steps=[line for line in lines if not is_evaluation(line)],
                looks=[line for line in lines if is_evaluation(line)],
            )
        )
    return runs


def series(
    lines: Sequence[Line], x_name: str, y_name: str
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return x and y of the lines that have both; what was not measured (null) is left out."""
    pairs = [
        (line[x_name], line[y_name])
        for line in lines
        if line.get(x_name) is not None and line.get(y_name) is not None
    ]
    xy = np.array(pairs, dtype=np.float64).reshape(-1, 2)
    return xy[:, 0], xy[:, 1]


def moving_mean(y: npt.NDArray[np.float64], width: int) -> npt.NDArray[np.float64]:
    """Return the centred mean over `width` values (odd); fewer at the ends, not padding."""
    kernel = np.ones(width)
    return np.convolve(y, kernel, "same") / np.convolve(np.ones_like(y), kernel, "same")


def draw(runs: Sequence[RunCurves], file_format: str) -> bytes:
    """Return a picture of all runs, overlaid, one colour each."""
    from matplotlib import colormaps, rc_context
    from matplotlib.figure import Figure

    palette = colormaps["tab10"].colors  # type: ignore[attr-defined]
    style: Any = {
        "font.size": 9,
        "axes.titlesize": 10,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": "#e6e6e6",
        "axes.axisbelow": True,
        "legend.frameon": False,
    }
    with rc_context(style):
        figure = Figure(figsize=(15, 7.2), layout="constrained")
        axes = figure.subplots(2, 4).flat
        for axis, panel in zip(axes, _PANELS, strict=True):
            for number, one in enumerate(runs):
                panel(axis, one, palette[number % len(palette)])
            _finish(axis)
        # The first steps of a run are off the scale that the others need.
        losses = [series(one.steps, "train/tokens", "train/loss")[1] for one in runs]
        if tops := [np.quantile(y, 0.97) for y in losses if len(y) > _SMOOTHED_POINTS]:
            figure.axes[0].set_ylim(top=1.08 * max(tops))
        handles = [
            figure.axes[0].plot(
                [], [], color=palette[i % len(palette)], linewidth=3, label=r.label
            )[0]
            for i, r in enumerate(runs)
        ]
        figure.legend(handles=handles, loc="outside upper left", ncols=4, fontsize=10)
        target = io.BytesIO()
        figure.savefig(target, format=file_format, dpi=130)
    return target.getvalue()


def _curve(axis: Any, x: Any, y: Any, color: Any, label: str | None = None) -> None:
    if len(y) <= _SMOOTHED_POINTS:
        axis.plot(x, y, color=color, linewidth=1.6, label=label)
        return
    axis.plot(x, y, color=color, linewidth=0.7, alpha=0.3)
    width = 2 * (len(y) // _SMOOTHED_POINTS // 2) + 3
    axis.plot(x, moving_mean(y, width), color=color, linewidth=1.6, label=label)


def _looks(axis: Any, one: RunCurves, name: str, color: Any, *, dashed: bool = False) -> None:
    x, y = series(one.looks, "eval/tokens", name)
    marker = "o" if len(y) <= _SMOOTHED_POINTS else None
    axis.plot(
        x, y, color=color, linewidth=1.4, linestyle="--" if dashed else "-", marker=marker,
        markersize=3.5, markerfacecolor="white" if dashed else color,
    )  # fmt: skip


def _loss(axis: Any, one: RunCurves, color: Any) -> None:
    axis.set_title("Loss (nats, by slot weight)")
    _curve(axis, *series(one.steps, "train/tokens", "train/loss"), color)
    _looks(axis, one, "eval/loss", color, dashed=True)
    _key(axis, bool(one.looks))


def _accuracy(axis: Any, one: RunCurves, color: Any) -> None:
    axis.set_title("Accuracy of scored slots (%)")
    x, y = series(one.steps, "train/tokens", "train/accuracy")
    _curve(axis, x, 100 * y, color)
    x, y = series(one.looks, "eval/tokens", "eval/accuracy")
    axis.plot(x, 100 * y, color=color, linewidth=1.4, linestyle="--", marker="o", markersize=3.5,
              markerfacecolor="white")  # fmt: skip
    _key(axis, bool(one.looks))


def _acceptance(axis: Any, one: RunCurves, color: Any) -> None:
    axis.set_title("Acceptance length, held out (tokens)")
    _looks(axis, one, "eval/sequential", color)
    _looks(axis, one, "eval/dense", color, dashed=True)
    x, y = series(one.looks, "eval/tokens", "eval/sequential")
    if len(y):
        best = int(y.argmax())
        axis.annotate(
            f"{y[best]:.2f}", (x[best], y[best]), textcoords="offset points", xytext=(0, 6),
            ha="center", color=color, fontweight="bold",
        )  # fmt: skip
        axis.margins(y=0.15)
    axis.set_ylim(bottom=1, auto=True)
    _key(axis, bool(one.looks), "sequential", "dense")


def _by_slot(axis: Any, one: RunCurves, color: Any) -> None:
    axis.set_title("Accuracy by slot, last look (%)")
    if not one.looks:
        return
    last = one.looks[-1]
    values = {
        int(name.rpartition("_")[2]): value
        for name, value in last.items()
        if name.startswith("eval/accuracy_slot_") and value is not None
    }
    axis.plot(
        list(values), [100 * v for v in values.values()], color=color, marker="o", markersize=4
    )
    axis.set_xticks(range(1, max(values, default=1) + 1, max(1, len(values) // 8)))
    axis.set_ylim(bottom=0, auto=True)
    axis.set_xlabel("slot (1 follows the anchor)")


def _rate(axis: Any, one: RunCurves, color: Any) -> None:
    axis.set_title("Learning rate")
    axis.plot(*series(one.steps, "train/tokens", "train/lr"), color=color, linewidth=1.6)
    axis.ticklabel_format(axis="y", style="sci", scilimits=(-3, 4))


def _norm(axis: Any, one: RunCurves, color: Any) -> None:
    axis.set_title("Gradient norm before clipping, largest")
    _curve(axis, *series(one.steps, "train/tokens", "train/grad_norm_max"), color)
    axis.set_yscale("log")


# `auto=True`: the other limit still follows the runs that are drawn next.
def _speed(axis: Any, one: RunCurves, color: Any) -> None:
    axis.set_title("Speed (context tokens/s)")
    _curve(axis, *series(one.steps, "train/tokens", "perf/tokens_per_s"), color)
    axis.set_ylim(bottom=0, auto=True)
    axis.yaxis.set_major_formatter(lambda value, _: short_count(value))


def _wait(axis: Any, one: RunCurves, color: Any) -> None:
    axis.set_title("Waiting for data (% of the time)")
    x, y = series(one.steps, "train/tokens", "perf/data_wait")
    _curve(axis, x, 100 * y, color)
    axis.set_ylim(0, max(1.0, axis.get_ylim()[1]), auto=True)


_PANELS: tuple[Callable[[Any, RunCurves, Any], None], ...] = (
    _loss, _accuracy, _acceptance, _by_slot, _rate, _norm, _speed, _wait,
)  # fmt: skip


def _key(axis: Any, wanted: bool, solid: str = "training", dashed: str = "held out") -> None:
    """Say once what the two kinds of lines are."""
    if wanted and axis.get_legend() is None:
        grey = "#555555"
        lines = [
            axis.plot([], [], color=grey, label=solid)[0],
            axis.plot([], [], color=grey, linestyle="--", label=dashed)[0],
        ]
        axis.legend(handles=lines, loc="best", fontsize=8)


def _finish(axis: Any) -> None:
    if not any(len(line.get_xdata()) for line in axis.lines):
        axis.text(
            0.5, 0.5, "nothing logged", transform=axis.transAxes, ha="center", color="#999999"
        )
        axis.set_xticks([])
        axis.set_yticks([])
        axis.grid(visible=False)
        return
    if not axis.get_xlabel():
        axis.set_xlabel("context tokens")
        axis.xaxis.set_major_formatter(lambda value, _: short_count(value))


def short_count(value: float) -> str:
    """Return a count as axes show it: 0, 500, 20k, 1.5M, 1.87B."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"
