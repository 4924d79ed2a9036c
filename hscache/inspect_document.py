"""One document of a cache on the terminal: its text, what is supervised, norms along it.

Takes an open cache and a plan row; reads that document's states and nothing else. The text comes
from `frozen/tokenizer/tokenizer.json` through the `tokenizers` library alone, because importing
transformers would take seconds.

Axes: T tokens, L captured layers, H hidden.
"""

import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hscache import layout
from hscache.errors import CacheIncompleteError, HscacheError
from hscache.reader import Cache, Document
from hscache.report import format_number, format_table

_WIDTH = 64
"""Columns of a sparkline."""
_LEVELS = "▁▂▃▄▅▆▇█"
CONTEXT, SUPERVISED, ANCHOR = 0, 1, 2
_BRACKETS = {CONTEXT: ("", ""), SUPERVISED: ("⟦", "⟧")}
_COLOURS = {CONTEXT: ("", ""), SUPERVISED: ("\033[33m", "\033[0m"), ANCHOR: ("\033[32m", "\033[0m")}
_VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {127: 0x2421}
"""Control characters, shown as symbols: a document must not steer the terminal."""


def describe_document(cache: Cache, row: int) -> str:
    """Return the view of one document.

    Raises ConfigError when there is no such document, ShardCorruptError when its shard is damaged.
    """
    document = cache.document(row)
    try:
        norms, where = _norms(cache, document), "published"
    except CacheIncompleteError as error:  # not yet, no longer, or never: the tokens are there
        norms, where = None, str(error)
    supervised = int(document.loss_mask.sum())
    facts = [
        ["tokens", f"{len(document):,}"],
        ["supervised", f"{supervised:,} ({supervised / len(document):.1%})"],
        ["possible anchors", f"{int(cache.plan.valid_anchors[row]):,}"],
        ["held out", "yes" if document.shard_number in cache.plan.held_out_shards else "no"],
        ["input row", f"{document.source_row:,} over all input files, from 0"],
        ["key", f"{document.key:016x}"],
        ["shard", f"{document.shard_number} ({where})"],
    ]
    parts = [format_table([f"document {row}", str(cache.path)], facts), _text(cache, document)]
    if norms is not None:
        parts.append(norms)
    return "\n\n".join(parts)


def _text(cache: Cache, document: Document) -> str:
    path = layout.frozen_dir(cache.path) / "tokenizer" / "tokenizer.json"
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    kinds = token_kinds(document.loss_mask) if colour else document.loss_mask.astype(np.uint8)
    runs = mask_runs(kinds)
    if path.is_file():
        pieces = _decode(path.read_bytes(), document.input_ids, [stop for stop, _ in runs])
    else:
        starts = [0, *(stop for stop, _ in runs[:-1])]
        pieces = [
            " ".join(map(str, document.input_ids[start:stop].tolist())) + " "
            for start, (stop, _) in zip(starts, runs, strict=True)
        ]
    marks = _COLOURS if colour else _BRACKETS
    marked = [
        marks[kind][0] + piece + marks[kind][1]
        for piece, (_, kind) in zip(pieces, runs, strict=True)
    ]
    left, right = marks[SUPERVISED]
    legend = f"supervised parts {left}like this{right}"
    if colour:
        left, right = marks[ANCHOR]
        legend += f", possible anchors {left}like this{right}"
    kind = "text" if path.is_file() else f"token ids ({path} is not there)"
    return f"{kind}, {legend}:\n{''.join(marked).rstrip()}"


def token_kinds(loss_mask_T: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint8]:
    """Return CONTEXT, SUPERVISED or ANCHOR for each token, [T].

    An anchor may be where a supervised token is followed by another one.
    """
    kinds_T = loss_mask_T.astype(np.uint8)
    kinds_T[:-1] += loss_mask_T[:-1] & loss_mask_T[1:]
    return kinds_T


