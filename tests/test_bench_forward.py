"""`hscache bench gemm` and `bench forward` on a CPU: figures add up, and what is off is said."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hybrid_maker import tiny_hybrid

from hscache import bench_forward, bench_gemm, cli
from hscache.bench_target_config import BenchForwardConfig, BenchGemmConfig
from hscache.config import TargetConfig
from hscache.errors import ConfigError
from hscache.forward_check import off_in_words, reference_errors, states_facts
from hscache.measured_rates import read_measured
from hscache.random_target import random_base
from hscache.roofline import gather

SOUND = {"finite": True, "equal_twice": True, "apart": True}


@pytest.fixture(scope="module")
def hybrid_dir(tmp_path_factory):
    """Only a config: no weights are read."""
    folder = tmp_path_factory.mktemp("hybrid")
    tiny_hybrid().config.save_pretrained(folder)
    return folder


def test_bench_gemm_measures_every_product(hybrid_dir, tmp_path, capsys):
    output = tmp_path / "out" / "gemm.json"
    config = BenchGemmConfig(
        target=str(hybrid_dir), rows=(8, 16), seconds=0.01, device="cpu", json=output
    )
    assert bench_gemm.run(config) == 0
    figures = json.loads(output.read_text())
    assert len(figures["shapes"]) == 6 * 2
    assert len(figures["all"]) == 2
    assert figures["best"]["sustained_flop_per_s"] > 0
    assert "ceiling" in capsys.readouterr().out
    figures["machine"]["device"] = "NVIDIA H200"  # of a GPU that plan and roofline know
    output.write_text(json.dumps(figures))
    best = figures["best"]["sustained_flop_per_s"]
    assert read_measured([output], "h200", hidden_size=1, num_blocks=1).sustained == best
    roofline = gather([output])
    assert roofline.sustained == roofline.points[0].flop_per_s == best
    words = ["bench", "gemm", "--target", str(hybrid_dir), "--rows", "8,16", "--device", "cpu"]
    assert cli.main([*words, "--dry-run"]) == 0
    assert "6 products of 2 sizes" in capsys.readouterr().out


def test_bench_forward_adds_up_and_compares(hybrid_dir, tmp_path, capsys):
    output = tmp_path / "forward.json"
    config = BenchForwardConfig(
        target=TargetConfig(path=str(hybrid_dir), target_layer_ids=(0, 3), device="cpu"),
        random_weights=0, budgets=(128, 64), mean_tokens=30, repeats=2, gemm_seconds=0.01,
        compare="transformers", equal_tokens=32, padded_batches=(3,), json=output,
    )  # fmt: skip
    assert bench_forward.run(config) == 0
    figures = json.loads(output.read_text())
    assert figures["off"] == []
    assert figures["blocks"] == 4
    assert figures["start_s"] is None  # nothing was loaded
    for forward, budget in zip(figures["budgets"], (128, 64), strict=True):
        flop = forward["flop"]
        assert forward["tokens"] == budget
        assert flop["total"] == flop["products"] + flop["scan"] + flop["attention"]
        seconds = forward["seconds"]["median"]
        assert forward["flop_per_s"] == pytest.approx(flop["total"] / seconds)
    theirs = figures["transformers"]
    assert theirs["equal"]["ratio"] > 0
    assert [padded["batch"] for padded in theirs["padded"]] == [3]
    table = capsys.readouterr().out
    assert "of sustained" in table
    assert "transformers, equal" in table
    assert bench_forward.run(config, dry_run=True) == 0


def test_the_checks_find_what_is_off():
    base = random_base(tiny_hybrid().config, 4, 0, torch.device("cpu"), torch.bfloat16)
    errors = reference_errors(base)
    assert 0 < errors["error"] <= 1.1 * errors["error_of_transformers"]
    assert errors["error"] < 0.05
    ids_T = torch.arange(10)

    def leaks(ids_T, offsets):
        return (ids_T.float().mean() + ids_T.float())[:, None, None]

    random = torch.Generator().manual_seed(0)

    def races(ids_T, offsets):
        return torch.rand(len(ids_T), 1, 1, generator=random) / 0

    assert states_facts(leaks, ids_T, (0, 3, 10)) == {**SOUND, "apart": False}
    found = states_facts(races, ids_T, (0, 3, 10))
    assert (found["finite"], found["equal_twice"]) == (False, True)
    said = off_in_words({**found, "equal_twice": False, "error": 0.02, "blocks_compared": 4,
                         "error_of_transformers": 0.01})  # fmt: skip
    assert ["NaN" in said[0], "two runs" in said[1], "less exact" in said[-1]] == [True] * 3
    assert off_in_words(SOUND) == []


def test_the_readme_shows_the_figures_of_the_results():
    root = Path(__file__).parents[1]
    tool = root / "tools" / "bench" / "forward_table.py"
    table = subprocess.run([sys.executable, tool], capture_output=True, text=True, check=True)
    assert table.stdout.strip() in (root / "README.md").read_text()


def test_bench_forward_loads_real_weights_too(llama_dir, capsys):
    words = ["bench", "forward", "--target.path", str(llama_dir), "--target.device", "cpu",
             "--target.target-layer-ids", "0,1,3", "--budgets", "64", "--repeats", "1",
             "--gemm-seconds", "0.01"]  # fmt: skip
    assert cli.main(words) == 0
    assert "64 tokens" in capsys.readouterr().out


def test_settings_that_measure_nothing_are_refused(hybrid_dir):
    with pytest.raises(ConfigError, match="budgets"):
        BenchForwardConfig(target=TargetConfig(path="x"), budgets=())
    with pytest.raises(ConfigError, match="seconds"):
        BenchGemmConfig(target="x", seconds=0)
