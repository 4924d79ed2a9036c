"""A bf16 step on CUDA gives the masters the gradients of an fp32 step; run by hand on a GPU."""

import pytest
import torch
from trainer_cache import documents, fit_config, make_cache

from trainer.batches import Loader
from trainer.products import add_product
from trainer.run_plan import plan_run
from trainer.run_state import start_training

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_product_is_added_in_fp32():
    generator = torch.Generator("cuda").manual_seed(0)
    master = torch.nn.Parameter(torch.zeros(48, 64, device="cuda"))
    exact = torch.zeros(48, 64, dtype=torch.float64, device="cuda")
    for _ in range(64):
        grad = torch.randn(256, 96, device="cuda", generator=generator).bfloat16()[:, 16:64]
        x = torch.randn(256, 64, device="cuda", generator=generator).bfloat16()
        add_product(master, grad, x)
        exact += grad.double().T @ x.double()
    assert (master.grad - exact).abs().max() < 1e-5 * exact.abs().max()


def gradients(folder, device, dtype):
    """Of all rows of a pass, accumulated over micro-batches, by name."""
    run = plan_run(fit_config(folder, folder / "unused", dtype=dtype))
    training = start_training(run, device)
    loader = Loader(run.cache, run.row_task(), device=device, dtype=getattr(torch, dtype))
    with loader:
        training._accumulate(list(loader))
    return {name: master.grad.cpu() for name, master in training.masters.by_name.items()}


def test_every_master_gets_the_gradient_of_an_fp32_run(tmp_path):
    """A gradient that is lost, doubled or put in another's place is off by far more than bf16."""
    corpus = documents((9, 30, 17, 24, 28, 12, 30, 21), seed=3)
    folder = make_cache(tmp_path / "cache", corpus)
    found = gradients(folder, torch.device("cuda"), "bfloat16")
    wanted = gradients(folder, torch.device("cpu"), "float32")
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert found[name].dtype == torch.float32
        assert (found[name] - gradient).norm() < 0.1 * gradient.norm(), name
