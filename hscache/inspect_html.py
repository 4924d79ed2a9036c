"""`hscache inspect --html`: a cache as one page with pictures, which needs nothing but a browser.

Takes an open cache and its shards' views; hands on the page. Text of the corpus is escaped, colours
follow the browser's light or dark setting, and a policy in the page forbids it to fetch anything.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import time
from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np

from hscache import layout, svg
from hscache.inspect_html_document import document_card
from hscache.page_parts import card, details, figure, pair, table, thinned
from hscache.page_style import STYLE
from hscache.reader import Cache
from hscache.report import format_bytes, format_number, format_seconds
from hscache.shard_view import ShardView, summarise_layers, visits_done

_CELLS = 1200
_TABLE_ROWS = 400
_SAMPLE = 2000
_BINS = 24


def page(cache: Cache, shards: Sequence[ShardView], doc: int | None) -> str:
    """Return the page; with a document, or else the first one to train on that has states.

    Raises ConfigError when `doc` is out of range.
    """
    row = _first_to_train_on(cache, shards) if doc is None else doc
    sections = [
        _tiles(cache, shards),
        card("Shards", _shard_strip(cache, shards) + _shard_charts(shards)),
        pair(
            card("Length of documents", _lengths(cache)),
            card("Supervised share of a document", _supervised(cache)),
        ),
        card("Captured layers", _layers(shards)),
        _drops(cache, shards),
        "" if row is None else document_card(cache, row),
        details("All shards", _shard_table(cache, shards)),
        details("Identity", _identity(cache)),
    ]
    title = escape(str(cache.path))
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{title}</title><style>{STYLE}</style></head><body><main>"
        f'<header><p class="kicker">hscache inspect</p><h1>{title}</h1>'
        f"<p>{escape(_subtitle(cache))}</p></header>"
        + "".join(sections)
        + f"<footer>{time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}</footer>"
        "</main></body></html>\n"
    )


def _subtitle(cache: Cache) -> str:
    states = cache.identity.states
    layers = ", ".join(map(str, states.target_layer_ids))
    return (
        f"Hidden states of {states.target}: outputs of blocks {layers} of "
        f"{states.num_target_layers}, {states.hidden_size:,} wide, codec "
        f"{cache.identity.encoding.codec}."
    )


def _sound(shards: Sequence[ShardView]) -> list[Any]:
    return [view.manifest for view in shards if view.manifest is not None and not view.problem]


def _tiles(cache: Cache, shards: Sequence[ShardView]) -> str:
    plan, sound = cache.plan, _sound(shards)
    tokens = sum(m.num_tokens for m in sound)
    raw, stored = sum(m.raw_bytes for m in sound), sum(m.stored_bytes for m in sound)
    kept = sum(m.stored_bytes for m in sound if m.state != "freed")
    quarantined = sum(len(m.quarantined) for m in sound)
    damaged = sum(bool(view.problem) for view in shards)
    share = tokens / max(1, plan.num_tokens)
    tiles = [
        (f"{share:.1%}", "produced"),
        (f"{tokens:,}", f"of {plan.num_tokens:,} tokens"),
        (f"{sum(m.num_documents for m in sound):,}", f"of {plan.num_documents:,} documents"),
        (f"{len(shards):,}", f"of {plan.num_shards:,} shards"),
        (format_bytes(kept), "of states on disk"),
        (f"{raw / stored:.3f}x" if stored else "-", "smaller than bf16"),
        (f"{quarantined:,}", "documents quarantined"),
        (f"{damaged:,}", "shards damaged"),
    ]
    alarm = [False] * 6 + [quarantined > 0, damaged > 0]
    cells = "".join(
        f'<div class="tile{" alarm" if bad else ""}"><b>{escape(value)}</b>'
        f"<span>{escape(label)}</span></div>"
        for (value, label), bad in zip(tiles, alarm, strict=True)
    )
    bar = f'<div class="progress"><div style="width:{100 * share:.2f}%"></div></div>'
    return f'{bar}<div class="tiles">{cells}</div>'


_STATES = {
    "damaged": "bad",
    "missing": "none",
    "empty": "c1",
    "freed": "gone",
    "held out": "c3",
    "published": "c0",
}
"""The first of these that a cell has decides its colour."""


def _shard_strip(cache: Cache, shards: Sequence[ShardView]) -> str:
    views = {view.shard: view for view in shards}
    kinds = []
    for shard in range(cache.plan.num_shards):
        state = views[shard].state if shard in views else "missing"
        if state == "published" and shard in cache.plan.held_out_shards:
            state = "held out"
        kinds.append(state)
    size = -(-len(kinds) // _CELLS)
    cells = []
    for first in range(0, len(kinds), size):
        group = kinds[first : first + size]
        worst = min(group, key=list(_STATES).index)
        name = f"shard {first}" if size == 1 else f"shards {first}-{first + len(group) - 1}"
        counts = ", ".join(f"{n} {s}" for s, n in collections.Counter(group).items())
        view = views.get(first) if size == 1 else None
        extra = ""
        if view is not None and view.manifest is not None:
            extra = f", {view.manifest.num_tokens:,} tokens" + (
                f", ratio {view.ratio:.3f}" if view.ratio else ""
            )
        cells.append((_STATES[worst], f"{name}: {counts if size > 1 else worst}{extra}"))
    present = [state for state in _STATES if state in set(kinds)]
    key = "".join(
        f'<span><i class="{_STATES[state]}"></i>{state} ({kinds.count(state):,})</span>'
        for state in present
    )
    each = "" if size == 1 else f"<span>a cell is {size} shards</span>"
    return svg.strip(cells) + f'<p class="key">{key}{each}</p>'


def _shard_charts(shards: Sequence[ShardView]) -> str:
    ratio, step = thinned([view.ratio for view in shards])
    rate, _ = thinned([view.tokens_per_s for view in shards])
    first = shards[0].shard if shards else 0
    return pair(
        figure(
            "Ratio, shard by shard",
            svg.lines([("ratio", ratio)], x_first=first, x_step=step, form=lambda v: f"{v:.3f}"),
        ),
        figure(
            "Produced tokens/s, shard by shard",
            svg.lines([("tokens/s", rate)], x_first=first, x_step=step, zero=True),
        ),
    )


def _first_to_train_on(cache: Cache, shards: Sequence[ShardView]) -> int | None:
    usable = [m for m in _sound(shards) if m.state == "published" and m.num_documents]
    usable.sort(key=lambda m: (m.shard in cache.plan.held_out_shards, m.shard))
    for m in usable[:1]:
        left_out = {q.document for q in m.quarantined}
        return next(d for d in cache.plan.shard_documents(m.shard) if d not in left_out)
    return 0 if cache.plan.num_documents else None


def _lengths(cache: Cache) -> str:
    lengths = cache.plan.lengths
    if not len(lengths):
        return "<p>no documents</p>"
    edges = np.unique(np.geomspace(lengths.min(), lengths.max() + 1, _BINS + 1).astype(np.int64))
    if len(edges) < 2:  # all are of one length
        edges = np.append(edges, edges[0] + 1)
    counts, edges = np.histogram(lengths, bins=edges)
    spans = [f"{low:,} to {high - 1:,}" for low, high in itertools.pairwise(edges)]
    titles = [f"{span} tokens: {n:,} documents" for span, n in zip(spans, counts, strict=True)]
    chart = svg.bars(counts.tolist(), [f"{low:,}" for low in edges[:-1]], titles=titles)
    facts = (
        f"min {lengths.min():,}, median {np.median(lengths):,.0f}, mean {lengths.mean():,.0f}, "
        f"max {lengths.max():,} tokens; bins grow in proportion"
    )
    return f"{chart}<p>{facts}</p>"


def _supervised(cache: Cache) -> str:
    rows = range(cache.plan.num_documents)
    sample = rows[:: max(1, len(rows) // _SAMPLE)]
    masks = [cache.plan.loss_mask(row) for row in sample]
    shares = np.array([mask.mean() for mask in masks if len(mask)])
    if not len(shares):
        return "<p>no documents</p>"
    counts, edges = np.histogram(shares, bins=20, range=(0, 1))
    titles = [f"{100 * low:.0f} to {100 * low + 5:.0f} %: {n:,} documents"
              for low, n in zip(edges[:-1], counts, strict=True)]  # fmt: skip
    chart = svg.bars(counts.tolist(), [f"{100 * low:.0f}%" for low in edges[:-1]], titles=titles)
    whole = sum(int(mask.sum()) for mask in masks) / sum(map(len, masks))
    anchors = int(cache.plan.valid_anchors.sum())
    of = "all documents" if len(sample) == len(rows) else f"a sample of {len(sample):,}"
    return f"{chart}<p>{whole:.1%} of the tokens ({of}); {anchors:,} possible anchors</p>"


def _layers(shards: Sequence[ShardView]) -> str:
    sound = [m for m in _sound(shards) if m.statistics]
    layers = summarise_layers(sound)
    if not layers:
        return "<p>no statistics yet</p>"
    bars = svg.rows(
        [(f"block {s.layer_id}", s.mean_norm, f"{format_number(s.mean_norm)}") for s in layers]
    )
    series = [
        (f"block {layer.layer_id}", thinned([m.statistics[index].mean_norm for m in sound])[0])
        for index, layer in enumerate(layers)
    ]
    step = thinned(list(range(len(sound))))[1]
    key = "".join(
        f'<span><i class="c{n % 6}"></i>block {s.layer_id}</span>' for n, s in enumerate(layers)
    )
    statistics = table(
        ["block", "mean norm", "max |x|", "median channel rms", "outlier channels (times median)"],
        [
            [s.layer_id, s.mean_norm, s.max_abs, s.median_channel_rms,
             ", ".join(f"{channel} ({format_number(x)}x)" for channel, x in s.outliers)]
            for s in layers
        ],
    )  # fmt: skip
    drift = svg.lines(series, x_first=sound[0].shard, x_step=step, log=True)
    pictures = pair(
        figure("Mean norm of a token's state", bars),
        figure(
            "The same, shard by shard (log scale): drift shows here",
            f'{drift}<p class="key">{key}</p>',
        ),
    )
    return pictures + statistics


def _drops(cache: Cache, shards: Sequence[ShardView]) -> str:
    report = cache.plan.manifest.report
    items = [
        (name, float(value), f"{value:,}")
        for name, value in sorted(report.items(), key=lambda item: item[0] != "rows in")
        if isinstance(value, int | float) and "token" not in name
    ]
    found = [(m.shard, q) for m in _sound(shards) for q in m.quarantined]
    reasons = collections.Counter(q.reason for _, q in found)
    parts = []
    if items:
        parts.append(card("Rows of the input", svg.rows(items)))
    if reasons:
        bars = svg.rows([(f"{n:,}", float(n), reason) for reason, n in reasons.most_common()])
        listed = table(
            ["document", "shard", "input row", "reason"],
            [[q.document, shard, int(cache.plan.source_rows[q.document]), q.reason]
             for shard, q in found[:50]],
        )  # fmt: skip
        parts.append(card("Quarantined documents", bars + listed))
    damaged = [view for view in shards if view.problem]
    if damaged:
        rows = [[view.shard, view.problem] for view in damaged[:50]]
        parts.append(card("Damaged shards", table(["shard", "problem"], rows)))
    return pair(*parts) if len(parts) == 2 else "".join(parts)


def _shard_table(cache: Cache, shards: Sequence[ShardView]) -> str:
    now_s, visits = time.time(), visits_done(cache)
    shown = list(shards)
    note = ""
    if len(shown) > _TABLE_ROWS:
        half = _TABLE_ROWS // 2
        bad = [view for view in shown[half:-half] if view.problem]
        note = f"<p>the first and last {half} of {len(shown):,} shards, and damaged ones</p>"
        shown = [*shown[:half], *bad[:_TABLE_ROWS], *shown[-half:]]
    rows = []
    for view in shown:
        m, age_s = view.manifest, view.age_s(now_s)
        rows.append(
            [
                view.shard, view.state,
                m and m.num_documents, m and m.num_tokens,
                m and format_bytes(m.stored_bytes),
                None if view.ratio is None else round(view.ratio, 3),
                None if view.tokens_per_s is None else round(view.tokens_per_s),
                None if age_s is None else format_seconds(age_s),
                visits.get(view.shard),
            ]
        )  # fmt: skip
    headers = ["shard", "state", "documents", "tokens", "size", "ratio", "tok/s", "age", "passes"]
    return note + table(headers, rows)


def _identity(cache: Cache) -> str:
    rows = []
    for tier in dataclasses.fields(cache.identity):
        part = getattr(cache.identity, tier.name)
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            text = ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
            rows.append([tier.name, field.name.replace("_", " "), text or "none"])
    rows.append(["", "folder", str(layout.shards_dir(cache.path).parent.absolute())])
    return table(["tier", "field", "value"], rows)
