"""Table drafters: the baselines a trained drafter has to beat.

`NGramTable` is counted on the training documents (their tokens and loss mask, nothing else),
`PromptLookup` copies from the context and needs no training. `evaluate_table` hands on the same
`Acceptance` counts that `trainer eval` reports for a real drafter.

Axes: T tokens of one document.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from trainer.acceptance import Acceptance, document_acceptance, span_anchors, supervised_spans


class TokenDocument(Protocol):
    """What is read of a document; a cache's documents are such."""

    @property
    def input_ids(self) -> Any:
        """Token ids, integers [T]."""

    @property
    def loss_mask(self) -> Any:
        """Non-zero where supervised, [T]."""


@dataclass(frozen=True)
class Text:
    """A `TokenDocument` of arrays at hand."""

    input_ids: np.ndarray
    loss_mask: np.ndarray


class TableDrafter(Protocol):
    """Anything that guesses the next tokens from the tokens so far."""

    def propose(self, context_ids: Sequence[int], num_tokens: int) -> list[int]:
        """Return at most `num_tokens` ids to follow `context_ids`; fewer mean no further guess."""
        ...


class NGramTable:
    """Greedy n-gram drafter with back-off: order 2 is the bigram, 3 the trigram, 4 the 4-gram.

    The longest context seen in training decides, and its most frequent successor is proposed. A tie
    goes to the one seen more often after the next shorter context, at last to the smaller id. An
    unseen context loses its oldest token, down to the unigram.
    """

    def __init__(self, order: int, best: dict[tuple[int, ...], int]) -> None:
        self.order = order
        self._best = best  # context of 0..order-1 ids -> its most frequent successor

    @classmethod
    def count(cls, documents: Iterable[TokenDocument], order: int) -> NGramTable:
        """Count successors over whole documents.

        The predicted token must be supervised; its context may be prompt tokens. A context never
        reaches into another document. At least one token must be supervised.
        """
        counts: dict[tuple[int, ...], dict[int, int]] = {}
        for document in documents:
            ids = np.asarray(document.input_ids).tolist()
            for position in np.flatnonzero(np.asarray(document.loss_mask)).tolist():
                successor = ids[position]
                for size in range(min(order - 1, position) + 1):
                    followers = counts.setdefault(tuple(ids[position - size : position]), {})
                    followers[successor] = followers.get(successor, 0) + 1
        best = {}
        for context, followers in counts.items():
            most = max(followers.values())
            tied = [token for token, seen in followers.items() if seen == most]
            for size in range(len(context) - 1, -1, -1):
                if len(tied) == 1:
                    break
                shorter = counts[context[len(context) - size :]]
                most = max(shorter[token] for token in tied)
                tied = [token for token in tied if shorter[token] == most]
            best[context] = min(tied)
        return cls(order, best)

    def propose(self, context_ids: Sequence[int], num_tokens: int) -> list[int]:
        """Return `num_tokens` ids, each predicted from the ones before it, drafts included."""
        longest = self.order - 1
        tail = list(context_ids[-longest:])
        proposed = []
        for _ in range(num_tokens):
            context = tuple(tail[-longest:])
            while context not in self._best:
                context = context[1:]
            tail.append(self._best[context])
            proposed.append(tail[-1])
        return proposed


class PromptLookup:
    """Copy what followed the last place in the context that looks like its end.

    The longest suffix of `min_match`..`max_match` tokens that occurred before wins, then the most
    recent occurrence; a copy that reaches the end of the context goes on into its own draft.
    Method: Saxena, Prompt Lookup Decoding, 2023.
    """

    def __init__(self, max_match: int = 4, min_match: int = 1) -> None:
        self.max_match = max_match
        self.min_match = min_match

    def propose(self, context_ids: Sequence[int], num_tokens: int) -> list[int]:
        """Return `num_tokens` copied ids; none if no `min_match` tokens occurred before."""
        ids = list(context_ids)
        source, longest = 0, self.min_match - 1
        last = len(ids) - 1
        for end in range(last - 1, -1, -1):
            if ids[end] != ids[last]:
                continue
            size = 1
            while size < self.max_match and size <= end and ids[end - size] == ids[last - size]:
                size += 1
            if size > longest:
                source, longest = end + 1, size
                if size == self.max_match:
                    break
        if longest < self.min_match:
            return []
        for offset in range(num_tokens):
            ids.append(ids[source + offset])
        return ids[last + 1 :]


def evaluate_table(
    drafter: TableDrafter, documents: Iterable[TokenDocument], block_size: int
) -> Acceptance:
    """Return the acceptance of `drafter` on the supervised spans of `documents`.

    Drafts `block_size - 1` tokens at every possible anchor, so that the sequential and the dense
    figure come from one pass; the context is everything up to and including the anchor.
    """
    total = Acceptance()
    for document in documents:
        ids = np.asarray(document.input_ids).tolist()
        num_matches_T = np.zeros(len(ids), dtype=np.int64)
        for start, end in supervised_spans(document.loss_mask):
            for anchor in span_anchors(start, end):
                proposed = drafter.propose(ids[: anchor + 1], block_size - 1)
                num_matches_T[anchor] = _common_prefix(proposed, ids[anchor + 1 :])
        total += document_acceptance(num_matches_T, document.loss_mask)
    return total


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    size = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        size += 1
    return size
