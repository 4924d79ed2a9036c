"""Turn rows of conversations into documents: token ids, and a mask of what the assistant said.

Takes JSONL files (plain or .gz) with one object with `messages` a line, and a tokenizer with a chat
template; hands on `TokenizedDocument`s and a count of what was dropped and why. The loss mask comes
from the boundaries between renders of growing prefixes; a template that rewrites earlier turns is
refused, not guessed at.
"""

import collections
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import jinja2
import numpy as np

from hscache.config import DataConfig
from hscache.errors import DataError
from hscache.plan import TokenizedDocument
from hscache.progress import Progress
from hscache.rows import read_conversations

OverLong = Literal["drop", "truncate"]

_BATCH = 256
_HASH_RANGE = 1 << 64


@dataclass(frozen=True, kw_only=True)
class Row:
    """One conversation of the input, and where it came from."""

    messages: list[dict[str, Any]]
    truncated: bool
    """the last answer was cut by a token limit: its end is not the model's"""
    where: str
    """file and line, for messages"""


def read_rows(path: str) -> Iterator[Row]:
    """Yield the conversations of a JSONL file.

    Raises DataError naming file and line for a line that is no JSON object, or has no messages.
    """
    for number, row in read_conversations(path):
        yield Row(
            messages=row["messages"],
            truncated=row.get("finish_reason") == "length",
            where=f"{path}, line {number}",
        )


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """A conversation as text, and the character spans the assistant generated."""

    text: str
    spans: tuple[tuple[int, int], ...]


def render(row: Row, tokenizer: Any) -> Rendered:
    """Render a conversation and find what the assistant generated, end-of-turn marker included.

    An answer starts where the render of the turns before it, with a generation prompt, ends; it
    ends where the render of the turns up to it ends, trailing white space aside. A truncated last
    answer ends the document with its content. Raises DataError if a render is not an append.
    """

    def text_of(count: int, prompt: bool = False) -> str:
        try:
            return tokenizer.apply_chat_template(
                row.messages[:count], tokenize=False, add_generation_prompt=prompt
            )
        except jinja2.TemplateError as error:
            raise DataError(
                f"{row.where}: the chat template refuses it: {error}. Mend or delete the row."
            ) from error

    full = text_of(len(row.messages))
    spans = []
    for index, message in enumerate(row.messages):
        if message["role"] != "assistant":
            continue
        if index == 0:
            raise DataError(
                f"{row.where}: the conversation starts with an assistant turn, so it answers "
                "nothing. Put the question before it, or delete the row."
            )
        before, upto = text_of(index, prompt=True), text_of(index + 1)
        if not (full.startswith(before) and full.startswith(upto)):
            raise DataError(
                f"{row.where}: the chat template does not only append: rendering turns "
                f"1..{index + 1} is no prefix of the whole, so a loss mask would be a guess. "
                "Use a template that keeps earlier turns unchanged."
            )
        end = len(upto.rstrip())
        if row.truncated and index == len(row.messages) - 1:
            content = message["content"].strip()
            start = full.find(content, len(before))
            if start < 0:
                raise DataError(
                    f"{row.where}: the chat template changes the text of the truncated answer, so "
                    "where it ends would be a guess. Delete the row."
                )
            end = start + len(content)
            full = full[:end]
        spans.append((len(before), end))
    return Rendered(text=full, spans=tuple(spans))


def tokenize(rendered: list[Rendered], tokenizer: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return (ids_T int32, loss_mask_T uint8) per text; a token is supervised if it lies in a span.

    The template has written the special tokens, so none is added (never two BOS). Byte-level
    tokenizers may trim spaces off offsets, which leaves a token of spaces at (p, p), p its end.
    """
    encoded = tokenizer(
        [r.text for r in rendered], add_special_tokens=False, return_offsets_mapping=True
    )
    result = []
    for text, ids, offsets in zip(
        rendered, encoded["input_ids"], encoded["offset_mapping"], strict=True
    ):
        start_T, end_T = np.array(offsets, np.int64).reshape(-1, 2).T
        mask_T = np.zeros(len(ids), np.uint8)
        for low, high in text.spans:
            mask_T |= ((start_T >= low) & (end_T <= high) & (end_T > low)).astype(np.uint8)
        result.append((np.array(ids, np.int32), mask_T))
    return result


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Documents of all files and a report of what happened to the rows."""

    documents: list[TokenizedDocument]
    report: dict[str, int]


def load_corpus(data: DataConfig, tokenizer: Any, seed: int) -> Corpus:
    """Read, render and tokenise every row; count drops by reason.

    A training document that equals a held-out one is dropped. Raises DataError on unusable rows, or
    when no document to train on is left.
    """
    train = list(enumerate(row for path in data.train for row in read_rows(path)))
    held_out = list(enumerate((r for path in data.held_out for r in read_rows(path)), len(train)))
    counts: collections.Counter[str] = collections.Counter({"rows in": len(train) + len(held_out)})
    if data.max_documents is not None and data.max_documents < len(train):
        counts["not in the sample of max_documents"] = len(train) - data.max_documents
        chosen = np.random.default_rng(seed).permutation(len(train))[: data.max_documents]
        train = [train[i] for i in sorted(chosen.tolist())]
    rows = train + held_out
    documents = []
    with Progress(len(rows), unit="rows", label="tokenize") as progress:
        for start in range(0, len(rows), _BATCH):
            batch = rows[start : start + _BATCH]
            pairs = tokenize([render(row, tokenizer) for _, row in batch], tokenizer)
            for offset, (ids_T, mask_T) in enumerate(pairs):
                source_row, row = batch[offset]
                counts["last answer cut by its token limit"] += row.truncated
                if len(ids_T) > data.max_tokens:
                    counts[f"over max_tokens, {data.over_long}"] += 1
                    if data.over_long == "drop":
                        continue
                    ids_T, mask_T = ids_T[: data.max_tokens], mask_T[: data.max_tokens]
                document = TokenizedDocument(
                    ids_T=ids_T,
                    loss_mask_T=mask_T,
                    source_row=source_row,
                    held_out=start + offset >= len(train),
                )
                if document.num_valid_anchors == 0:
                    counts["dropped: no two supervised tokens in a row"] += 1
                    continue
                documents.append(_maybe_hold_out(document, data.held_out_fraction))
            progress.advance(len(batch))
    held_out_keys = {document.key for document in documents if document.held_out}
    kept = [d for d in documents if d.held_out or d.key not in held_out_keys]
    counts["dropped: also held out"] = len(documents) - len(kept)
    documents = kept
    counts["kept to train on"] = sum(not d.held_out for d in documents)
    counts["kept held out"] = sum(d.held_out for d in documents)
    if not counts["kept to train on"]:
        raise DataError(
            "no document is left to train on: "
            f"{', '.join(f'{reason}: {n}' for reason, n in counts.items() if n)}. Rows need an "
            "assistant turn with at least two tokens within data.max_tokens."
        )
    return Corpus(documents=documents, report={k: n for k, n in counts.items() if n})


def _maybe_hold_out(document: TokenizedDocument, fraction: float) -> TokenizedDocument:
    if document.held_out or document.key >= fraction * _HASH_RANGE:
        return document
    return dataclasses.replace(document, held_out=True)
