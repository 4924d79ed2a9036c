"""`hscache plan`: what a run costs before it is started, and what limits it. Nothing is written.

Takes the config files of `produce` and `trainer fit`, a corpus or its size, GPUs and a disk; prints
bytes, window, FLOPs, limits and the days of each pipeline (`hscache.cost` has the arithmetic).

    hscache plan --produce p.yaml --fit f.yaml --gpu h200 --gpus 4 --tokens 1e9 --mean-tokens 1700
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

from hscache import budget, cost
from hscache.config import DEFAULT_RESERVE, spaced_layer_ids
from hscache.cost_config import CostConfig, PlannedFit, PlannedProduce
from hscache.cost_corpus import describe_corpus
from hscache.cost_memory import require_memory
from hscache.cost_text import format_plan
from hscache.drafter_sizes import DrafterShape, num_parameters
from hscache.flops import RowFlops, row_flops
from hscache.forward_flops import ForwardFlops, forward_flops
from hscache.gpus import GPUS, TERA, Gpu
from hscache.measured_rates import Measured, read_measured
from hscache.planes import ARRAYS
from hscache.progress import configure_logging
from hscache.settings import read_part
from hscache.sizes import parse_size
from hscache.target_shape import TargetShape, load_shape

DEFAULT_SHARE = 0.75
"""Of the sustained products, where nothing was measured: both sides (design.md section 1)."""
DEFAULT_SUSTAINED = 0.7
"""Of the dense peak, where nobody measured the products of a GPU: an H200 sustains 67 %."""


def run(config: CostConfig, *, dry_run: bool = False) -> int:
    """Print the plan; a dry run only leaves `--json` unwritten."""
    configure_logging()
    figures = plan(config)
    print(format_plan(figures))
    if config.json is not None and not dry_run:
        config.json.parent.mkdir(parents=True, exist_ok=True)
        config.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


def plan(config: CostConfig) -> dict[str, Any]:
    """Return all figures as nested plain values: bytes, FLOPs, days.

    Raises ConfigError with the arithmetic when a model does not fit the GPU.
    """
    produce, fit = read_part(config.produce, PlannedProduce), read_part(config.fit, PlannedFit)
    if config.codec is not None:
        store = dataclasses.replace(produce.store, codec=config.codec)
        produce = dataclasses.replace(produce, store=store)
    if config.passes is not None:
        fit = dataclasses.replace(fit, passes=config.passes)
    if config.anchors_per_row is not None:
        fit = dataclasses.replace(fit, anchors_per_row=config.anchors_per_row)
    gpu = _gpu(config)
    target = load_shape(produce.target, config.target_config)
    layers = produce.target.target_layer_ids or spaced_layer_ids(
        target.num_blocks, produce.target.num_features
    )
    num_blocks = target.num_blocks if produce.target.last_hidden else layers[-1] + 1
    drafter = DrafterShape(
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        num_features=len(layers),
        **dataclasses.asdict(fit.drafter),
    )
    corpus = describe_corpus(config, produce)
    measured = read_measured(
        config.measured, config.gpu, hidden_size=target.hidden_size, num_blocks=target.num_blocks
    )
    memory = require_memory(
        produce, fit, gpu, target, drafter, num_blocks, corpus["longest"], config.gpus
    )
    lengths = cost.Lengths(
        num_documents=corpus["documents"],
        num_tokens=corpus["tokens"],
        mean_square=corpus["mean_square"],
        longest=corpus["longest"],
    )
    of_target = forward_flops(target, num_blocks, num_tokens=1, mean_context=lengths.mean_context)
    rows = {
        anchors: row_flops(
            drafter,
            num_tokens=fit.row_tokens,
            num_anchors=anchors,
            mean_context=lengths.mean_context,
            num_scored=None
            if measured.scored_per_anchor is None
            else round(anchors * measured.scored_per_anchor),
        )
        for anchors in sorted({fit.anchors_per_row, config.fewer_anchors}, reverse=True)
    }
    disk = _disk(config, produce, fit, target, len(layers), corpus, measured)
    sustained = _sustained(config, gpu, measured)
    speeds, rates = _speeds(measured, sustained["flop_per_s"], of_target)
    token_bytes = disk["raw_token_bytes"]
    pipelines, limits = [], []
    for anchors, row in rows.items():
        work = _work(lengths, corpus, fit, of_target, row)
        limits.append(_limits(anchors, work, config.gpus, gpu, sustained["flop_per_s"]))
        pipelines += [
            {"anchors_per_row": anchors, **dataclasses.asdict(found), "days": found.days}
            for found in (
                cost.lock_step(work, speeds, config.gpus),
                cost.online(work, speeds, config.gpus),
                cost.cached(work, speeds, config.gpus, token_bytes),
                cost.windowed(work, speeds, config.gpus, token_bytes),
            )
            if found is not None
        ]
    return {
        "what": "hscache plan",
        "run": {
            "target": produce.target.path,
            "layers": list(layers),
            "blocks_run": num_blocks,
            "blocks": target.num_blocks,
            "hidden_size": target.hidden_size,
            "drafter_weights": num_parameters(drafter),
            "passes": fit.passes,
            "row_tokens": fit.row_tokens,
            "anchors_per_row": fit.anchors_per_row,
            "block_size": fit.drafter.block_size,
            "gpus": config.gpus,
        },
        "gpu": {**dataclasses.asdict(gpu), **sustained},
        "corpus": {**corpus, "mean": lengths.mean, "mean_context": lengths.mean_context},
        "disk": disk,
        "memory": memory,
        "flops": {
            "target_token": {**dataclasses.asdict(of_target), "total": of_target.total},
            "drafter_token": {
                str(anchors): {
                    **{n: v / fit.row_tokens for n, v in dataclasses.asdict(row).items()},
                    "total": row.total / fit.row_tokens,
                }
                for anchors, row in rows.items()
            },
        },
        "rates": rates,
        "limits": limits,
        "pipelines": pipelines,
        "levers": _levers(pipelines, limits, fit.anchors_per_row, config.fewer_anchors, disk),
        "notes": measured.notes,
    }


def _gpu(config: CostConfig) -> Gpu:
    if config.gpu != "other":
        return GPUS[config.gpu]
    assert config.ceiling_tflops is not None
    assert config.gpu_memory is not None
    return Gpu(
        name="a GPU that is not in the table",
        bf16=config.ceiling_tflops * TERA,
        fp8=None,
        fp4=None,
        sparse_bf16=None,
        memory_bytes=parse_size(config.gpu_memory, "gpu_memory"),
        bandwidth=None,
        power_w=None,
        source="no dense peak is known: the measured ceiling stands in for it",
    )


def _disk(
    config: CostConfig,
    produce: PlannedProduce,
    fit: PlannedFit,
    target: TargetShape,
    num_layers: int,
    corpus: dict[str, Any],
    measured: Measured,
) -> dict[str, Any]:
    stored_layers = num_layers + produce.target.last_hidden
    raw = 2 * stored_layers * target.hidden_size
    # plan/: ids and mask of each token (ids compress by a third or more; counted whole), and about
    # 28 bytes a document; frozen/: embedding and head
    fixed = 5 * corpus["tokens"] + 28 * corpus["documents"] + target.frozen_bytes
    codecs = {}
    for codec in ARRAYS:
        ratio = measured.ratios.get(codec, cost.RATIOS[codec])
        codecs[codec] = {
            "ratio": ratio,
            "measured": codec in measured.ratios,
            "token_bytes": raw / ratio,
            "states_bytes": raw / ratio * corpus["tokens"],
            "total_bytes": raw / ratio * corpus["tokens"] + fixed,
        }
    codec = produce.store.codec
    shape = budget.ShardShape(
        codec=codec,
        num_layers=num_layers,
        hidden_size=target.hidden_size,
        last_hidden=produce.target.last_hidden,
    )
    inodes = corpus["shards"] * budget.shard_inodes(shape)
    free_bytes, free_inodes = _free(config)
    documents = math.ceil(corpus["documents"] / corpus["shards"])
    shard_bytes = budget.shard_bound(shape, produce.store.shard_tokens, documents)
    window = cost.plan_window(
        free_bytes,
        shard_bytes=shard_bytes,
        num_training_shards=corpus["shards"] - corpus["held_out_shards"],
        held_out_bytes=corpus["held_out_shards"] * shard_bytes,
        fixed_bytes=fixed,
        passes=fit.passes,
    )
    return {
        "codec": codec,
        "raw_token_bytes": raw,
        "fixed_bytes": fixed,
        "codecs": codecs,
        "inodes": inodes,
        "free_bytes": free_bytes,
        "free_inodes": free_inodes,
        "fits": codecs[codec]["total_bytes"] <= free_bytes
        and (free_inodes is None or inodes <= free_inodes),
        "worst_shard_bytes": shard_bytes,
        "reserve_shards": DEFAULT_RESERVE,
        "window": {**dataclasses.asdict(window), "fits": window.fits},
    }


def _free(config: CostConfig) -> tuple[int, int | None]:
    if config.disk is not None:
        return parse_size(config.disk, "disk"), None
    return budget.free_bytes(config.shard_dir.absolute()), budget.free_inodes(
        config.shard_dir.absolute()
    )


def _sustained(config: CostConfig, gpu: Gpu, measured: Measured) -> dict[str, Any]:
    if config.ceiling_tflops is not None:
        return {"flop_per_s": config.ceiling_tflops * TERA, "how": "given as ceiling_tflops"}
    if measured.sustained is not None:
        return {"flop_per_s": measured.sustained, "how": "measured by a bench"}
    if gpu.sustained is not None:
        return {"flop_per_s": gpu.sustained, "how": gpu.sustained_source}
    how = f"assumed: {DEFAULT_SUSTAINED:.0%} of the dense peak, for nobody measured it"
    return {"flop_per_s": DEFAULT_SUSTAINED * gpu.bf16, "how": how}


def _speeds(
    measured: Measured, sustained: float, of_target: ForwardFlops
) -> tuple[cost.Speeds, dict[str, Any]]:
    assumed = f"assumed: {DEFAULT_SHARE:.0%} of the sustained products"
    target, target_how = DEFAULT_SHARE * sustained, assumed
    if measured.target_flop_per_s is not None:
        target, target_how = measured.target_flop_per_s, "measured"
    elif measured.target_tokens_per_s is not None:
        target = measured.target_tokens_per_s * of_target.total
        target_how = "measured, shards of a cache"
    trainer, trainer_how = DEFAULT_SHARE * sustained, assumed
    if measured.trainer_flop_per_s is not None:
        trainer, trainer_how = measured.trainer_flop_per_s, "measured, steps from shards"
    speeds = cost.Speeds(target=target, trainer=trainer, write=measured.write, read=measured.read)
    return speeds, {
        "target": {"flop_per_s": target, "share": target / sustained, "how": target_how},
        "trainer": {"flop_per_s": trainer, "share": trainer / sustained, "how": trainer_how},
        "disk_write": None if math.isinf(measured.write) else measured.write,
        "disk_read": None if math.isinf(measured.read) else measured.read,
    }


def _work(
    lengths: cost.Lengths,
    corpus: dict[str, Any],
    fit: PlannedFit,
    of_target: ForwardFlops,
    row: RowFlops,
) -> cost.Work:
    # The target also runs over held-out documents, the drafter does not: a fraction of a percent.
    share = corpus["training_tokens"] / corpus["tokens"]
    return cost.Work(
        num_tokens=lengths.num_tokens,
        passes=fit.passes,
        target=of_target.total,
        drafter=share * row.total / fit.row_tokens,
    )


def _limits(anchors: int, work: cost.Work, gpus: int, gpu: Gpu, sustained: float) -> dict[str, Any]:
    return {
        "anchors_per_row": anchors,
        **{
            f"{name}_{rate_name}_days": cost.limit_days(flop, gpus, rate)
            for name, flop in (("online", work.online_flop), ("cached", work.cached_flop))
            for rate_name, rate in (("dense", gpu.bf16), ("sustained", sustained))
        },
        "drafter_share": work.passes * work.drafter * work.num_tokens / work.cached_flop,
    }


def _levers(
    pipelines: list[dict[str, Any]],
    limits: list[dict[str, Any]],
    anchors: int,
    fewer: int,
    disk: dict[str, Any],
) -> list[dict[str, Any]]:
    def days(name: str, anchors_per_row: int) -> float:
        [found] = [
            p["days"]
            for p in pipelines
            if p["name"] == name and p["anchors_per_row"] == anchors_per_row
        ]
        return found

    steps = [
        ("lock step", days("lock step", anchors)),
        ("both sides at once", days("asynchronous online", anchors)),
    ]
    windowed = any(p["name"] == "window" for p in pipelines)
    kept = "cached" if disk["fits"] or not windowed else "window"
    steps.append((f"target once ({kept})", days(kept, anchors)))
    last = anchors
    if fewer < anchors:
        steps.append((f"{fewer} anchors a row, not {anchors}", days(kept, fewer)))
        last = fewer
    [limit] = [found for found in limits if found["anchors_per_row"] == last]
    steps.append(("sustained products, nothing else", limit["cached_sustained_days"]))
    steps.append(("dense peak at 100 %", limit["cached_dense_days"]))
    return [dataclasses.asdict(lever) for lever in cost.compound(steps)]
