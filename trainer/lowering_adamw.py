"""AdamW for fp32 masters of bf16 weights on a GPU: scale, step and round in one pass over memory.

Takes masters with gradients and the bf16 weights they stand for; changes both. torch's fused AdamW
reads and writes everything once, and so does the product that clips before it and the rounding
that follows; memory traffic is all that an optimizer costs, so here the three are one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn


class LoweringAdamW(torch.optim.AdamW):
    """torch's AdamW (its state too), with the gradients' factor and the rounding taken in."""

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lowered: Mapping[nn.Parameter, torch.Tensor],
        *,
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
        compiled: bool = True,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, weight_decay=weight_decay, fused=True)
        self.factor: torch.Tensor | None = None
        """what gradients are multiplied by, fp32 [] on their device; set before each step"""
        self._lowered = lowered
        self._update = _compiled_update if compiled else adamw_update

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step every master that has a gradient, and give its bf16 weight the new value."""
        assert closure is None
        assert self.factor is not None, "set before each step"
        for group in self.param_groups:
            masters = [master for master in group["params"] if master.grad is not None]
            for master in masters:
                if not self.state[master]:
                    self.state[master] = {
                        "step": torch.zeros((), device=master.device),
                        "exp_avg": torch.zeros_like(master),
                        "exp_avg_sq": torch.zeros_like(master),
                    }
            if not masters:
                continue
            states = [self.state[master] for master in masters]
            torch._foreach_add_([state["step"] for state in states], 1)
            steps_N = torch.stack([state["step"] for state in states])
            beta1, beta2 = group["betas"]
            # Numbers that change go in as tensors: a compiler would bake in plain ones.
            factors_N4 = torch.stack(
                [
                    self.factor.expand_as(steps_N),
                    torch.full_like(steps_N, group["lr"]),
                    1 - beta1**steps_N,
                    (1 - beta2**steps_N).sqrt(),
                ],
                dim=1,
            )
            for master, state, factors in zip(masters, states, factors_N4.unbind(), strict=True):
                assert master.grad is not None
                self._update(
                    master.detach().view(-1),
                    state["exp_avg"].view(-1),
                    state["exp_avg_sq"].view(-1),
                    master.grad.view(-1),
                    self._lowered[master].detach().view(-1),
                    factors,
                    beta1,
                    beta2,
                    group["eps"],
                    group["weight_decay"],
                )
        self.factor = None


def adamw_update(
    master_P: torch.Tensor,
    mean_P: torch.Tensor,
    square_P: torch.Tensor,
    grad_P: torch.Tensor,
    lowered_P: torch.Tensor,
    factors: torch.Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """Change master, moments (fp32) and lowered weights (bf16), all [P], by one step of AdamW.

    `factors` is fp32 [4]: the gradients' factor, the learning rate, and what the zeros that the
    moments began with have taken from them, 1 - beta1^t and sqrt(1 - beta2^t) (Loshchilov and
    Hutter 2019, algorithm 2).
    """
    factor, rate, mean_share, square_root_share = factors.unbind()
    grad = grad_P * factor
    mean = mean_P + (1 - beta1) * (grad - mean_P)
    square = beta2 * square_P + (1 - beta2) * grad * grad
    decayed = master_P * (1 - rate * weight_decay)
    master = decayed - rate / mean_share * mean / (square.sqrt() / square_root_share + eps)
    mean_P.copy_(mean)
    square_P.copy_(square)
    master_P.copy_(master)
    lowered_P.copy_(master)


# One graph for matrices of every size.
_compiled_update = torch.compile(adamw_update, fullgraph=True, dynamic=True)
