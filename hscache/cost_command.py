"""`hscache plan`: what a run costs before it is started, and what limits it. Nothing is written.

Takes the config files of `produce` and `trainer fit`, a corpus or its size, GPUs and a disk; prints
bytes, window, FLOPs, limits and the days of each pipeline (`hscache.cost` has the arithmetic).

    hscache plan --produce p.yaml --fit f.yaml --gpu h200 --gpus 4 --tokens 1e9 --mean-tokens 1700
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from hscache import budget, cost
from hscache.config import DEFAULT_RESERVE, spaced_layer_ids
from hscache.cost_config import CostConfig, PlannedFit, PlannedProduce
from hscache.cost_corpus import describe_corpus
from hscache.cost_memory import require_memory
from hscache.cost_rates import pauses_of, planned_gpu, speeds_of, sustained_rate
from hscache.cost_text import format_plan
from hscache.drafter_sizes import DrafterShape, num_parameters
from hscache.flops import RowFlops, row_flops
from hscache.forward_flops import ForwardFlops, forward_flops
from hscache.gpus import Gpu
from hscache.measured_rates import Measured, read_measured
from hscache.planes import ARRAYS
from hscache.progress import configure_logging
from hscache.result_file import require_writable, write_json
from hscache.settings import read_part
from hscache.sizes import parse_size
from hscache.target_shape import TargetShape, load_shape


def run(config: CostConfig, *, dry_run: bool = False) -> int:
    """Print the plan; a dry run only leaves `--json` unwritten."""
    configure_logging()
    wanted = None if dry_run else config.json
    require_writable(wanted)
    figures = plan(config)
    print(format_plan(figures))
    write_json(wanted, figures)
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
    gpu = planned_gpu(config)
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
    row_tokens = round(fit.row_tokens * measured.token_fill)
    rows = {
        anchors: _row_flops(drafter, row_tokens, anchors, lengths.mean_context, measured)
        for anchors in sorted({fit.anchors_per_row, config.fewer_anchors}, reverse=True)
    }
    disk = _disk(config, produce, fit, target, len(layers), corpus, measured)
    sustained = sustained_rate(config, gpu, measured)
    pauses, unknown = pauses_of(measured, fit, corpus)
    speeds, rates = speeds_of(measured, sustained["flop_per_s"], of_target)
    token_bytes = disk["raw_token_bytes"]
    pipelines, limits = [], []
    for anchors, row in rows.items():
        work = _work(lengths, corpus, fit.passes, of_target, row.total / row_tokens)
        limits.append(_limits(anchors, work, config.gpus, gpu, sustained["flop_per_s"]))
        pipelines += [
            _with_sums(anchors, found.with_pauses(pauses))
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
            "filled_tokens": measured.token_fill,
            "filled_anchors": measured.anchor_fill,
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
                    **{n: v / row_tokens for n, v in dataclasses.asdict(row).items()},
                    "total": row.total / row_tokens,
                }
                for anchors, row in rows.items()
            },
        },
        "rates": rates,
        "pauses": {**dataclasses.asdict(pauses), "unknown": unknown},
        "limits": limits,
        "pipelines": pipelines,
        "levers": _levers(pipelines, limits, fit.anchors_per_row, config.fewer_anchors, disk),
        "notes": measured.notes,
    }


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


def _row_flops(
    drafter: DrafterShape, row_tokens: int, anchors: int, context: float, measured: Measured
) -> RowFlops:
    filled = anchors * measured.anchor_fill
    scored = measured.scored_per_anchor
    return row_flops(
        drafter,
        num_tokens=row_tokens,
        num_anchors=round(filled),
        mean_context=context,
        num_scored=None if scored is None else round(filled * scored),
    )


def _with_sums(anchors: int, found: cost.Estimate) -> dict[str, Any]:
    sums = {"seconds": found.seconds, "days": found.days}
    return {"anchors_per_row": anchors, **dataclasses.asdict(found), **sums}


def _work(
    lengths: cost.Lengths,
    corpus: dict[str, Any],
    passes: int,
    of_target: ForwardFlops,
    drafter_token: float,
) -> cost.Work:
    # The target also runs over held-out documents, the drafter does not: a fraction of a percent.
    share = corpus["training_tokens"] / corpus["tokens"]
    return cost.Work(
        num_tokens=lengths.num_tokens,
        passes=passes,
        target=of_target.total,
        drafter=share * drafter_token,
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
