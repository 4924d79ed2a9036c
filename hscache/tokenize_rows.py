"""Turn rows into token ids, and a mask of what is supervised, as flat arrays.

Takes packets of unparsed rows, the corpus' settings and a tokenizer with a chat template; hands on
`TokenizedRows`, the documents of a packet one behind the other, with counts of what was dropped.
A row's document depends on nothing but the row, so packets may be done in any order, anywhere.

Axes: T tokens of a document or of all documents, D documents.
"""

import io
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hscache.config import DataConfig
from hscache.conversations import Conversation, PlainText, Tokens, parse_row
from hscache.errors import DataError
from hscache.inputs import Packet
from hscache.plan import TokenizedDocument
from hscache.render import Rendered, render

_BATCH = 256

Pair = tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]
"""(ids_T, loss_mask_T) of a document."""

REASONS = (
    "last answer cut by its token limit",
    "over max_tokens, truncate",
    "over max_tokens, drop",
    "dropped: no two supervised tokens in a row",
)
"""What is counted of rows, in the order of `TokenizedRows.counts`."""


@dataclass(frozen=True, kw_only=True)
class TokenizedRows:
    """Documents of neighbouring rows, in order, as flat arrays."""

    ids_T: npt.NDArray[np.int32]
    loss_mask_T: npt.NDArray[np.uint8]
    lengths_D: npt.NDArray[np.int32]
    keys_D: npt.NDArray[np.uint64]
    """`TokenizedDocument.key` of each"""
    rows_D: npt.NDArray[np.int32]
    """each document's row: its position in the packet, `Packet.positions`"""
    counts: npt.NDArray[np.int64]
    """rows to which each of `REASONS` applied"""

    def to_bytes(self) -> bytes:
        """Return the arrays as an .npz file, which carries checksums."""
        buffer = io.BytesIO()
        np.savez(buffer, **vars(self))
        return buffer.getvalue()


class RowTokenizer:
    """Tokenises packets of rows by the settings of a corpus."""

    def __init__(self, data: DataConfig, tokenizer: Any) -> None:
        self._data = data
        self._tokenizer = tokenizer
        # Ids may have gaps, so their number is not the bound.
        self._vocab_size = max(tokenizer.get_vocab().values()) + 1

    def __call__(self, packet: Packet) -> TokenizedRows:
        """Return the documents of a packet; raise DataError naming file and row."""
        pairs: list[Pair] = []
        keys, positions = [], []
        counts = dict.fromkeys(REASONS, 0)
        rows = zip(packet.positions, packet.parse(), strict=True)
        while batch := list(itertools.islice(rows, _BATCH)):
            parsed = [parse_row(row) for _, row in batch]
            for (position, _), row, pair in zip(batch, parsed, self._pairs(parsed), strict=True):
                document = self._document(row, pair, counts)
                if document is not None:
                    pairs.append((document.ids_T, document.loss_mask_T))
                    keys.append(document.key)
                    positions.append(position)
        return TokenizedRows(
            ids_T=np.concatenate([np.zeros(0, np.int32), *(ids_T for ids_T, _ in pairs)]),
            loss_mask_T=np.concatenate([np.zeros(0, np.uint8), *(mask_T for _, mask_T in pairs)]),
            lengths_D=np.array([len(ids_T) for ids_T, _ in pairs], np.int32),
            keys_D=np.array(keys, np.uint64),
            rows_D=np.array(positions, np.int32),
            counts=np.array(list(counts.values()), np.int64),
        )

    def _pairs(self, rows: list[Conversation | PlainText | Tokens]) -> Iterator[Pair]:
        """Yield the documents of rows in order; conversations go through the tokenizer at once."""
        rendered = [
            render(row, self._tokenizer, self._data.answers)
            for row in rows
            if isinstance(row, Conversation)
        ]
        pairs = iter(tokenize(rendered, self._tokenizer) if rendered else ())
        for row in rows:
            if isinstance(row, Conversation):
                yield next(pairs)
            elif isinstance(row, PlainText):
                yield tokenize_text(row, self._tokenizer)
            else:
                yield check_tokens(row, self._vocab_size)

    def _document(
        self, row: Conversation | PlainText | Tokens, pair: Pair, counts: dict[str, int]
    ) -> TokenizedDocument | None:
        """Return a row's document at its final length, or None and the reason counted."""
        ids_T, mask_T = pair
        if isinstance(row, Conversation):
            counts["last answer cut by its token limit"] += row.truncated
        if len(ids_T) > self._data.max_tokens:
            counts[f"over max_tokens, {self._data.over_long}"] += 1
            if self._data.over_long == "drop":
                return None
            ids_T, mask_T = ids_T[: self._data.max_tokens], mask_T[: self._data.max_tokens]
        document = TokenizedDocument(ids_T=ids_T, loss_mask_T=mask_T, source_row=0, held_out=False)
        if document.num_valid_anchors == 0:
            counts["dropped: no two supervised tokens in a row"] += 1
            return None
        return document


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
