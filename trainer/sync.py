"""What ranks do with their weights when they meet: average, take rank 0's, or step along it.

Takes lists of fp32 masters, the same on every rank after a meeting, and the weight of what each
rank has learned since; changes the masters in place. Pure maths but for the sums over `Ranks`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trainer.config import SyncConfig
from trainer.ranks import Ranks


class OuterStep:
    """DiLoCo's outer optimizer (arXiv 2311.08105): Nesterov SGD on how far the average has moved.

    The pseudo-gradient is the old weights minus the average, so that a rate of 1 without momentum
    lands on the average. Momentum as in torch.optim.SGD: m = mu m + g, w -= lr (g + mu m).
    """

    def __init__(self, masters: Sequence[torch.Tensor], *, lr: float, momentum: float) -> None:
        self._lr, self._momentum = lr, momentum
        self.anchors = [master.detach().clone() for master in masters]
        """masters after the last meeting"""
        self.momenta = [torch.zeros_like(master) for master in masters]

    @torch.no_grad()
    def reset(self, masters: Sequence[torch.Tensor]) -> None:
        """Start from other masters; a checkpoint holds them as they are after a meeting."""
        torch._foreach_copy_(self.anchors, list(masters))

    @torch.no_grad()
    def step_(self, averages: Sequence[torch.Tensor]) -> None:
        """Replace the averages by the new masters."""
        for average, anchor, momentum in zip(averages, self.anchors, self.momenta, strict=True):
            gradient = anchor - average
            momentum.mul_(self._momentum).add_(gradient)
            anchor.sub_(gradient.add_(momentum, alpha=self._momentum), alpha=self._lr)
            average.copy_(anchor)


@torch.no_grad()
def average_(masters: Sequence[torch.Tensor], weights: Sequence[float], ranks: Ranks) -> None:
    """Replace masters by their mean over ranks, weighted; all zero weights change nothing."""
    if sum(weights) == 0:
        return
    torch._foreach_mul_(list(masters), weights[ranks.rank] / sum(weights))
    ranks.add_(masters)


def synchronise(
    masters: Sequence[torch.Tensor],
    weights: Sequence[float],
    ranks: Ranks,
    *,
    mode: str,
    outer: OuterStep | None,
) -> None:
    """Make the masters of all ranks equal; `weights` are what each has learned from, in sum."""
    if sum(weights) == 0:
        return
    if mode == "broadcast":
        ranks.take_from_first_(masters)
        return
    average_(masters, weights, ranks)
    if outer is not None:
        outer.step_(masters)


def make_outer(masters: Sequence[torch.Tensor], config: SyncConfig) -> OuterStep | None:
    """Return the outer optimizer of a mode that has one."""
    if config.mode != "diloco":
        return None
    return OuterStep(masters, lr=config.outer_lr, momentum=config.outer_momentum)


@torch.no_grad()
def checksum(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return an int64 scalar of the bits and the order of the tensors; stays on the device."""
    total = torch.zeros((), dtype=torch.int64, device=tensors[0].device)
    for tensor in tensors:
        bits = tensor.contiguous().view(torch.int32 if tensor.element_size() == 4 else torch.int64)
        total = total * 1_000_003 + bits.sum(dtype=torch.int64)
    return total
