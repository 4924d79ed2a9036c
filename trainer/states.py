"""States of a row as a shard stores them, on their way to the device that merges them.

Takes stored arrays of documents, decoded into host memory; hands on features [S, F] in bf16.
`hscache.planes` says what the arrays mean; this is its `decode` on torch tensors.

Axes: S row tokens, L captured layers, H hidden, F = L * H.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from hscache.layout import LAST_HIDDEN
from hscache.planes import ARRAYS, Codec
from hscache.reader import Shard

_TORCH_DTYPES = {"uint8": torch.uint8, "uint16": torch.int16, "float32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class StatePlanes:
    """Stored arrays of a row, [S, L, H] or [S, L], in host memory; pinned for a GPU."""

    codec: Codec
    tensors: dict[str, torch.Tensor]
    arrays: dict[str, np.ndarray]
    """the same memory, in the dtypes that shards are read in"""

    @classmethod
    def empty(
        cls, shard: Shard, num_tokens: int, device: torch.device, *, last_hidden: bool = False
    ) -> StatePlanes:
        """Allocate a row of a shard's codec; torch hands pinned memory out again when copied.

        `last_hidden` adds the arrays of the last block's output, which the cache must have.
        """
        shapes = {
            name: shape
            for name, shape in shard.array_shapes().items()
            if last_hidden or not name.startswith(LAST_HIDDEN)
        }
        tensors = {
            name: torch.empty(
                (num_tokens, *row_shape),
                dtype=_TORCH_DTYPES[dtype.name],
                pin_memory=device.type == "cuda",
            )
            for name, (dtype, row_shape) in shapes.items()
        }
        arrays = {name: t.numpy().view(shapes[name][0]) for name, t in tensors.items()}
        return cls(codec=shard.manifest.codec, tensors=tensors, arrays=arrays)

    def rows(self, start: int, stop: int) -> dict[str, np.ndarray]:
        """Return views of tokens [start, stop)."""
        return {name: array[start:stop] for name, array in self.arrays.items()}

    def clear_from(self, num_tokens: int) -> None:
        """Set the places after the last token to 0: no gradient of theirs may be NaN times 0."""
        for array in self.arrays.values():
            array[num_tokens:] = 0


def merge_planes(planes: StatePlanes, device: torch.device) -> torch.Tensor:
    """Copy the planes to a device and return the states there, bfloat16 [S, L * H]."""
    return _merge(planes, "", device).flatten(1)


def merge_last_hidden(planes: StatePlanes, device: torch.device) -> torch.Tensor:
    """Copy the planes of the last block's output to a device and return it, bfloat16 [S, H]."""
    return _merge(planes, LAST_HIDDEN, device)


def _merge(planes: StatePlanes, prefix: str, device: torch.device) -> torch.Tensor:
    on_device = {
        name: planes.tensors[prefix + name].to(device, non_blocking=True)
        for name in ARRAYS[planes.codec]
    }
    if planes.codec == "none":
        values = on_device["bits"].view(torch.bfloat16)
    elif planes.codec == "fp8":
        values = on_device["fp8"].view(torch.float8_e4m3fn).float()
        values = (values * on_device["scale"][..., None]).bfloat16()
    else:
        significand = on_device["significand"]
        bits = on_device["exponent"].to(torch.int16).bitwise_left_shift_(7)
        bits |= significand & 0x7F
        bits |= (significand & 0x80).to(torch.int16).bitwise_left_shift_(8)
        values = bits.view(torch.bfloat16)
    return values
