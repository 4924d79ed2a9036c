"""Gradients of products that add to fp32 masters by themselves equal those that autograd sums.

The kernel that adds runs on a GPU alone (tests/gpu/test_products_gpu.py); here a plain sum stands
in for it, so that what surrounds it is tested everywhere.
"""

import pytest
import torch
from torch import nn

from trainer import products
from trainer.masters import Masters

NAMES = ("a", "b", "c")


def module_and_masters():
    torch.manual_seed(0)
    module = nn.ParameterDict({name: nn.Parameter(torch.randn(6, 8)) for name in NAMES})
    return module, Masters(module, torch.bfloat16)


def network(module, x, multiply):
    """Two weights side by side, one of them once more, and one that autograd alone sees."""
    joined = multiply(x, module["a"], module["b"])
    again = multiply(joined[..., :8].tanh(), module["a"])
    return (joined.square().sum() + again.sum()) + (x @ module["c"].T).sum()


def plain(x, *weights):
    return torch.cat([x @ weight.T for weight in weights], dim=-1)


@pytest.fixture
def summing(monkeypatch):
    """The product as on a GPU; counts how often a gradient was added."""
    added = []

    def add(master, grad_RO, x_RI):
        added.append(master)
        term = grad_RO.float().T @ x_RI.float()
        master.grad = term if master.grad is None else master.grad + term

    def multiply(x, *weights):
        merged = torch.cat(weights).detach()
        masters = [weight.master for weight in weights]
        return products._SummingProduct.apply(x, merged, masters, *weights)

    monkeypatch.setattr(products, "add_product", add)
    return multiply, added


@pytest.mark.parametrize("grad_of_x", [False, True])
def test_sums_of_products_are_those_of_autograd(summing, grad_of_x):
    multiply, added = summing
    module, masters = module_and_masters()
    exact, _ = module_and_masters()
    exact = {name: p.detach().float().requires_grad_() for name, p in exact.items()}
    for seed in range(3):  # micro-batches
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(2, 5, 8, generator=generator).bfloat16().requires_grad_(grad_of_x)
        wide = x.detach().float().requires_grad_()
        network(module, x, multiply).backward()
        network(exact, wide, plain).backward()
        if grad_of_x:
            torch.testing.assert_close(x.grad.float(), wide.grad, rtol=0.05, atol=0.5)
    assert len(added) == 3 * 3  # a twice and b once
    for name in NAMES:
        assert module[name].grad is None
        found, wanted = masters.by_name[name].grad, exact[name].grad
        assert found.dtype == torch.float32
        assert (found - wanted).norm() < 0.01 * wanted.norm(), name


def test_without_gradients_and_without_masters_it_is_the_plain_product():
    module, _ = module_and_masters()
    x = torch.randn(3, 8).bfloat16()
    with torch.no_grad():
        found = products.product(x, module["a"], module["b"])
    assert torch.equal(found, torch.cat([x @ module["a"].T, x @ module["b"].T], dim=-1))
    weight = torch.randn(4, 8, requires_grad=True)
    products.product(x.float(), weight).sum().backward()
    assert torch.allclose(weight.grad, x.float().sum(0).expand(4, 8), atol=1e-5)
