"""One forward pass over several documents: where each begins, on the host and on the device.

Takes boundaries, hands on what kernels of variable length want, made once a pack without waiting
for the device.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hscache.forward_flops import SCAN_CHUNK


@dataclass(frozen=True)
class Pack:
    """Boundaries of the documents of a pack."""

    offsets: tuple[int, ...]
    cumulative: torch.Tensor
    """the same as int32 on the device, as varlen kernels want it"""
    positions_T: torch.Tensor
    """int32, of each token in its document"""
    chunks: torch.Tensor
    """int32 [chunks, 2]: document, and chunk in it, of each chunk of a scan"""

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return max(b - a for a, b in itertools.pairwise(self.offsets))


def make_pack(offsets: Sequence[int], device: torch.device) -> Pack:
    """Return the pack of documents between `offsets`, which go from 0 to T; none may be empty."""
    bounds = np.asarray(offsets, np.int32)
    lengths = np.diff(bounds)
    positions_T = _counting(lengths)
    chunks = -(-lengths // SCAN_CHUNK)
    of = np.repeat(np.arange(len(lengths), dtype=np.int32), chunks)

    return Pack(
        offsets=tuple(int(offset) for offset in bounds),
        cumulative=to_device(bounds, device),
        positions_T=to_device(positions_T, device),
        chunks=to_device(np.stack([of, _counting(chunks)], axis=1), device),
    )


def to_device(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy to a device without waiting for the work it already has.

    A copy from pageable memory would wait, and end the running ahead of the host.
    """
    host = torch.from_numpy(np.ascontiguousarray(values))
    if device.type != "cuda":
        return host
    return host.pin_memory().to(device, non_blocking=True)


def _counting(lengths: np.ndarray) -> np.ndarray:
    """Return 0, 1, ..., length - 1 for each length, one after the other."""
    starts = np.cumsum(lengths) - lengths
    return (np.arange(lengths.sum()) - np.repeat(starts, lengths)).astype(np.int32)
