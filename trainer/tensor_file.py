"""Write a safetensors file tensor by tensor, and checksum files piece by piece.

The safetensors package turns all tensors into bytes before it writes the first: a second copy of a
checkpoint in memory. The format itself is a length, a JSON header and the tensors end to end
(https://github.com/huggingface/safetensors); the package reads what is written here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import crc32c
import torch

from hscache.files import disk_full_named

_CHUNK_BYTES = 2**24
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.uint8: "U8",
}


def write_tensors(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    *,
    dtype: torch.dtype | None = None,
    metadata: Mapping[str, str] | None = None,
) -> str:
    """Write CPU tensors durably and return the file's crc32c, 8 hex digits.

    `dtype` converts each as it is written. Raises DiskFullError.
    """
    # wide types first, so that every tensor starts at a multiple of its item size
    names = sorted(tensors, key=lambda name: (-(dtype or tensors[name].dtype).itemsize, name))
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    start = 0
    for name in names:
        tensor, stored = tensors[name], dtype or tensors[name].dtype
        stop = start + tensor.numel() * stored.itemsize
        header[name] = {
            "dtype": _NAMES[stored],
            "shape": list(tensor.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    checksum = 0
    with disk_full_named(path), path.open("wb") as file:
        for data in (len(text).to_bytes(8, "little"), text):
            file.write(data)
            checksum = crc32c.crc32c(data, checksum)
        for name in names:
            tensor = tensors[name].detach().to(dtype or tensors[name].dtype).contiguous()
            view = tensor.reshape(-1).view(torch.uint8).numpy().data
            for offset in range(0, len(view), _CHUNK_BYTES):
                chunk = view[offset : offset + _CHUNK_BYTES]
                file.write(chunk)
                checksum = crc32c.crc32c(chunk, checksum)
        file.flush()
        os.fsync(file.fileno())
    return f"{checksum:08x}"


def file_checksum(path: Path) -> str:
    """Return the crc32c of a file, 8 hex digits, reading a piece at a time."""
    checksum = 0
    with path.open("rb") as file:
        while data := file.read(_CHUNK_BYTES):
            checksum = crc32c.crc32c(data, checksum)
    return f"{checksum:08x}"
