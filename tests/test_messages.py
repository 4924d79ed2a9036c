"""What a user reads after a mistake: the thing, the place, what was expected, what to do.

Commands run in this process in a folder of broken things, on a tiny target, cache and run.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import conversation, write_jsonl

from hscache.cli import main as hscache
from trainer.cli import main as trainer

SCREEN = 24
"""Lines a message may have."""

PRODUCE = (
    "produce --shard-dir out/new --target.path tiny --target.target-layer-ids 0,1,3 "
    "--target.device cpu --data.train train.jsonl --data.max-tokens 128 --token-budget 256"
)
CACHE = "--data.held-out-fraction 0.4 --store.shard-tokens 200 --shard-dir cache"
SMALL = f"{PRODUCE} --store.shard-tokens 200 --shard-dir out/small --max-disk 100kB"
REGENERATE = (
    "regenerate --target tiny --prompts prompts.jsonl --output out/a.jsonl --device cpu "
    "--max-new-tokens 4"
)
ASK = "regenerate --endpoint http://127.0.0.1:1 --prompts prompts.jsonl --output out/e.jsonl"
FIT = (
    "fit --shards cache --run-dir out/run --drafter.num-hidden-layers 1 "
    "--drafter.intermediate-size 64 --drafter.num-attention-heads 2 "
    "--drafter.num-key-value-heads 1 --drafter.head-dim 32 --drafter.block-size 4 "
    "--drafter.mask-token-id 1 --loss.gamma 4 --passes 1 --row-tokens 128 --anchors-per-row 8 "
    "--device cpu"
)
EXPORT = "export --checkpoint run --format zlab --output out/drafter"
EVAL = "eval --checkpoint run --shards cache --device cpu"
IMPORT = (
    "import --format specforge --source peer --target tiny --layer-convention block "
    "--layer-ids 1 3 --allow-pickle --shard-dir out/imported --device cpu"
)
BOTH = "--produce produce.yaml --fit fit.yaml"
PLAN = f"plan {BOTH} --gpu h200"


def spoil_targets(world: Path, llama_dir: Path) -> None:
    def without(folder: str, *names: str) -> None:
        shutil.copytree(llama_dir, world / folder)
        for name in names:
            (world / folder / name).unlink()

    without("tiny")
    without("no-config", "config.json")
    without("no-weights", "model.safetensors")
    without("no-tokenizer", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    without("no-template", "chat_template.jinja")
    without("cut-weights")
    weights = world / "cut-weights" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    for folder, changes in (
        ("wider", {"intermediate_size": 100}),
        ("unknown", {"model_type": "frobnicate"}),
        ("sliding", {"sliding_window": 16}),
    ):
        without(folder)
        config = world / folder / "config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))


@pytest.fixture(scope="module")
def world(tmp_path_factory, llama_dir):
    """A folder with a tiny target, cache and run that work, and much that does not."""
    world = tmp_path_factory.mktemp("world")
    spoil_targets(world, llama_dir)
    rows = [conversation(f"what is {i}?", f"it is the number {i}, I think.") for i in range(12)]
    write_jsonl(world / "train.jsonl", rows)
    write_jsonl(world / "prompts.jsonl", [{"messages": rows[0]["messages"][:1]}])
    parts = [{"type": "text", "text": "hi"}]
    write_jsonl(world / "parts.jsonl", [{"messages": [{"role": "user", "content": parts}]}])
    write_jsonl(world / "sharegpt.jsonl", [{"conversations": [{"from": "human"}]}])
    write_jsonl(world / "answer.jsonl", [{"messages": rows[0]["messages"][1:]}])
    (world / "cut.jsonl").write_text(f'{json.dumps(rows[0])}\n{{"messages": [\n')
    (world / "empty.jsonl").touch()
    (world / "torn.parquet").write_bytes(b"PAR1")
    (world / "afile").write_text("x")
    (world / "peer").mkdir()
    torch.save({"input_ids": torch.ones(9)}, world / "peer" / "data_0.ckpt")
    (world / "folder").mkdir()
    (world / "produce.yaml").write_text(
        "target: {path: tiny, target_layer_ids: [0, 1, 3]}\ndata: {train: [train.jsonl]}\n"
    )
    (world / "fit.yaml").write_text("drafter: {intermediate_size: 64}\n")
    (world / "open.yaml").write_text("target: [1, 2\n")
    (world / "typo.yaml").write_text("target:\n  pth: tiny\n")
    (world / "flat.yaml").write_text("target: tiny\n")
    (world / "list.yaml").write_text("- a\n")
    (world / "eagle").mkdir()
    (world / "eagle" / "config.json").write_text('{"speculators_model_type": "eagle3"}')
    (world / "eagle" / "model.safetensors").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(world)
        assert hscache(f"{PRODUCE} {CACHE}".split()) == 0
        assert trainer(f"{FIT} --run-dir run".split()) == 0
    return world


def id_of(case) -> str:
    line = case[1].replace(IMPORT, "import")
    for whole, name in (
        (PRODUCE, "produce"),
        (REGENERATE, "regenerate"),
        (ASK, "ask"),
        (FIT, "fit"),
    ):
        line = line.replace(whole, name)
    return line.replace(EVAL, "eval").replace(EXPORT, "export")


CASES = [
    # the command line and config files
    (hscache, "frobnicate", 2, ["unknown command `frobnicate`", "produce, import, inspect"]),
    (hscache, "produce", 2, ["`shard_dir`, `target.path`, `data.train`", "--shard-dir"]),
    (hscache, f"{PRODUCE} --shard-dri x", 2, ["`--shard-dri`", "did you mean `--shard-dir`?"]),
    (hscache, f"{PRODUCE} --config none.yaml", 2, ["config file none.yaml: No such file"]),
    (hscache, f"{PRODUCE} --config folder", 2, ["config file folder: Is a directory"]),
    (hscache, f"{PRODUCE} --config open.yaml", 2, ["open.yaml, line 2 is not valid YAML"]),
    (hscache, f"{PRODUCE} --config list.yaml", 2, ["list.yaml must hold `setting: value`"]),
    (hscache, f"{PRODUCE} --config flat.yaml", 2, ["flat.yaml, line 1", "`target.path`"]),
    (hscache, f"{PRODUCE} --config typo.yaml", 2, ["`target.pth`", "line 2", "`target.path`"]),
    # wrong types and numbers
    (hscache, f"{PRODUCE} --target.target-layer-ids a", 2, ["found `a`", "a whole number"]),
    (hscache, f"{PRODUCE} --store.shard-tokens 1e-3", 2, ["found `1e-3`", "a whole number"]),
    (hscache, f"{PRODUCE} --target.device gpu", 2, ["found `gpu`", "auto, cpu, cuda"]),
    (hscache, f"{PRODUCE} --data.max-tokens -5", 2, ["data.max_tokens is -5", "at least 2"]),
    (hscache, f"{PRODUCE} --data.max-documents 0", 2, ["max_documents is 0", "at least 1"]),
    (hscache, f"{PRODUCE} --data.workers -1", 2, ["data.workers is -1", "at least 0"]),
    (hscache, f"{PRODUCE} --data.answers first", 2, ["found `first`", "all, last"]),
    (hscache, f"{PRODUCE} --store.seed -1", 2, ["store.seed is -1", "at least 0"]),
    (hscache, f"{PRODUCE} --token-budget 12", 2, ["token_budget is 12", "Raise the first"]),
    (hscache, f"{PRODUCE} --target.target-layer-ids -1", 2, ["[-1]", "from 0 to 3", "5 blocks"]),
    (hscache, f"{PRODUCE} --target.target-layer-ids 30", 2, ["[30]", "from 0 to 3"]),
    (hscache, f"{PRODUCE} --target.target-layer-ids 1,1", 2, ["[1, 1]", "increasing"]),
    # targets
    (hscache, f"{PRODUCE} --target.path /none", 2, ["'/none'", "there is no such folder"]),
    (hscache, f"{PRODUCE} --target.path afile", 2, ["'afile'", "it is a file"]),
    (hscache, f"{PRODUCE} --target.path folder", 2, ["'folder'", "has no config.json"]),
    (hscache, f"{PRODUCE} --target.path no-tokenizer", 2, ["has no tokenizer.json"]),
    (hscache, f"{PRODUCE} --target.path no-template", 2, ["no chat template", "instruction"]),
    (hscache, f"{PRODUCE} --target.path no-weights", 2, ["has no *.safetensors"]),
    (hscache, f"{PRODUCE} --target.path cut-weights", 2, ["'cut-weights'", "file not fully"]),
    (hscache, f"{PRODUCE} --target.path wider", 2, ["[64, 96], expected [64, 100]"]),
    (hscache, f"{PRODUCE} --target.path unknown", 2, ["`frobnicate`"]),
    (hscache, f"{REGENERATE} --target no-weights", 2, ["has no *.safetensors"]),
    (hscache, f"{REGENERATE} --target no-template --dry-run", 2, ["no chat template"]),
    (hscache, f"{REGENERATE} --target no-config --dry-run", 2, ["has no config.json"]),
    (hscache, f"{REGENERATE} --max-new-tokens 999", 2, ["999", "context is 512"]),
    # a bounded cache
    (hscache, f"{PRODUCE} --max-disk much", 2, ["max_disk is 'much'", "4TB", "80%"]),
    (hscache, f"{PRODUCE} --max-disk 120%", 2, ["max_disk is '120%'", "at most 100 %"]),
    (hscache, f"{PRODUCE} --retain window", 2, ["needs max_disk and passes", "--max-disk 2TB"]),
    (hscache, f"{PRODUCE} --passes 6", 2, ["passes is 6", "only --retain window"]),
    (hscache, f"{SMALL}", 2, ["max_disk is 100 kB", "before compression", "--retain window"]),
    (hscache, f"{SMALL} --retain window --passes 6", 2, ["a window of 0", "give --max-disk"]),
    (
        hscache,
        f"{PRODUCE} {CACHE} --max-disk 9MB --retain window --passes 1",
        1,
        ["window.shards: the cache has 0", "Run with the settings"],
    ),
    (hscache, "consumers folder", 2, ["folder is no hidden-state cache"]),
    (hscache, "consumers cache --drop x", 2, ["no consumer 'x'", "registered: none"]),
    (trainer, f"{FIT} --window 0", 2, ["window: found 0", "at least 1"]),
    (trainer, f"{FIT} --passes 2 --window 1", 2, ["window: found 1", "at least 2"]),
    (trainer, f"{FIT} --follow --allow-partial", 2, ["allow_partial and follow"]),
    (trainer, f"{FIT} --follow --shards none/c", 2, ["none/c cannot be followed", "not there"]),
    # servers
    (hscache, ASK, 1, ["cannot reach", "http://127.0.0.1:1/v1", "refused", "Is it up"]),
    (hscache, f"{ASK} --target tiny", 2, ["both of target and endpoint", "--target FOLDER"]),
    (hscache, "regenerate --prompts p --output o", 2, ["neither of target", "--endpoint URL"]),
    (hscache, f"{ASK} --endpoint localhost:1", 2, ["'localhost:1'", "http://localhost:8000"]),
    (hscache, f"{ASK} --endpoint http://xn--a", 2, ["'http://xn--a/v1'", "no address"]),
    (hscache, f"{ASK} --endpoint http://u:pw@h", 2, ["password before h", "HSCACHE_API_KEY"]),
    (hscache, f"{ASK} --batch-size 4", 2, ["batch_size is 4", "only a run with target"]),
    (hscache, f"{REGENERATE} --top-p 0.9", 2, ["top_p is 0.9", "only a run with endpoint"]),
    (hscache, f"{ASK} --top-p 0", 2, ["top_p is 0", "0 < top_p <= 1"]),
    (hscache, f"{ASK} --timeout-s 0", 2, ["timeout_s is 0", "more than 0"]),
    (hscache, f"{ASK} --concurrency 0", 2, ["concurrency is 0", "at least 1"]),
    (hscache, f"{ASK} --extra-body {{top_k:1}}", 2, ["extra_body is not JSON", "single quotes"]),
    (hscache, f'{ASK} --extra-body {{"n":2}}', 2, ["extra_body holds `n`", "Leave it out"]),
    # rows
    *[
        (hscache, f"{command} {flag} {name} --dry-run", 1, [name, *words])
        for command, flag in ((PRODUCE, "--data.train"), (REGENERATE, "--prompts"))
        for name, words in (
            ("none.jsonl", ["does not exist", "expected a file of rows"]),
            ("none*.jsonl", ["pattern none*.jsonl matches nothing", ".parquet"]),
            ("folder", ["is a folder without rows", ".jsonl.zst, .parquet"]),
            ("empty.jsonl", ["has no rows", "`messages`"]),
            ("cut.jsonl", ["line 2 is not JSON", "column", "mend or delete"]),
            ("parts.jsonl", ["line 1", "not text", "'type': 'text'", "delete the row"]),
            ("sharegpt.jsonl", ["line 1", "content of a user message is not text", "None"]),
            ("answer.jsonl", ["line 1", "elete the row"]),
            ("tiny/model.safetensors", ["unknown kind", ".jsonl.gz", "convert it"]),
            ("torn.parquet", ["torn.parquet cannot be read as parquet", "write it again"]),
        )
    ],
    (hscache, f"{PRODUCE} --data.train prompts.jsonl", 1, ["no document", "supervised", "need"]),
    (
        hscache,
        f"{PRODUCE} --data.min-supervised-share 2",
        2,
        ["supervised_share is 2", "0 and"],
    ),
    (
        hscache,
        f"{PRODUCE} --data.min-supervised-share 0.9 --dry-run",
        1,
        ["% of the tokens are supervised", "is 90.00%", "data.min_supervised_share", "lower"],
    ),
    # where to write
    (hscache, f"{PRODUCE} --shard-dir afile", 1, ["afile", "Not a directory", "--shard-dir"]),
    (hscache, f"{PRODUCE} --shard-dir cache", 1, ["content.shard_tokens", "200", "262144"]),
    (hscache, f"{REGENERATE} --output folder", 2, ["folder: Is a directory", "Give a file"]),
    (hscache, f"{REGENERATE} --output afile", 1, ["afile.settings.json", "another output"]),
    (trainer, f"{FIT} --run-dir afile", 1, ["afile: File exists"]),
    (trainer, f"{FIT} --run-dir run", 1, ["checkpoint-", "--resume", "another --run-dir"]),
    (trainer, f"{FIT} --run-dir cache", 2, ["run_dir cache lies in the cache cache", "outside"]),
    (trainer, f"{FIT} --run-dir cache/shards", 2, ["cache/shards lies in", "Give a folder"]),
    (trainer, f"{FIT} --resume", 2, ["out/run has no checkpoint"]),
    (hscache, "bench gemm --target no-config --device cpu", 2, ["no-config", "config.json"]),
    (hscache, "bench forward --target.path tiny --budgets 0", 2, ["budgets", "above 0"]),
    (hscache, "bench forward --target.path tiny --repeats 0", 2, ["repeats", "more than 0"]),
    (trainer, f"{EVAL} --json afile/x.json", 1, ["afile: File exists"]),
    # imports of other programs' caches
    (
        hscache,
        IMPORT.replace("--layer-convention block", ""),
        2,
        ["layer_convention is missing", "--layer-convention block", "hidden_states"],
    ),
    (hscache, IMPORT.replace("--layer-ids 1 3", ""), 2, ["layer_ids is missing", "specforge"]),
    (hscache, IMPORT.replace("--allow-pickle", ""), 2, ["are pickles", "--allow-pickle"]),
    (hscache, f"{IMPORT} --layer-ids 3 1", 2, ["[3, 1]", "increasing ids", "other convention?"]),
    (hscache, f"{IMPORT} --layer-ids 1 7", 2, ["[1, 7]", "of 5 blocks"]),
    (hscache, f"{IMPORT} --source none", 1, ["none is no folder", "specforge"]),
    (hscache, f"{IMPORT} --source folder", 1, ["folder holds no SpecForge", "data_0.ckpt"]),
    (hscache, IMPORT, 1, ["peer/data_0.ckpt", "found ['input_ids']", "expected tensors"]),
    (hscache, f"{IMPORT} --format speculators", 1, ["peer holds no files named hs_0"]),
    (hscache, f"{IMPORT} --format deepspec", 1, ["peer/manifest.json", "finished DeepSpec"]),
    # plans
    (hscache, "plan --gpu h200", 2, ["`produce`, `fit`", "--produce"]),
    (hscache, f"{PLAN} --gpu h300", 2, ["found `h300`", "rtx-pro-6000"]),
    (hscache, f"{PLAN} --produce flat.yaml", 2, ["flat.yaml", "`target.path`"]),
    (hscache, f"{PLAN} --fit produce.yaml", 2, ["`drafter.inter", "write it into produce.yaml"]),
    (hscache, "roofline afile", 2, ["afile is no result file", "`what`"]),
    (hscache, f"{PLAN} --tokens 1e6", 2, ["lengths as well", "--mean-tokens"]),
    (hscache, f"{PLAN} --disk 4XB", 2, ["disk is '4XB'", "such as 4TB"]),
    (hscache, f"{PLAN} --measured afile", 2, ["afile is no result file", "trainer bench"]),
    # caches, drafters, checkpoints
    (hscache, "inspect none", 2, ["none/zarr.json does not exist", "--shard-dir"]),
    (hscache, "inspect afile", 2, ["afile is no hidden-state cache"]),
    (hscache, "inspect run", 2, ["run is no hidden-state cache"]),
    (hscache, "inspect cache --doc 99", 2, ["no document 99", "0 to 11"]),
    (hscache, "repair none", 2, ["none/zarr.json does not exist", "--shard-dir"]),
    (hscache, "verify cache --target tiny", 2, ["--target does nothing", "--replay N"]),
    (hscache, "verify cache --replay -1", 2, ["replay is -1", "0 or more"]),
    (hscache, "verify cache --replay 1 --target nowhere", 2, ["'nowhere'", "no such folder"]),
    (hscache, "status folder", 2, ["folder is no hidden-state cache", "--shard-dir"]),
    (hscache, "status cache --every-s 0", 2, ["every_s is 0", "more than 0"]),
    (trainer, "status cache", 2, ["cache is no run folder", "run_dir"]),
    (hscache, "bench store none", 2, ["none is no folder", "on the disk to measure"]),
    (hscache, "bench store . --size-gb 1e5", 2, ["needs 105000.0 GB", "free", "--size-gb"]),
    (hscache, "bench store . --cache cache", 2, ["rows of 5120 values", "larger cache"]),
    (hscache, f"bench all out/b {BOTH} --produce flat.yaml", 2, ["flat.yaml", "`target.path`"]),
    (hscache, f"bench all out/b {BOTH} --picture a.txt", 2, ["found `.txt`", ".svg"]),
    (hscache, f"bench all out/b {BOTH} --seconds 0", 2, ["seconds is 0", "more than 0"]),
    (hscache, "bench tape .", 2, ["unknown command `tape`"]),
    (trainer, f"{FIT} --shards folder", 2, ["folder is no hidden-state cache"]),
    (trainer, f"{FIT} --shards cache folder", 2, ["folder is no hidden-state cache"]),
    (trainer, f"{FIT} --shards cache cache", 2, ["cache and cache are the same", "--weights"]),
    (trainer, f"{FIT} --weights 2", 2, ["one cache needs none", "passes"]),
    (trainer, f"{FIT} --shards cache x --weights 1", 2, ["weights: found 1", "each of the 2"]),
    (trainer, f"{FIT} --shards cache x --weights 1 0", 2, ["[1.0, 0.0]", "leave a cache"]),
    (trainer, f"{FIT} --on-bad-shard skipp", 2, ["found `skipp`", "stop, skip"]),
    (trainer, f"{FIT} --row-tokens 8", 2, ["row_tokens is 8", "longest document"]),
    (trainer, f"{FIT} --drafter.mask-token-id 2", 2, ["mask_token_id 2", "eos_token_id"]),
    (trainer, f"{FIT} --drafter.mask-token-id 999", 2, ["found 999", "0 to 258"]),
    (trainer, f"{FIT} --drafter.target-layer-ids 0,2", 1, ["(0, 2)", "(0, 1, 3)"]),
    (trainer, f"{FIT} --drafter.head-dim 33", 2, ["head_dim: found 33", "even"]),
    (trainer, f"{FIT} --loss.weighting dpace", 2, ["gamma 4.0", "dpace", "Leave one"]),
    (trainer, f"{FIT} --loss.labels soft", 2, ["last hidden states", "cache", "last-hidden true"]),
    (trainer, f"{FIT} --drafter.layer-types sliding_attention", 2, ["sliding_window", "2048"]),
    (trainer, f"{FIT} --drafter.layer-types slides", 2, ["`slides`", "sliding_attention"]),
    (trainer, f"{FIT} --optim.lr -1", 2, ["lr: found -1", "more than 0"]),
    (trainer, f"{FIT} --passes -1", 2, ["passes: found -1", "at least 1"]),
    (trainer, f"{FIT} --sync.mode dilcoo", 2, ["found `dilcoo`", "average, broadcast, diloco"]),
    (trainer, f"{FIT} --sync.local-steps 0", 2, ["local_steps: found 0", "at least 1"]),
    (trainer, f"{FIT} --sync.outer-momentum 1", 2, ["outer_momentum: found 1", "below 1"]),
    (trainer, f"{EVAL} --checkpoint folder", 2, ["folder is neither a checkpoint", "run folder"]),
    (trainer, f"{EVAL} --checkpoint tiny", 2, ["tiny/config.json", "DFlash config"]),
    (trainer, f"{EVAL} --checkpoint eagle", 2, ["eagle/config.json", "'eagle3'", "'dflash'"]),
    (trainer, f"{FIT} --init-from eagle", 2, ["eagle/config.json", "'eagle3'", "'dflash'"]),
    (trainer, f"{FIT} --init-from folder", 2, ["folder is neither a checkpoint", "run folder"]),
    (trainer, f"{FIT} --init-from tiny", 2, ["model_type 'llama'", "z-lab's", "speculators"]),
    (trainer, f"{FIT} --eval-every-tokens -1", 2, ["eval_every_tokens: found -1", "0 (none)"]),
    (trainer, f"{FIT} --eval-documents 0", 2, ["eval_documents: found 0", "at least 1"]),
    (trainer, "plot --output out/a.png", 2, ["`runs`"]),
    (trainer, "plot run --output out/a.txt", 2, ["out/a.txt", "found `.txt`", ".png, .svg"]),
    (trainer, "plot run folder --output out/a.png", 2, ["folder has no metrics.jsonl", "run_dir"]),
    (trainer, f"{EXPORT} --format gguf", 2, ["found `gguf`", "zlab, speculators"]),
    (trainer, f"{EXPORT} --format speculators", 2, ["needs --shards", "embedding", "the cache"]),
    (trainer, f"{EXPORT} --target a/b", 2, ["--target", "names no target", "Leave it out"]),
    (trainer, f"{EXPORT} --checkpoint folder", 2, ["folder is neither a checkpoint"]),
    (trainer, f"{EXPORT} --checkpoint tiny", 2, ["tiny/config.json", "no DFlash config"]),
    (trainer, f"{EXPORT} --shards folder", 2, ["folder is no hidden-state cache"]),
    (trainer, f"{EXPORT} --output run", 2, ["run exists already", "new folder"]),
    (trainer, f"{EXPORT} --output afile/x", 1, ["afile: File exists"]),
    (trainer, f"{EVAL} --prompts parts.jsonl --dry-run", 1, ["parts.jsonl, line 1", "not text"]),
    (trainer, f"{EVAL} --prompts prompts.jsonl --target wider", 1, ["the config of wider"]),
]


@pytest.mark.parametrize("case", CASES, ids=id_of)
def test_a_mistake_is_explained(case, world, monkeypatch, capsys):
    main, line, code, words = case
    monkeypatch.chdir(world)
    assert main(line.split()) == code
    error = capsys.readouterr().err
    for word in words:
        assert word in error
    assert "Traceback" not in error
    assert "--debug" not in error  # the message for what we did not foresee
    assert len(error.splitlines()) <= SCREEN


def test_plot_without_matplotlib_says_what_to_install(world, monkeypatch, capsys):
    monkeypatch.chdir(world)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert trainer(["plot", "run", "--output", "out/a.png"]) == 2
    assert 'pip install "hscache[plot]"' in capsys.readouterr().err


def test_a_tracker_that_is_not_installed_is_named(world, monkeypatch, capsys):
    monkeypatch.chdir(world)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert trainer(f"{FIT} --log-with mlflow".split()) == 2
    assert "mlflow is not installed" in capsys.readouterr().err


def test_loading_a_target_leaves_stderr_to_our_log_lines(world):
    """Neither transformers' bars nor its report on the blocks that are cut off."""
    cut = f"{PRODUCE} --target.target-layer-ids 0,1 --shard-dir other"
    code = (
        "import sys; from hscache.cli import main\n"
        f"sys.exit(main({cut.split()!r}) or main({REGENERATE.split()!r}))"
    )
    root = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=world,
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    foreign = [x for x in done.stderr.splitlines() if not re.match(r"\d\d:\d\d:\d\d ", x)]
    assert foreign == []
    assert "regenerate: done" in done.stderr
