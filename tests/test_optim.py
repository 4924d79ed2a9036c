"""Learning rate by hand, weight decay on matrices only, clipping."""

import math

import pytest
import torch
from torch import nn

from trainer.optim import clip_gradients, learning_rate, make_optimizer


def rates(**kwargs):
    return [learning_rate(step, **kwargs) for step in range(kwargs["total_steps"] + 2)]


def test_warm_up_then_cosine_by_hand():
    actual = rates(total_steps=10, peak=1.0, warmup_fraction=0.2, final_fraction=0.1)
    cosine = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * i / 8)) for i in range(1, 9)]
    assert actual == pytest.approx([0.5, 1.0, *cosine, 0.1, 0.1])
    assert actual[5] == pytest.approx(0.55)  # half way down
    assert actual[9] == pytest.approx(0.1)


def test_first_step_is_never_zero():
    for total_steps in (1, 2, 1000):
        for warmup_fraction in (0.0, 0.001, 0.04, 0.5):
            first = learning_rate(
                0,
                total_steps=total_steps,
                peak=6e-4,
                warmup_fraction=warmup_fraction,
                final_fraction=0.1,
            )
            assert 0 < first <= 6e-4


def test_rate_without_warm_up_only_falls():
    actual = rates(total_steps=20, peak=2.0, warmup_fraction=0.0, final_fraction=0.0)
    assert actual == sorted(actual, reverse=True)
    assert actual[0] > 1.9
    assert actual[19] == pytest.approx(0.0)


def test_decay_falls_on_matrices_only():
    matrix, vector = nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(3))
    optimizer = make_optimizer(
        [matrix, vector], learning_rate=0.1, betas=(0.9, 0.95), weight_decay=0.5
    )
    for parameter in (matrix, vector):
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    torch.testing.assert_close(matrix.detach(), torch.full((3, 3), 1 - 0.1 * 0.5))
    torch.testing.assert_close(vector.detach(), torch.ones(3))


def test_first_step_moves_by_the_learning_rate():
    weight = nn.Parameter(torch.zeros(2, 2))
    optimizer = make_optimizer([weight], learning_rate=0.1, betas=(0.9, 0.95), weight_decay=0.0)
    weight.grad = torch.tensor([[3.0, -0.5], [1.0, -9.0]])
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.tensor([[-0.1, 0.1], [-0.1, 0.1]]))


def test_clipping_scales_the_joint_norm_and_returns_the_norm_before():
    a, b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    a.grad, b.grad = torch.tensor([3.0]), torch.tensor([4.0])
    assert clip_gradients([a, b], 10.0).item() == pytest.approx(5.0)
    assert (a.grad.item(), b.grad.item()) == (3.0, 4.0)
    assert clip_gradients(iter([a, b]), 1.0).item() == pytest.approx(5.0)
    assert a.grad.item() == pytest.approx(0.6, rel=1e-5)
    assert b.grad.item() == pytest.approx(0.8, rel=1e-5)
