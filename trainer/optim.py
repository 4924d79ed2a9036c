"""Learning rate, optimizer and gradient clipping of the drafter.

Takes a step number or parameters; hands back a rate, a torch AdamW or the gradient norm. The
schedule is a pure function of the step, so a resumed run needs no scheduler state.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn


def learning_rate(
    step: float, *, total_steps: int, peak: float, warmup_fraction: float, final_fraction: float
) -> float:
    """Return the rate of 0-based `step`: linear warm-up, then half a cosine.

    The warm-up takes ceil(warmup_fraction * total_steps) steps; its first has peak / that many,
    never 0, and its last the peak. The run's last step, and any later one, has the final rate,
    final_fraction * peak.
    """
    warmup_steps = math.ceil(warmup_fraction * total_steps)
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = min(1.0, (step + 1 - warmup_steps) / max(1, total_steps - warmup_steps))
    return peak * (final_fraction + (1 - final_fraction) * 0.5 * (1 + math.cos(math.pi * progress)))


def make_optimizer(
    params: Iterable[nn.Parameter],
    *,
    learning_rate: float,
    betas: tuple[float, float],
    weight_decay: float,
    eps: float = 1e-8,
) -> torch.optim.AdamW:
    """Make a fused AdamW over fp32 masters; weight decay on matrices only, not on norms."""
    params = list(params)
    matrices = [p for p in params if p.ndim >= 2]
    vectors = [p for p in params if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}]
    if vectors:
        groups.append({"params": vectors, "weight_decay": 0.0})
    fused = all(p.device.type in ("cpu", "cuda") for p in params)
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, eps=eps, fused=fused)


def clip_gradients(params: Iterable[nn.Parameter], max_norm: float) -> torch.Tensor:
    """Scale gradients to a joint L2 norm of at most `max_norm`; return the norm before.

    The norm stays on the device (no synchronisation). A NaN or infinite norm makes the gradients
    NaN: the caller must look at it before the optimizer steps.
    """
    return nn.utils.clip_grad_norm_(list(params), max_norm)
