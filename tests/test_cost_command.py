"""`hscache plan`: what it says is what a real cache then takes."""

import dataclasses
import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import write_jsonl
from transformers import AutoConfig, AutoModelForCausalLM

from hscache import cost_memory, packed_forward, stages
from hscache.cli import main
from hscache.config import DataConfig, ProduceConfig, StoreConfig, TargetConfig
from hscache.cost_config import PlannedDrafter, PlannedFit, PlannedLoss, PlannedOptim
from hscache.forward_flops import forward_flops
from hscache.produce import produce
from hscache.reader import open_cache
from hscache.target_shape import shape_of
from trainer.config import DrafterShape, FitConfig, LossConfig, OptimConfig

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "tools" / "bench" / "results"
SHAPE_27B = ROOT / "configs" / "qwen3.6-27b-target.json"
THE_27B = [
    "--produce", str(ROOT / "configs" / "produce-qwen3.6-27b.yaml"),
    "--fit", str(ROOT / "configs" / "fit-qwen3.6-27b.yaml"),
    "--target-config", str(SHAPE_27B),
    "--tokens", "1866e6", "--mean-tokens", "1700", "--disk", "8TB",
]  # fmt: skip


def plan(tmp_path, *flags: str) -> dict:
    file = tmp_path / "plan.json"
    assert main(["plan", *flags, "--json", str(file)]) == 0
    return json.loads(file.read_text())


def test_the_27b_run_is_planned_in_full(tmp_path, capsys):
    found = plan(tmp_path, *THE_27B, "--gpu", "rtx-pro-6000", "--gpus", "4")
    text = capsys.readouterr().out
    disk = found["disk"]
    assert disk["raw_token_bytes"] == 51_200
    assert 65e12 < disk["codecs"]["lossless"]["total_bytes"] < 67e12
    assert disk["codecs"]["none"]["total_bytes"] == pytest.approx(95.5e12, rel=1e-3)
    assert not disk["fits"]
    assert disk["window"]["fits"]
    names = {(p["name"], p["anchors_per_row"]) for p in found["pipelines"]}
    pipelines = ("lock step", "asynchronous online", "cached", "window")
    assert names == {(name, anchors) for name in pipelines for anchors in (512, 128)}
    compound = [lever["compound"] for lever in found["levers"]]
    assert compound == sorted(compound)
    for words in (
        "source:", "no peak", "least window", "assumed: 75%", "too small",
        "best with 512 anchors: window, 1 of 4 GPUs for the target",
    ):  # fmt: skip
        assert words in text


def test_measured_rates_replace_the_defaults_on_that_gpu_only(tmp_path, capsys):
    bench = RESULTS / "trainer-27b-h200.json"
    figures = json.loads(bench.read_text())
    found = plan(tmp_path, *THE_27B, "--gpu", "h200", "--gpus", "4", "--measured", str(bench))
    assert found["gpu"]["flop_per_s"] == figures["gemm"]["sustained_flop_per_s"]
    # The rate is of a run of its own: its rows are full, so their work a token is the bench's.
    row = figures["row"]
    shards_rate = found["rates"]["trainer"]["flop_per_s"] / (row["flop"]["total"] / row["tokens"])
    assert shards_rate == pytest.approx(figures["from_shards"]["tokens_per_s"])
    assert "measured, steps from shards" in capsys.readouterr().out
    other = plan(tmp_path, *THE_27B, "--gpu", "b200", "--measured", str(bench))
    assert other["rates"]["trainer"]["how"].startswith("assumed")
    assert "NVIDIA H200: not used" in other["notes"][0]


def test_slots_that_the_bench_did_not_score_are_not_counted(tmp_path):
    bench = RESULTS / "trainer-27b-h200.json"
    figures = json.loads(bench.read_text())
    figures["row"]["scored_slots"] = 3 * figures["row"]["anchors"]
    bench = tmp_path / "bench.json"
    bench.write_text(json.dumps(figures))
    flags = [*THE_27B, "--gpu", "h200"]
    all_slots = plan(tmp_path, *flags)["flops"]["drafter_token"]["512"]
    sampled = plan(tmp_path, *flags, "--measured", str(bench))["flops"]["drafter_token"]["512"]
    assert sampled["head"] == pytest.approx(all_slots["head"] * 3 / 15)
    assert sampled["blocks"] == all_slots["blocks"]


