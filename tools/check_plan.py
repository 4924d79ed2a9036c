"""Compare the time that `hscache plan` says with the time that `produce` and `trainer fit` take.

Takes the config files of both, and a folder for everything that is written. Makes the cache once
(the benches need one), runs `hscache bench all`, plans with its files, and then produces and trains
anew, each `--rounds` times; the medians are compared. The load of the machine is in the JSON.

    python tools/check_plan.py OUT --produce configs/demo-produce.yaml --fit configs/demo-fit.yaml
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    """Run the comparison and write `check_plan.json`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--produce", type=Path, required=True)
    parser.add_argument("--fit", type=Path, required=True)
    parser.add_argument("--gpu", default="other", help="as for hscache plan; other: a CPU")
    parser.add_argument("--seconds", default="2", help="as for hscache bench all")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    folder = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    cache, run = folder / "cache", folder / "run"
    both = ["--produce", str(options.produce), "--fit", str(options.fit)]
    rounds: list[dict[str, float]] = []
    _produce(options.produce, cache)
    _call("hscache", "bench", "all", str(folder / "bench"), *both, "--shards", str(cache),
          "--seconds", options.seconds, "--json", str(folder / "all.json"))  # fmt: skip
    planned = _plan(folder, both, options.gpu)
    for _ in range(options.rounds):
        load = os.getloadavg()[0]
        produce_s = _produce(options.produce, cache)
        shutil.rmtree(run, ignore_errors=True)
        fit_s = _call("trainer", "fit", "--config", str(options.fit), "--shards", str(cache),
                      "--run-dir", str(run))  # fmt: skip
        rounds.append({"load": load, "produce_s": produce_s, "fit_s": fit_s,
                       "steps_s": _steps_s(run)})  # fmt: skip
    measured = {key: statistics.median(r[key] for r in rounds) for key in rounds[0]}
    [cached] = [
        p for p in planned["pipelines"]
        if p["name"] == "cached" and p["anchors_per_row"] == planned["run"]["anchors_per_row"]
    ]  # fmt: skip
    whole = measured["produce_s"] + measured["fit_s"]
    found = {
        "what": "check_plan",
        "plan": {"seconds": cached["seconds"], **_parts(planned, cached["seconds"])},
        "measured": {"seconds": whole, **measured},
        "off": cached["seconds"] / whole - 1,
        "rounds": rounds,
        "corpus": planned["corpus"],
        "rates": planned["rates"],
        "cpus": os.cpu_count(),
    }
    (folder / "check_plan.json").write_text(json.dumps(found, indent=2) + "\n")
    print(f"planned {found['plan']}, took {found['measured']}, off by {found['off']:+.1%}")


def _plan(folder: Path, both: list[str], gpu: str) -> dict[str, Any]:
    results = [str(p) for p in sorted((folder / "bench").glob("*-*.json"))
               if not p.name.endswith(".config.json")]  # fmt: skip
    flags: list[str] = []
    if gpu == "other":
        best = json.loads((folder / "all.json").read_text())["roofline"]["sustained"]
        flags = ["--ceiling-tflops", str(best / 1e12), "--gpu-memory", "1TB"]
    _call("hscache", "plan", *both, "--gpu", gpu, *flags, "--measured", *results,
          "--json", str(folder / "plan.json"))  # fmt: skip
    return json.loads((folder / "plan.json").read_text())


def _steps_s(run: Path) -> float:
    """Return the seconds of the steps alone, without start-up, looks and checkpoints."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    seconds, before = 0.0, 0
    for line in lines:
        if "perf/tokens_per_s" in line:
            seconds += (line["train/tokens"] - before) / line["perf/tokens_per_s"]
            before = line["train/tokens"]
    return seconds


def _parts(planned: dict[str, Any], seconds: float) -> dict[str, float]:
    rate = planned["rates"]["target"]["flop_per_s"]
    produce_s = planned["corpus"]["tokens"] * planned["flops"]["target_token"]["total"] / rate
    return {"produce_s": produce_s, "fit_s": seconds - produce_s}


def _produce(config: Path, cache: Path) -> float:
    shutil.rmtree(cache, ignore_errors=True)
    return _call("hscache", "produce", "--config", str(config), "--shard-dir", str(cache))


def _call(program: str, *words: str) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", f"{program}.cli", *words], check=True)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
