"""Pieces of the page of `hscache inspect --html`: cards, figures, tables; all text is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np

from hscache.report import format_number

_POINTS = 400
"""Points of a line over shards or tokens: more are means of neighbours."""


def card(title: str, body: str) -> str:
    """Return a titled section."""
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def pair(left: str, right: str) -> str:
    """Put two parts side by side."""
    return f'<div class="pair">{left}{right}</div>'


def figure(caption: str, body: str) -> str:
    """Return a picture with a line above it."""
    return f"<figure><figcaption>{escape(caption)}</figcaption>{body}</figure>"


def details(title: str, body: str) -> str:
    """Return a section that opens on a click."""
    return f"<details><summary>{escape(title)}</summary>{body}</details>"


def table(headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a table; numbers go through `format_number`."""

    def cell(value: Any) -> str:
        right = ' class="n"' if isinstance(value, int | float) else ""
        text = "" if value is None else format_number(value)
        return f"<td{right}>{escape(text)}</td>"

    head = "".join(f"<th>{escape(header)}</th>" for header in headers)
    body = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in rows)
    scroll = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll">{scroll}</div>'


def thinned(values: Sequence[float | None]) -> tuple[list[float | None], float]:
    """Return at most `_POINTS` means of neighbours, and how many values one stands for."""
    size = max(1, -(-len(values) // _POINTS))
    means: list[float | None] = []
    for first in range(0, len(values), size):
        known = [v for v in values[first : first + size] if v is not None]
        means.append(float(np.mean(known)) if known else None)
    return means, size