def test_every_kind_of_result_is_understood(tmp_path):
    def result(name: str, what: str, **figures) -> str:
        file = tmp_path / f"{name}.json"
        machine = {"device": "NVIDIA H200", "host": "here"}
        file.write_text(json.dumps({"what": what, "machine": machine, **figures}))
        return str(file)

    forward = {"flop_per_s": 6e14, "tokens_per_s": 12_600, "tokens": 65_536}
    rate = {"gb_per_s": {"median": 2.0}}
    parts = {"write": rate, "cold read": {"gb_per_s": {"median": 5.0}}, "warm read": rate}
    found = plan(
        tmp_path, *THE_27B, "--gpu", "h200", "--measured",
        result("forward", "hscache bench forward", budgets=[forward],
               gemm={"sustained_flop_per_s": 6.8e14}),
        result("gemm", "hscache bench gemm", best={"sustained_flop_per_s": 6.6e14}),
        result("store", "hscache bench store", parts=parts, ratio=1.5,
               config={"codec": "lossless"}),
        result("other", "something else"),
    )  # fmt: skip
    rates = found["rates"]
    assert rates["target"]["flop_per_s"] == 6e14
    assert found["gpu"]["flop_per_s"] == 6.8e14
    assert (rates["disk_write"], rates["disk_read"]) == (2e9, 5e9)
    assert found["disk"]["codecs"]["lossless"]["ratio"] == 1.5
    assert "has no rate for a plan" in found["notes"][-1]


def test_a_fit_takes_the_days_its_bench_says(tmp_path):
    """On the machine of the bench: rows as full as the bench's, time within 20 %."""
    bench = RESULTS / "trainer-27b-h200.json"
    figures = json.loads(bench.read_text())
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("4096\n" * 3)
    flags = [f for f in THE_27B if f not in ("--mean-tokens", "1700")]
    found = plan(tmp_path, *flags, "--lengths", str(lengths), "--held-out-fraction", "0",
                 "--gpu", "h200", "--measured", str(bench))  # fmt: skip
    token = found["flops"]["drafter_token"]["512"]["total"]
    rate = found["rates"]["trainer"]["flop_per_s"] / token
    assert rate == pytest.approx(figures["from_shards"]["tokens_per_s"], rel=0.2)


