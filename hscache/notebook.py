"""How a cache, a shard and a document look in a notebook: small HTML tables with their own colours.

Takes the objects of `hscache.reader`; hands on markup for their `_repr_html_`. Reads attributes and
tokens, never states.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from hscache.errors import HscacheError
from hscache.inspect_document import token_kinds, token_texts
from hscache.report import format_bytes, format_number

if TYPE_CHECKING:
    from hscache.reader import Cache, Document
    from hscache.shard import Shard

_SHOWN_TOKENS = 300
# Half-transparent: they suit light and dark notebooks.
_BACKGROUNDS = ("transparent", "rgba(227,155,18,.28)", "rgba(59,111,212,.28)")


def cache_html(cache: Cache) -> str:
    """Return what a cache holds, in one table."""
    states, content = cache.identity.states, cache.identity.content
    published = cache.published_shards()
    layers = ", ".join(map(str, states.target_layer_ids))
    rows = [
        ("target", f"{states.target} ({states.num_target_layers} blocks)"),
        ("states", f"blocks {layers} x {states.hidden_size:,}, {cache.identity.encoding.codec}"),
        ("documents", f"{content.num_documents:,}, {len(cache.held_out):,} of them held out"),
        ("tokens", f"{content.num_tokens:,}"),
        ("shards", f"{len(published):,} of {content.num_shards:,}"),
    ]
    return _table(f"Cache {cache.path}", rows)


def shard_html(shard: Shard) -> str:
    """Return a shard's counts and the statistics of its layers."""
    m = shard.manifest
    rows: list[tuple[Any, ...]] = [
        ("documents", f"{m.num_documents:,}"),
        ("tokens", f"{m.num_tokens:,}"),
        (
            "stored",
            f"{format_bytes(m.stored_bytes)}, {m.raw_bytes / max(1, m.stored_bytes):.3f}x smaller",
        ),
        ("quarantined", f"{len(m.quarantined):,}"),
    ]
    rows += [
        (
            f"block {s.layer_id}",
            f"mean norm {format_number(s.mean_norm)}, max |x| {format_number(s.max_abs)}",
        )
        for s in m.statistics
    ]
    return _table(f"Shard {shard.number}", rows)


def document_html(document: Document) -> str:
    """Return a document's text, coloured by what is supervised and what may be an anchor."""
    mask_T = document.loss_mask
    kinds_T = token_kinds(mask_T)
    ids_T = document.input_ids[:_SHOWN_TOKENS]
    try:
        texts = token_texts(document.cache, ids_T)
    except HscacheError:  # a damaged tokenizer is no reason to fail in a notebook
        texts = [f"{token} " for token in ids_T.tolist()]
    spans = "".join(
        f'<span title="{position}: id {token}" style="background:{_BACKGROUNDS[kind]}">'
        f"{escape(text)}</span>"
        for position, (token, text, kind) in enumerate(
            zip(ids_T.tolist(), texts, kinds_T.tolist(), strict=False)
        )
    )
    more = len(document) - len(ids_T)
    rest = f" ... and {more:,} more tokens" if more > 0 else ""
    facts = (
        f"{len(document):,} tokens, {int(mask_T.sum()):,} supervised (yellow or blue), "
        f"{int((kinds_T == 2).sum()):,} possible anchors (blue), shard {document.shard_number}"
    )
    return (
        f"<div><b>Document {document.row}</b>: {facts}"
        '<div style="white-space:pre-wrap;font-family:monospace;max-height:24em;overflow:auto">'
        f"{spans}{rest}</div></div>"
    )


def _table(title: str, rows: Sequence[tuple[Any, ...]]) -> str:
    def cell(value: Any) -> str:
        return f'<td style="text-align:left">{escape(str(value))}</td>'

    body = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in rows)
    return f"<div><b>{escape(title)}</b><table>{body}</table></div>"
