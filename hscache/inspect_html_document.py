"""One document on the page of `hscache inspect --html`: its tokens, its mask, norms along it.

Takes an open cache and a plan row; hands on markup. Text of the corpus is escaped.
"""

from __future__ import annotations

from html import escape
from typing import Any

from hscache import svg
from hscache.errors import HscacheError
from hscache.inspect_document import CONTEXT, layer_norms, mask_runs, token_kinds, token_texts
from hscache.page_parts import card, figure, thinned
from hscache.reader import Cache, Document

_TOKENS = 4096


def document_card(cache: Cache, row: int) -> str:
    """Return the section of one document; raises ConfigError when there is none."""
    document = cache.document(row)
    mask_T = document.loss_mask
    kinds_T = token_kinds(mask_T)
    held_out = document.shard_number in cache.plan.held_out_shards
    facts = (
        f"{len(document):,} tokens, {int(mask_T.sum()):,} supervised "
        f"({mask_T.mean():.1%}), {int(cache.plan.valid_anchors[row]):,} possible anchors; shard "
        f"{document.shard_number}, {'held out' if held_out else 'to train on'}, input row "
        f"{document.source_row:,}"
    )
    key = (
        '<p class="key"><span class="token x">context</span><span class="token s">supervised</span>'
        '<span class="token a">supervised, and a possible anchor</span></p>'
    )
    return card(
        f"Document {row:,}",
        f"<p>{facts}</p>{_norm_chart(cache, document, kinds_T)}{key}"
        f'<div class="text">{_tokens(cache, document, kinds_T)}</div>',
    )


def _norm_chart(cache: Cache, document: Document, kinds_T: Any) -> str:
    try:
        found = list(layer_norms(cache, document))
    except HscacheError as error:  # not produced, quarantined, freed or damaged: it is said
        return f"<p>no states: {escape(str(error))}</p>"
    series = [(f"block {layer}", thinned(norms_T.tolist())[0]) for layer, norms_T in found]
    step = thinned(kinds_T.tolist())[1]
    starts = [0, *(stop for stop, _ in mask_runs(kinds_T > CONTEXT))]
    length = max(1, len(kinds_T) - 1)
    bands = [
        (start / length, min(1.0, stop / length))
        for start, (stop, supervised) in zip(starts, mask_runs(kinds_T > CONTEXT), strict=False)
        if supervised
    ]
    key = "".join(
        f'<span><i class="c{n % 6}"></i>{escape(name)}</span>' for n, (name, _) in enumerate(series)
    )
    chart = svg.lines(series, x_step=step, log=True, bands=bands, width=1040, height=220)
    caption = "Norm of the states along the document (log scale), supervised parts shaded"
    return figure(caption, chart) + f'<p class="key">{key}</p>'


def _tokens(cache: Cache, document: Document, kinds_T: Any) -> str:
    ids_T = document.input_ids[:_TOKENS]
    parts = [
        f'<span class="token {"xsa"[kind]}" title="{position}: id {token}">{escape(text)}</span>'
        for position, (token, text, kind) in enumerate(
            zip(ids_T.tolist(), token_texts(cache, ids_T), kinds_T.tolist(), strict=False)
        )
    ]
    if len(document) > _TOKENS:
        parts.append(f"<p>... and {len(document) - _TOKENS:,} more tokens</p>")
    return "".join(parts)
