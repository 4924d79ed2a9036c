"""`trainer fit` end to end on a small cache: what it leaves, and how it fails."""

import dataclasses
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from trainer_cache import documents, fit_config, make_cache, metrics_of, random_bits, small_disk

from hscache import files
from hscache.errors import (
    CacheMismatchError,
    ConfigError,
    DiskFullError,
    HscacheError,
    ShardCorruptError,
)
from hscache.layout import list_shards, shard_dir, target_config_file
from hscache.reader import open_cache
from hscache.settings import parse, to_dict
from trainer import cli
from trainer.checkpoint import read_state
from trainer.fit import fit, run
from trainer.run_folder import list_checkpoints

CORPUS = documents([30] * 20, held_out=(0, 1))


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return make_cache(tmp_path_factory.mktemp("fit") / "cache", CORPUS)


def test_run_folder_holds_checkpoint_metrics_and_the_resolved_config(cache, tmp_path, capsys):
    run_dir = tmp_path / "run"
    config = fit_config(cache, run_dir)
    assert run(config) == 0
    assert sorted(p.name for p in run_dir.iterdir()) == [
        list_checkpoints(run_dir)[0].name, "config.json", "env.json", "lock", "metrics.jsonl",
    ]  # fmt: skip
    again = parse(cli.COMMANDS[0], ["--config", str(run_dir / "config.json")])
    assert again == config
    state = read_state(list_checkpoints(run_dir)[0])
    lines = metrics_of(run_dir)
    assert [line["step"] for line in lines] == list(range(1, state.step + 1))
    assert set(lines[0]) == {
        "step", "train/loss", "train/accuracy", "train/grad_norm_max", "train/lr", "train/tokens",
        "train/empty_windows", "perf/tokens_per_s", "perf/anchors_per_s", "perf/data_wait",
        "perf/sync_s",
    }  # fmt: skip
    rates = [line["train/lr"] for line in lines]
    assert rates[-1] < 0.05 * max(rates)
    output = capsys.readouterr().out
    assert "coverage" in output
    assert str(list_checkpoints(run_dir)[0]) in output


def test_weights_change_and_every_parameter_is_trained(cache, tmp_path):
    first = fit(fit_config(cache, tmp_path / "a", optim={"lr": 1e-12}))
    second = fit(fit_config(cache, tmp_path / "b"))
    a, b = (load_file(path / "model.safetensors") for path in (first, second))
    assert all(not torch.equal(a[name], b[name]) for name in a)


def test_runs_are_repeatable_and_differ_by_seed(cache, tmp_path):
    runs = [
        load_file(fit(fit_config(cache, tmp_path / str(i), seed=seed)) / "model.safetensors")
        for i, seed in enumerate((3, 3, 4))
    ]
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])
    assert not torch.equal(runs[0]["fc.weight"], runs[2]["fc.weight"])


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("sample_slots", [False, True])
def test_bf16_training_lowers_the_loss(cache, tmp_path, optimizer, sample_slots):
    config = fit_config(
        cache, tmp_path / "run", dtype="bfloat16", passes=15, log_every=1000, checkpoint_every=20,
        optim={"name": optimizer, "lr": 1e-2}, loss={"sample_slots": sample_slots}, row_tokens=120,
        keep_checkpoints=1,
    )  # fmt: skip
    fit(fit_config(cache, tmp_path / "run0", dtype="bfloat16", passes=1, log_every=1000))
    fit(config)
    before = metrics_of(tmp_path / "run0")[-1]["train/loss"]
    assert metrics_of(tmp_path / "run")[-1]["train/loss"] < before - 0.3


def test_dry_run_prints_the_arithmetic_and_touches_nothing(cache, tmp_path, capsys):
    assert run(fit_config(cache, tmp_path / "run"), dry_run=True) == 0
    assert not (tmp_path / "run").exists()
    assert "1,080 over all passes" in capsys.readouterr().out


def test_training_never_writes_into_the_cache(cache, tmp_path):
    before = {p: p.stat().st_mtime_ns for p in cache.rglob("*")}
    fit(fit_config(cache, tmp_path / "run"))
    assert {p: p.stat().st_mtime_ns for p in cache.rglob("*")} == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_refused(cache, tmp_path):
    with pytest.raises(ConfigError, match="no CUDA device"):
        fit(fit_config(cache, tmp_path / "run", device="cuda"))


def test_loss_that_is_not_finite_names_the_step_and_leaves_no_poisoned_checkpoint(tmp_path):
    """One state of one document is NaN; lines are rarer than checkpoints."""

    def bits(row, num_tokens):
        states = random_bits(num_tokens, row)
        if row == 12:
            states[4, 1, 7] = 0x7FC0
        return states

    folder = make_cache(tmp_path / "c", CORPUS, bits=bits)
    run_dir = tmp_path / "run"
    with pytest.raises(HscacheError, match=r"not finite at step (\d+)") as error:
        fit(fit_config(folder, run_dir, checkpoint_every=1, log_every=1000, keep_checkpoints=99))
    step = int(str(error.value).partition("at step ")[2].partition(":")[0])
    assert step > 1
    checkpoints = list_checkpoints(run_dir)
    assert checkpoints[-1].name == f"checkpoint-{step - 1}"
    for path in checkpoints:
        tensors = load_file(path / "training.safetensors")
        assert all(v.isfinite().all() for v in tensors.values() if v.is_floating_point())


