"""Small charts as inline SVG: bars, lines and strips, coloured by the page's CSS variables.

Takes numbers, hands on markup. There is no script and nothing is fetched; titles inside of the
marks are what a browser shows under the mouse. Classes `c0` to `c5` are the page's colours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from hscache.report import format_number

WIDTH, HEIGHT = 520, 170
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 10, 26
_LABELS = 8
"""Of bars, at most."""
_STRIP_COLUMNS = 80

Format = Callable[[float], str]


def bars(values: Sequence[float], labels: Sequence[str], *, titles: Sequence[str]) -> str:
    """Draw upright bars from 0, a label below some of them."""
    top = _round_up(max(values, default=0))
    plot_width, plot_height = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM
    step = plot_width / max(1, len(values))
    every = max(1, math.ceil(len(values) / _LABELS))
    parts = [_grid(0, top, format_number_short, log=False)]
    for index, (value, label, title) in enumerate(zip(values, labels, titles, strict=True)):
        height = plot_height * value / top
        x = _LEFT + index * step
        parts.append(
            f'<rect class="c0" x="{x + 0.5:.1f}" y="{_TOP + plot_height - height:.1f}" '
            f'width="{max(step - 1.5, 0.5):.1f}" height="{height:.1f}" rx="1.5">'
            f"<title>{escape(title)}</title></rect>"
        )
        if index % every == 0:
            parts.append(_text(x + step / 2, HEIGHT - 8, label, "middle"))
    return _svg(parts)


def lines(
    series: Sequence[tuple[str, Sequence[float | None]]],
    *,
    x_first: int = 0,
    x_step: float = 1.0,
    log: bool = False,
    form: Format | None = None,
    zero: bool = False,
    bands: Sequence[tuple[float, float]] = (),
    width: int = WIDTH,
    height: int = HEIGHT,
) -> str:
    """Draw one line for each (name, values); None leaves a gap, one lone value is a dot.

    `bands` are shares (from, to) of the width to be shaded.
    """
    form = form or format_number_short
    known = [v for _, values in series for v in values if v is not None and (v > 0 or not log)]
    if not known:
        return _svg([_text(width / 2, height / 2, "nothing yet", "middle")], width, height)
    low, high = (min(known), max(known))
    if zero and not log:
        low, high = 0.0, _round_up(high)
    elif high - low < 1e-9 * max(1.0, abs(high)):
        low, high = (low / 1.5, high * 1.5) if log else (low - 0.5, high + 0.5)
    elif not log:
        low, high = low - 0.05 * (high - low), high + 0.05 * (high - low)
    plot_width, plot_height = width - _LEFT - _RIGHT, height - _TOP - _BOTTOM
    longest = max(len(values) for _, values in series)

    def y_of(value: float) -> float:
        a, b, v = (math.log(x) if log else x for x in (low, high, value))
        return _TOP + plot_height * (1 - (v - a) / (b - a))

    parts = [
        f'<rect class="band" x="{_LEFT + start * plot_width:.1f}" y="{_TOP}" '
        f'width="{(stop - start) * plot_width:.1f}" height="{plot_height}"/>'
        for start, stop in bands
    ]
    parts.append(_grid(low, high, form, log=log, width=width, height=height))
    dx = plot_width / max(1, longest - 1)
    for number, (name, values) in enumerate(series):
        runs: list[list[str]] = [[]]
        for index, value in enumerate(values):
            if value is None or (log and value <= 0):
                runs.append([])
            else:
                runs[-1].append(f"{_LEFT + index * dx:.1f},{y_of(value):.1f}")
        for run in filter(None, runs):
            title = f"<title>{escape(name)}</title>"
            if len(run) == 1:
                x, y = run[0].split(",")
                dot = f'class="c{number % 6}" cx="{x}" cy="{y}" r="3"'
                parts.append(f"<circle {dot}>{title}</circle>")
            else:
                parts.append(
                    f'<polyline class="line l{number % 6}" points="{" ".join(run)}">{title}'
                    "</polyline>"
                )
    for share in (0.0, 0.5, 1.0) if longest % 2 else (0.0, 1.0):
        x_value = round(x_first + share * (longest - 1) * x_step)
        anchor = ("start", "middle", "end")[int(2 * share)]
        parts.append(_text(_LEFT + share * plot_width, height - 8, f"{x_value:,}", anchor))
    return _svg(parts, width, height)


def rows(items: Sequence[tuple[str, float, str]]) -> str:
    """Draw lying bars, one a line: (label, value, text behind the bar)."""
    top = max((value for _, value, _ in items), default=0) or 1
    height = 24 * len(items) + 6
    left = min(240, 12 + 7 * max((len(label) for label, _, _ in items), default=0))
    parts = []
    for index, (label, value, text) in enumerate(items):
        y = 24 * index + 4
        length = (WIDTH - left - 90) * value / top
        parts += [
            _text(left, y + 12, label, "end"),
            f'<rect class="c0" x="{left + 10}" y="{y}" width="{max(length, 1):.1f}" '
            f'height="16" rx="2"><title>{escape(label)}: {escape(text)}</title></rect>',
            _text(left + 18 + length, y + 12, text, "start"),
        ]
    return _svg(parts, WIDTH, height, f' style="max-width:{WIDTH}px"')


def strip(cells: Sequence[tuple[str, str]]) -> str:
    """Draw a grid of cells, each (class, title), row by row."""
    size, gap = 12, 2
    columns = min(_STRIP_COLUMNS, max(1, len(cells)))
    parts = [
        f'<rect class="{kind}" x="{index % columns * (size + gap)}" '
        f'y="{index // columns * (size + gap)}" width="{size}" height="{size}" rx="2">'
        f"<title>{escape(title)}</title></rect>"
        for index, (kind, title) in enumerate(cells)
    ]
    width, height = columns * (size + gap), -(-len(cells) // columns) * (size + gap)
    return (
        f'<svg class="strip" viewBox="0 0 {width} {height}" style="max-width:{width}px" '
        f'role="img">{"".join(parts)}</svg>'
    )


def format_number_short(value: float) -> str:
    """Return a number as an axis shows it: 0, 0.25, 12, 1.5k, 3M."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}" if abs(value) < 1000 else format_number(value)


def _grid(
    low: float, high: float, form: Format, *, log: bool, width: int = WIDTH, height: int = HEIGHT
) -> str:
    parts = []
    plot_height = height - _TOP - _BOTTOM
    for share in (0.0, 1 / 3, 2 / 3, 1.0):
        value = low * (high / low) ** share if log else low + share * (high - low)
        y = _TOP + plot_height * (1 - share)
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{width - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            + _text(_LEFT - 6, y + 4, form(value), "end")
        )
    return "".join(parts)


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _round_up(top: float) -> float:
    """Return the next number whose thirds are round."""
    if top <= 0:
        return 1.0
    power = 10 ** math.floor(math.log10(top / 3))
    return next(
        3 * step * power
        for step in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10)
        if (3 * step * power >= top * (1 - 1e-9))
    )


def _svg(
    parts: Sequence[str], width: int = WIDTH, height: int = HEIGHT, attributes: str = ""
) -> str:
    inside = "".join(parts)
    return f'<svg viewBox="0 0 {width} {height}" role="img"{attributes}>{inside}</svg>'
