"""How close a whole `hscache produce` comes to its forward alone: `python tools/bench_produce.py`.

Takes a target's config, builds it with random weights on the GPU, and runs produce's own code on
random documents into each `--folder` (/dev/shm, a disk), between two measurements of the forward.
Counted is the time from the first pack's launch to the last shard's publication, with all tokens:
tokenising and loading come once in a run of days. Writes JSON with `--json`.

    python tools/bench_produce.py --target FOLDER_WITH_CONFIG_JSON \
        --layers 1 16 31 46 61 --folder /dev/shm/cache --folder /nvme/cache --json produce.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from hscache import produce as produce_module
from hscache.bench_forward import make_subject
from hscache.bench_gemm import machine
from hscache.bench_target_config import BenchForwardConfig
from hscache.clock import Clock
from hscache.config import DataConfig, ProduceConfig, StoreConfig, TargetConfig
from hscache.device import choose_device
from hscache.forward_flops import document_lengths
from hscache.frozen import Frozen
from hscache.progress import configure_logging
from hscache.result_file import require_writable, write_json
from hscache.target import Target

MEAN_TOKENS, SHORTEST, LONGEST = 1_700, 64, 8_191
NUM_WORDS = 256


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, required=True, help="folder with a config.json")
    parser.add_argument("--layers", type=int, nargs="+", required=True)
    parser.add_argument("--folder", type=Path, action="append", required=True)
    parser.add_argument("--packs", type=int, default=16, help="packs of tokens a folder gets")
    parser.add_argument("--token-budget", type=int, default=65_536)
    parser.add_argument("--shard-packs", type=int, default=4)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--codec", default="lossless")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    configure_logging()
    device = choose_device(args.device)
    require_writable(args.json)
    target = random_target(args, device)
    produce_module.Target = lambda config: target
    runs = []
    for number, folder in enumerate(args.folder):
        run = measure(target, args, folder, number)
        print(json.dumps({name: run[name] for name in ("folder", "tokens_per_s", "ratio")}))
        runs.append(run)
        write_json(args.json, figures(args, device, runs))


def figures(args: argparse.Namespace, device: torch.device, runs: list[Any]) -> dict[str, Any]:
    """Return what `--json` holds."""
    settings = {name: str(value) for name, value in vars(args).items()}
    return {
        "what": "tools/bench_produce.py",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": machine(device),
        "settings": settings,
        "runs": runs,
    }


def random_target(args: argparse.Namespace, device: torch.device) -> Target:
    """A target of the config's shape whose weights were never on a disk."""
    settings = TargetConfig(
        path=str(args.target), target_layer_ids=tuple(args.layers), device=str(device)
    )
    subject = make_subject(BenchForwardConfig(target=settings, random_weights=0), device)
    base = subject.base
    hidden = int(base.config.hidden_size)
    target = Target.__new__(Target)
    target.device, target.dtype, target.revision = device, torch.bfloat16, ""
    target.config, target.num_target_layers = base.config, int(base.config.num_hidden_layers)
    target.layer_ids = target.captured_ids = tuple(args.layers)
    target.full_config = json.loads(base.config.to_json_string(use_diff=False))
    target.tokenizer = word_tokenizer()
    target.frozen = Frozen(
        embedding_VH=torch.zeros(16, hidden).bfloat16(),
        head_VH=None,
        norm_H=torch.ones(hidden).bfloat16(),
        norm_eps=1e-6,
        norm_form="w",
    )
    target._base, target._fused, target._packed = base, subject.capture, True
    target._fused.warm_up()
    return target


def word_tokenizer() -> Any:
    """Rows are given as ids; a cache records a tokenizer nevertheless."""
    import tokenizers

    vocab = {f"word{index}": index for index in range(NUM_WORDS)}
    model = tokenizers.models.WordLevel(vocab, unk_token="word0")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(model))


def measure(target: Target, args: argparse.Namespace, folder: Path, seed: int) -> dict[str, Any]:
    """Produce into an empty folder between two measurements of the forward alone."""
    rows = folder.parent / f"{folder.name}-rows.jsonl"
    folder.parent.mkdir(parents=True, exist_ok=True)
    write_rows(rows, args, seed)
    config = ProduceConfig(
        shard_dir=folder,
        target=TargetConfig(path=str(args.target), target_layer_ids=tuple(args.layers)),
        data=DataConfig(train=(str(rows),), max_tokens=min(8_192, args.token_budget)),
        store=StoreConfig(
            shard_tokens=args.shard_packs * args.token_budget,
            threads=args.threads,
            codec=args.codec,
        ),
        token_budget=args.token_budget,
    )
    alone = [forward_alone(target, args.token_budget)]
    started = [0.0]
    fill = produce_module.fill

    def watched(*arguments: Any, **options: Any) -> Any:
        started[0] = time.perf_counter()
        return fill(*arguments, **options)

    produce_module.fill = watched
    try:
        cache = produce_module.produce(config)
    finally:
        produce_module.fill = fill
    seconds = time.perf_counter() - started[0]
    alone.append(forward_alone(target, args.token_budget))
    tokens = cache.plan.num_tokens
    reports = [cache.shard_manifest(shard).provenance for shard in cache.published_shards()]
    rate = tokens / seconds
    stored = sum(cache.shard_manifest(shard).stored_bytes for shard in cache.published_shards())
    shutil.rmtree(folder)
    rows.unlink()
    return {
        "folder": str(folder),
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_s": rate,
        "forward_alone_tokens_per_s": alone,
        "ratio": rate / statistics.mean(alone),
        "stored_bytes": stored,
        "shards": [
            {name: report.get(name) for name in ("tokens_per_s", "busy", "limit", "gpu", "seconds")}
            for report in reports
        ],
    }


def write_rows(path: Path, args: argparse.Namespace, seed: int) -> None:
    """Write input rows of ids: so many tokens as fill the packs."""
    source = random.Random(seed)
    with path.open("w") as out:
        for pack in range(args.packs):
            for length in pack_lengths(args.token_budget, seed + pack):
                ids = [source.randrange(NUM_WORDS) for _ in range(length)]
                out.write(json.dumps({"input_ids": ids, "loss_mask": [1] * length}) + "\n")


def pack_lengths(token_budget: int, seed: int) -> Sequence[int]:
    """Return lengths of documents that fill a pack."""
    mean = min(MEAN_TOKENS, max(1, token_budget // 4))
    shortest = min(SHORTEST, mean)
    return document_lengths(token_budget, seed, mean=mean, shortest=shortest, longest=LONGEST)


def forward_alone(target: Target, token_budget: int, repeats: int = 3) -> float:
    """Tokens/s of full packs through the forward, nothing else, states left on the device."""
    offsets = [0, *itertools.accumulate(pack_lengths(token_budget, 0))]
    ids_T = torch.randint(NUM_WORDS, (offsets[-1],))
    clock = Clock(target.device)
    target.capture(ids_T, offsets)
    clock.finish()
    seconds = [clock.seconds(lambda: target.capture(ids_T, offsets)) for _ in range(repeats)]
    return offsets[-1] / statistics.median(seconds)


if __name__ == "__main__":
    main()
