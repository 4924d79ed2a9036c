"""Learning rate by hand, weight decay on matrices only, Muon for matrices, clipping."""

import math

import pytest
import torch
from torch import nn

from hscache.errors import ConfigError
from trainer.config import OptimConfig
from trainer.optim import learning_rate, make_optimizers, step_optimizers


def rates(**kwargs):
    return [learning_rate(step, **kwargs) for step in range(kwargs["total_steps"] + 2)]


def test_warm_up_then_cosine_by_hand():
    actual = rates(total_steps=10, peak=1.0, warmup_fraction=0.2, final_fraction=0.1)
    cosine = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * i / 8)) for i in range(1, 9)]
    assert actual == pytest.approx([0.5, 1.0, *cosine, 0.1, 0.1])
    assert actual[5] == pytest.approx(0.55)  # half way down
    assert actual[9] == pytest.approx(0.1)


def test_warm_up_stay_and_fall_by_hand():
    actual = rates(
        total_steps=10, peak=2.0, warmup_fraction=0.2, final_fraction=0.1, schedule="wsd",
        decay_fraction=0.3,
    )  # fmt: skip
    assert actual == pytest.approx([1, 2, 2, 2, 2, 2, 2, 1.4, 0.8, 0.2, 0.2, 0.2])


def test_stay_and_fall_without_decay_ends_at_the_final_rate_in_the_last_step():
    actual = rates(
        total_steps=4, peak=1.0, warmup_fraction=0.0, final_fraction=0.0, schedule="wsd",
        decay_fraction=0.0,
    )  # fmt: skip
    assert actual == pytest.approx([1, 1, 1, 0, 0, 0])


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


def step_all(parameters, **config) -> list[torch.optim.Optimizer]:
    """Make the optimizers and take one step with the gradients that are there."""
    optimizers = make_optimizers(parameters, OptimConfig(**config))
    for optimizer in optimizers:
        optimizer.step()
    return optimizers


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_decay_falls_on_matrices_only(name):
    matrix, vector = nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(3))
    for parameter in (matrix, vector):
        parameter.grad = torch.zeros_like(parameter)
    step_all([matrix, vector], name=name, lr=0.1, weight_decay=0.5)
    torch.testing.assert_close(matrix.detach(), torch.full((3, 3), 1 - 0.1 * 0.5))
    torch.testing.assert_close(vector.detach(), torch.ones(3))


def test_first_step_moves_by_the_learning_rate():
    weight = nn.Parameter(torch.zeros(2, 2))
    weight.grad = torch.tensor([[3.0, -0.5], [1.0, -9.0]])
    step_all([weight], lr=0.1)
    torch.testing.assert_close(weight.detach(), torch.tensor([[-0.1, 0.1], [-0.1, 0.1]]))


def test_muon_step_is_nearly_orthogonal_and_as_long_as_an_adamw_step():
    """Update = 0.2 sqrt(max(A, B)) U V^T: root mean square 0.2 lr (arXiv 2502.16982, eq. 4)."""
    torch.manual_seed(0)
    matrix = nn.Parameter(torch.zeros(24, 16))
    matrix.grad = torch.randn(24, 16)
    left, _, right = torch.linalg.svd(matrix.grad, full_matrices=False)
    step_all([matrix], name="muon", lr=0.1)
    update = -matrix.detach()
    assert update.square().mean().sqrt().item() == pytest.approx(0.02, rel=0.2)
    assert torch.cosine_similarity(update.flatten(), (left @ right).flatten(), 0) > 0.97


@pytest.mark.parametrize(("name", "kinds"), [("adamw", ["AdamW"]), ("muon", ["Muon", "AdamW"])])
def test_every_parameter_has_exactly_one_optimizer(name, kinds):
    parameters = [nn.Parameter(torch.ones(shape)) for shape in ((4, 4), (4,), (2, 4), (3,))]
    optimizers = make_optimizers(iter(parameters), OptimConfig(name=name))
    assert [type(optimizer).__name__ for optimizer in optimizers] == kinds
    owned = [p for o in optimizers for group in o.param_groups for p in group["params"]]
    assert sorted(map(id, owned)) == sorted(map(id, parameters))


def test_norms_are_stepped_by_adamw_under_muon():
    vectors = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    matrix = nn.Parameter(torch.zeros(2, 2))
    for vector, name in zip(vectors, ("adamw", "muon"), strict=True):
        vector.grad, matrix.grad = torch.tensor([2.0, -3.0]), torch.ones(2, 2)
        step_all([matrix, vector], name=name, lr=0.1)
    assert torch.equal(vectors[0], vectors[1])


def test_gradients_are_scaled_and_then_clipped_by_their_joint_norm():
    a, b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    a.grad, b.grad = torch.tensor([6.0]), torch.tensor([8.0])
    optimizers = [torch.optim.SGD([p], lr=9.0) for p in (a, b)]
    norm = step_optimizers(optimizers, scale=0.5, max_norm=10.0, rate=1.0)
    assert norm.item() == pytest.approx(5.0)
    assert (a.item(), b.item()) == (-3.0, -4.0)
    assert a.grad is None
    assert b.grad is None
    a.grad, b.grad = torch.tensor([6.0]), torch.tensor([8.0])
    norm = step_optimizers(optimizers, scale=0.5, max_norm=1.0, rate=1.0)
    assert norm.item() == pytest.approx(5.0)
    assert a.item() == pytest.approx(-3.6, rel=1e-5)
    assert b.item() == pytest.approx(-4.8, rel=1e-5)


@pytest.mark.parametrize("norm", [float("nan"), float("inf")])
def test_clipping_a_gradient_that_is_not_finite_returns_it_for_the_caller_to_see(norm):
    weight = nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([1.0, norm])
    optimizers = [torch.optim.SGD([weight], lr=1.0)]
    assert not step_optimizers(optimizers, scale=1.0, max_norm=1.0, rate=1.0).isfinite()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lr", 0.0), ("lr", float("nan")), ("lr", float("inf")), ("clip", -1.0), ("clip", 0.0),
        ("warmup_fraction", 1.5), ("final_fraction", -0.1), ("betas", (0.9, 1.0)),
        ("weight_decay", -0.1), ("weight_decay", float("nan")),
    ],
)  # fmt: skip
def test_settings_that_cannot_train_are_refused(field, value):
    with pytest.raises(ConfigError, match=field):
        OptimConfig(**{field: value})


def test_warm_up_and_decay_longer_than_the_run_are_refused():
    OptimConfig(warmup_fraction=0.9, decay_fraction=0.2)  # a cosine has no decay of its own
    with pytest.raises(ConfigError, match=r"warmup_fraction 0.9 and decay_fraction 0.2"):
        OptimConfig(schedule="wsd", warmup_fraction=0.9, decay_fraction=0.2)
