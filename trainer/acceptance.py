"""Acceptance-length arithmetic shared by training metrics, `trainer eval` and the table drafters.

Takes the number of leading draft tokens that match the recorded ids at every possible anchor, walks
each answer as speculative decoding would, and hands on counts that add up over documents and ranks.

Axes: T tokens of one document.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, kw_only=True)
class SpanCount:
    """Tokens committed and verify steps taken while decoding one span."""

    committed: int
    steps: int


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """Acceptance counts over documents; combine with `+` or `sum(parts, Acceptance())`.

    The bonus token of each verify step counts as committed. The first token of a span does not: the
    prefill gives it. Every property is nan when there was nothing to decode.
    """

    committed: int = 0
    steps: int = 0
    document_means: tuple[float, ...] = ()  # one per document with at least one verify step
    dense_sum: int = 0
    dense_anchors: int = 0

    @property
    def sequential(self) -> float:
        """Acceptance length: committed tokens over verify steps, summed over all documents."""
        return self.committed / self.steps if self.steps else math.nan

    @property
    def per_document_mean(self) -> float:
        """Mean over documents of each one's acceptance length (the figure z-lab publishes)."""
        return fmean(self.document_means) if self.document_means else math.nan

    @property
    def dense(self) -> float:
        """Mean tokens committed by a step from each possible anchor, visited by decoding or not."""
        return self.dense_sum / self.dense_anchors if self.dense_anchors else math.nan

    def __add__(self, other: Acceptance) -> Acceptance:
        return Acceptance(
            committed=self.committed + other.committed,
            steps=self.steps + other.steps,
            document_means=self.document_means + other.document_means,
            dense_sum=self.dense_sum + other.dense_sum,
            dense_anchors=self.dense_anchors + other.dense_anchors,
        )


def supervised_spans(loss_mask_T: npt.ArrayLike) -> list[tuple[int, int]]:
    """Return each maximal run of supervised tokens as a half-open range [start, end), in order."""
    mask_T = np.asarray(loss_mask_T) != 0
    padded = np.concatenate(([False], mask_T, [False]))
    starts = np.flatnonzero(padded[1:] & ~padded[:-1])
    ends = np.flatnonzero(~padded[1:] & padded[:-1])
    return list(zip(starts.tolist(), ends.tolist(), strict=True))


def span_anchors(start: int, end: int) -> range:
    """Return the possible anchors of a span: all its tokens but the last."""
    return range(start, end - 1)


def walk_span(num_matches_T: npt.ArrayLike, start: int, end: int) -> SpanCount:
    """Decode the span [start, end) and count.

    `num_matches_T[a]` holds how many leading proposals equal the recorded ids if a block is
    anchored at a. A step commits these and the bonus token, never past the end of the span.
    """
    matches_T = np.asarray(num_matches_T)
    last = end - 1
    anchor, steps = start, 0
    while anchor < last:
        anchor += min(int(matches_T[anchor]) + 1, last - anchor)
        steps += 1
    return SpanCount(committed=anchor - start, steps=steps)


def document_acceptance(num_matches_T: npt.ArrayLike, loss_mask_T: npt.ArrayLike) -> Acceptance:
    """Count one document: all its spans sequentially, and all possible anchors for the dense mean.

    `num_matches_T` needs right values at the possible anchors of each span only.
    """
    matches_T = np.asarray(num_matches_T)
    committed = steps = dense_sum = dense_anchors = 0
    for start, end in supervised_spans(loss_mask_T):
        count = walk_span(matches_T, start, end)
        committed += count.committed
        steps += count.steps
        anchors = np.asarray(span_anchors(start, end), dtype=np.int64)
        dense_sum += int(np.minimum(matches_T[anchors] + 1, end - 1 - anchors).sum())
        dense_anchors += len(anchors)
    return Acceptance(
        committed=committed,
        steps=steps,
        document_means=(committed / steps,) if steps else (),
        dense_sum=dense_sum,
        dense_anchors=dense_anchors,
    )
