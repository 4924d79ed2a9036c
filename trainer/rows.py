"""Rows: documents packed end to end with their blocks, in arrays of one fixed shape.

Takes token ids, loss masks and anchors of whole documents; hands numpy arrays to the training
step. A block sees only its own document, strictly before its anchor, and its labels and weights
never cross the document's end (dflash.md 2.1).

Axes: S row tokens, N anchor slots, K = block_size - 1 predicted slots, M scored slots, D documents,
T tokens and A anchors of one document.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hscache.errors import ConfigError

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]

PACKING = "largest first"
"""How `pack_rows` deals documents. Checkpoints count rows, so they record it: a run that was dealt
in another way cannot be resumed."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RowDocument:
    """One document as training reads it."""

    document_id: int
    """Row of the document in the cache's plan."""
    input_ids_T: npt.NDArray[np.integer]
    loss_mask_T: npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    """One packed row. Positions count from the start of the row unless said otherwise."""

    input_ids_S: IntArray
    """Token ids; 0 after `num_tokens`."""
    position_ids_S: IntArray
    """Position within the document; 0 after `num_tokens`."""
    anchor_ids_N: IntArray
    """Token id at each anchor, the known slot 0 of its block; 0 in empty slots."""
    context_start_N: IntArray
    """First position that the block sees: the start of its document; 0 in empty slots."""
    context_end_N: IntArray
    """One past the last position that it sees: the anchor itself; 0 in empty slots."""
    labels_NK: IntArray
    """Token ids at anchor + 1 .. anchor + K; 0 past the document's end and in empty slots."""
    weights_NK: FloatArray
    """Weight of the slot for supervised labels inside the document, else 0."""
    num_tokens: int
    """Tokens in use, at most S."""
    num_anchors: int
    """Anchor slots in use, at most N; the first ones."""
    document_ids: tuple[int, ...]
    """Plan rows of the documents, in row order."""
    document_offsets: tuple[int, ...]
    """Row position where each document starts, then `num_tokens`."""

    @property
    def scored_M(self) -> IntArray:
        """Flat indices n * K + k - 1 of the slots with weight > 0, into any [N, K]."""
        return np.flatnonzero(self.weights_NK).astype(np.int64)


def decayed_weights(block_size: int, gamma: float | None) -> FloatArray:
    """Return exp(-(k - 1) / gamma) for k = 1 .. block_size - 1; without gamma ones."""
    if gamma is None:
        return np.ones(block_size - 1, np.float32)
    return np.exp(-np.arange(block_size - 1) / gamma).astype(np.float32)


def pack_rows(
    lengths_D: npt.NDArray[np.integer] | Sequence[int],
    num_anchors_D: npt.NDArray[np.integer] | Sequence[int],
    order: Sequence[int],
    *,
    row_tokens: int,
    anchors_per_row: int,
) -> list[tuple[int, ...]]:
    """Deal whole documents into rows, the largest first; return the document indices of each row.

    First-fit decreasing: a document goes into the first row with room for its tokens and anchors,
    by the larger of its shares of both. Rows come in the `order` of their largest documents, so a
    shuffled order gives shuffled rows. Of conversations it fills 94 % of the anchor slots, which
    a GPU computes whether filled or not; next-fit in the order given filled 74 %.

    A document without anchors is left out: it would fill a row and teach nothing. Raises
    `ConfigError` naming a document that no row can hold.
    """
    documents: list[tuple[float, int, int, int, int]] = []
    for place, document in enumerate(order):
        length, anchors = int(lengths_D[document]), int(num_anchors_D[document])
        if length > row_tokens:
            raise ConfigError(
                f"row_tokens: document {document} has {length} tokens, a row holds {row_tokens}. "
                f"Set row_tokens to at least the cache's longest document ({max(lengths_D)})."
            )
        if anchors > anchors_per_row:
            raise ConfigError(
                f"anchors_per_row: document {document} has {anchors} anchors, a row holds "
                f"{anchors_per_row}. Sample with limit = anchors_per_row."
            )
        if anchors:
            share = max(length / row_tokens, anchors / anchors_per_row)
            documents.append((-share, place, int(document), length, anchors))

    rows: list[_OpenRow] = []
    for _, place, document, length, anchors in sorted(documents):
        for row in rows:
            if row.tokens_left >= length and row.anchors_left >= anchors:
                break
        else:
            row = _OpenRow(place=place, tokens_left=row_tokens, anchors_left=anchors_per_row)
            rows.append(row)
        row.documents.append(document)
        row.tokens_left -= length
        row.anchors_left -= anchors
    return [tuple(row.documents) for row in sorted(rows, key=lambda row: row.place)]


@dataclass(kw_only=True)
class _OpenRow:
    place: int
    """of its first document in the order"""
    tokens_left: int
    anchors_left: int
    documents: list[int] = field(default_factory=list)


def build_row(
    documents: Sequence[RowDocument],
    anchors: Sequence[IntArray],
    *,
    row_tokens: int,
    anchors_per_row: int,
    block_size: int,
    slot_weights: Sequence[FloatArray],
) -> Row:
    """Lay documents end to end and describe the block of every anchor.

    `anchors[i]` holds the anchor positions within `documents[i]`, counted from its own start, and
    `slot_weights[i]` the weights of their slots, [A, K] or [K] for all alike. The documents must
    fit (`pack_rows` sees to it).
    """
    num_predicted = block_size - 1
    offsets = np.cumsum([0] + [len(document.input_ids_T) for document in documents])
    num_tokens, num_anchors = int(offsets[-1]), sum(len(anchors_A) for anchors_A in anchors)
    assert num_tokens <= row_tokens
    assert num_anchors <= anchors_per_row

    input_ids_S = np.zeros(row_tokens, dtype=np.int64)
    position_ids_S = np.zeros(row_tokens, dtype=np.int64)
    anchor_ids_N, context_start_N, context_end_N = np.zeros((3, anchors_per_row), dtype=np.int64)
    labels_NK = np.zeros((anchors_per_row, num_predicted), dtype=np.int64)
    weights_NK = np.zeros((anchors_per_row, num_predicted), dtype=np.float32)

    first = 0
    for document, anchors_A, weights_AK, start in zip(
        documents, anchors, slot_weights, offsets, strict=False
    ):
        ids_T, mask_T = document.input_ids_T, document.loss_mask_T
        length, last = len(ids_T), first + len(anchors_A)
        input_ids_S[start : start + length] = ids_T
        position_ids_S[start : start + length] = np.arange(length)
        anchor_ids_N[first:last] = ids_T[anchors_A]
        context_start_N[first:last] = start
        context_end_N[first:last] = start + anchors_A
        label_positions_AK = anchors_A[:, None] + np.arange(1, block_size)
        inside_AK = label_positions_AK < length
        label_positions_AK = np.where(inside_AK, label_positions_AK, 0)
        labels_NK[first:last] = np.where(inside_AK, ids_T[label_positions_AK], 0)
        scored_AK = inside_AK & mask_T[label_positions_AK].astype(bool)
        weights_NK[first:last] = scored_AK * weights_AK
        first = last

    return Row(
        input_ids_S=input_ids_S,
        position_ids_S=position_ids_S,
        anchor_ids_N=anchor_ids_N,
        context_start_N=context_start_N,
        context_end_N=context_end_N,
        labels_NK=labels_NK,
        weights_NK=weights_NK,
        num_tokens=num_tokens,
        num_anchors=num_anchors,
        document_ids=tuple(document.document_id for document in documents),
        document_offsets=tuple(int(offset) for offset in offsets),
    )