def test_poison_is_found_without_any_line_or_checkpoint_between(tmp_path):
    def bits(row, num_tokens):
        states = random_bits(num_tokens, row)
        states[4:6] = 0x7F80  # infinite
        return states

    folder = make_cache(tmp_path / "c", CORPUS, bits=bits)
    with pytest.raises(HscacheError, match="not finite at step 1:"):
        fit(fit_config(folder, tmp_path / "run", log_every=1000))
    assert not list_checkpoints(tmp_path / "run")


def test_full_disk_stops_the_run_and_room_lets_it_go_on(cache, tmp_path):
    settings = {"checkpoint_every": 1, "keep_checkpoints": 99}
    straight = fit(fit_config(cache, tmp_path / "straight", **settings))
    run_dir = tmp_path / "small" / "run"
    with small_disk(tmp_path / "small", "300k") as resize:
        with pytest.raises(DiskFullError, match="disk full"):
            fit(fit_config(cache, run_dir, **settings))
        stopped = list_checkpoints(run_dir)[-1]
        assert not list(run_dir.glob(".tmp-*"))
        assert 1 <= read_state(stopped).step < read_state(straight).step
        assert resize("30m")
        last = fit(fit_config(cache, run_dir, resume=True, **settings))
        found, expected = (load_file(c / "training.safetensors") for c in (last, straight))
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_command_line_explains_a_refusal(cache, tmp_path, capsys):
    file = tmp_path / "fit.json"
    file.write_text(json.dumps(to_dict(fit_config(cache, tmp_path / "run"))))
    assert cli.main(["fit", "--config", str(file), "--drafter.mask-token-id", "2"]) == 2
    assert "eos_token_id" in capsys.readouterr().err
    assert cli.main(["fit", "--config", str(file), "--optim.lr", "0"]) == 2
    assert cli.main(["fit", "--config", str(file), "--seed=-1"]) == 2
    assert cli.main(["fit", "--config", str(file), "--dry-run"]) == 0


def test_a_run_folder_has_one_writer(cache, tmp_path):
    run_dir = tmp_path / "run"
    fit(fit_config(cache, run_dir))
    before = {p: p.read_bytes() for p in run_dir.rglob("*") if p.is_file()}
    with (
        files.only_writer(run_dir / "lock", "a test"),
        pytest.raises(ConfigError, match="another process is writing"),
    ):
        fit(fit_config(cache, run_dir, resume=True))
    assert {p: p.read_bytes() for p in run_dir.rglob("*") if p.is_file()} == before


def test_rows_that_cannot_be_read_save_the_steps_before_them(tmp_path):
    folder = make_cache(tmp_path / "c", CORPUS)
    last = list_shards(folder)[-1]
    damaged = shard_dir(folder, last) / "exponent" / "c.0.0.0"
    data = bytearray(damaged.read_bytes())
    data[100] ^= 1
    damaged.write_bytes(bytes(data))
    run_dir = tmp_path / "run"
    with pytest.raises(ShardCorruptError, match="exponent"):
        fit(fit_config(folder, run_dir, global_batch_rows=1, checkpoint_every=1000))
    state = read_state(list_checkpoints(run_dir)[-1])
    assert state.step > 1
    data[100] ^= 1
    damaged.write_bytes(bytes(data))
    resumed = fit(fit_config(folder, run_dir, global_batch_rows=1, resume=True))
    straight = fit(fit_config(folder, tmp_path / "straight", global_batch_rows=1))
    assert (resumed / "model.safetensors").read_bytes() == (
        straight / "model.safetensors"
    ).read_bytes()


def test_a_changed_target_config_is_noticed(tmp_path):
    folder = make_cache(tmp_path / "c", CORPUS)
    path = target_config_file(folder)
    path.write_text(path.read_text().replace("10000.0", "70000.0"))
    with pytest.raises(ShardCorruptError, match="does not have the hash"):
        fit(fit_config(folder, tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_dry_run_refuses_what_the_run_would_refuse(cache, tmp_path, capsys):
    fit(fit_config(cache, tmp_path / "run"))
    with pytest.raises(CacheMismatchError, match="already holds"):
        run(fit_config(cache, tmp_path / "run"), dry_run=True)
    assert run(fit_config(cache, tmp_path / "run", resume=True), dry_run=True) == 0
    assert "would resume" in capsys.readouterr().out


def test_dry_run_of_a_partial_run_plans_the_shards_it_will_go_on_with(cache, tmp_path, capsys):
    folder, aside = shutil.copytree(cache, tmp_path / "cache"), tmp_path / "aside"
    last = shard_dir(folder, open_cache(folder).plan.training_shards[-1])
    last.rename(aside)
    config = fit_config(folder, tmp_path / "run", allow_partial=True)
    fit(config)
    shards = len(open_cache(folder).plan.training_shards) - 1
    aside.rename(last)
    capsys.readouterr()
    assert run(dataclasses.replace(config, resume=True), dry_run=True) == 0
    assert f" {shards} x 2 passes" in capsys.readouterr().out
