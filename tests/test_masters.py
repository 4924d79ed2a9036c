"""Masters hold what bf16 cannot: small steps, and sums of many gradients."""

import torch
from torch import nn

from trainer.masters import Masters


def pair(dtype):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 8, bias=False), nn.LayerNorm(8, bias=False))
    return module, Masters(module, dtype)


def test_gradients_of_64_micro_batches_add_up_in_fp32():
    module, masters = pair(torch.bfloat16)
    weight = module[0].weight
    assert weight.dtype == torch.bfloat16
    assert module[1].weight.dtype == torch.float32
    exact = torch.zeros(8, 16, dtype=torch.float64)
    in_bf16 = torch.zeros(8, 16, dtype=torch.bfloat16)
    for seed in range(64):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(seed)).bfloat16()
        (one,) = torch.autograd.grad((x @ weight.T).sum(), weight)
        exact += one.double()
        in_bf16 += one
        (x @ weight.T).sum().backward()
        assert weight.grad is None
    found = masters.by_name["0.weight"].grad
    scale = exact.abs().max()
    assert found.dtype == torch.float32
    assert (found - exact).abs().max() < 1e-6 * scale
    assert (in_bf16 - exact).abs().max() > 1e-3 * scale  # what adding in bf16 would have given


def test_steps_below_the_resolution_of_bf16_are_kept():
    module, masters = pair(torch.bfloat16)
    weight, master = module[0].weight, masters.by_name["0.weight"]
    start = weight.detach().clone()
    for _ in range(64):
        with torch.no_grad():
            master += 2**-12 * start.float()
        masters.round_into_drafter()
    assert torch.equal(weight, master.bfloat16())
    assert ((weight.float() / start.float() - 1) > 0.01).all()


def test_in_fp32_the_drafter_is_its_own_master():
    module, masters = pair(torch.float32)
    assert [id(p) for p in masters.parameters] == [id(p) for p in module.parameters()]


def test_loading_reaches_masters_and_drafter():
    module, masters = pair(torch.bfloat16)
    values = {"0.weight": torch.full((8, 16), 1.001), "1.weight": torch.full((8,), 3.0)}
    masters.load(values)
    assert torch.equal(masters.by_name["0.weight"], values["0.weight"])
    assert torch.equal(module[0].weight, values["0.weight"].bfloat16())
    assert torch.equal(module[1].weight, values["1.weight"])
