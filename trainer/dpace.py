"""D-PACE (arXiv 2605.18810): weigh a block's slots by how likely the drafter gets that far.

Takes the losses of a row's scored slots; hands back their weights. Slot j weighs the expected
number of accepted tokens that depend on it: w_j = sum over m >= j of prod over i <= m of q~_i, with
q~ = (1 - alpha) q + alpha and q = exp(-cross-entropy).

Axes: N blocks, K predicted slots, M scored slots (those that count, in order).
"""

from __future__ import annotations

import torch

ALPHA = 0.5
"""Smoothing of the confidence, as in the paper, SpecForge, Model-Optimizer and speculators."""


def dpace_weights(
    losses_M: torch.Tensor, scored_M: torch.Tensor, *, num_blocks: int, num_predicted: int
) -> torch.Tensor:
    """Return the weights [M], detached; `scored_M` are the slots' indices into [N * K].

    Slots of a block that are not scored are no-ops: they multiply by 1 and add nothing.
    """
    confidences_M = (1 - ALPHA) * torch.exp(-losses_M.detach()) + ALPHA
    reached_NK = confidences_M.new_ones(num_blocks, num_predicted)
    reached_NK.view(-1)[scored_M] = confidences_M
    reached_NK = reached_NK.cumprod(1)
    counted_NK = torch.zeros_like(reached_NK)
    counted_NK.view(-1)[scored_M] = reached_NK.view(-1)[scored_M]
    return counted_NK.flip(1).cumsum(1).flip(1).view(-1)[scored_M]
