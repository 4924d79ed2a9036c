"""`trainer bench`: how fast a run would train on this machine, against what its GPU can do.

Takes a fit configuration and a cache; measures the products alone (the ceiling), forward and
backward, whole steps, whole steps from shards, and what a run pays beside them: its start, a look
at held-out documents, a checkpoint (written beside the file of figures, and deleted again).

    trainer bench --config configs/fit-qwen3.6-27b.yaml --shards /dev/shm/cache --json bench.json
"""

from __future__ import annotations

import datetime
import itertools
import logging
import math
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch._dynamo.utils import counters

from hscache import __version__
from hscache.began import running_s
from hscache.clock import Clock, gpu_monitor
from hscache.device import DTYPES, choose_device
from hscache.flops import RowFlops, row_flops
from hscache.progress import configure_logging
from hscache.report import format_table
from hscache.result_file import require_writable, write_json
from hscache.settings import to_dict
from trainer.batches import Batch, Loader
from trainer.bench_pauses import checkpoint_seconds, describe_pauses, look_seconds
from trainer.config import BenchConfig
from trainer.drafter_config import DrafterConfig
from trainer.run_plan import RunPlan, plan_run
from trainer.run_state import start_training
from trainer.state_arrays import arrays_in, row_bytes, stored_shapes
from trainer.states import merge_last_hidden, merge_planes
from trainer.training import Training

log = logging.getLogger(__name__)

_TURNS = 3
_KEPT_ROWS = 4
"""Rows kept on the device for the parts that are timed without a loader."""


def run(config: BenchConfig, *, dry_run: bool = False) -> int:
    """Run the command; with `dry_run` say what would be measured."""
    configure_logging()
    device = choose_device(config.device)
    plan = plan_run(config)
    if dry_run:
        print(
            f"would measure {config.repeats} steps of {config.global_batch_rows} rows on {device}"
        )
        return 0
    require_writable(config.json)
    figures = measure(plan, device)
    print(format_figures(figures))
    write_json(config.json, figures)
    return 0


