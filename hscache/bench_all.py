"""`hscache bench all`: every bench, one after another, as one JSON and one picture.

Takes the config files of `produce` and `trainer fit` and a folder, also the disk that is measured.
Each bench is a process of its own, so that the next finds the GPU's memory free; what cannot run
here is named with the reason, and the rest goes on. Result files stay in the folder, for `plan`.

    hscache bench all bench/ --produce p.yaml --fit f.yaml --shards CACHE --picture roofline.svg
"""

from __future__ import annotations

import datetime
import json
import logging
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hscache import files, roofline
from hscache.bench_config import BenchAllConfig, BenchStoreConfig
from hscache.bench_target_config import BenchForwardConfig, BenchGemmConfig
from hscache.config import spaced_layer_ids
from hscache.cost_config import PlannedProduce
from hscache.progress import configure_logging
from hscache.reader import open_cache
from hscache.result_file import require_writable
from hscache.settings import read_part, save_config
from hscache.target_shape import load_shape

log = logging.getLogger(__name__)

_STORE_GB = 2.0
_SHARD_SECONDS = 4
"""Times `seconds` that steps run from shards: the loader's queue has to settle."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """One bench: its name, the words that run it, and why it cannot run ("" if it can)."""

    name: str
    words: tuple[str, ...] = ()
    why_not: str = ""


def run(config: BenchAllConfig, *, dry_run: bool = False) -> int:
    """Run all benches, print the tables, write the files; 1 if none ran."""
    configure_logging()
    roofline.require_drawable(config.picture)
    produce = read_part(config.produce, PlannedProduce)
    configs = _configs(config, produce)
    benches = [
        *(Bench(name=name, words=("hscache", *name.split(), "--config", str(_file(config, name))))
          for name in configs),
        _trainer_bench(config),
    ]  # fmt: skip
    if dry_run:
        for bench in benches:
            print(f"{bench.name}: {bench.why_not or 'would run'}")
        return 0
    files.make_folder(config.folder)
    require_writable(config.json)
    require_writable(config.picture)
    for name, settings in configs.items():
        save_config(settings, _file(config, name))
    not_run = {bench.name: why for bench in benches if (why := run_bench(config, bench))}
    results = [_result(config, b.name) for b in benches if b.name not in not_run]
    rates = [path for path in results if path != _result(config, "bench store")]
    found = roofline.gather(rates, any_device=True) if rates else None
    if found is not None:
        print("\n" + roofline.describe(found))
    print()
    for name, why in not_run.items():
        print(f"{name} not run: {why}")
    if config.json is not None:
        everything = {
            "what": "hscache bench all",
            "date": datetime.date.today().isoformat(),
            "not_run": not_run,
            "roofline": None if found is None else _without_results(found),
            "results": {path.stem: json.loads(path.read_text()) for path in results},
        }
        _write(config.json, json.dumps(everything, indent=2).encode() + b"\n")
    if config.picture is not None and found is not None:
        _write(config.picture, roofline.draw(found, config.picture.suffix[1:]))
    return 0 if results else 1


def _configs(config: BenchAllConfig, produce: PlannedProduce) -> dict[str, Any]:
    # Sizes are those of the run that is planned: its packs, documents, shards, and its codec.
    target, store = produce.target, produce.store
    shape = load_shape(target)
    layers = target.target_layer_ids or spaced_layer_ids(shape.num_blocks, target.num_features)
    stored_layers = len(layers) + target.last_hidden
    shard_gb = store.shard_tokens * stored_layers * shape.hidden_size * 2 / 1e9
    return {
        "bench gemm": BenchGemmConfig(
            target=target.path,
            rows=(produce.token_budget,),
            seconds=config.seconds,
            dtype=target.dtype,
            device=target.device,
            json=_result(config, "bench gemm"),
        ),
        "bench forward": BenchForwardConfig(
            target=target,
            random_weights=config.random_weights,
            budgets=(produce.token_budget,),
            mean_tokens=_mean_tokens(config),
            gemm_seconds=config.seconds,
            json=_result(config, "bench forward"),
        ),
        "bench store": BenchStoreConfig(
            folder=config.folder,
            codec=store.codec,
            size_gb=min(_STORE_GB, shard_gb),
            num_layers=stored_layers,
            hidden_size=shape.hidden_size,
            threads=store.threads,
            json=_result(config, "bench store"),
        ),
    }


def _mean_tokens(config: BenchAllConfig) -> int:
    """Return the mean length of the cache's documents, so that packs are like the run's."""
    if config.shards is None:
        return BenchForwardConfig.mean_tokens
    plan = open_cache(config.shards).plan
    return max(1, round(plan.num_tokens / plan.num_documents))


def _trainer_bench(config: BenchAllConfig) -> Bench:
    name = "trainer bench"
    if config.shards is None:
        return Bench(name=name, why_not="it trains from a cache: give --shards CACHE")
    return Bench(
        name=name,
        words=(
            "trainer", "bench", "--config", str(config.fit), "--shards", str(config.shards),
            "--gemm-seconds", str(config.seconds),
            "--shard-seconds", str(_SHARD_SECONDS * config.seconds),
            "--json", str(_result(config, name)),
        ),
    )  # fmt: skip


def run_bench(config: BenchAllConfig, bench: Bench) -> str:
    """Run a bench; return why there is no result of it, or "" if there is."""
    if bench.why_not:
        return bench.why_not
    result, logged = _result(config, bench.name), _result(config, bench.name).with_suffix(".log")
    result.unlink(missing_ok=True)
    log.info("%s; its log is %s", bench.name, logged)
    program, *words = bench.words
    with logged.open("w") as stderr:
        done = subprocess.run([sys.executable, "-m", f"{program}.cli", *words], stderr=stderr)
    # `bench forward` fails when states are off, but has measured: its result says so.
    return "" if result.is_file() else _reason(logged, done.returncode)


def _reason(logged: Path, exit_code: int) -> str:
    lines = [line.strip() for line in logged.read_text().splitlines() if line.strip()]
    last = lines[-1] if lines else "it said nothing"
    starts = [n for n, line in enumerate(lines) if line.startswith(("hscache ", "trainer "))]
    message = " ".join(lines[starts[-1] :]) if starts else last
    return f"{message} (exit code {exit_code}, {logged})"


def _file(config: BenchAllConfig, name: str) -> Path:
    return config.folder / f"{name.replace(' ', '-')}.config.json"


def _result(config: BenchAllConfig, name: str) -> Path:
    return config.folder / f"{name.replace(' ', '-')}.json"


def _without_results(found: roofline.Roofline) -> dict[str, Any]:
    return {key: value for key, value in roofline.to_json(found).items() if key != "results"}


def _write(path: Path, data: bytes) -> None:
    files.make_folder(path.parent)
    files.replace_atomically(path, data)
    print(path)
