"""fp32 masters of the drafter's matrices: what the optimizer steps on while products run in bf16.

Takes a drafter whose parameters are fp32; turns its matrices into the compute dtype and keeps the
fp32 originals. A matrix's gradient moves to its master, and is added there in fp32, as soon as a
backward pass has formed it; so sums over micro-batches never round to bf16, and only a layer's
worth of bf16 gradients exists at a time. Norms stay fp32 throughout and are their own masters.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


class Masters:
    """The trained parameters in fp32, by name, with their accumulated gradients in `.grad`."""

    def __init__(self, drafter: nn.Module, dtype: torch.dtype) -> None:
        self.by_name: dict[str, nn.Parameter] = {}
        self.lowered: dict[nn.Parameter, torch.Tensor] = {}
        """the drafter's own copy of each master that is not its own"""
        for name, parameter in drafter.named_parameters():
            if parameter.ndim < 2 or parameter.dtype == dtype:
                self.by_name[name] = parameter
                continue
            master = nn.Parameter(parameter.detach().clone())
            parameter.data = parameter.data.to(dtype)
            parameter.register_post_accumulate_grad_hook(_move_gradient_to(master))
            parameter.master = master  # type: ignore[attr-defined]  # for `trainer.products`
            self.by_name[name] = master
            self.lowered[master] = parameter

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters to optimize."""
        return list(self.by_name.values())

    @torch.no_grad()
    def round_into_drafter(self) -> None:
        """Give the drafter the masters' values, after they have changed."""
        if self.lowered:
            torch._foreach_copy_(list(self.lowered.values()), list(self.lowered))

    @torch.no_grad()
    def load(self, values: dict[str, torch.Tensor]) -> None:
        """Replace all masters, and the drafter's copies; raises KeyError for a missing name."""
        for name, master in self.by_name.items():
            master.copy_(values[name])
        self.round_into_drafter()


def _move_gradient_to(master: nn.Parameter) -> Callable[[torch.Tensor], None]:
    def move(lowered: torch.Tensor) -> None:
        if lowered.grad is None:  # `trainer.products` has added it to the master's already
            return
        if master.grad is None:
            master.grad = lowered.grad.to(master.dtype)
        else:
            master.grad.add_(lowered.grad)
        lowered.grad = None

    return move
