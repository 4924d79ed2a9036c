"""Scaling, AdamW and rounding in one are torch's one after another."""

import pytest
import torch
from torch import nn

from trainer.config import OptimConfig
from trainer.lowering_adamw import LoweringAdamW
from trainer.optim import make_optimizers, step_optimizers


def masters_and_lowered(seed=0):
    generator = torch.Generator().manual_seed(seed)
    masters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((4, 6), (3, 5))]
    return masters, {master: master.detach().bfloat16() for master in masters}


def test_steps_are_those_of_torch_and_the_lowered_weights_are_the_masters_rounded():
    settings = {"lr": 9.0, "betas": (0.8, 0.95), "weight_decay": 0.1}
    masters, lowered = masters_and_lowered()
    wanted, _ = masters_and_lowered()
    found = LoweringAdamW(masters, lowered, **settings, compiled=False)
    reference = torch.optim.AdamW(wanted, **settings)
    generator = torch.Generator().manual_seed(1)
    for step in range(4):
        for master, twin in zip(masters, wanted, strict=True):
            if step == 1 and master.shape == (3, 5):
                continue  # nothing taught it anything in this step
            master.grad = 3 * torch.randn(master.shape, generator=generator)
            twin.grad = master.grad.clone()
        norms = [
            step_optimizers([optimizer], scale=0.5, max_norm=1.0, rate=0.1 / (step + 1))
            for optimizer in (found, reference)
        ]
        assert norms[0] == norms[1] > 1
        for master, twin in zip(masters, wanted, strict=True):
            torch.testing.assert_close(master, twin, rtol=1e-5, atol=1e-6)
            assert torch.equal(lowered[master], master.detach().bfloat16())
            assert found.state[master].keys() == reference.state[twin].keys()
            for key, value in reference.state[twin].items():
                torch.testing.assert_close(found.state[master][key], value, rtol=1e-5, atol=1e-7)


def test_a_step_without_a_factor_cannot_be_made():
    masters, lowered = masters_and_lowered()
    optimizer = LoweringAdamW(masters, lowered, lr=1.0, betas=(0.9, 0.99), weight_decay=0.0)
    with pytest.raises(AssertionError):
        optimizer.step()


def test_on_a_cpu_torch_steps():
    masters, lowered = masters_and_lowered()
    (optimizer,) = make_optimizers(masters, OptimConfig(name="adamw"), lowered)
    assert type(optimizer) is torch.optim.AdamW
