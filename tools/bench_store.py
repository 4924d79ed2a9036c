"""Compare hscache's store with others, in one run, on the same states, with the same threads.

    python tools/bench_store.py --cache demo-out/cache --folder /dev/shm --json a.json --png a.png

Every side writes the same samples and reads them back, in turns, `--rounds` times: real states
(those of --cache, regrouped to 5120 wide) and random ones. GB are 10^9 bytes of decoded bf16. A
library that is not installed is listed as such. Where the filesystem can forget a file, reads are
measured cold too. malloc keeps what it is given back (MALLOC_* below), for all sides alike.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from store_sides import PARALLEL_LIMIT, SIDES, exact, read_all

from hscache.bench_states import random_states, regrouped
from hscache.bench_store import drop_from_memory
from hscache.planes import split
from hscache.reader import open_cache
from hscache.report import format_table
from hscache.zarr_array import encode_chunk

MALLOC = {"MALLOC_MMAP_THRESHOLD_": "1073741824", "MALLOC_TRIM_THRESHOLD_": "8589934592"}
LIBRARIES = [
    "numpy",
    "torch",
    "zarr",
    "numcodecs",
    "zstandard",
    "crc32c",
    "safetensors",
    "zipnn",
    "blosc2",
    "tensorstore",
    "mosaicml-streaming",
]
Row = dict[str, Any]


def main() -> int:
    """Parse arguments, measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", type=Path, help="cache of real states; none: random ones only")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--samples", type=int, default=12)
    parser.add_argument("--sample-tokens", type=int, default=512)
    parser.add_argument("--num-layers", type=int, default=5)
    parser.add_argument("--hidden-size", type=int, default=5120)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sides", nargs="+", default=list(SIDES))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path)
    arguments = parser.parse_args()
    if any(os.environ.get(name) != value for name, value in MALLOC.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **MALLOC})
    figures = measure(arguments)
    print(format_figures(figures))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    if arguments.png:
        draw(figures, arguments.png)
    return 0


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return all figures."""
    shape = (
        arguments.samples * arguments.sample_tokens,
        arguments.num_layers,
        arguments.hidden_size,
    )
    data = {"random": random_states(shape)}
    if arguments.cache is not None:
        data = {"real": regrouped(open_cache(arguments.cache), shape), **data}
    load_before, rows = os.getloadavg(), []
    missing: dict[str, str] = {}
    memory = memory_figures(data)
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        for name, bits in data.items():
            samples = np.split(bits, arguments.samples)
            rows += compare(arguments, name, samples, threads, missing)
    return {
        "what": "tools/bench_store.py",
        "date": datetime.date.today().isoformat(),
        "machine": {
            "cpu": cpu_name(),
            "cpus": os.cpu_count(),
            "python": platform.python_version(),
            "load_before": load_before,
            "load_after": os.getloadavg(),
        },
        "libraries": {name: version(name) for name in LIBRARIES},
        "settings": {k: str(v) if isinstance(v, Path) else v for k, v in vars(arguments).items()},
        "memory": memory,
        "rows": rows,
        "not_installed": missing,
        "bars": bars(rows, memory),
    }


def compare(
    arguments: argparse.Namespace,
    data: str,
    samples: list[np.ndarray],
    threads: int,
    missing: dict[str, str],
) -> list[Row]:
    """Run all sides in turns over one set of samples; return a row for each."""
    timings: dict[str, Row] = {}
    for number in range(arguments.rounds):
        for name in arguments.sides if number % 2 == 0 else reversed(arguments.sides):
            try:
                side = SIDES[name]()
            except ImportError as error:
                missing[name] = str(error)
                continue
            own = samples[: PARALLEL_LIMIT.get(name, len(samples))]
            row = timings.setdefault(name, {"write": [], "warm": [], "cold": [], "open_s": []})
            folder = Path(tempfile.mkdtemp(prefix="bench-store-", dir=arguments.folder))
            try:
                one_turn(side, name, own, threads, folder, row)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            show(number, data, threads, name, row)
    rows = []
    for name in arguments.sides:
        if name not in timings:
            continue
        row = timings[name]
        for part in ("write", "warm", "cold"):
            row[part] = rate(row[part], row["bytes"]) if row[part] else None
        row["open_s"] = statistics.median(row["open_s"])
        rows.append({"side": name, "data": data, "threads": threads, **row})
    return rows


def one_turn(
    side: Any, name: str, samples: list[np.ndarray], threads: int, folder: Path, row: Row
) -> None:
    """Write, read cold if the files can be forgotten, read warm."""
    side.prepare(samples)
    row["write"].append(timed(lambda: (side.write(folder, samples, threads), fsync_all(folder))))
    found = [path for path in folder.rglob("*") if path.is_file()]
    row["files"], row["bytes"] = len(found), sum(sample.nbytes for sample in samples)
    row["ratio"] = row["bytes"] / sum(path.stat().st_size for path in found)
    if drop_from_memory(found):
        side.open(folder, threads)
        row["cold"].append(timed(lambda: read_all(side, name, samples, threads)))
    row["open_s"].append(timed(lambda: side.open(folder, threads))[0])
    read_all(side, name, samples, threads)
    row["warm"].append(timed(lambda: read_all(side, name, samples, threads)))
    row["exact"] = exact(side, samples)


def memory_figures(data: dict[str, np.ndarray]) -> dict[str, Any]:
    """Measure copying, and our encoder alone, from planes in memory to frames in memory."""
    figures: dict[str, Any] = {}
    for name, bits in data.items():
        chunks = [np.ascontiguousarray(bits[:256, layer]) for layer in range(bits.shape[1])]
        planes = [split(chunk) for chunk in chunks]
        size = sum(chunk.nbytes for chunk in chunks)
        target = np.empty_like(bits[:256])
        frames = _encode(planes)
        copies = [timed(lambda: np.copyto(target, bits[:256])) for _ in range(25)]  # noqa: B023
        encodes = [timed(lambda: _encode(planes)) for _ in range(25)]  # noqa: B023
        figures[name] = {
            "memcpy": rate(copies, size),
            "encode_planes": rate(encodes, size),
            "ratio": size / sum(map(len, frames)),
        }
    return figures


def _encode(planes: list[tuple[np.ndarray, np.ndarray]]) -> list[bytes | memoryview]:
    """Return what goes to the file of exponent and significand planes."""
    return [
        encode_chunk(plane, compressed=compressed).payload
        for both in planes
        for plane, compressed in zip(both, (True, False), strict=True)
    ]


def bars(rows: list[Row], memory: dict[str, Any]) -> list[Row]:
    """Return the project's bars and what one thread reached, on real states if there are any.

    `wall` is of the clock's medians; `cpu` of the medians of CPU time, which a busy machine that
    takes the core away does not change much. A bar counts as reached by either, and says by which.
    """
    data = "real" if "real" in memory else "random"
    one = {row["side"]: row for row in rows if row["threads"] == 1 and row["data"] == data}

    def rates(figure: Row | None) -> tuple[float, float] | None:
        if figure is None:
            return None
        return figure["gb_per_s"]["median"], 1 / figure["cpu_s_per_gb"]["median"]

    def of(side: str, part: str = "warm") -> tuple[float, float] | None:
        return rates(one[side][part]) if side in one else None

    def over(a: tuple[float, float] | None, b: tuple[float, float] | None) -> Any:
        return (a[0] / b[0], a[1] / b[1]) if a and b else None

    planes = of("hscache lossless, planes")
    ratio = memory[data]["ratio"]
    found = [
        ("lossless ratio", (ratio, ratio), 1.43, ""),
        ("decode to planes", planes, 1.9, "GB/s"),
        ("decode to planes / zipnn", over(planes, of("zipnn")), 1.6, "x"),
        ("decode to planes / zarr-python zstd", over(planes, of("zarr-python zstd")), 2.0, "x"),
        ("decode and merge", of("hscache lossless, merged"), 0.9, "GB/s"),
        ("encode from planes", rates(memory[data]["encode_planes"]), 1.2, "GB/s"),
        ("none / safetensors mmap", over(of("hscache none"), of("safetensors")), 0.65, "x"),
    ]
    return [
        {
            "bar": name,
            "wall": value and value[0],
            "cpu": value and value[1],
            "expected": bar,
            "unit": unit,
            "reached": verdict(value, bar),
        }
        for name, value, bar, unit in found
    ]


def verdict(found: tuple[float, float] | None, bar: float) -> str:
    """Say whether a bar was reached, by the clock or only by CPU time."""
    if found is None:
        return "not measured"
    if found[0] >= bar:
        return "reached"
    return "reached by CPU time" if found[1] >= bar else "NOT reached"


def format_figures(figures: dict[str, Any]) -> str:
    """Return tables: one for each kind of states and number of threads, then the bars."""
    parts = []
    for threads in figures["settings"]["threads"]:
        for data in figures["memory"]:
            rows = [r for r in figures["rows"] if (r["threads"], r["data"]) == (threads, data)]
            cells = [
                [
                    row["side"],
                    cell(row["write"]), cpu(row["write"]),
                    cell(row["warm"]), cpu(row["warm"]), cell(row["cold"]),
                    f"{row['ratio']:.3f}", row["files"], f"{1e3 * row['open_s']:.1f}",
                    "yes" if row["exact"] else "no",
                ]
                for row in rows
            ]  # fmt: skip
            head = ["side", "write GB/s", "cpu-s/GB", "read GB/s", "cpu-s/GB", "cold GB/s"]
            head += ["ratio", "files", "open ms", "exact"]
            parts.append(f"{data} states, {threads} thread(s)\n" + format_table(head, cells))
    parts += [f"{name}: not installed ({why})" for name, why in figures["not_installed"].items()]
    cells = []
    for bar in figures["bars"]:
        wall, cpu_rate = (
            None if bar[by] is None else f"{bar[by]:.3f} {bar['unit']}" for by in ("wall", "cpu")
        )
        cells.append([bar["bar"], wall, cpu_rate, f"{bar['expected']:g}", bar["reached"]])
    head = ["bar, one thread", "by the clock", "by CPU time", "at least", ""]
    parts.append(format_table(head, cells))
    machine = figures["machine"]
    parts.append(
        f"{machine['cpu']}, {machine['cpus']} CPUs; load {machine['load_before'][0]:.1f} before, "
        f"{machine['load_after'][0]:.1f} after; {figures['settings']['folder']}"
    )
    return "\n\n".join(parts)


def draw(figures: dict[str, Any], path: Path) -> None:
    """Draw GB of states per second of CPU time, one thread, with the range; ratios in the names."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    data = next(iter(figures["memory"]))
    threads = min(figures["settings"]["threads"])
    rows = [r for r in figures["rows"] if (r["threads"], r["data"]) == (threads, data)][::-1]
    figure, axes = pyplot.subplots(1, 2, figsize=(12, 6), sharey=True)
    for axis, part, title in zip(
        axes, ("warm", "write"), ("read from memory", "write"), strict=True
    ):
        seconds = [row[part]["cpu_s_per_gb"] for row in rows]
        medians = [1 / s["median"] for s in seconds]
        reach = [
            [1 / s["median"] - 1 / s["max"] for s in seconds],
            [1 / s["min"] - 1 / s["median"] for s in seconds],
        ]
        colours = ["#2a6f97" if r["side"].startswith("hscache") else "#b0b0b0" for r in rows]
        axis.barh(range(len(rows)), medians, xerr=reach, color=colours, ecolor="#444444")
        axis.set_title(f"{title}: GB of bf16 states per CPU second, {data} states", fontsize=10)
        axis.set_xscale("log")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_yticks(range(len(rows)), [f"{r['side']}  ({r['ratio']:.2f}x)" for r in rows])
    where = f"{figures['machine']['cpu']}, {figures['settings']['folder']}, 1 thread"
    figure.text(0.01, 0.01, f"bars: median, lines: range; {where}", fontsize=8)
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(path, dpi=110)


