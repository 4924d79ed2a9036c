"""Who the ranks are, how they wait, and what is left when one of them dies."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist
from safetensors.torch import load_file
from trainer_cache import documents, fit_config, make_cache

from hscache.errors import ConfigError
from hscache.settings import to_dict
from trainer.checkpoint import read_state
from trainer.config import SyncConfig
from trainer.drafter_folder import load_drafter
from trainer.fit import _plan_alike, fit
from trainer.ranks import Launch, RankLostError, Ranks, buckets, launch_of
from trainer.run_folder import list_checkpoints

ROOT = Path(__file__).parents[1]
PLACE = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, Launch()),
        ({"WORLD_SIZE": "1", "RANK": "0"}, Launch()),
        (  # second process of the second node
            {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", **PLACE},
            Launch(rank=3, num_ranks=4),
        ),
        (
            {"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", **PLACE},
            Launch(rank=5, num_ranks=8),
        ),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, Launch()),  # a batch script without srun
        (  # torchrun inside of a SLURM step
            {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "WORLD_SIZE": "16", "RANK": "9",
             **PLACE},
            Launch(rank=9, num_ranks=16),
        ),
    ],
)  # fmt: skip
def test_launchers_say_who_this_is(environment, expected):
    assert launch_of(environment) == expected


def test_ranks_that_cannot_find_each_other_are_refused():
    with pytest.raises(ConfigError, match="WORLD_SIZE is 2, and RANK, MASTER_ADDR, MASTER_PORT"):
        launch_of({"WORLD_SIZE": "2"})
    with pytest.raises(ConfigError, match="SLURM_STEP_NUM_TASKS is 2, and MASTER_ADDR"):
        launch_of({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"})
    with pytest.raises(ConfigError, match="RANK is 2, expected 0 to 1"):
        launch_of({"WORLD_SIZE": "2", "RANK": "2", **PLACE})


def test_buckets_keep_the_order_and_the_limit():
    import torch

    sizes = [3, 4, 9, 1, 2, 3, 8, 20, 1]
    found = [[t.numel() for t in bucket] for bucket in buckets([torch.ones(n) for n in sizes], 8)]
    assert found == [[3, 4], [9], [1, 2, 3], [8], [20], [1]]


def test_preparing_for_longer_than_the_time_out_is_no_failure(pool):
    waited_s = pool("prepare_slowly", 2)
    assert min(waited_s) > 1.4  # the time-out is 0.5 s


def test_a_rank_that_cannot_start_ends_the_others_wait(tmp_path):
    """Also where no launcher ends them (srun, ranks started by hand)."""
    cache = make_cache(tmp_path / "cache", documents([30] * 8))
    store = dist.HashStore()
    ranks = [Ranks(rank, 2, store=store) for rank in range(2)]
    with pytest.raises(ConfigError, match="no hidden-state cache"):
        fit(fit_config(tmp_path / "none", tmp_path / "run"), ranks[1])
    with pytest.raises(RankLostError, match=r"rank 1 cannot start: .*none is no hidden-state"):
        fit(fit_config(cache, tmp_path / "run"), ranks[0])


def test_ranks_train_on_the_shards_that_rank_0_found(tmp_path):
    """A producer publishes more between the looks of two ranks."""
    corpus = documents([30] * 20)
    few = make_cache(tmp_path / "few", corpus, leave_out=(1, 2))
    more = make_cache(tmp_path / "more", corpus, leave_out=(2,))
    store = dist.HashStore()
    found = [
        _plan_alike(
            fit_config(cache, tmp_path / "run", allow_partial=True), Ranks(rank, 2, store=store)
        )
        for rank, cache in enumerate((few, more))
    ]
    assert found[0].schedule == found[1].schedule
    assert 1 not in found[1].schedule.shards
    assert found[0].total_tokens == found[1].total_tokens


def start(config, run_dir, *flags):
    file = run_dir.with_suffix(".json")
    file.write_text(json.dumps(to_dict(config)))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
         "-m", "trainer.cli", "fit", "--config", str(file), *flags],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=ROOT,
    )  # fmt: skip


def workers_of(process):
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(child) for child in children]


def test_a_killed_rank_ends_the_job_and_the_resumed_run_is_the_same_run(pool, tmp_path):
    """torchrun and two processes; the message names a checkpoint, and its end is bit-equal."""
    lengths = np.random.default_rng(4).integers(8, 40, 150).tolist()
    cache = make_cache(tmp_path / "cache", documents(lengths))

    def config_of(run_dir, **changes):
        sync = SyncConfig(mode="diloco", local_steps=3, timeout_s=30)
        return fit_config(
            cache, run_dir, sync=sync, global_batch_rows=4, checkpoint_every=6, passes=4, **changes
        )

    run_dir = tmp_path / "run"
    process = start(config_of(run_dir), run_dir)
    while not list_checkpoints(run_dir):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)
    os.kill(workers_of(process)[-1], signal.SIGKILL)
    output, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "rank 0 of 2: lost contact with another of the 2 ranks" in output
    last = list_checkpoints(run_dir)[-1]
    assert f"Continue from {last} with --resume." in output
    load_drafter(last)
    straight = tmp_path / "straight"
    for config in (config_of(straight), config_of(run_dir, resume=True)):
        assert [rank["error"] for rank in pool("train", 2, config=config)] == [None] * 2
    a, b = list_checkpoints(straight)[-1], list_checkpoints(run_dir)[-1]
    assert read_state(a) == read_state(b)
    for name in ("training.safetensors", "moments-0000.safetensors", "moments-0001.safetensors"):
        left, right = load_file(a / name), load_file(b / name)
        assert left.keys() == right.keys()
        for key, value in left.items():
            np.testing.assert_array_equal(value, right[key], err_msg=key)
