"""Refuse a GPU that lacks the memory which a run is predicted to take (hscache.fit_memory)."""

from __future__ import annotations

import torch

from hscache.errors import ConfigError
from hscache.fit_memory import RunMemory, describe_memory
from hscache.report import format_bytes
from trainer.attention import Backend


def require_memory(memory: RunMemory, *, free_bytes: int, total_bytes: int, device: str) -> None:
    """Raise ConfigError with the arithmetic when a GPU has not that much free."""
    if memory.peak <= free_bytes:
        return
    lines = "\n".join(f"  {name}: {text}" for name, text in describe_memory(memory))
    others = total_bytes - free_bytes
    raise ConfigError(
        f"{device} has {format_bytes(free_bytes)} free of {format_bytes(total_bytes)} "
        f"({format_bytes(others)} are taken), and this run needs about "
        f"{format_bytes(memory.peak)}:\n{lines}\n"
        "Activations follow anchors_per_row, logits loss.chunk_size (down to a few hundred slots "
        "it costs little speed), states global_batch_rows x row_tokens, moments optim.name (muon "
        "has half of adamw's); the rest is the drafter's size. Or free the GPU."
    )


def require_gpu_memory(memory: RunMemory, device: torch.device, backend: Backend) -> None:
    """Check a GPU before anything is on it; without a compiler the sum is too rough to refuse."""
    if device.type == "cuda" and backend == "flex":
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        name = torch.cuda.get_device_name(device)
        require_memory(memory, free_bytes=free_bytes, total_bytes=total_bytes, device=name)