def measure(run: RunPlan, device: torch.device) -> dict[str, Any]:
    """Return all figures: rates in FLOP/s and tokens/s, times in seconds, sizes in bytes."""
    config = run.config
    assert isinstance(config, BenchConfig)
    clock = Clock(device)
    training = start_training(run, device)
    batches = list(itertools.islice(_rows(run, device), _KEPT_ROWS))
    flops = [useful_flops(run.drafter, batch) for batch in batches]
    row_flop = statistics.mean(flop.total for flop in flops)
    log.info("compiling")
    started = time.perf_counter()
    for batch in batches:
        _forward_backward(training, batch)
    training.update(batches[:1])
    clock.finish()
    compile_s, ready_s = time.perf_counter() - started, running_s()

    clock.reset_peak()
    rows = itertools.cycle(batches)
    ceilings, forward, backward, both, shares = [], [], [], [], []
    for turn in range(1, _TURNS + 1):
        # In turns, so that both sides meet the same heat and the same power limit.
        log.info("turn %d of %d: the products alone, then forward and backward", turn, _TURNS)
        ceilings.append(gemm_rate(run.drafter, config, device))
        whole = []
        for _ in range(config.repeats * config.global_batch_rows):
            forward_s, whole_s = _timed_row(training, next(rows), clock)
            forward.append(forward_s)
            backward.append(whole_s - forward_s)
            whole.append(whole_s)
        both += whole
        rate = row_flop / statistics.median(whole)
        shares.append(rate / ceilings[-1]["sustained_flop_per_s"])
    ceiling = sorted(ceilings, key=lambda c: c["sustained_flop_per_s"])[_TURNS // 2]
    _clear(training)
    log.info("steps of %d rows", config.global_batch_rows)
    steps = []
    for _ in range(config.repeats):
        group = list(itertools.islice(rows, config.global_batch_rows))
        steps.append(clock.seconds(lambda group=group: training.update(group)))  # type: ignore[misc]
    optimizer = [_optimizer_seconds(training, batches[0], clock) for _ in range(config.repeats)]
    copy = _copy_seconds(run, device, clock)
    log.info("steps from shards")
    streamed = _from_shards(run, training, device)
    peak_bytes = clock.peak_bytes()
    log.info("a look at held-out documents, a checkpoint")
    looks, checkpoint = look_seconds(run, training), checkpoint_seconds(run, training, config.json)
    step_flop = row_flop * config.global_batch_rows
    worked_s = (len(batches) + 1) * statistics.median(both) + statistics.median(optimizer)
    figures = {
        "what": "trainer bench",
        "date": datetime.date.today().isoformat(),
        "machine": _machine(device),
        "config": to_dict(config),
        "drafter": to_dict(run.drafter),
        "row": {
            "tokens": statistics.mean(batch.num_tokens for batch in batches),
            "anchors": statistics.mean(batch.num_anchors for batch in batches),
            "scored_slots": statistics.mean(len(batch.labels_M) for batch in batches),
            "flop": {
                name: statistics.mean(getattr(flop, name) for flop in flops)
                for name in ("blocks", "head", "context", "attention", "total")
            },
        },
        "compile_s": compile_s,
        # of the process, to where its first step could be made; the rows of `compile_s` left out
        "start_s": max(0.0, ready_s - worked_s),
        "looks": looks,
        "checkpoint": checkpoint,
        "gemm": ceiling,
        "copy_s": spread(copy),
        "forward_s": spread(forward),
        "backward_s": spread(backward),
        "forward_backward": {**_rate(both, row_flop, ceiling), "share_by_turn": shares},
        "optimizer_s": spread(optimizer),
        "step": _rate(steps, step_flop, ceiling),
        "from_shards": streamed,
        "peak_bytes": peak_bytes,
    }
    if config.compare == "naive":
        log.info("the same rows without a compiler, attention by scaled_dot_product_attention")
        training.backend = "sdpa"
        training.chunk_size = 512
        rows = itertools.cycle(batches)
        naive = [
            clock.seconds(lambda: _forward_backward(training, next(rows)))
            for _ in range(2 + config.repeats)
        ][2:]
        figures["naive_forward_backward"] = _rate(naive, row_flop, ceiling)
    return figures


def useful_flops(config: DrafterConfig, batch: Batch) -> RowFlops:
    """Count what this row needs: its tokens, anchors, intervals and scored slots."""
    context_N = (batch.context_end_N - batch.context_start_N)[: batch.num_anchors].double()
    windows = [config.window_of(layer) or math.inf for layer in range(config.num_hidden_layers)]
    seen = [context_N.clamp(max=window).mean().item() for window in windows]
    return row_flops(
        config,
        num_tokens=batch.num_tokens,
        num_anchors=batch.num_anchors,
        mean_context=statistics.mean(seen),
        num_scored=len(batch.labels_M),
    )


def gemm_rate(config: DrafterConfig, bench: BenchConfig, device: torch.device) -> dict[str, Any]:
    """Return the rate of the run's own largest products, back to back on random data.

    The rate of the first moments is `burst`; a power-limited card then slows down, and `sustained`
    is the denominator of every share. Shapes count by their FLOPs.
    """
    queries = bench.anchors_per_row * config.block_size
    scored = bench.anchors_per_row * (config.block_size - 1)
    shapes = [
        (queries, config.hidden_size, config.intermediate_size),
        (queries, config.intermediate_size, config.hidden_size),
        (scored, config.hidden_size, config.vocab_size),
    ]
    dtype, clock = DTYPES[bench.dtype], Clock(device)
    operands = [
        (
            torch.randn(m, k, device=device, dtype=dtype),
            torch.randn(n, k, device=device, dtype=dtype).T,
            torch.empty(m, n, device=device, dtype=dtype),
        )
        for m, k, n in shapes
    ]
    flop = sum(2.0 * m * k * n for m, k, n in shapes)

    def products() -> None:
        for a, b, out in operands:
            torch.mm(a, b, out=out)

    products()
    clock.finish()
    seconds: list[float] = []
    with gpu_monitor(device) as gpu:
        ends = time.perf_counter() + bench.gemm_seconds
        while time.perf_counter() < ends or len(seconds) < 5:
            seconds.append(clock.seconds(products))
    later = seconds[len(seconds) // 2 :]
    return {
        "shapes": shapes,
        "burst_flop_per_s": flop / min(seconds[:3]),
        "sustained_flop_per_s": flop / statistics.median(later),
        "seconds": bench.gemm_seconds,
        **gpu,
    }


def _from_shards(run: RunPlan, training: Training, device: torch.device) -> dict[str, Any]:
    config = run.config
    assert isinstance(config, BenchConfig)
    graphs_at = []
    with _loader(run, device) as loader:
        groups = _groups(loader, config.global_batch_rows)
        for group in itertools.islice(groups, 2):  # the queue fills, the clock settles
            training.update(group)
        Clock(device).finish()
        loader.wait_s, num_tokens, num_anchors, num_rows = 0.0, 0, 0, 0
        started = time.perf_counter()
        with gpu_monitor(device) as gpu:
            for group in groups:
                before = _graphs()
                training.update(group)
                num_tokens += sum(batch.num_tokens for batch in group)
                num_anchors += sum(batch.num_anchors for batch in group)
                num_rows += len(group)
                if _graphs() > before:
                    graphs_at.append(num_rows)
                if time.perf_counter() - started > config.shard_seconds:
                    break
            Clock(device).finish()
            seconds = time.perf_counter() - started
    return {
        "seconds": seconds,
        "rows": num_rows,
        "tokens_per_s": num_tokens / seconds,
        "anchors_per_s": num_anchors / seconds,
        "data_wait": loader.wait_s / seconds,
        "graphs_compiled": _graphs(),
        "graphs_compiled_at_rows": graphs_at,
        **gpu,
    }


def _rows(run: RunPlan, device: torch.device) -> Iterator[Batch]:
    with _loader(run, device) as loader:
        yield from loader


def _loader(run: RunPlan, device: torch.device) -> Loader:
    return Loader(run.cache, run.row_task(), device=device, dtype=DTYPES[run.config.dtype])


def _groups(loader: Loader, size: int) -> Iterator[list[Batch]]:
    rows = iter(loader)
    while group := list(itertools.islice(rows, size)):
        yield group


def _forward_backward(training: Training, batch: Batch) -> None:
    loss_sum, _ = training.row_loss(batch)
    loss_sum.backward()


def _timed_row(training: Training, batch: Batch, clock: Clock) -> tuple[float, float]:
    # Seconds of forward, and of forward and backward.
    start = clock.mark()
    loss_sum, _ = training.row_loss(batch)
    middle = clock.mark()
    loss_sum.backward()
    end = clock.mark()
    return clock.between(start, middle), clock.between(start, end)


def _optimizer_seconds(training: Training, batch: Batch, clock: Clock) -> float:
    _forward_backward(training, batch)
    clock.finish()
    return clock.seconds(lambda: training.apply_gradients(batch.weight_sum))


def _copy_seconds(run: RunPlan, device: torch.device, clock: Clock) -> list[float]:
    # A row's states from pinned memory to the device, merged there; training does it on a stream of
    # its own, beside the row before.
    config = run.config
    assert isinstance(config, BenchConfig)
    soft, codec = config.loss.labels == "soft", run.cache.identity.encoding.codec
    shapes = stored_shapes(run.cache, last_hidden=soft)
    memory = torch.zeros(
        row_bytes(shapes, config.row_tokens), dtype=torch.uint8, pin_memory=device.type == "cuda"
    )
    arrays = arrays_in(memory.numpy().data, shapes, config.row_tokens)

    def copy() -> None:
        merge_planes(arrays, codec, device)
        if soft:
            merge_last_hidden(arrays, codec, device)

    copy()
    return [clock.seconds(copy) for _ in range(config.repeats)]


def _clear(training: Training) -> None:
    for parameter in training.masters.parameters:
        parameter.grad = None


def spread(seconds: list[float]) -> dict[str, float]:
    """Return median, smallest and largest."""
    return {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds)}


def _rate(seconds: list[float], flop: float, ceiling: dict[str, Any]) -> dict[str, Any]:
    rate = flop / statistics.median(seconds)
    return {
        "seconds": spread(seconds),
        "flop_per_s": rate,
        "share_of_sustained_gemm": rate / ceiling["sustained_flop_per_s"],
    }


def _graphs() -> int:
    return counters["stats"]["unique_graphs"]


def _machine(device: torch.device) -> dict[str, Any]:
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else platform.processor() or "CPU",
        "hscache": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "command": ["trainer", *sys.argv[1:]],
    }


