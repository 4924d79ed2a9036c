"""`hscache bench all` on a CPU: one JSON, one picture, and what cannot run is said."""

import json

import pytest
from trainer_cache import documents, make_cache

from hscache import bench_all
from hscache.bench_all import Bench, run_bench
from hscache.bench_config import BenchAllConfig
from hscache.cli import main


@pytest.fixture
def flags(llama_dir, tmp_path):
    produce, fit = tmp_path / "produce.yaml", tmp_path / "fit.yaml"
    produce.write_text(
        f"target: {{path: {llama_dir}, target_layer_ids: [0, 1, 3], device: cpu}}\n"
        "data: {train: [none.jsonl], max_tokens: 64}\nstore: {shard_tokens: 256}\n"
        "token_budget: 64\n"
    )
    fit.write_text(
        "drafter: {num_hidden_layers: 1, intermediate_size: 64, num_attention_heads: 2,\n"
        "  num_key_value_heads: 1, head_dim: 32, block_size: 4, mask_token_id: 1}\n"
        "loss: {gamma: 4}\nrow_tokens: 64\nanchors_per_row: 12\nglobal_batch_rows: 2\n"
        "dtype: float32\ndevice: cpu\npasses: 100\nrepeats: 1\n"
    )
    return ["--produce", str(produce), "--fit", str(fit), "--seconds", "0.02"]


def test_all_benches_are_one_json_and_one_picture(flags, tmp_path, capfd):
    cache = make_cache(tmp_path / "cache", documents([30] * 12))
    everything, picture = tmp_path / "all.json", tmp_path / "roofline.svg"
    line = ["bench", "all", str(tmp_path / "out"), *flags, "--shards", str(cache)]
    assert main([*line, "--json", str(everything), "--picture", str(picture)]) == 0
    found = json.loads(everything.read_text())
    assert found["not_run"] == {}
    assert {figures["what"] for figures in found["results"].values()} == {
        "hscache bench gemm", "hscache bench forward", "hscache bench store", "trainer bench",
    }  # fmt: skip
    for name, figures in found["results"].items():
        assert json.loads((tmp_path / "out" / f"{name}.json").read_text()) == figures
    assert found["results"]["bench-forward"]["config"]["mean_tokens"] == 30  # as in the cache
    assert found["results"]["bench-forward"]["start_s"] > 0
    roofline = found["roofline"]
    best = max(f["sustained_flop_per_s"] for f in (
        found["results"]["bench-gemm"]["best"], found["results"]["bench-forward"]["gemm"],
        found["results"]["trainer-bench"]["gemm"],
    ))  # fmt: skip
    assert roofline["sustained"] == roofline["gpu"]["bf16"] == best
    assert len(roofline["splits"]) == 2
    assert picture.read_bytes().startswith(b"<?xml")
    assert "no peak is known" in capfd.readouterr().out


def test_a_bench_that_fails_is_named_with_its_own_words(tmp_path):
    config = BenchAllConfig(folder=tmp_path, produce=tmp_path, fit=tmp_path)
    (tmp_path / "bench-tape.json").write_text("an old result")
    why = run_bench(config, Bench(name="bench tape", words=("hscache", "bench", "tape")))
    assert "hscache bench: unknown command `tape`" in why
    assert "exit code 2" in why
    assert not (tmp_path / "bench-tape.json").exists()


def test_if_none_ran_the_exit_code_says_so(flags, tmp_path, monkeypatch, capsys):
    everything = tmp_path / "all.json"
    monkeypatch.setattr(bench_all, "run_bench", lambda config, bench: "no such machine")
    line = ["bench", "all", str(tmp_path / "out"), *flags, "--json", str(everything)]
    assert main(line) == 1
    assert set(json.loads(everything.read_text())["not_run"].values()) == {"no such machine"}
    assert "bench store not run: no such machine" in capsys.readouterr().out


def test_a_dry_run_writes_nothing(flags, tmp_path, capsys):
    assert main(["bench", "all", str(tmp_path / "out"), *flags, "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "bench store: would run" in text
    assert "trainer bench: it trains from a cache: give --shards CACHE" in text
    assert not (tmp_path / "out").exists()
