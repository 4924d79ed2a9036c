"""`hscache bench forward`: how fast a target's states are made here, and whether they are right.

Takes a target, or only its config with `--random_weights`. Runs packs of documents through the
blocks up to the last captured one, in turns with the products alone (the ceiling), over several
sizes of pack. Says in plain words when the states are off: not finite, not the same twice, leaking
between documents, or further from float32 than transformers' own layers.

    hscache bench forward --target.path Qwen/Qwen3.6-27B --random_weights 0 --compare transformers
"""

from __future__ import annotations

import datetime
import itertools
import logging
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hscache import packed_forward, packed_ops
from hscache.began import running_s
from hscache.bench_gemm import dense_rate, machine, power_words, product_rate
from hscache.bench_target_config import BenchForwardConfig
from hscache.clock import Clock, gpu_monitor
from hscache.device import DTYPES, choose_device
from hscache.errors import ConfigError
from hscache.forward_check import off_in_words, reference_errors, states_facts
from hscache.forward_flops import document_lengths, forward_flops, mean_context_of, products
from hscache.prepare import states_identity
from hscache.pretrained import check_layer_ids, load_config
from hscache.progress import configure_logging
from hscache.random_target import random_base
from hscache.report import format_table
from hscache.result_file import require_writable, write_json
from hscache.settings import to_dict
from hscache.target import Target

log = logging.getLogger(__name__)

_TURNS = 3
_GEMM_ROWS = (16_384, 65_536)
Capture = Callable[[torch.Tensor, Sequence[int]], torch.Tensor]


def run(config: BenchForwardConfig, *, dry_run: bool = False) -> int:
    """Run the command; with `dry_run` say what would be measured."""
    configure_logging()
    device = choose_device(config.target.device)
    if dry_run:
        budgets = ", ".join(f"{budget:,}" for budget in config.budgets)
        print(f"would measure forwards of {budgets} tokens on {device}")
        return 0
    require_writable(config.json)
    subject = make_subject(config, device)
    figures = measure(subject, config)
    write_json(config.json, figures)  # the comparison takes minutes
    if config.compare == "transformers":
        figures["transformers"] = compare(subject, config, figures["budgets"][0])
        write_json(config.json, figures)
    print(format_figures(figures))
    return 1 if figures["off"] else 0


@dataclass(frozen=True)
class Subject:
    """What is measured: a decoder, its packed forward, and how many blocks run."""

    base: Any
    capture: Capture
    name: str
    num_blocks: int
    device: torch.device


def make_subject(config: BenchForwardConfig, device: torch.device) -> Subject:
    """Load the target, or build one of its shape with random weights."""
    if config.random_weights is None:
        target = Target(config.target)
        # as produce does before its first pack: every weight is hashed
        states_identity(config.target, target, target.frozen.to_bytes())
        blocks = target.captured_ids[-1] + 1
        return Subject(target._base, target.capture, target.forward_name, blocks, device)
    model, _ = load_config(config.target)
    layer_ids = check_layer_ids(config.target, int(model.num_hidden_layers))
    blocks = layer_ids[-1] + 1
    dtype = DTYPES[config.target.dtype]
    base = random_base(model, blocks, config.random_weights, device, dtype)
    if why_not := packed_forward.why_not(base):
        raise ConfigError(f"random_weights: {why_not}; measure it with its real weights.")
    kernels = packed_forward.kernels() if device.type == "cuda" else packed_ops
    if kernels is None:
        raise ConfigError(
            "random_weights on a GPU needs triton and fla: pip install 'hscache[cuda]'."
        )
    forward = packed_forward.PackedForward(base, layer_ids, kernels)
    return Subject(base, forward, "fused", blocks, device)