def fsync_all(folder: Path) -> None:
    """Make every file durable: ours has done so already, the others have not."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Return seconds of the clock and of all this process's threads."""
    started, cpu_started = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - started, time.process_time() - cpu_started


def rate(timings: list[tuple[float, float]], size_bytes: int) -> Row:
    """Return GB/s and CPU seconds per GB, median and range."""
    gigabytes = size_bytes / 1e9
    return {
        "gb_per_s": spread([gigabytes / seconds for seconds, _ in timings]),
        "cpu_s_per_gb": spread([seconds / gigabytes for _, seconds in timings]),
    }


def spread(values: list[float]) -> dict[str, float]:
    """Return median and range."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def cell(figure: Row | None) -> str | None:
    """Return a rate with its range."""
    if figure is None:
        return None
    found = figure["gb_per_s"]
    return f"{found['median']:.2f} ({found['min']:.2f}-{found['max']:.2f})"


def cpu(figure: Row | None) -> str | None:
    """Return the CPU time of a GB."""
    return None if figure is None else f"{figure['cpu_s_per_gb']['median']:.2f}"


def show(number: int, data: str, threads: int, name: str, row: Row) -> None:
    """Say what was measured, on stderr."""
    write, warm = (row["bytes"] / 1e9 / row[part][-1][0] for part in ("write", "warm"))
    where = f"round {number + 1}, {data}, {threads} thread(s), {name}"
    print(f"{where}: write {write:.2f}, read {warm:.2f} GB/s", file=sys.stderr)


def version(name: str) -> str | None:
    """Return an installed library's version."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    """Return the processor's name."""
    with open("/proc/cpuinfo") as file:
        names = [line.split(":")[1].strip() for line in file if line.startswith("model name")]
    return names[0] if names else platform.machine()


if __name__ == "__main__":
    sys.exit(main())
