"""Measure a pack's states and split them into planes, on the device that made them.

Takes bfloat16 states; hands on, per document, what `hscache.content` and a shard's statistics would
find on the host, and the planes of `hscache.planes` in a buffer on the host. In plain PyTorch, a
few thousand tokens at a time, so that it needs little memory beside a forward; and never document
by document, for each would take tens of kernels.

Axes: T tokens, L captured layers, H hidden, N documents of a pack.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hscache.content import Facts
from hscache.pack import to_device
from hscache.planes import ARRAYS, LOSSY, Codec
from hscache.planes_torch import TORCH_DTYPES, encode_states, squared_errors
from hscache.sums import StateSums

_ROWS = 4_096
"""Tokens measured and split at a time."""
_NOT_FINITE, _ZERO, _FLAT, _AS_FIRST = 1, 2, 4, 8


@dataclass(frozen=True, kw_only=True)
class Measures:
    """What is found out about a pack on its device."""

    flags_TL: torch.Tensor
    norms_TL: torch.Tensor
    squares_NLH: torch.Tensor
    max_NL: torch.Tensor
    errors_NLH: torch.Tensor | None
    """what a lossy codec changes, squared"""

    def to_host(self) -> Measures:
        """Return copies in page-locked memory, on their way on the current stream."""
        found = {name: _to_host(value) for name, value in vars(self).items() if value is not None}
        return dataclasses.replace(self, **found)


def measure(states_TLH: torch.Tensor, offsets: Sequence[int], codec: Codec) -> Measures:
    """Measure a pack's states, bfloat16, for the checks and statistics of each document."""
    num_tokens, layers, hidden = states_TLH.shape
    num_documents, device = len(offsets) - 1, states_TLH.device
    flags_TL = torch.empty((num_tokens, layers), dtype=torch.uint8, device=device)
    norms_TL = torch.empty((num_tokens, layers), dtype=torch.float32, device=device)
    squares_NLH = torch.zeros((num_documents, layers, hidden), device=device)
    max_NL = torch.zeros((num_documents, layers), device=device)
    errors_NLH = torch.zeros_like(squares_NLH) if codec in LOSSY else None
    firsts_T = to_device(np.repeat(offsets[:-1], np.diff(offsets)), device)
    for rows, documents, lengths in _pieces(offsets, device):
        states = states_TLH[rows]
        bits = states.view(torch.int16)
        if errors_NLH is not None:
            squares = squared_errors(states, encode_states(states, codec), codec)
            errors_NLH[documents] += _by_document(squares, "sum", lengths)
        values = states.float()
        largest = values.abs().amax(dim=2)
        flags = (~torch.isfinite(largest)).to(torch.uint8) * _NOT_FINITE
        flags += (largest == 0).to(torch.uint8) * _ZERO
        flags += (bits == bits[:, :, :1]).all(dim=2).to(torch.uint8) * _FLAT
        firsts = states_TLH[firsts_T[rows]].view(torch.int16)
        flags += (bits == firsts).all(dim=2).to(torch.uint8) * _AS_FIRST
        squares = values.square_()
        flags_TL[rows] = flags
        norms_TL[rows] = squares.sum(dim=2).sqrt_()
        squares_NLH[documents] += _by_document(squares, "sum", lengths)
        found = _by_document(largest, "max", lengths)
        max_NL[documents] = torch.maximum(max_NL[documents], found)
    return Measures(
        flags_TL=flags_TL,
        norms_TL=norms_TL,
        squares_NLH=squares_NLH,
        max_NL=max_NL,
        errors_NLH=errors_NLH,
    )


def _pieces(
    offsets: Sequence[int], device: torch.device
) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """Cut a pack into runs of `_ROWS` tokens: the rows, their documents, and rows of each."""
    bounds = np.asarray(offsets)
    slices, lengths = [], []
    for start in range(0, int(bounds[-1]), _ROWS):
        stop = min(start + _ROWS, int(bounds[-1]))
        first, after = np.searchsorted(bounds, start, "right") - 1, np.searchsorted(bounds, stop)
        slices.append((slice(start, stop), slice(int(first), int(after))))
        lengths.append(np.diff(bounds[first : after + 1].clip(start, stop)))
    on_device = to_device(np.concatenate(lengths), device)  # one copy for all
    parts = on_device.split([len(of) for of in lengths])
    return ((*found, part) for found, part in zip(slices, parts, strict=True))


def _by_document(values: torch.Tensor, how: str, lengths: torch.Tensor) -> torch.Tensor:
    # `unsafe` leaves out a check of the lengths, for which the host would wait
    return torch.segment_reduce(values, how, lengths=lengths, axis=0, unsafe=True)


def document_facts(measures: Measures, begin: int, end: int) -> Facts:
    """Return what `hscache.content.facts` would find in one document of a measured pack."""
    flags_TL = measures.flags_TL[begin:end].numpy()
    return Facts(
        finite=not (flags_TL & _NOT_FINITE).any(),
        zero_row=bool((flags_TL & _ZERO).any()),
        flat_row=bool((flags_TL & _FLAT).any()),
        repeated=end - begin > 1 and bool((flags_TL & _AS_FIRST).all(axis=0).any()),
        norms_TL=measures.norms_TL[begin:end].numpy(),
    )


def document_sums(measures: Measures, index: int, begin: int, end: int) -> StateSums:
    """Return what `hscache.writer.state_sums` would, from float32 sums."""
    errors_NLH = measures.errors_NLH
    return StateSums(
        num_tokens=end - begin,
        squares_LH=measures.squares_NLH[index].double().numpy(),
        norms_L=measures.norms_TL[begin:end].double().sum(dim=0).numpy(),
        max_L=measures.max_NL[index].double().numpy(),
        errors_LH=None if errors_NLH is None else errors_NLH[index].double().numpy(),
    )


def split_into(states_TLH: torch.Tensor, codec: Codec, buffer: torch.Tensor) -> dict[str, Any]:
    """Copy states into a uint8 buffer as the codec stores them; return its arrays, [T, L, H].

    `none` gives the bits. The buffer has 2 bytes for each value, more than any codec needs.
    """
    shape, arrays, used = states_TLH.shape, {}, 0
    # The widest first, so that each begins where its dtype may.
    for name, stored in sorted(ARRAYS[codec].items(), key=lambda item: -_itemsize(item[1].dtype)):
        size = _itemsize(stored.dtype) * math.prod(shape if stored.per_hidden else shape[:-1])
        dtype = TORCH_DTYPES[stored.dtype]
        flat = buffer[used : used + size].view(dtype)
        arrays[name] = flat.view(shape if stored.per_hidden else shape[:-1])
        used += size
    for start in range(0, len(states_TLH), _ROWS):
        rows = slice(start, start + _ROWS)
        for name, values in encode_states(states_TLH[rows], codec).items():
            arrays[name][rows].copy_(values, non_blocking=True)
    return {name: array.numpy().view(ARRAYS[codec][name].dtype) for name, array in arrays.items()}


def _itemsize(dtype: str) -> int:
    return np.dtype(dtype).itemsize


def _to_host(values: torch.Tensor) -> torch.Tensor:
    if not values.is_cuda:
        return values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)