def measure(subject: Subject, config: BenchForwardConfig) -> dict[str, Any]:
    """Return the figures: rates in FLOP/s and tokens/s, times in seconds, sizes in bytes."""
    device = subject.device
    clock = Clock(device)
    main = config.budgets[0]
    pack = make_pack(subject, config, main)
    log.info("compiling")
    started = clock.mark()
    subject.capture(*pack)
    compile_s = clock.between(started, clock.mark())
    ready_s = running_s()
    log.info("checking the states")
    checks = {**states_facts(subject.capture, *pack), **reference_errors(subject.base)}
    found = products(subject.base.config, subject.num_blocks)
    dtype = DTYPES[config.target.dtype]
    turns = []
    for turn in range(_TURNS):
        # In turns, so that both sides meet the same heat and the same power limit.
        log.info("turn %d of %d: the products alone, then forwards", turn + 1, _TURNS)
        rows = min(_GEMM_ROWS[turn % len(_GEMM_ROWS)], main)
        gemm = product_rate(found, rows, config.gemm_seconds, device, dtype)
        _release(device)
        turns.append({"gemm": gemm, "forward": _forward(subject, config, pack, warm=0)})
    ceiling = max((turn["gemm"] for turn in turns), key=lambda gemm: gemm["sustained_flop_per_s"])
    forward = sorted((turn["forward"] for turn in turns), key=lambda f: f["tokens_per_s"])[1]
    by_budget = [forward]
    for budget in config.budgets[1:]:
        log.info("packs of %s tokens", f"{budget:,}")
        by_budget.append(_forward(subject, config, make_pack(subject, config, budget)))
    return {
        "what": "hscache bench forward",
        "date": datetime.date.today().isoformat(),
        "machine": machine(device),
        "config": to_dict(config),
        "forward_name": subject.name,
        "blocks": subject.num_blocks,
        "compile_s": compile_s,
        # of the process, as long as that of `produce` until its first pack but for the corpus
        "start_s": None
        if config.random_weights is not None
        else max(0.0, ready_s - forward["seconds"]["median"]),
        "checks": checks,
        "off": off_in_words(checks),
        "gemm": ceiling,
        "dense_flop_per_s": dense_rate(device),
        "turns": turns,
        "budgets": by_budget,
    }