def test_start_looks_and_checkpoints_are_added_as_the_benches_measured_them(tmp_path, capsys):
    bench = json.loads((RESULTS / "trainer-27b-h200.json").read_text())
    bench |= {
        "start_s": 25.0, "looks": {"first_s": 9.0, "again_s": 2.0, "documents": 64},
        "checkpoint": {"copy_s": 4.0, "whole_s": 20.0},
    }  # fmt: skip
    bench["row"] |= {"tokens": 2048, "anchors": 384}  # half and three quarters of a row
    trainer = tmp_path / "trainer.json"
    trainer.write_text(json.dumps(bench))
    forward = tmp_path / "forward.json"
    rate = {"flop_per_s": 6e14, "tokens_per_s": 12_600, "tokens": 65_536}
    forward.write_text(json.dumps({
        "what": "hscache bench forward", "machine": {"device": "NVIDIA H200", "kind": "cuda"},
        "budgets": [rate], "gemm": {"sustained_flop_per_s": 6.8e14}, "start_s": 90.0,
    }))  # fmt: skip
    found = plan(tmp_path, *THE_27B, "--gpu", "h200", "--measured", str(trainer), str(forward))
    [cached] = [p for p in found["pipelines"]
                if p["name"] == "cached" and p["anchors_per_row"] == 512]  # fmt: skip
    tokens = 6 * found["corpus"]["training_tokens"]
    saves = -(-tokens // (8 * 2048)) // 1000  # the last step is no thousandth one
    assert cached["start_s"] == 25 + 90
    assert cached["checkpoints_s"] == saves * 4 + 20
    assert cached["looks_s"] == 9 + 2 * (tokens // 20_000_000 + saves)
    names = ("start_s", "steps_s", "looks_s", "checkpoints_s")
    assert cached["seconds"] == pytest.approx(sum(cached[name] for name in names))
    assert found["pauses"]["unknown"] == ["tokenising"]
    assert cached["start_s"] < 1e-3 * cached["seconds"]  # days: noise
    text = capsys.readouterr().out
    assert "parts, 512 anchors" in text
    assert "not measured, so not counted: tokenising" in text
    assert "50% of their tokens, 75% of their anchors" in text


@pytest.fixture(scope="module")
def small(tmp_path_factory, llama_dir, corpus_file):
    """A real small cache, and the config files it was made with."""
    folder = tmp_path_factory.mktemp("plan")
    config = ProduceConfig(
        shard_dir=folder / "cache",
        target=TargetConfig(path=str(llama_dir), target_layer_ids=(0, 1, 3), device="cpu"),
        data=DataConfig(train=(str(corpus_file),), held_out_fraction=0.2, max_tokens=128),
        store=StoreConfig(shard_tokens=1500, codec="none"),
        token_budget=512,
    )
    produce(config)
    (folder / "produce.yaml").write_text(
        f"target: {{path: {llama_dir}, target_layer_ids: [0, 1, 3]}}\n"
        f"data: {{train: [{corpus_file}], held_out_fraction: 0.2, max_tokens: 128}}\n"
        "store: {shard_tokens: 1500, codec: none}\ntoken_budget: 512\n"
    )
    (folder / "fit.yaml").write_text("drafter: {intermediate_size: 96, block_size: 4}\npasses: 3\n")
    return folder


def of_small(small, *flags):
    files = ["--produce", str(small / "produce.yaml"), "--fit", str(small / "fit.yaml")]
    return [*files, "--gpu", "h200", *flags]


def test_the_rate_of_shards_goes_before_that_of_the_forward_alone(small, tmp_path, monkeypatch):
    """On the device that made them; writing is in it, so the disk's rate adds nothing."""
    monkeypatch.chdir(small)
    cache = open_cache(small / "cache")
    [device] = {cache.shard_manifest(s).provenance["device_name"] for s in cache.published_shards()}
    rates = [m.num_tokens / m.provenance["seconds"]
             for m in map(cache.shard_manifest, cache.published_shards())]  # fmt: skip
    forward = tmp_path / "forward.json"
    forward.write_text(json.dumps({
        "what": "hscache bench forward", "machine": {"device": device, "kind": "cpu"},
        "budgets": [{"flop_per_s": 1e9, "tokens_per_s": 1, "tokens": 512}],
        "gemm": {"sustained_flop_per_s": 1e12},
    }))  # fmt: skip
    flags = of_small(small, "--measured", str(forward), "cache")
    flags[flags.index("h200")] = "other"
    found = plan(tmp_path, *flags, "--ceiling-tflops", "1", "--gpu-memory", "1TB")
    rate = found["rates"]["target"]["flop_per_s"] / found["flops"]["target_token"]["total"]
    assert rate == pytest.approx(statistics.median(rates))


@pytest.mark.parametrize("flags", [(), ("--measured", "cache")], ids=["codec none", "its ratio"])
def test_bytes_and_inodes_are_within_5_percent_of_a_real_cache(small, tmp_path, flags, monkeypatch):
    monkeypatch.chdir(small)
    found = plan(tmp_path, *of_small(small, *flags))
    cache = small / "cache"
    assert found["corpus"]["shards"] == len(list((cache / "shards").iterdir()))
    assert found["pauses"]["target_start_s"] == found["corpus"]["tokenise_s"] > 0
    inodes = sum(1 for _ in (cache / "shards").rglob("*"))
    assert found["disk"]["inodes"] == inodes
    arrays = list((cache / "shards").rglob("bits/c.*"))
    states = sum(p.stat().st_size for p in arrays)
    # Files of a whole chunk of 256 tokens a layer: a shard's last one is padded, which only shows
    # in shards as small as these.
    tokens = found["corpus"]["tokens"]
    predicted = found["disk"]["codecs"]["none"]["states_bytes"]
    if flags:
        assert predicted == pytest.approx(states, rel=0.05)
    else:
        padding = 3 * 64 * 2 * 256 * len(arrays)
        assert states - padding <= predicted == tokens * 3 * 64 * 2 <= states


def test_the_target_is_counted_as_torch_counts_its_weights(llama_dir, qwen3_dir):
    for folder in (llama_dir, qwen3_dir):
        model = AutoModelForCausalLM.from_pretrained(folder)
        shape = shape_of(json.loads((folder / "config.json").read_text()), str(folder))
        matrices = sum(p.numel() for n, p in model.model.layers.named_parameters() if p.ndim == 2)
        assert shape.block_weights(shape.num_blocks) == matrices
        assert shape.embedding_weights == model.model.embed_tokens.weight.numel()
        assert shape.tied_head == (model.lm_head.weight is model.model.embed_tokens.weight)


def test_a_hybrid_is_counted_as_torch_counts_its_weights():
    from hybrid_maker import TEXT

    config = AutoConfig.for_model("qwen3_5_text", **TEXT)
    model = AutoModelForCausalLM.from_config(config)
    shape = shape_of(config.to_dict(), "hybrid")
    weights = sum(p.numel() for p in model.model.layers.parameters() if p.ndim == 2)
    assert shape.block_weights(shape.num_blocks) == weights


def test_the_27b_target_takes_48_gflop_a_token():
    shape = shape_of(json.loads(SHAPE_27B.read_text()), "27B")
    whole = forward_flops(shape, 64, num_tokens=1, mean_context=1000)
    assert whole.products == pytest.approx(48.70e9, rel=1e-3)
    assert whole.scan == pytest.approx(0.43e9, rel=0.05)
    assert whole.attention == pytest.approx(0.40e9, rel=0.03)
    cut = forward_flops(shape, 62, num_tokens=1, mean_context=1000)
    assert cut.total == pytest.approx(48e9, rel=2e-3)
    assert shape.weight_bytes(64) == pytest.approx(51.25e9, rel=1e-3)


def test_memory_is_what_was_measured_on_an_h200(tmp_path):
    """The bench of the forward: its weights, one pack of 65,536 tokens and its states."""
    forward = json.loads((RESULTS / "forward-27b-h200.json").read_text())["budgets"][0]
    found = plan(tmp_path, *THE_27B, "--gpu", "h200")["memory"]
    assert forward["tokens"] == found["token_budget"]
    held = found["target_weights_bytes"] + found["target_pack_bytes"]
    assert held == pytest.approx(forward["peak_bytes"], rel=0.02)
    # one GPU: 8 rows a step; the bench had 4, and kept 4 of its own
    trainer = json.loads((RESULTS / "trainer-27b-h200.json").read_text())
    assert found["trainer_peak_bytes"] == pytest.approx(trainer["peak_bytes"], rel=0.02)


def test_memory_is_counted_as_the_trainer_and_the_forward_do():
    assert cost_memory._MLP_ROWS == packed_forward.MLP_ROWS
    assert stages.AHEAD == cost_memory._STATES_AHEAD
    assert LossConfig().slots_per_chunk("cuda") == cost_memory._CHUNK_SIZE


def test_defaults_of_the_fit_file_are_those_of_the_trainer():
    pairs = ((PlannedFit, FitConfig), (PlannedDrafter, DrafterShape), (PlannedLoss, LossConfig),
             (PlannedOptim, OptimConfig))  # fmt: skip
    for mine, theirs in pairs:
        defaults = {f.name: f.default for f in dataclasses.fields(theirs)}
        for field in dataclasses.fields(mine):
            assert field.name in defaults
            if isinstance(field.default, int | str):
                assert field.default == defaults[field.name]


def test_plan_needs_neither_torch_nor_transformers_for_a_folder_or_a_config_file():
    code = (
        "import sys; from hscache.cli import main\n"
        f"assert main(['plan', *{THE_27B!r}, '--gpu', 'h200']) == 0\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, cwd=ROOT)


REFUSED = [
    (["--gpu", "rtx-5090"], ["the target does not fit GeForce RTX 5090 (32.0 GB)", "49.7 GB"]),
    (
        ["--gpu", "other", "--ceiling-tflops", "300", "--gpu-memory", "60GB",
         "--anchors-per-row", "2048"],
        ["training does not fit", "masters 6.92 GB", "activations", "Fewer anchors_per_row"],
    ),
    (["--gpu", "other"], ["--ceiling-tflops", "The table knows rtx-pro-6000"]),
    (["--gpu", "h300"], ["found `h300`", "rtx-pro-6000-max-q"]),
    (["--gpu", "h200", "--disk", "many"], ["disk is 'many'", "4TB"]),
    (["--gpu", "h200", "--gpus", "0"], ["gpus is 0", "more than 0"]),
    (["--gpu", "h200", "--lengths", "x"], ["only one of the two"]),
    (["--gpu", "h200", "--target-config", "none.json"], ["none.json does not exist"]),
    (["--gpu", "h200", "--measured", str(SHAPE_27B)], ["no result file of a bench", "`what`"]),
    (["--gpu", "h200", "--fit", "none.yaml"], ["none.yaml", "No such file"]),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "words"), REFUSED)
def test_what_cannot_be_is_refused_with_the_reason(flags, words, capsys):
    assert main(["plan", *THE_27B, *flags]) == 2
    error = capsys.readouterr().err
    for word in words:
        assert word in error
    assert "Traceback" not in error


def test_a_mixture_of_experts_is_refused(tmp_path, capsys):
    shape = tmp_path / "moe.json"
    shape.write_text(json.dumps({**json.loads(SHAPE_27B.read_text()), "num_experts": 64}))
    assert main(["plan", *THE_27B, "--gpu", "h200", "--target-config", str(shape)]) == 2
    assert "mixture of experts" in capsys.readouterr().err


def test_lengths_may_come_from_a_file(tmp_path):
    lengths = write_jsonl(tmp_path / "lengths", [100, 300])  # type: ignore[list-item]
    flags = [f for f in THE_27B if f not in ("--mean-tokens", "1700")]
    found = plan(tmp_path, *flags, "--gpu", "h200", "--lengths", str(lengths))
    assert found["corpus"]["documents"] == 1_866_000_000 / 200
