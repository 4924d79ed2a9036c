"""Turn rows into documents: token ids, and a mask of what is supervised.

Takes the inputs of a corpus and a tokenizer with a chat template; hands on `TokenizedDocument`s and
a count of what was dropped and why. Rows stream through in batches: only ids are kept.
"""

import collections
import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from hscache.config import DataConfig
from hscache.conversations import Conversation, PlainText, Tokens, parse_row
from hscache.errors import DataError
from hscache.inputs import InputFile, RawRow, find_files
from hscache.plan import TokenizedDocument
from hscache.progress import Progress
from hscache.render import Rendered, render

OverLong = Literal["drop", "truncate"]

_BATCH = 256
_HASH_RANGE = 1 << 64

Pair = tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]
"""(ids_T, loss_mask_T) of a document."""


def tokenize(rendered: list[Rendered], tokenizer: Any) -> list[Pair]:
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


def tokenize_text(row: PlainText, tokenizer: Any) -> Pair:
    """Return the ids of a text, with the tokenizer's own special tokens once; all are supervised.

    A text that begins with the BOS token's own text has it already, so no other is put before it.
    """
    bos = tokenizer.bos_token
    add = not (bos and row.text.startswith(bos))
    ids_T = np.array(tokenizer(row.text, add_special_tokens=add)["input_ids"], np.int32)
    return ids_T, np.ones(len(ids_T), np.uint8)


def check_tokens(row: Tokens, vocab_size: int) -> Pair:
    """Return the user's ids and mask as they are; raise DataError for ids beyond the vocabulary."""
    largest = int(row.ids_T.max())
    if largest >= vocab_size:
        raise DataError(
            f"{row.where}: `input_ids` holds {largest}, and the target's tokenizer has ids from 0 "
            f"to {vocab_size - 1}. The ids were made with another tokenizer; use this target's."
        )
    return row.ids_T.astype(np.int32), row.loss_mask_T


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Documents of all files and a report of what happened to the rows."""

    documents: list[TokenizedDocument]
    report: dict[str, int | float]


def load_corpus(data: DataConfig, tokenizer: Any, seed: int) -> Corpus:
    """Read, render and tokenise every row; count drops by reason.

    A training document that equals a held-out one is dropped. Raises DataError on unusable rows,
    when no document to train on is left, or when too few of its tokens are supervised.
    """
    train, held_out = find_files(data.train), find_files(data.held_out)
    num_train = sum(file.count_rows() for file in train)
    num_rows = num_train + sum(file.count_rows() for file in held_out)
    counts: collections.Counter[str] = collections.Counter({"rows in": num_rows})
    chosen = _sample(num_train, data.max_documents, seed)
    if chosen is not None:
        counts["not in the sample of max_documents"] = num_train - len(chosen)
        num_rows -= num_train - len(chosen)
    rows = (
        (source_row, row)
        for source_row, row in enumerate(_read_all([*train, *held_out]))
        if chosen is None or source_row >= num_train or source_row in chosen
    )
    # Ids may have gaps, so their number is not the bound.
    vocab_size = max(tokenizer.get_vocab().values()) + 1
    documents = []
    with Progress(num_rows, unit="rows", label="tokenize") as progress:
        while batch := list(itertools.islice(rows, _BATCH)):
            parsed = [parse_row(row) for _, row in batch]
            pairs = _tokenize_rows(parsed, tokenizer, vocab_size)
            for (source_row, _), row, (ids_T, mask_T) in zip(batch, parsed, pairs, strict=True):
                if isinstance(row, Conversation):
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
                    held_out=source_row >= num_train,
                )
                if document.num_valid_anchors == 0:
                    counts["dropped: no two supervised tokens in a row"] += 1
                    continue
                documents.append(_maybe_hold_out(document, data.held_out_fraction))
            progress.advance(len(batch))
    held_out_keys = {document.key for document in documents if document.held_out}
    kept = [d for d in documents if d.held_out or d.key not in held_out_keys]
    counts["dropped: also held out"] = len(documents) - len(kept)
    counts["kept to train on"] = sum(not d.held_out for d in kept)
    counts["kept held out"] = sum(d.held_out for d in kept)
    if not counts["kept to train on"]:
        raise DataError(
            "no document is left to train on: "
            f"{', '.join(f'{reason}: {n}' for reason, n in counts.items() if n)}. Rows need an "
            "assistant turn with at least two tokens within data.max_tokens."
        )
    counts["supervised tokens"] = sum(int(d.loss_mask_T.sum()) for d in kept)
    share = counts["supervised tokens"] / sum(len(d.ids_T) for d in kept)
    _require_share(share, data.min_supervised_share)
    report = {key: n for key, n in counts.items() if n}
    return Corpus(documents=kept, report={**report, "supervised share": round(share, 4)})


def _sample(num_rows: int, max_rows: int | None, seed: int) -> set[int] | None:
    """Return the row numbers of a seeded sample, drawn over all files alike; None means all."""
    if max_rows is None or max_rows >= num_rows:
        return None
    return set(np.random.default_rng(seed).permutation(num_rows)[:max_rows].tolist())


def _read_all(files: list[InputFile]) -> Iterator[RawRow]:
    for file in files:
        yield from file.read_rows()


def _tokenize_rows(
    rows: list[Conversation | PlainText | Tokens], tokenizer: Any, vocab_size: int
) -> Iterator[Pair]:
    """Yield the documents of rows in order; the conversations go through the tokenizer at once."""
    rendered = [render(row, tokenizer) for row in rows if isinstance(row, Conversation)]
    pairs = iter(tokenize(rendered, tokenizer) if rendered else ())
    for row in rows:
        if isinstance(row, Conversation):
            yield next(pairs)
        elif isinstance(row, PlainText):
            yield tokenize_text(row, tokenizer)
        else:
            yield check_tokens(row, vocab_size)


def _require_share(share: float, floor: float) -> None:
    if share < floor:
        raise DataError(
            f"only {share:.2%} of the tokens are supervised, and data.min_supervised_share is "
            f"{floor:.2%}: the rest would be run through the target for nothing. Look at the "
            "loss mask (answers far shorter than prompts, a role that is not `assistant`?), or "
            "lower the setting."
        )


def _maybe_hold_out(document: TokenizedDocument, fraction: float) -> TokenizedDocument:
    if document.held_out or document.key >= fraction * _HASH_RANGE:
        return document
    return dataclasses.replace(document, held_out=True)