def make_pack(
    subject: Subject, config: BenchForwardConfig, budget: int
) -> tuple[torch.Tensor, list[int]]:
    """Return ids on the device and the boundaries of a pack that fills the budget."""
    mean = min(config.mean_tokens, max(1, budget // 4))
    shortest = min(64, mean)
    lengths = document_lengths(budget, 0, mean=mean, shortest=shortest, longest=8_191)
    return _ids(subject, budget), [0, *itertools.accumulate(lengths)]


def compare(
    subject: Subject, config: BenchForwardConfig, forward: dict[str, Any]
) -> dict[str, Any]:
    """Time transformers' forward of the same blocks: equal lengths, then padded batches.

    `forward` are the figures of the pack whose documents are padded.
    """
    _, offsets = make_pack(subject, config, forward["tokens"])
    base, clock = subject.base, Clock(subject.device)
    kept = base.config._attn_implementation
    base.config._attn_implementation = "sdpa"
    try:
        count = max(1, config.budgets[0] // config.equal_tokens)
        tokens = count * config.equal_tokens
        ids = _ids(subject, tokens)
        log.info("transformers, %d documents of %d tokens", count, config.equal_tokens)
        together = ids.view(count, -1)
        clock.reset_peak()
        theirs = _timed(subject, config, lambda: _theirs(base, together, None))
        theirs["peak_bytes"] = clock.peak_bytes()
        _release(subject.device)
        equal = list(range(0, tokens + 1, config.equal_tokens))
        ours = _forward(subject, config, (ids, equal))
        found: dict[str, Any] = {
            "equal": {
                "tokens_per_s": tokens / theirs["seconds"]["median"],
                "ratio": theirs["seconds"]["median"] / ours["seconds"]["median"],
                "theirs": theirs,
                "ours": ours,
            },
            "padded": [],
        }
        lengths = [b - a for a, b in itertools.pairwise(offsets)]
        for size in config.padded_batches:
            log.info("transformers, padded batches of %d", size)
            batches = [_padded(subject, part) for part in _groups(lengths, size)]

            def all_batches(batches: list[Any] = batches) -> None:
                for batch in batches:
                    _theirs(base, *batch)

            padded = _timed(subject, config, all_batches, 1)
            rate = offsets[-1] / padded["seconds"]["median"]
            ratio = forward["tokens_per_s"] / rate
            found["padded"].append({"batch": size, "tokens_per_s": rate, "ratio": ratio, **padded})
            _release(subject.device)
    finally:
        base.config._attn_implementation = kept
    return found


def _theirs(base: Any, ids: torch.Tensor, mask: torch.Tensor | None) -> None:
    base(input_ids=ids, attention_mask=mask, use_cache=False)


def _groups(lengths: list[int], size: int) -> list[list[int]]:
    return [lengths[start : start + size] for start in range(0, len(lengths), size)]


def _padded(subject: Subject, lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    ends = torch.tensor(lengths, device=subject.device)[:, None]
    mask = (torch.arange(max(lengths), device=subject.device)[None] < ends).long()
    return _ids(subject, mask.numel()).view(mask.shape), mask


def _ids(subject: Subject, num_tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    size = int(subject.base.config.vocab_size)
    return torch.randint(size, (num_tokens,), generator=generator).to(subject.device)


def _forward(
    subject: Subject,
    config: BenchForwardConfig,
    pack: tuple[torch.Tensor, list[int]],
    warm: int = 1,
) -> dict[str, Any]:
    clock = Clock(subject.device)
    clock.reset_peak()
    timed = _timed(subject, config, lambda: subject.capture(*pack), warm=warm)
    lengths = [b - a for a, b in itertools.pairwise(pack[1])]
    flops = forward_flops(
        subject.base.config,
        subject.num_blocks,
        num_tokens=len(pack[0]),
        mean_context=mean_context_of(lengths),
    )
    seconds = timed["seconds"]["median"]
    return {
        "tokens": len(pack[0]),
        "documents": len(lengths),
        "tokens_per_s": len(pack[0]) / seconds,
        "flop": {**vars(flops), "total": flops.total},
        "flop_per_s": flops.total / seconds,
        "peak_bytes": clock.peak_bytes(),
        **timed,
    }


@torch.inference_mode()
def _timed(
    subject: Subject,
    config: BenchForwardConfig,
    work: Callable[[], object],
    repeats: int | None = None,
    warm: int = 1,
) -> dict[str, Any]:
    clock = Clock(subject.device)
    for _ in range(warm):
        work()
    clock.finish()
    with gpu_monitor(subject.device) as gpu:
        seconds = [clock.seconds(work) for _ in range(repeats or config.repeats)]
    return {
        "seconds": {
            "median": statistics.median(seconds),
            "min": min(seconds),
            "max": max(seconds),
        },
        **gpu,
    }


def _release(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()


def format_figures(figures: dict[str, Any]) -> str:
    """Return the figures as a table."""
    gemm, dense = figures["gemm"], figures["dense_flop_per_s"]
    ceiling = gemm["sustained_flop_per_s"]
    rows = [
        [
            "products alone",
            f"{ceiling / 1e12:,.1f} TFLOP/s sustained at {gemm['rows']:,} rows, "
            f"{gemm['burst_flop_per_s'] / 1e12:,.1f} at first{power_words(gemm)}",
        ]
    ]
    for forward in figures["budgets"]:
        shares = f"{forward['flop_per_s'] / ceiling:.1%} of sustained"
        if dense:
            shares += f", {forward['flop_per_s'] / dense:.1%} of the vendor's dense rate"
        peak = forward["peak_bytes"]
        memory = f", peak {peak / 1e9:,.1f} GB" if peak else ""
        rows.append(
            [
                f"{forward['tokens']:,} tokens",
                f"{forward['tokens_per_s']:,.0f} tokens/s, "
                f"{1e3 * forward['seconds']['median']:,.0f} ms, "
                f"{forward['flop_per_s'] / 1e12:,.1f} TFLOP/s, {shares}{memory}"
                f"{power_words(forward)}",
            ]
        )
    if (theirs := figures.get("transformers")) is not None:
        equal = theirs["equal"]
        rows.append(
            [
                "transformers, equal",
                f"{equal['tokens_per_s']:,.0f} tokens/s; ours {equal['ratio']:.2f}x",
            ]
        )
        rows += [
            [
                f"... padded by {padded['batch']}",
                f"{padded['tokens_per_s']:,.0f} tokens/s; ours {padded['ratio']:.2f}x",
            ]
            for padded in theirs["padded"]
        ]
    off = figures["off"]
    rows.append(["states", "; ".join(off) if off else "finite, equal twice, apart, close to fp32"])
    return format_table(["bench forward", figures["machine"]["device"]], rows)
