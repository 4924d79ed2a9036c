"""A run that is killed or stopped and resumed ends bit for bit like one that never stopped."""

import json
import random
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from forked import Forked
from safetensors.torch import load_file
from trainer_cache import documents, fit_config, make_cache, metrics_of, random_bits

from hscache.errors import CacheMismatchError, ConfigError, ShardCorruptError
from hscache.settings import to_dict
from trainer.checkpoint import read_state
from trainer.config import SyncConfig
from trainer.fit import fit
from trainer.run_folder import list_checkpoints

ROOT = Path(__file__).parents[1]
LENGTHS = np.random.default_rng(4).integers(8, 40, 60).tolist()
EVERY = 6


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return make_cache(
        tmp_path_factory.mktemp("resume") / "cache", documents(LENGTHS, held_out=(1,))
    )


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Like the processes started here: the number of threads decides how sums are split."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def config_of(cache, run_dir, **changes):
    settings = {"passes": 6, "checkpoint_every": EVERY, "log_every": 4, "global_batch_rows": 7}
    return fit_config(cache, run_dir, **{**settings, **changes})


@pytest.fixture(scope="module")
def straight(cache, one_thread, tmp_path_factory):
    """Uninterrupted runs, by optimizer."""
    runs = {}
    for name in ("adamw", "muon"):
        runs[name] = tmp_path_factory.mktemp("straight") / "run"
        fit(config_of(cache, runs[name], optim={"name": name}))
    return runs


def timeless(run_dir):
    """Lines of metrics without the figures that depend on the clock."""
    lines = metrics_of(run_dir)
    return [{k: v for k, v in line.items() if not k.startswith("perf/")} for line in lines]


def assert_same_run(found, expected):
    """Weights, moments, RNG, position, counters and metrics are equal, bit for bit."""
    a, b = list_checkpoints(found)[-1], list_checkpoints(expected)[-1]
    assert a.name == b.name
    assert read_state(a) == read_state(b)
    for name in ("model.safetensors", "training.safetensors"):
        left, right = load_file(a / name), load_file(b / name)
        assert left.keys() == right.keys()
        for key, value in left.items():
            assert torch.equal(value, right[key]), key
    assert (a / "config.json").read_bytes() == (b / "config.json").read_bytes()
    assert timeless(found) == timeless(expected)


def start(cache, run_dir, *flags) -> Forked:
    """`trainer fit` in a process of its own, with the settings of `config_of`."""
    file = run_dir.with_suffix(".json")
    if not file.exists():
        file.write_text(json.dumps(settings_of(cache, run_dir)))
    return Forked("trainer", ["fit", "--config", str(file), *flags])


def settings_of(cache, run_dir):

    return to_dict(config_of(cache, run_dir))


def wait_for(path, process):
    while not path.exists():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.001)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_killed_run_resumes_to_the_same_end(cache, straight, tmp_path, name):
    run_dir = tmp_path / "run"
    process = start(cache, run_dir, f"--optim.name={name}")
    wait_for(run_dir / f"checkpoint-{EVERY}", process)
    time.sleep(random.random() * 0.1)
    process.kill()
    process.communicate()
    (run_dir / ".tmp-of-a-killed-save").mkdir()
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 999, "train/lo')
    fit(config_of(cache, run_dir, optim={"name": name}, resume=True))
    assert_same_run(run_dir, straight[name])
    assert not list(run_dir.glob(".tmp-*"))


def test_terminated_run_saves_exits_143_and_resumes_to_the_same_end(cache, straight, tmp_path):
    run_dir = tmp_path / "run"
    process = start(cache, run_dir, "--checkpoint-every=10000")
    while not (run_dir / "metrics.jsonl").exists() or not metrics_of(run_dir):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.001)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 143, output
    (checkpoint,) = list_checkpoints(run_dir)
    assert f"stopped by SIGTERM after step {read_state(checkpoint).step}" in output
    assert checkpoint.name in output
    assert "--resume" in output
    last = list_checkpoints(straight["adamw"])[-1]
    assert 4 <= read_state(checkpoint).step < read_state(last).step
    fit(config_of(cache, run_dir, resume=True))
    assert_same_run(run_dir, straight["adamw"])


@pytest.mark.parametrize("step", [6, 12])
def test_resuming_at_a_checkpoint_gives_the_same_end(cache, straight, tmp_path, step):
    """Also without the cache's RNG state: it is drawn from nothing."""
    run_dir = tmp_path / "run"
    fit(config_of(cache, run_dir, keep_checkpoints=99))
    for path in list_checkpoints(run_dir):
        if int(path.name.removeprefix("checkpoint-")) > step:
            shutil.rmtree(path)
    torch.manual_seed(step)
    fit(config_of(cache, run_dir, resume=True))
    assert_same_run(run_dir, straight["adamw"])


