"""Two GPUs against one, over nccl; run by hand on a machine with at least two."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from trainer_cache import documents, fit_config, make_cache, metrics_of

from hscache.settings import to_dict
from trainer.checkpoint import read_state
from trainer.config import SyncConfig
from trainer.run_folder import list_checkpoints

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    lengths = [9, 30, 17, 24, 28, 12, 30, 21] * 4
    return make_cache(tmp_path_factory.mktemp("ranks_gpu") / "cache", documents(lengths))


def fit(folder, run_dir, mode, num_ranks, *flags):
    """Run torchrun with so many processes; return the text that it wrote."""
    config = fit_config(
        folder, run_dir, sync=SyncConfig(mode=mode, local_steps=3, timeout_s=120), device="cuda",
        global_batch_rows=4, checkpoint_every=5,
    )  # fmt: skip
    file = run_dir.with_suffix(".json")
    file.write_text(json.dumps(to_dict(config)))
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone",
         f"--nproc-per-node={num_ranks}", "-m", "trainer.cli", "fit", "--config", str(file),
         *flags],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=ROOT, text=True, capture_output=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_ddp_on_two_gpus_is_the_run_of_one(folder, tmp_path):
    for num_ranks in (1, 2):
        fit(folder, tmp_path / str(num_ranks), "ddp", num_ranks, "--log-with=tensorboard")
    one, two = metrics_of(tmp_path / "1"), metrics_of(tmp_path / "2")
    assert [line["train/tokens"] for line in one] == [line["train/tokens"] for line in two]
    for a, b in zip(one, two, strict=True):
        assert b["train/loss"] == pytest.approx(a["train/loss"], rel=2e-3)


@pytest.mark.parametrize("mode", ["average", "broadcast", "diloco"])
def test_two_gpus_that_step_alone_meet_and_end_together(folder, tmp_path, mode):
    """The run compares checksums of the weights at every meeting by itself."""
    run_dir = tmp_path / "run"
    assert "ranks          2" in fit(folder, run_dir, mode, 2)
    checkpoint = list_checkpoints(run_dir)[-1]
    state = read_state(checkpoint)
    assert state.moment_ranks == 2
    assert state.position.ahead == ()
    tensors = load_file(checkpoint / "training.safetensors")
    assert all(v.isfinite().all() for v in tensors.values() if v.is_floating_point())
    fit(folder, run_dir, mode, 1, "--resume")  # nothing is left, and the moments are averaged
