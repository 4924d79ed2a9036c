"""Learning rate, optimizer and gradient scaling of the drafter.

Takes a step number or parameters; hands back a rate, torch's optimizers or the gradient norm. The
schedule is a pure function of the step, so a resumed run needs no scheduler state.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn

from trainer.config import OptimConfig
from trainer.lowering_adamw import LoweringAdamW


def learning_rate(
    step: float,
    *,
    total_steps: int,
    peak: float,
    warmup_fraction: float,
    final_fraction: float,
    schedule: Literal["cosine", "wsd"] = "cosine",
    decay_fraction: float = 0.2,
) -> float:
    """Return the rate of 0-based `step`: linear warm-up, then half a cosine, or stay and fall.

    The warm-up takes ceil(warmup_fraction * total_steps) steps; its first has peak / that many,
    never 0, and its last the peak. `wsd` (warm-up, stable, decay: MiniCPM, arXiv 2404.06395) then
    stays there, and falls linearly over the last ceil(decay_fraction * total_steps) steps. With
    either, the run's last step, and any later one, has the final rate, final_fraction * peak.
    """
    warmup_steps = math.ceil(warmup_fraction * total_steps)
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if schedule == "wsd":
        decay_steps = max(1, math.ceil(decay_fraction * total_steps))
        fallen = min(1.0, max(0.0, (step + 1 - (total_steps - decay_steps)) / decay_steps))
        return peak * (1 - (1 - final_fraction) * fallen)
    progress = min(1.0, (step + 1 - warmup_steps) / max(1, total_steps - warmup_steps))
    return peak * (final_fraction + (1 - final_fraction) * 0.5 * (1 + math.cos(math.pi * progress)))


def make_optimizers(
    params: Iterable[nn.Parameter],
    config: OptimConfig,
    lowered: Mapping[nn.Parameter, torch.Tensor] | None = None,
) -> list[torch.optim.Optimizer]:
    """Make the optimizers over fp32 masters; weight decay on matrices only, not on norms.

    On a GPU, AdamW steps the matrices that have `lowered` weights together with these.

    `adamw`: one fused AdamW. `muon`: torch's Muon for the matrices (Jordan et al. 2024), its step
    scaled to AdamW's root mean square (Moonlight, arXiv 2502.16982) so that one learning rate
    serves both, and AdamW for the norms.
    """
    params = list(params)
    matrices = [p for p in params if p.ndim >= 2]
    vectors = [p for p in params if p.ndim < 2]
    decay, none = config.weight_decay, 0.0

    def adamw(groups: list[dict[str, Any]]) -> torch.optim.AdamW:
        return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)

    without_decay = {"params": vectors, "weight_decay": none}
    if config.name == "adamw":
        if lowered and all(matrix.is_cuda and matrix in lowered for matrix in matrices):
            own = LoweringAdamW(
                matrices, lowered, lr=config.lr, betas=config.betas, weight_decay=decay
            )
            return [own, adamw([without_decay])] if vectors else [own]
        groups = [{"params": matrices, "weight_decay": decay}, without_decay]
        return [adamw([group for group in groups if group["params"]])]
    muon = torch.optim.Muon(
        matrices, lr=config.lr, weight_decay=decay, adjust_lr_fn="match_rms_adamw"
    )
    return [muon, adamw([without_decay])] if vectors else [muon]


@torch.no_grad()
def step_optimizers(
    optimizers: Sequence[torch.optim.Optimizer], *, scale: float, max_norm: float, rate: float
) -> torch.Tensor:
    """Step with gradients times `scale`, and further down to a joint L2 norm of `max_norm`.

    Returns the norm after `scale` and before clipping; it stays on the device (no synchronisation).
    A NaN or infinite norm makes the weights NaN: the caller must look at it before it keeps them.
    """
    owned = [[p for group in o.param_groups for p in group["params"]] for o in optimizers]
    gradients = [p.grad for params in owned for p in params if p.grad is not None]
    norm = nn.utils.get_total_norm(gradients) * scale
    factor = scale * (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for optimizer, params in zip(optimizers, owned, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = rate
        if isinstance(optimizer, LoweringAdamW):
            optimizer.factor = factor
        elif stepped := [p.grad for p in params if p.grad is not None]:
            torch._foreach_mul_(stepped, factor)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return norm
