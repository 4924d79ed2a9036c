"""Print the demo's one summary table from what its stages wrote.

python tools/demo_summary.py demo-out 480
"""

import json
import sys
from pathlib import Path

import hscache
from hscache.report import format_seconds, format_table

BAR = 1.05


def summary(out: Path, total_s: int) -> str:
    """Return the table; `total_s` is the demo's wall time without the installation."""
    seconds = {}
    for line in (out / "seconds").read_text().splitlines():
        stage, spent = line.split()
        seconds[stage] = int(spent)
    cache = hscache.open(out / "cache")
    shards = [cache.shard(number).manifest for number in cache.published_shards()]
    raw, stored = (sum(getattr(m, k) for m in shards) for k in ("raw_bytes", "stored_bytes"))
    figures = json.loads((out / "eval.json").read_text())
    results = figures["results"]
    last = json.loads((out / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    tables = {name: r["sequential"] for name, r in results.items() if name.endswith("table")}
    best = max(tables, key=lambda name: tables[name])
    rows = [
        ["cached", f"{sum(m.num_tokens for m in shards):,} tokens in {len(shards)} shards"],
        ["stored", f"{stored / 1e6:,.0f} MB, {raw / stored:.2f}x smaller, no bit lost"],
        ["trained", f"{last['step']:,} steps, loss {last['train/loss']:.2f}"],
        ["acceptance length, drafter", f"{results['drafter']['sequential']:.3f}"],
        [f"acceptance length, {best}", f"{tables[best]:.3f}"],
        ["acceptance length, prompt look-up", f"{results['prompt look-up']['sequential']:.3f}"],
        ["drafter / best trained table", f"{figures['ratio_to_best_table']:.3f} (bar: {BAR})"],
        ["really decoded", f"{figures['tokens_per_target_step']:.3f} tokens per target step"],
        [
            "text equals greedy decoding",
            f"{figures['identical_to_greedy']} of {figures['num_prompts']} prompts",
        ],
        *([stage, format_seconds(spent) if spent else "< 1 s"] for stage, spent in seconds.items()),
        ["all of it", format_seconds(total_s)],
    ]
    return format_table(["demo", "result"], rows)


if __name__ == "__main__":
    out = Path(sys.argv[1])
    print(summary(out, int(sys.argv[2])))
    if json.loads((out / "eval.json").read_text())["ratio_to_best_table"] < BAR:
        sys.exit(f"the drafter is below {BAR} times the best table: something is wrong")