def mask_runs(kinds_T: npt.NDArray[Any]) -> list[tuple[int, int]]:
    """Return (stop, kind) of every stretch of equal values."""
    changes = np.flatnonzero(np.diff(kinds_T)) + 1
    stops = [*changes.tolist(), len(kinds_T)]
    return [(stop, int(kinds_T[stop - 1])) for stop in stops]


def _decode(tokenizer: bytes, ids_T: npt.NDArray[np.int32], stops: Sequence[int]) -> list[str]:
    """Return the text of each stretch, special tokens included.

    Stretches are cut out of ever longer prefixes: alone, one may lose the space it starts with.
    """
    decode = _tokenizer(tokenizer).decode
    prefixes = ["", *(decode(ids_T[:stop].tolist(), skip_special_tokens=False) for stop in stops)]
    return [
        after[len(before) :].translate(_VISIBLE) for before, after in itertools.pairwise(prefixes)
    ]


def _tokenizer(tokenizer: bytes) -> Any:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_buffer(tokenizer)
    except Exception as error:  # tokenizers raises nothing more specific
        raise HscacheError(
            f"frozen/tokenizer/tokenizer.json cannot be read: {error}. Delete frozen/ and run "
            "`hscache produce` again."
        ) from error


def token_texts(cache: Cache, ids_T: npt.NDArray[np.int32]) -> list[str]:
    """Return the text that each token adds, control characters as symbols; ids without a tokenizer.

    A token is decoded behind the few before it: alone it may lose the space it starts with. One
    that is a part of a character shows as a replacement mark.
    """
    path = layout.frozen_dir(cache.path) / "tokenizer" / "tokenizer.json"
    if not path.is_file():
        return [f"{token} " for token in ids_T.tolist()]
    decode = _tokenizer(path.read_bytes()).decode
    ids = ids_T.tolist()
    texts = []
    for stop in range(1, len(ids) + 1):
        start = max(0, stop - 5)
        before = decode(ids[start : stop - 1], skip_special_tokens=False)
        after = decode(ids[start:stop], skip_special_tokens=False)
        if not after.startswith(before):  # a character was completed
            before = before.rstrip("�")
        texts.append(after[len(before) :].translate(_VISIBLE))
    return texts


def _norms(cache: Cache, document: Document) -> str:
    rows = []
    for layer_id, norms_T in layer_norms(cache, document):
        figures = (norms_T.min(), norms_T.mean(), norms_T.max())
        rows.append([layer_id, *(format_number(float(f)) for f in figures), sparkline(norms_T)])
    headers = ["layer", "min norm", "mean", "max", "along the document (log scale)"]
    return format_table(headers, rows)


def layer_norms(cache: Cache, document: Document) -> Iterator[tuple[int, npt.NDArray[np.float32]]]:
    """Yield (layer id, L2 norm over hidden of each token, [T]) of every stored layer."""
    states = cache.identity.states
    last = (states.num_target_layers - 1,) if states.last_hidden else ()
    for layer_id in (*states.target_layer_ids, *last):
        # a layer at a time: a long document of a 27B target has a gigabyte of states
        captured = layer_id in states.target_layer_ids
        states_TH = document.hidden_states(layer_id) if captured else document.last_hidden()
        yield layer_id, np.linalg.norm(states_TH.astype(np.float32), axis=1)


def sparkline(values: npt.NDArray[np.float32]) -> str:
    """Draw values as bars of eight heights, at most `_WIDTH` of them (means), on a log scale.

    The scale leaves out the extremes: the first token's norm is often 100 times the others'.
    """
    parts = np.array_split(values, min(_WIDTH, len(values)))
    logs = np.log(np.maximum([part.mean() for part in parts], np.finfo(np.float32).tiny))
    low, high = np.quantile(logs, (0.03, 0.97), method="nearest")
    heights = np.clip((logs - low) / max(high - low, 1e-6), 0, 1)  # under 1e-6 all are equal
    return "".join(_LEVELS[min(int(h * len(_LEVELS)), len(_LEVELS) - 1)] for h in heights)
