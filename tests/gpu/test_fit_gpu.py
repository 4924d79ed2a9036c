"""Training on CUDA against the CPU; run by hand on a machine with a GPU."""

import dataclasses

import pytest
import torch
from torch._dynamo.utils import counters
from trainer_cache import documents, fit_config, make_cache, metrics_of

from trainer.batches import Loader
from trainer.drafter_folder import load_drafter
from trainer.fit import fit
from trainer.row_loss import row_loss
from trainer.run_plan import plan_run
from trainer.run_state import start_training

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    corpus = documents((9, 30, 17, 24, 28, 12, 30, 21), seed=3)
    return make_cache(tmp_path_factory.mktemp("fit_gpu") / "cache", corpus)


def loss_and_gradients(folder, device, attention):
    run = plan_run(fit_config(folder, folder / "unused", attention=attention))
    training = start_training(run, device)
    loader = Loader(run.cache, run.row_task(), device=device, dtype=torch.float32)
    total = torch.zeros((), device=device)
    with loader:
        for batch in loader:
            loss_sum, _ = row_loss(
                training.drafter, training.frozen, batch, chunk_size=7, backend=training.backend
            )
            total = total + loss_sum
    total.backward()
    return total.detach().cpu(), [p.grad.cpu() for p in training.drafter.parameters()]


@pytest.mark.parametrize("attention", ["auto", "sdpa"])
def test_loss_and_gradients_of_static_cuda_rows_equal_those_of_trimmed_cpu_rows(folder, attention):
    loss, gradients = loss_and_gradients(folder, CUDA, attention)
    expected, expected_gradients = loss_and_gradients(folder, CPU, "auto")
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)
    for found, wanted in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(found, wanted, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_training_in_bf16_on_cuda_learns_and_its_checkpoint_loads(folder, tmp_path, name):
    config = fit_config(folder, tmp_path / "run", optim={"name": name, "lr": 1e-2})
    config = dataclasses.replace(config, device="cuda", dtype="bfloat16", passes=60)
    checkpoint = fit(config)
    losses = [line["train/loss"] for line in metrics_of(tmp_path / "run")]
    # The labels are random, so it learns by heart.
    assert sum(losses[-4:]) < 0.8 * sum(losses[:4]), losses
    assert load_drafter(checkpoint).config.block_size == 4


def test_a_step_never_waits_for_the_gpu_and_compiles_nothing_new(folder):
    config = fit_config(folder, folder / "unused", dtype="bfloat16")
    run = plan_run(config)
    training = start_training(run, CUDA)
    loader = Loader(run.cache, run.row_task(), device=CUDA, dtype=torch.bfloat16)
    with loader:
        batches = list(loader)
    assert len({len(batch.labels_M) for batch in batches}) > 1
    torch._dynamo.reset()
    counters.clear()
    training.update(batches[:1])  # compiles
    graphs = counters["stats"]["unique_graphs"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in batches[1:]:
            training.update([batch])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert counters["stats"]["unique_graphs"] == graphs <= 8
