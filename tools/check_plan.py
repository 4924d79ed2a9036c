"""Compare the time that `hscache plan` says with the time that `produce` and `trainer fit` take.

Takes the config files of both, and a folder for everything that is written. Produces and trains
once, which fills the caches of disk and compilers and makes the shards that the benches need; runs
`hscache bench all`; plans with its files; then produces and trains anew, each `--rounds` times. The
medians are compared, part by part. The load of the machine is in the JSON.

    python tools/check_plan.py OUT --produce configs/demo-produce.yaml --fit configs/demo-fit.yaml

`--until first` ends after the first time; a later call with the same folder goes on from there.
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
from importlib.util import find_spec
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
    parser.add_argument("--until", choices=("first", "end"), default="end")
    options = parser.parse_args()
    folder = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    first = folder / "first.json"
    if not first.exists():
        first.write_text(json.dumps(_round(options, folder)) + "\n")
    if options.until == "first":
        print(first.read_text())
        return
    both = ["--produce", str(options.produce), "--fit", str(options.fit)]
    picture = ["--picture", str(folder / "roofline.svg")] if find_spec("matplotlib") else []
    _call(
        "hscache", "bench", "all", str(folder / "bench"), *both, "--shards", str(folder / "cache"),
        "--seconds", options.seconds, "--json", str(folder / "all.json"), *picture,
    )  # fmt: skip
    planned = _plan(folder, both, options.gpu)
    from_shards = _plan(folder, both, options.gpu, str(folder / "cache"))
    rounds = [_round(options, folder) for _ in range(options.rounds)]
    measured = {key: statistics.median(r[key] for r in rounds) for key in rounds[0]}
    expected = _parts(planned)
    found = {
        "what": "check_plan",
        "plan": expected,
        "measured": measured,
        # with the rate of the first cache's shards, not that of the forward and the disk alone
        "plan_from_shards": _parts(from_shards),
        "off": {
            name: expected[name] / measured[name] - 1
            for name in ("seconds", "produce_s", "fit_s", "steps_s", "looks_s")
            if measured[name]
        },
        "first": json.loads(first.read_text()),
        "rounds": rounds,
        "corpus": planned["corpus"],
        "rates": planned["rates"],
        "pauses": planned["pauses"],
        "cpus": os.cpu_count(),
    }
    (folder / "check_plan.json").write_text(json.dumps(found, indent=2) + "\n")
    for name, off in found["off"].items():
        print(
            f"{name:10} planned {expected[name]:8.1f} s, took {measured[name]:8.1f} s, {off:+.1%}"
        )
    shards_s = found["plan_from_shards"]["produce_s"]
    print(f"produce_s  planned {shards_s:8.1f} s from the shards of the first cache")
    print(f"load {measured['load']:.1f} on {os.cpu_count()} cores")


def _round(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Produce and train anew; return the seconds of each, and of the parts of training."""
    cache, run = folder / "cache", folder / "run"
    load = os.getloadavg()[0]
    shutil.rmtree(cache, ignore_errors=True)
    shutil.rmtree(run, ignore_errors=True)
    produce_s = _call("hscache", "produce", "--config", str(options.produce),
                      "--shard-dir", str(cache))  # fmt: skip
    fit_s = _call("trainer", "fit", "--config", str(options.fit), "--shards", str(cache),
                  "--run-dir", str(run))  # fmt: skip
    return {"load": load, "seconds": produce_s + fit_s, "produce_s": produce_s, "fit_s": fit_s,
            **_parts_of_fit(run)}  # fmt: skip


def _plan(folder: Path, both: list[str], gpu: str, *more: str) -> dict[str, Any]:
    results = [str(p) for p in sorted((folder / "bench").glob("*-*.json"))
               if not p.name.endswith(".config.json")]  # fmt: skip
    flags: list[str] = []
    if gpu == "other":
        best = json.loads((folder / "all.json").read_text())["roofline"]["sustained"]
        flags = ["--ceiling-tflops", str(best / 1e12), "--gpu-memory", "1TB"]
    written = folder / ("plan-from-shards.json" if more else "plan.json")
    _call("hscache", "plan", *both, "--gpu", gpu, *flags, "--measured", *results, *more,
          "--json", str(written))  # fmt: skip
    return json.loads(written.read_text())


def _parts_of_fit(run: Path) -> dict[str, float]:
    """Return the seconds of all steps and looks; steps at the rate behind the first line, whose
    time has the start of the reader and all compiling in it."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line.get("perf/tokens_per_s")]
    tokens = [line["train/tokens"] for line in steps]
    later_s = sum(
        (reached - before) / line["perf/tokens_per_s"]
        for before, reached, line in zip(tokens, tokens[1:], steps[1:], strict=False)
    )
    share = (tokens[-1] - tokens[0]) / tokens[-1]
    return {
        "steps_s": later_s / share if share else 0.0,
        "looks_s": sum(line.get("eval/seconds", 0.0) for line in lines),
    }


def _parts(planned: dict[str, Any]) -> dict[str, float]:
    """Return what the plan says of produce, then fit, and of the parts of the second."""
    run, pauses = planned["run"], planned["pauses"]
    [cached] = [
        p for p in planned["pipelines"]
        if p["name"] == "cached" and p["anchors_per_row"] == run["anchors_per_row"]
    ]  # fmt: skip
    token = planned["flops"]["drafter_token"][str(run["anchors_per_row"])]["total"]
    tokens = planned["corpus"]["training_tokens"] * run["passes"]
    steps_s = tokens * token / planned["rates"]["trainer"]["flop_per_s"]
    fit_s = pauses["trainer_start_s"] + steps_s + cached["looks_s"] + cached["checkpoints_s"]
    return {
        "seconds": cached["seconds"],
        "produce_s": cached["seconds"] - fit_s,
        "fit_s": fit_s,
        "steps_s": steps_s,
        **{name: cached[name] for name in ("start_s", "looks_s", "checkpoints_s")},
    }


def _call(program: str, *words: str) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", f"{program}.cli", *words], check=True)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