def format_figures(figures: dict[str, Any]) -> str:
    """Return the figures as a table."""
    gemm, both, step = figures["gemm"], figures["forward_backward"], figures["step"]
    shards, row = figures["from_shards"], figures["row"]

    def tera(rate: float) -> str:
        return f"{rate / 1e12:,.1f} TFLOP/s"

    def milli(seconds: dict[str, float]) -> str:
        low, high = 1e3 * seconds["min"], 1e3 * seconds["max"]
        return f"{1e3 * seconds['median']:,.1f} ms ({low:,.1f} to {high:,.1f})"

    rows = [
        ["row", f"{row['tokens']:,.0f} tokens, {row['anchors']:,.0f} anchors, "
         f"{row['flop']['total'] / 1e12:,.2f} TFLOP"],
        ["products alone", f"{tera(gemm['sustained_flop_per_s'])} sustained over "
         f"{gemm['seconds']:g} s, {tera(gemm['burst_flop_per_s'])} at first"],
        ["copy and merge", f"{milli(figures['copy_s'])} a row, beside the row before"],
        ["forward", milli(figures["forward_s"])],
        ["backward", milli(figures["backward_s"])],
        ["both", f"{milli(both['seconds'])}, {tera(both['flop_per_s'])}, "
         f"{both['share_of_sustained_gemm']:.1%} of sustained"],
        ["optimizer", milli(figures["optimizer_s"])],
        ["step", f"{milli(step['seconds'])}, {tera(step['flop_per_s'])}, "
         f"{step['share_of_sustained_gemm']:.1%} of sustained"],
        ["from shards", f"{shards['tokens_per_s']:,.0f} tokens/s over {shards['seconds']:.0f} s, "
         f"waiting for data {shards['data_wait']:.2%}"],
        ["start", f"{figures['start_s']:.1f} s, compiling included"],
        *describe_pauses(figures),
        ["compiled", f"{shards['graphs_compiled']} graphs, {figures['compile_s']:.0f} s; "
         f"later than the first rows at rows {shards['graphs_compiled_at_rows']}"],
    ]  # fmt: skip
    if figures["peak_bytes"] is not None:
        rows.append(["peak memory", f"{figures['peak_bytes'] / 1e9:,.1f} GB"])
    if gemm["power_w"] is not None:
        rows.append(["power, clock", f"{shards['power_w']} W, {shards['clock_mhz']} MHz; products "
                     f"{gemm['power_w']} W, {gemm['clock_mhz']} MHz"])  # fmt: skip
    if (naive := figures.get("naive_forward_backward")) is not None:
        rows.append(["both, naive", f"{milli(naive['seconds'])}, "
                     f"{naive['share_of_sustained_gemm']:.1%} of sustained"])  # fmt: skip
    rows.append(["limit", limit_in_words(figures)])
    return format_table(["bench", figures["machine"]["device"]], rows)


def limit_in_words(figures: dict[str, Any]) -> str:
    """Say what stands between this run and the rate of its products."""
    shards, step = figures["from_shards"], figures["step"]
    if shards["data_wait"] > 0.05:
        return "data: training waits for shards; more threads, a faster disk, or codec none"
    if step["share_of_sustained_gemm"] < 0.6:
        return "the host or memory traffic: products are too small to fill the device"
    if (shards["power_capped_share"] or 0) > 0.5:
        return "the matrix units, at the card's power limit"
    return "the matrix units"