def test_resuming_a_finished_run_changes_nothing(cache, straight, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(straight["adamw"], run_dir)
    before = {p: p.stat().st_mtime_ns for p in list_checkpoints(run_dir)[-1].iterdir()}
    fit(config_of(cache, run_dir, resume=True))
    assert {p: p.stat().st_mtime_ns for p in before} == before
    assert_same_run(run_dir, straight["adamw"])


def test_accumulation_and_logging_do_not_need_to_divide_the_run(straight):
    state = read_state(list_checkpoints(straight["adamw"])[-1])
    assert state.position.rows % 7  # the last group was a partial one
    assert state.step % 4
    lines = metrics_of(straight["adamw"])
    assert [line["step"] for line in lines] == [*range(4, state.step, 4), state.step]
    assert all(line["train/loss"] > 0 for line in lines)
    assert lines[-1]["train/tokens"] == state.tokens


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"passes": 5}, "schedule.passes"),
        ({"seed": 1}, "settings.seed"),
        ({"optim": {"lr": 1e-4}}, "settings.optim.lr"),
        ({"optim": {"name": "muon"}}, "settings.optim.name"),
        ({"optim": {"schedule": "wsd"}}, "settings.optim.schedule"),
        ({"loss": {"gamma": 7.0}}, "settings.gamma"),
        ({"loss": {"sample_slots": True}}, "settings.sample_slots"),
        ({"loss": {"gamma": None, "weighting": "dpace"}}, "settings.weighting"),
        ({"row_tokens": 80}, "settings.row_tokens"),
        ({"global_batch_rows": 2}, "settings.global_batch_rows"),
        ({"dtype": "bfloat16"}, "settings.dtype"),
        ({"sync": SyncConfig(mode="ddp")}, "settings.sync.mode"),
        ({"sync": SyncConfig(local_steps=7)}, "settings.sync.local_steps"),
        ({"drafter": {"mask_token_id": 6}}, "settings.drafter.mask_token_id"),
    ],
)
def test_other_settings_are_refused_with_a_diff(cache, straight, changes, named):
    run_dir = straight["adamw"]
    kept = (run_dir / "config.json").read_bytes(), (run_dir / "metrics.jsonl").read_bytes()
    with pytest.raises(CacheMismatchError, match=named) as error:
        fit(config_of(cache, run_dir, resume=True, **changes))
    assert "the checkpoint has" in str(error.value)
    now = (run_dir / "config.json").read_bytes(), (run_dir / "metrics.jsonl").read_bytes()
    assert now == kept


def test_rows_that_were_dealt_in_another_way_are_refused(cache, straight, monkeypatch):
    """A checkpoint counts rows; under another packing the rest would not be the rest."""
    monkeypatch.setattr("trainer.run_state.PACKING", "in the order given")
    with pytest.raises(CacheMismatchError, match=r"schedule.packing: .* 'largest first'"):
        fit(config_of(cache, straight["adamw"], resume=True))


def test_free_settings_may_change(cache, straight, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(straight["adamw"], run_dir)
    changes = {"threads": 3, "keep_checkpoints": 1, "log_every": 2, "loss": {"chunk_size": 64}}
    fit(config_of(cache, run_dir, resume=True, sync=SyncConfig(timeout_s=5), **changes))


def test_another_cache_is_refused_and_a_moved_one_is_not(cache, straight, tmp_path):
    other = make_cache(
        tmp_path / "other", documents(LENGTHS, held_out=(1,), seed=8),
        bits=lambda row, n: random_bits(n, row + 1000),
    )  # fmt: skip
    with pytest.raises(CacheMismatchError, match=r"cache\.content\.corpus_sha256"):
        fit(config_of(other, straight["adamw"], resume=True))
    moved = tmp_path / "moved"
    shutil.copytree(cache, moved)
    run_dir = tmp_path / "run"
    shutil.copytree(straight["adamw"], run_dir)
    fit(config_of(moved, run_dir, resume=True))


def test_damaged_newest_checkpoint_is_refused_and_the_one_before_goes_on(cache, straight, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(straight["adamw"], run_dir)
    newest = list_checkpoints(run_dir)[-1]
    with (newest / "training.safetensors").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(ShardCorruptError, match=f"{newest.name}/training.safetensors"):
        fit(config_of(cache, run_dir, resume=True))
    shutil.rmtree(newest)
    fit(config_of(cache, run_dir, resume=True))
    assert_same_run(run_dir, straight["adamw"])


def test_used_run_folder_needs_resume_and_resume_needs_a_checkpoint(cache, straight, tmp_path):
    with pytest.raises(CacheMismatchError, match="already holds checkpoint-"):
        fit(config_of(cache, straight["adamw"]))
    with pytest.raises(ConfigError, match="no checkpoint to continue"):
        fit(config_of(cache, tmp_path / "new", resume=True))
    assert not (tmp_path / "new").exists()
