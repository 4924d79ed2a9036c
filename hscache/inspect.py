"""`hscache inspect`: what is in a cache, from its metadata alone; a damaged shard is a row, no end.

Takes a cache folder, also one that is being produced; prints identity, plan, shards, statistics and
producers. No torch, no target, no states: a folder of a terabyte takes a second. `--doc N` shows
one document instead, see `inspect_document`.

    hscache inspect /nvme/cache
"""

import collections
import dataclasses
import io
import itertools
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from hscache import files, layout, producers
from hscache.config import InspectConfig
from hscache.consumers import describe_consumers
from hscache.inspect_document import describe_document
from hscache.inspect_html import page
from hscache.manifest import ShardManifest, WindowIdentity
from hscache.progress import configure_logging
from hscache.reader import Cache, open_cache
from hscache.report import format_bytes, format_number, format_seconds, format_table
from hscache.shard_view import ShardView, look_at, summarise_layers, visits_done

_ENDS = 10
"""Rows shown from each end of a long table."""
_SAMPLE = 2000
"""Documents whose loss mask is read for the supervised share."""
_BAR = 40


def run(config: InspectConfig, *, dry_run: bool = False) -> int:
    """Print the view or write it as a page; return 1 if a shard is damaged.

    A dry run is the same without a page: nothing else is written.
    """
    if dry_run:
        config = dataclasses.replace(config, html=None)
    configure_logging()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # texts and bars on a terminal without UTF-8
    cache = open_cache(config.cache)
    if config.doc is not None and config.html is None:
        print(describe_document(cache, config.doc))
        return 0
    shards = [look_at(cache, shard) for shard in cache.published_shards()]
    if config.html is not None:
        files.make_folder(config.html.parent)
        files.replace_atomically(config.html, page(cache, shards, config.doc).encode())
        print(config.html)
        return int(any(shard.problem for shard in shards))
    print(describe_cache(cache, shards))
    return int(any(shard.problem for shard in shards))


def describe_cache(cache: Cache, shards: Sequence[ShardView]) -> str:
    """Return the whole view of a cache, section by section."""
    sound = [view.manifest for view in shards if view.manifest is not None and not view.problem]
    sections = [
        _identity(cache),
        _plan(cache),
        _lengths(cache.plan.lengths),
        _report(cache),
        _shards(cache, shards),
        _totals(cache, shards, sound),
        _layers(sound),
        _quarantined(cache, sound),
        _producers(cache),
        describe_consumers(cache) if any(layout.consumers_dir(cache.path).glob("*.json")) else "",
        _problems(shards),
    ]
    return "\n\n".join(section for section in sections if section)


def _identity(cache: Cache) -> str:
    rows = []
    for tier in dataclasses.fields(cache.identity):
        part = getattr(cache.identity, tier.name)
        if part == WindowIdentity():
            continue  # it keeps every shard
        for index, field in enumerate(dataclasses.fields(part)):
            value = getattr(part, field.name)
            if field.name.endswith("sha256"):
                value = f"{value[:16]}..." if value else "none"
            if isinstance(value, tuple):
                value = ", ".join(map(str, value))
            if isinstance(value, bool):
                value = "yes" if value else "no"
            name = field.name.replace("_", " ")
            rows.append([tier.name if index == 0 else "", name, value if value != "" else "none"])
    return format_table(["identity", "", str(cache.path)], rows)


def _plan(cache: Cache) -> str:
    plan = cache.plan
    sides = {
        "training": (cache.training, plan.training_shards),
        "held out": (cache.held_out, plan.held_out_shards),
    }
    rows = []
    for name, (documents, shards) in sides.items():
        start = documents[0].row if len(documents) else 0
        stop = start + len(documents)
        share, exact = _supervised_share(cache, range(start, stop))
        rows.append(
            [
                name,
                len(documents),
                int(plan.offsets[stop] - plan.offsets[start]),
                f"{share:.1%}" if exact else f"{share:.1%} (a sample)",
                int(plan.valid_anchors[start:stop].sum()),
                len(shards),
            ]
        )
    return format_table(
        ["plan", "documents", "tokens", "supervised", "possible anchors", "shards"], rows
    )


