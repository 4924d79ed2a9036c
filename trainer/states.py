"""States of a row as a shard stores them, merged by the device that trains on them.

Takes stored arrays of documents, decoded into host memory; hands on features [S, F] in bf16.
`hscache.planes` says what the arrays mean.

Axes: S row tokens, L captured layers, H hidden, F = L * H.
"""

from __future__ import annotations

import numpy as np
import torch

from hscache.layout import LAST_HIDDEN
from hscache.planes import ARRAYS, Codec
from hscache.planes_torch import decode_states


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
    return decode_states(on_device, codec)


def _tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.view(np.int16) if array.dtype == np.uint16 else array)
