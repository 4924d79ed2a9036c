"""Numbers and tables as people read them: sizes, durations, counts and aligned plain-text tables.

Takes plain values, hands on text; used by progress lines, `hscache inspect` and the table at the
end of every command. Sizes are decimal (1 GB = 10^9 bytes), as disks and links are sold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def format_bytes(size_bytes: float) -> str:
    """Return a size with three significant digits: `999 B`, `1.87 GB`, `65.3 TB`."""
    size = float(size_bytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(size) < 999.5:
            return f"{_three_digits(size) if unit != 'B' else f'{size:.0f}'} {unit}"
        size /= 1000
    return f"{_three_digits(size)} PB"


def format_seconds(duration_s: float) -> str:
    """Return a duration in its largest units: `3.1 ms`, `0.42 s`, `3 min 04 s`, `2 d 03 h`."""
    if duration_s < 0.0995:
        return f"{1000 * duration_s:.2g} ms"
    if duration_s < 9.95:
        return f"{duration_s:.2g} s"
    seconds = round(duration_s)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    if seconds < 86400:
        return f"{seconds // 3600} h {seconds % 3600 // 60:02d} min"
    return f"{seconds // 86400} d {seconds % 86400 // 3600:02d} h"


def format_number(value: Any) -> str:
    """Return a number with three significant digits, integers in full (`1,866,000`); else `str`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or abs(value) >= 999.5:
        return f"{value:,.0f}" if value == value and abs(value) != float("inf") else str(value)
    return _three_digits(value) if value == 0 or abs(value) >= 1e-3 else f"{value:.3g}"


def format_table(headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return an aligned plain-text table; columns of numbers are aligned to the right.

    Numbers go through `format_number`; pass text to choose your own format. `None` is left blank.
    """
    cells = [["" if value is None else format_number(value) for value in row] for row in rows]
    lines = [list(headers), *cells]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]
    right = [
        bool(rows) and all(row[column] is None or _looks_numeric(row[column]) for row in rows)
        for column in range(len(headers))
    ]

    def draw(line: Sequence[str]) -> str:
        padded = (
            text.rjust(width) if numeric else text.ljust(width)
            for text, width, numeric in zip(line, widths, right, strict=True)
        )
        return "  ".join(padded).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([draw(headers), rule, *(draw(line) for line in cells)])


def _three_digits(value: float) -> str:
    size = abs(value)
    decimals = 2 if size < 9.995 else 1 if size < 99.95 else 0
    return f"{value:.{decimals}f}"


def _looks_numeric(value: Any) -> bool:
    """Say whether a cell belongs to the right: a number, or text like `3.2 GB` or `45 %`."""
    if isinstance(value, bool):
        return False
    return isinstance(value, int | float) or (isinstance(value, str) and value[:1].isdigit())
