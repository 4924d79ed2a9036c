"""Stored arrays of a row's states, decoded into host memory, before a device merges them.

Takes a cache's array shapes and a number of tokens; hands on numpy arrays [tokens, ...] by name.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hscache import layout
from hscache.reader import Cache

Shapes = dict[str, tuple[np.dtype[Any], tuple[int, ...]]]
"""Dtype and shape of one token's row in each stored array."""

_ALIGNMENT = 4096
"""Bytes: arrays in one piece of memory begin at a page."""


def stored_shapes(cache: Cache, *, last_hidden: bool = False) -> Shapes:
    """Return what a cache stores of a token's states, also of the last block's if asked for."""
    states = cache.identity.states
    arrays = layout.state_layouts(
        cache.identity.encoding.codec,
        len(states.target_layer_ids),
        states.hidden_size,
        last_hidden=last_hidden,
    )
    return {name: (np.dtype(a.dtype), a.row_shape) for name, a in arrays.items()}


def row_arrays(shapes: Shapes, num_tokens: int) -> dict[str, np.ndarray]:
    """Allocate the arrays of a row, [num_tokens, ...] by name."""
    return {
        name: np.empty((num_tokens, *row_shape), dtype)
        for name, (dtype, row_shape) in shapes.items()
    }


def row_bytes(shapes: Shapes, num_tokens: int) -> int:
    """Return the bytes that `arrays_in` lays the arrays of a row out in."""
    return sum(
        _aligned(num_tokens * math.prod(row_shape) * dtype.itemsize)
        for dtype, row_shape in shapes.values()
    )


def arrays_in(memory: memoryview, shapes: Shapes, num_tokens: int) -> dict[str, np.ndarray]:
    """Return the arrays of a row, [num_tokens, ...] by name, as views of `memory` (`row_bytes`)."""
    arrays, start = {}, 0
    for name, (dtype, row_shape) in shapes.items():
        count = num_tokens * math.prod(row_shape)
        array = np.frombuffer(memory, dtype, count, start)
        arrays[name] = array.reshape(num_tokens, *row_shape)
        start += _aligned(count * dtype.itemsize)
    return arrays


def rows_of(arrays: dict[str, np.ndarray], start: int, stop: int) -> dict[str, np.ndarray]:
    """Return views of tokens [start, stop)."""
    return {name: array[start:stop] for name, array in arrays.items()}


def clear_from(arrays: dict[str, np.ndarray], num_tokens: int) -> None:
    """Set the places after the last token to 0: no gradient of theirs may be NaN times 0."""
    for array in arrays.values():
        array[num_tokens:] = 0


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT
