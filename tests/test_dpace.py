"""D-PACE weights and their loss against a slow loop and autograd, in double precision."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from trainer.dpace import ALPHA, dpace_weights
from trainer.loss import frozen_head_cross_entropy

NUM_BLOCKS, NUM_PREDICTED, VOCAB, HIDDEN = 6, 5, 41, 12


def scored_slots(seed=0):
    """All slots of one block, gaps in others, none of the last."""
    kept = (
        torch.rand(NUM_BLOCKS, NUM_PREDICTED, generator=torch.Generator().manual_seed(seed)) < 0.6
    )
    kept[0], kept[-1] = True, False
    return kept.flatten().nonzero()[:, 0]


def slow_weights(losses, scored):
    """Formula by formula, slot by slot: dflash.md 2.2."""
    loss_of = dict(zip(scored.tolist(), losses.tolist(), strict=True))
    weights = []
    for slot in scored.tolist():
        block, j = divmod(slot, NUM_PREDICTED)
        weight = 0.0
        for m in range(j, NUM_PREDICTED):
            if block * NUM_PREDICTED + m not in loss_of:
                continue
            product = 1.0
            for i in range(m + 1):
                loss = loss_of.get(block * NUM_PREDICTED + i)
                if loss is not None:
                    q = 2.718281828459045**-loss
                    product *= (1 - ALPHA) * q + ALPHA
            weight += product
        weights.append(weight)
    return torch.tensor(weights, dtype=torch.float64)


def test_weights_equal_the_formula():
    scored = scored_slots()
    losses = torch.rand(len(scored), generator=torch.Generator().manual_seed(1)).double() * 4
    found = dpace_weights(losses, scored, num_blocks=NUM_BLOCKS, num_predicted=NUM_PREDICTED)
    torch.testing.assert_close(found, slow_weights(losses, scored), rtol=1e-12, atol=0)


def test_certain_drafter_weighs_slots_by_what_follows_them():
    scored = torch.arange(4)
    found = dpace_weights(torch.zeros(4), scored, num_blocks=1, num_predicted=4)
    assert found.tolist() == [4, 3, 2, 1]


@pytest.mark.parametrize("chunk_size", [1, 7, 100])
def test_loss_and_gradient_equal_autograd_with_constant_weights(chunk_size):
    scored, generator = scored_slots(), torch.Generator().manual_seed(2)
    hidden = torch.randn(len(scored), HIDDEN, generator=generator).double().requires_grad_()
    head = torch.randn(VOCAB, HIDDEN, generator=generator).double()
    labels = torch.randint(0, VOCAB, (len(scored),), generator=generator)
    loss_sum, weight_sum, _ = frozen_head_cross_entropy(
        hidden,
        head,
        labels,
        torch.ones(len(scored)),
        chunk_size=chunk_size,
        reweight=partial(
            dpace_weights, scored_M=scored, num_blocks=NUM_BLOCKS, num_predicted=NUM_PREDICTED
        ),
    )
    (3.0 * loss_sum).backward()
    copy = hidden.detach().clone().requires_grad_()
    losses = F.cross_entropy(copy @ head.T, labels, reduction="none")
    expected = (losses * slow_weights(losses.detach(), scored)).sum()
    (3.0 * expected).backward()
    torch.testing.assert_close(loss_sum, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(hidden.grad, copy.grad, rtol=1e-12, atol=1e-14)
    assert weight_sum == len(scored)  # what one divides by: slots, not their weights


def test_row_without_scored_slots_gives_nothing():
    scored = torch.zeros(0, dtype=torch.int64)
    found = dpace_weights(torch.zeros(0), scored, num_blocks=2, num_predicted=3)
    assert found.shape == (0,)
