"""Rates that were measured, for `hscache plan`: from result files of benches and from caches.

Takes paths; hands on a `Measured`. A file of another kind of GPU, or of a bench this does not know,
is named among the notes and left out.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hscache.errors import ConfigError
from hscache.gpus import gpu_of_device
from hscache.reader import open_cache

OTHER = "other"
"""What `--gpu` calls every device that is not in the table, a CPU among them."""


@dataclass(kw_only=True)
class Measured:
    """What is known of this kind of GPU and this disk; None or inf where nothing is."""

    trainer_flop_per_s: float | None = None
    """useful FLOP/s of steps from shards"""
    scored_per_anchor: float | None = None
    """slots that the loss scores a block: fewer than there are where slots are sampled or masked"""
    token_fill: float = 1.0
    """share of a row's tokens that real documents fill, and of its anchors"""
    anchor_fill: float = 1.0
    target_start_s: float | None = None
    """of `produce`, until its first pack; the corpus is not in it"""
    trainer_start_s: float | None = None
    """of `trainer fit`, until its first step"""
    first_look_s: float | None = None
    """at held-out documents; the first compiles"""
    look_s: float | None = None
    checkpoint_copy_s: float | None = None
    """a checkpoint stops training"""
    checkpoint_s: float | None = None
    """until it is on disk: the last one is waited for"""
    in_turns: bool = False
    """the target runs on a CPU: its states are encoded and written afterwards, not meanwhile"""
    target_flop_per_s: float | None = None
    target_tokens_per_s: float | None = None
    """of a cache's shards, all that `produce` does included"""
    sustained: float | None = None
    """FLOP/s of products alone"""
    write: float = math.inf
    """decoded bytes/s that are encoded and written"""
    read: float = math.inf
    """decoded bytes/s that are read and decoded, cold where that was possible"""
    ratios: dict[str, float] = field(default_factory=dict)
    """by codec"""
    notes: list[str] = field(default_factory=list)


def read_measured(
    paths: Sequence[Path], gpu: str, *, hidden_size: int, num_blocks: int
) -> Measured:
    """Read result files and caches; those of another GPU or target are left out and said to be.

    Raises ConfigError for what is neither.
    """
    found = Measured()
    for path in paths:
        if path.is_dir():
            _add_cache(found, path, gpu, hidden_size=hidden_size, num_blocks=num_blocks)
        else:
            _add_file(found, path, gpu)
    return found


def _add_file(found: Measured, path: Path, gpu: str) -> None:
    try:
        figures = json.loads(path.read_text())
        what, machine = figures["what"], figures["machine"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"measured: {path} is no result file of a bench: expected JSON with `what` and "
            "`machine`, as `trainer bench --json` writes, or a cache's folder."
        ) from error
    if what == "hscache bench store":
        _add_store(found, path, figures)
        return
    device = machine.get("device") or machine.get("gpu") or ""
    if (gpu_of_device(device) or OTHER) != gpu:
        found.notes.append(f"{path} was measured on {device or 'another device'}: not used")
    elif what == "trainer bench":
        row, shards = figures["row"], figures["from_shards"]
        found.trainer_flop_per_s = shards["tokens_per_s"] * row["flop"]["total"] / row["tokens"]
        found.scored_per_anchor = row["scored_slots"] / row["anchors"]
        settings = figures["config"]
        found.token_fill = min(1.0, row["tokens"] / settings["row_tokens"])
        found.anchor_fill = min(1.0, row["anchors"] / settings["anchors_per_row"])
        found.trainer_start_s = figures.get("start_s")
        if looks := figures.get("looks"):
            found.first_look_s, found.look_s = looks["first_s"], looks["again_s"]
        if saved := figures.get("checkpoint"):
            found.checkpoint_copy_s, found.checkpoint_s = saved["copy_s"], saved["whole_s"]
        _add_ceiling(found, figures["gemm"])
        found.notes.append(
            f"trainer: {shards['tokens_per_s']:,.0f} tokens/s from shards, {path} ({device})"
        )
    elif what == "hscache bench forward":
        forward = figures["budgets"][0]
        found.target_flop_per_s = forward["flop_per_s"]
        found.target_start_s = figures.get("start_s")
        found.in_turns = machine.get("kind") == "cpu"
        _add_ceiling(found, figures["gemm"])
        found.notes.append(
            f"target: {forward['tokens_per_s']:,.0f} tokens/s of packs of {forward['tokens']:,}, "
            f"{path} ({device})"
        )
    elif what == "hscache bench gemm":
        _add_ceiling(found, figures["best"])
        found.notes.append(f"products: {path} ({device})")
    else:
        found.notes.append(f"{path} is a result of {what}, which has no rate for a plan")


def _add_ceiling(found: Measured, gemm: dict[str, Any]) -> None:
    # Of several the largest: what a card has reached, it can reach.
    found.sustained = max(found.sustained or 0.0, gemm["sustained_flop_per_s"])


def _add_store(found: Measured, path: Path, figures: dict[str, Any]) -> None:
    parts = figures["parts"]
    read = parts.get("cold read") or parts["warm read"]
    found.write = 1e9 * parts["write"]["gb_per_s"]["median"]
    found.read = 1e9 * read["gb_per_s"]["median"]
    found.ratios[figures["config"]["codec"]] = figures["ratio"]
    found.notes.append(f"disk: {path} on {figures['machine'].get('host', 'an unknown host')}")


def _add_cache(found: Measured, path: Path, gpu: str, *, hidden_size: int, num_blocks: int) -> None:
    cache = open_cache(path)
    states = cache.identity.states
    if (states.hidden_size, states.num_target_layers) != (hidden_size, num_blocks):
        found.notes.append(f"{path} holds states of another target, {states.target}: not used")
        return
    shards = [cache.shard_manifest(shard) for shard in cache.published_shards()]
    shards = [m for m in shards if m.num_tokens]
    stored = sum(m.stored_bytes for m in shards)
    if stored:
        ratio = sum(m.raw_bytes for m in shards) / stored
        found.ratios[cache.identity.encoding.codec] = ratio
        found.notes.append(f"ratio {ratio:.3f}: {len(shards)} shards of {path}")
    rates = [
        m.num_tokens / m.provenance["seconds"]
        for m in shards
        if m.provenance.get("seconds")
        and (gpu_of_device(m.provenance.get("device_name", "")) or OTHER) == gpu
    ]
    if rates:
        found.target_tokens_per_s = statistics.median(rates)
        found.notes.append(f"target: {found.target_tokens_per_s:,.0f} tokens/s, shards of {path}")
