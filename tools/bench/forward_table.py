"""Print the README's table of forward rates from the figures in `results/`.

python tools/bench/forward_table.py
"""

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
HEAD = """| GPU, pack | tokens/s | useful TFLOP/s | of sustained GEMM | of vendor's dense | peak |
|---|---|---|---|---|---|"""


def row(figures: dict[str, Any], forward: dict[str, Any]) -> str:
    """Return the row of one size of pack."""
    rate, ceiling = forward["flop_per_s"], figures["gemm"]["sustained_flop_per_s"]
    dense = figures["dense_flop_per_s"]
    vendor = f"{rate / dense:.1%} of {dense / 1e12:.0f}" if dense else "-"
    peak = f"{forward['peak_bytes'] / 1e9:.0f} GB" if forward["peak_bytes"] else "-"
    return (
        f"| {figures['machine']['device']}, {forward['tokens']:,} tokens | "
        f"{forward['tokens_per_s']:,.0f} | {rate / 1e12:.0f} | "
        f"{rate / ceiling:.1%} of {ceiling / 1e12:.0f} | {vendor} | {peak} |"
    )


def table() -> str:
    """Return the table of all `results/forward-*.json`."""
    rows = [HEAD]
    for path in sorted(RESULTS.glob("forward-*.json")):
        figures = json.loads(path.read_text())
        rows += [row(figures, forward) for forward in figures["budgets"]]
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