def _supervised_share(cache: Cache, documents: range) -> tuple[float, bool]:
    """Return the supervised share of the tokens, and whether every document was read for it."""
    step = max(1, len(documents) // _SAMPLE)
    masks = [cache.plan.loss_mask(document) for document in documents[::step]]
    tokens = sum(len(mask) for mask in masks)
    return (sum(int(mask.sum()) for mask in masks) / tokens if tokens else 0.0), step == 1


def _lengths(lengths: np.ndarray) -> str:
    """Return the documents' lengths: four figures, and a bar for each power of two."""
    if not len(lengths):
        return ""
    exponents, counts = np.unique(np.frexp(lengths)[1] - 1, return_counts=True)
    by_power = dict(zip(exponents.tolist(), counts.tolist(), strict=True))
    rows = []
    for power in range(min(by_power), max(by_power) + 1):
        count = by_power.get(power, 0)
        bar = "#" * -(-_BAR * count // max(by_power.values()))
        rows.append([f"{1 << power:,} to {(2 << power) - 1:,}", count, bar])
    figures = {
        "min": int(lengths.min()),
        "median": float(np.median(lengths)),
        "mean": float(lengths.mean()),
        "max": int(lengths.max()),
    }
    text = ", ".join(f"{name} {format_number(value)}" for name, value in figures.items())
    return format_table(["document tokens", "documents", text], rows)


def _report(cache: Cache) -> str:
    """Return what became of the input rows, as produce counted them: kept, dropped by reason."""
    report = cache.plan.manifest.report
    rows = sorted(report.items(), key=lambda item: (item[0] != "rows in", item[0]))
    return format_table(["input", "rows"], rows) if rows else ""


def _shards(cache: Cache, shards: Sequence[ShardView]) -> str:
    if not shards:
        return ""
    visits, now_s = visits_done(cache), time.time()
    rows = [_shard_row(view, visits.get(view.shard), now_s) for view in shards]
    if len(rows) > 2 * _ENDS + 1:
        hidden = len(rows) - 2 * _ENDS
        rows = [*rows[:_ENDS], [None, f"... {hidden} more", *[None] * 7], *rows[-_ENDS:]]
    headers = ["shard", "state", "documents", "tokens", "MB", "ratio", "tok/s", "age", "passes"]
    return format_table(headers, rows)


def _shard_row(view: ShardView, visits: int | None, now_s: float) -> list[Any]:
    m = view.manifest
    if m is None:
        return [view.shard, "damaged", *[None] * 7]
    rate, age_s = view.tokens_per_s, view.age_s(now_s)
    return [
        view.shard,
        view.state,
        m.num_documents,
        m.num_tokens,
        f"{m.stored_bytes / 1e6:,.2f}",
        None if view.ratio is None else f"{view.ratio:.3f}",
        None if rate is None else f"{rate:,.0f}",
        None if age_s is None else format_seconds(age_s),
        visits,
    ]


def _totals(cache: Cache, shards: Sequence[ShardView], sound: Sequence[ShardManifest]) -> str:
    plan = cache.plan
    tokens = sum(m.num_tokens for m in sound)
    raw, stored = sum(m.raw_bytes for m in sound), sum(m.stored_bytes for m in sound)
    on_disk = sum(m.stored_bytes for m in sound if m.state != "freed")
    present = {view.shard for view in shards}
    missing = [shard for shard in range(plan.num_shards) if shard not in present]
    states = collections.Counter(view.state for view in shards)
    rows = [
        ["shards", f"{len(shards):,} of {plan.num_shards:,} on disk: {_counts(states)}"],
        ["missing", f"{len(missing):,}" + (f": {_ranges(missing)}" if missing else "")],
        ["documents", f"{sum(m.num_documents for m in sound):,} of {plan.num_documents:,}"],
        ["tokens", f"{tokens:,} of {plan.num_tokens:,}"],
        ["states", f"{format_bytes(on_disk)} on disk"],
    ]
    if tokens:
        rows.append(["ratio", f"{raw / stored:.3f} ({format_bytes(raw)} as bf16)"])
    if tokens and missing:
        whole = stored / tokens * plan.num_tokens
        rows.append(["when complete", f"about {format_bytes(whole)}"])
    return format_table(["total", ""], rows)


def _counts(counter: collections.Counter[str]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counter.items()) or "none"


def _ranges(numbers: Sequence[int]) -> str:
    """Write ascending numbers as `0-3, 7, 9-12`, the first ten runs of them."""
    runs = [
        [number for _, number in run]
        for _, run in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    ]
    texts = [f"{r[0]}-{r[-1]}" if len(r) > 1 else f"{r[0]}" for r in runs]
    return ", ".join(texts[:_ENDS]) + (", ..." if len(texts) > _ENDS else "")


def _layers(sound: Sequence[ShardManifest]) -> str:
    """Return statistics per layer over the shards, weighted by tokens."""
    summaries = summarise_layers(sound)
    rows = [
        [
            layer.layer_id,
            layer.mean_norm,
            layer.max_abs,
            layer.median_channel_rms,
            ", ".join(f"{channel} ({format_number(x)}x)" for channel, x in layer.outliers),
        ]
        for layer in summaries
    ]
    headers = ["layer", "mean norm", "max |x|", "median channel rms", "outlier channels (x median)"]
    if any(layer.channel_error is not None for layer in summaries):
        headers.append("codec's error, per channel")
        for row, layer in zip(rows, summaries, strict=True):
            row.append(None if layer.channel_error is None else f"{layer.channel_error:.2%}")
    return format_table(headers, rows) if rows else ""


def _quarantined(cache: Cache, sound: Sequence[ShardManifest]) -> str:
    found = [(m.shard, q) for m in sound for q in m.quarantined]
    if not found:
        return ""
    rows: list[list[Any]] = [
        [q.document, shard, int(cache.plan.source_rows[q.document]), q.reason]
        for shard, q in found[: 2 * _ENDS]
    ]
    if len(found) > len(rows):
        rows.append([None, None, None, f"... {len(found) - len(rows):,} more"])
    return format_table(["quarantined document", "shard", "input row", "reason"], rows)


def _producers(cache: Cache) -> str:
    rows: list[list[Any]] = []
    for path in sorted(layout.producers_dir(cache.path).glob("*.json")):
        record = producers.read_record(path)
        if record is None or not producers.is_alive(path, record):
            continue
        age_s = max(0.0, time.time() - float(record.get("time", 0)))
        figures = [record.get(name) for name in ("claim", "tokens", "shards")]
        rows.append([path.stem, *figures, f"{format_seconds(age_s)} ago"])
    if not rows:
        return ""
    return format_table(["producing now", "shard", "tokens", "shards", "last sign of life"], rows)


def _problems(shards: Sequence[ShardView]) -> str:
    problems = [f"shard {view.shard}: {view.problem}" for view in shards if view.problem]
    if len(problems) > _ENDS:
        problems = [*problems[:_ENDS], f"... and {len(problems) - _ENDS:,} more damaged shards"]
    return "\n".join(problems)
