"""States of a row as a shard stores them, merged by the device that trains on them.

Takes stored arrays of documents, decoded into host memory; hands on features [S, F] in bf16.
`hscache.planes` says what the arrays mean; this is its `decode` on torch tensors.

Axes: S row tokens, L captured layers, H hidden, F = L * H.
"""

from __future__ import annotations

import numpy as np
import torch

from hscache.layout import LAST_HIDDEN
from hscache.planes import ARRAYS, Codec


def merge_planes(arrays: dict[str, np.ndarray], codec: Codec, device: torch.device) -> torch.Tensor:
    """Copy the arrays to a device and return the states there, bfloat16 [S, L * H].

    A copy from pinned memory does not wait; on a CPU the result may share the arrays' memory.
    """
    return _merge(arrays, "", codec, device).flatten(1)


def merge_last_hidden(
    arrays: dict[str, np.ndarray], codec: Codec, device: torch.device
) -> torch.Tensor:
    """Copy the arrays of the last block's output and return it, bfloat16 [S, H]."""
    return _merge(arrays, LAST_HIDDEN, codec, device)


def _merge(
    arrays: dict[str, np.ndarray], prefix: str, codec: Codec, device: torch.device
) -> torch.Tensor:
    on_device = {
        name: _tensor(arrays[prefix + name]).to(device, non_blocking=True) for name in ARRAYS[codec]
    }
    if codec == "none":
        values = on_device["bits"].view(torch.bfloat16)
    elif codec == "fp8":
        values = on_device["fp8"].view(torch.float8_e4m3fn).float()
        values = (values * on_device["scale"][..., None]).bfloat16()
    else:
        significand = on_device["significand"]
        bits = on_device["exponent"].to(torch.int16).bitwise_left_shift_(7)
        bits |= significand & 0x7F
        bits |= (significand & 0x80).to(torch.int16).bitwise_left_shift_(8)
        values = bits.view(torch.bfloat16)
    return values


def _tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.view(np.int16) if array.dtype == np.uint16 else array)
