"""The compiled step on a GPU is torch's fused one; run by hand on a GPU."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from trainer.config import OptimConfig
from trainer.lowering_adamw import LoweringAdamW
from trainer.optim import make_optimizers, step_optimizers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPES = ((64, 48), (128, 64), (33, 70), (16,), (1000, 1000))


def test_steps_are_those_of_torch_in_one_graph():
    def parameters():
        generator = torch.Generator("cuda").manual_seed(0)
        return [
            nn.Parameter(torch.randn(shape, device="cuda", generator=generator)) for shape in SHAPES
        ]

    masters, wanted = parameters(), parameters()
    lowered = {master: master.detach().bfloat16() for master in masters if master.ndim > 1}
    config = OptimConfig(name="adamw", weight_decay=0.1, clip=1.0)
    optimizers = make_optimizers(masters, config, lowered)
    assert isinstance(optimizers[0], LoweringAdamW)
    reference = make_optimizers(wanted, config)
    graphs = counters["stats"]["unique_graphs"]
    generator = torch.Generator("cuda").manual_seed(1)
    for step in range(4):
        for master, twin in zip(masters, wanted, strict=True):
            master.grad = torch.randn(master.shape, device="cuda", generator=generator)
            twin.grad = master.grad.clone()
        for group in (optimizers, reference):
            step_optimizers(group, scale=0.5, max_norm=1.0, rate=0.1 / (step + 1))
        for master, twin in zip(masters, wanted, strict=True):
            torch.testing.assert_close(master, twin, rtol=1e-5, atol=1e-6)
            if master in lowered:
                assert torch.equal(lowered[master], master.detach().bfloat16())
    assert counters["stats"]["unique_graphs"] <= graphs + 1
