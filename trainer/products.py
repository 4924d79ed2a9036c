"""Products with trained weights; on a GPU their gradients are summed in fp32 by the product itself.

Takes activations and weights [out, in]; hands on activations. A weight that `trainer.masters` has
lowered to bf16 gets no gradient of its own: the product that would form it adds to the master's
instead, in fp32 throughout, and no pass over memory is spent on the sum (as Megatron-LM does).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


def product(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    """Return x @ w.T for all weights side by side, [..., sum of out], as one product."""
    lowered = [weight.to(x.dtype) for weight in weights]
    merged = lowered[0] if len(lowered) == 1 else torch.cat(lowered)
    masters = [getattr(weight, "master", None) for weight in weights]
    if x.is_cuda and torch.is_grad_enabled() and None not in masters:
        return _SummingProduct.apply(x, merged.detach(), masters, *weights)
    return F.linear(x, merged)


class _SummingProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        merged: torch.Tensor,
        masters: list[torch.nn.Parameter],
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, merged)
        ctx.masters = masters
        return F.linear(x, merged)

    @staticmethod
    def backward(ctx: Any, grad_y: torch.Tensor) -> Any:
        x, merged = ctx.saved_tensors
        grad_RO, x_RI = grad_y.flatten(0, -2), x.flatten(0, -2)
        start = 0
        for master in ctx.masters:
            add_product(master, grad_RO[:, start : start + len(master)], x_RI)
            start += len(master)
        grad_x = (grad_RO @ merged).view_as(x) if ctx.needs_input_grad[0] else None
        return (grad_x, None, None, *[None] * len(ctx.masters))


def add_product(master: torch.nn.Parameter, grad_RO: torch.Tensor, x_RI: torch.Tensor) -> None:
    """Add grad.T @ x, of bf16 operands on a GPU, to the fp32 gradient of a master."""
    if master.grad is None:
        master.grad = torch.mm(grad_RO.T, x_RI, out_dtype=torch.float32)
    else:
        sum_OI = master.grad
        torch.addmm(sum_OI, grad_RO.T, x_RI, out_dtype=torch.float32, out=sum_OI)
