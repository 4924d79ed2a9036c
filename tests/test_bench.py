"""`trainer bench` on a CPU: the figures add up; how high they are is no test's business."""

import json
from dataclasses import replace

import pytest
import torch
from trainer_cache import documents, fit_config, make_cache

from hscache.began import running_s
from hscache.settings import to_dict
from trainer.bench import _rows, format_figures, measure, run, spread, useful_flops
from trainer.config import BenchConfig
from trainer.run_plan import plan_run


@pytest.fixture
def config(tmp_path):
    folder = make_cache(tmp_path / "cache", documents([30] * 12))
    fit = fit_config(folder, tmp_path / "unused")
    settings = {name: getattr(fit, name) for name in to_dict(fit)}
    return BenchConfig(
        **{**settings, "passes": 50}, compare="naive", repeats=2, gemm_seconds=0.01,
        shard_seconds=0.05, json=tmp_path / "out" / "bench.json",
    )  # fmt: skip


def test_figures_add_up_and_are_written(config, capsys):
    assert run(config) == 0
    figures = json.loads(config.json.read_text())
    assert "of sustained" in capsys.readouterr().out
    assert not config.run_dir.is_dir()
    flop = figures["row"]["flop"]
    assert flop["total"] == pytest.approx(sum(v for k, v in flop.items() if k != "total"))
    assert 0 < figures["row"]["scored_slots"] <= figures["row"]["anchors"] * 3
    for part in ("forward_backward", "naive_forward_backward"):
        rate = flop["total"] / figures[part]["seconds"]["median"]
        assert figures[part]["flop_per_s"] == pytest.approx(rate)
    ceiling = figures["gemm"]["sustained_flop_per_s"]
    step = figures["step"]
    assert step["flop_per_s"] == pytest.approx(2 * flop["total"] / step["seconds"]["median"])
    assert step["share_of_sustained_gemm"] == pytest.approx(step["flop_per_s"] / ceiling)
    shards = figures["from_shards"]
    assert len(figures["forward_backward"]["share_by_turn"]) == 3
    assert 0 <= shards["data_wait"] <= 1
    assert shards["tokens_per_s"] * shards["seconds"] >= 30 * shards["rows"]


def test_what_a_run_pays_beside_its_steps_is_measured(tmp_path):
    folder = make_cache(tmp_path / "cache", documents([30] * 12, held_out=(0, 1, 2)))
    fit = fit_config(folder, tmp_path / "unused", eval_every_tokens=100, eval_documents=2)
    settings = {name: getattr(fit, name) for name in to_dict(fit)}
    config = BenchConfig(
        **{**settings, "passes": 50}, repeats=1, gemm_seconds=0.01, shard_seconds=0.01,
        json=tmp_path / "out" / "bench.json",
    )  # fmt: skip
    started = running_s()
    figures = measure(plan_run(config), torch.device("cpu"))
    assert started < figures["start_s"] < running_s()
    assert figures["looks"]["documents"] == 2
    assert figures["looks"]["again_s"] > 0
    assert 0 < figures["checkpoint"]["copy_s"] <= figures["checkpoint"]["whole_s"]
    assert list(config.json.parent.iterdir()) == []  # the checkpoint is gone
    assert "2 documents" in format_figures(figures)


def test_dry_run_measures_nothing(config, capsys):
    assert run(config, dry_run=True) == 0
    assert "would measure 2 steps of 2 rows" in capsys.readouterr().out
    assert not config.json.exists()


def test_table_names_the_limit(config):
    figures = measure(plan_run(config), torch.device("cpu"))
    figures["from_shards"]["data_wait"] = 0.5
    assert "training waits for shards" in format_figures(figures)


def test_spread_is_median_and_range():
    assert spread([3.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 3.0}


def test_a_window_bounds_what_counts_as_useful(config):
    plan = plan_run(config)
    batch = next(iter(_rows(plan, torch.device("cpu"))))
    full = useful_flops(plan.drafter, batch)
    sliding = replace(
        plan.drafter, layer_types=("sliding_attention",) * plan.drafter.num_hidden_layers,
        sliding_window=5,
    )  # fmt: skip
    context_N = (batch.context_end_N - batch.context_start_N)[: batch.num_anchors].double()
    assert context_N.max() > 5
    ratio = context_N.clamp(max=5).mean() / context_N.mean()
    assert useful_flops(sliding, batch).attention == pytest.approx(full.attention * ratio.item())
    assert useful_flops(sliding, batch).blocks == full.blocks
