"""Acceptance arithmetic against a decoder that is played out token by token."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.acceptance import (
    Acceptance,
    SpanCount,
    document_acceptance,
    supervised_spans,
    walk_span,
)

BLOCK_SIZE = 4
masks = st.lists(st.booleans(), min_size=1, max_size=40)


@st.composite
def documents(draw):
    """A mask, and per position an id and a draft over three symbols: matches are common."""
    mask_T = draw(masks)
    symbols = st.integers(0, 2)
    ids_T = [draw(symbols) for _ in mask_T]
    draft_TS = [[draw(symbols) for _ in range(BLOCK_SIZE - 1)] for _ in mask_T]
    return mask_T, ids_T, draft_TS


def slow_spans(mask_T):
    spans, start = [], None
    for position, supervised in enumerate(mask_T):
        if supervised and start is None:
            start = position
        if not supervised and start is not None:
            spans.append((start, position))
            start = None
    return spans if start is None else [*spans, (start, len(mask_T))]


def slow_step(answer, num_known, draft):
    """Verify one draft as the target would and return the tokens it adds to the answer."""
    added: list[int] = []
    for guess in draft:
        if num_known + len(added) == len(answer):
            return added
        truth = answer[num_known + len(added)]
        added.append(truth)  # the target's own token: the accepted guess, or the correction
        if guess != truth:
            return added
    if num_known + len(added) < len(answer):
        added.append(answer[num_known + len(added)])  # the bonus token after a full match
    return added


def slow_acceptance(mask_T, ids_T, draft_TS):
    committed = steps = dense_sum = dense_anchors = 0
    for start, end in slow_spans(mask_T):
        answer = ids_T[start:end]
        known = answer[:1]
        while len(known) < len(answer):
            known = known + slow_step(answer, len(known), draft_TS[start + len(known) - 1])
            steps += 1
        assert known == answer
        committed += len(known) - 1
        for num_known in range(1, len(answer)):
            dense_sum += len(slow_step(answer, num_known, draft_TS[start + num_known - 1]))
            dense_anchors += 1
    return committed, steps, dense_sum, dense_anchors


@given(masks)
def test_spans_are_the_maximal_supervised_runs(mask_T):
    assert supervised_spans(np.array(mask_T, dtype=np.uint8)) == slow_spans(mask_T)


@given(documents())
def test_counts_equal_a_decoder_played_out_token_by_token(document):
    mask_T, ids_T, draft_TS = document
    num_matches_T = []
    for place, draft in enumerate(draft_TS):
        pairs = zip(draft, ids_T[place + 1 :], strict=False)
        num_matches_T.append(len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))))
    got = document_acceptance(num_matches_T, mask_T)
    committed, steps, dense_sum, dense_anchors = slow_acceptance(mask_T, ids_T, draft_TS)
    assert (got.committed, got.steps) == (committed, steps)
    assert (got.dense_sum, got.dense_anchors) == (dense_sum, dense_anchors)
    assert got.document_means == ((committed / steps,) if steps else ())


@given(st.integers(2, 16), st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_oracle_reaches_exactly_the_block_size(block_size, num_blocks_per_span):
    mask_T = []
    for num_blocks in num_blocks_per_span:
        mask_T += [0, 0] + [1] * (1 + num_blocks * block_size)
    got = document_acceptance(np.full(len(mask_T), block_size - 1), mask_T)
    assert got.sequential == got.per_document_mean == block_size
    assert got.dense < block_size  # near the end of a span a step cannot commit a whole block


@given(st.lists(st.integers(2, 30), min_size=1, max_size=4))
def test_drafter_that_never_matches_gives_one(span_lengths):
    mask_T = []
    for length in span_lengths:
        mask_T += [0] + [1] * length
    got = document_acceptance(np.zeros(len(mask_T), dtype=np.int64), mask_T)
    assert got.sequential == got.per_document_mean == got.dense == 1.0
    assert got.steps == sum(span_lengths) - len(span_lengths)


def test_last_step_is_capped_at_the_remaining_length():
    # Nine tokens after the free one; steps of 4, 4 and only 1, though three more would match.
    assert walk_span(np.full(12, 3), 2, 12) == SpanCount(committed=9, steps=3)


def test_span_of_one_token_needs_no_step():
    got = document_acceptance(np.full(3, 7), [0, 1, 0])
    assert got == Acceptance()
    assert math.isnan(got.sequential)
    assert math.isnan(got.per_document_mean)
    assert math.isnan(got.dense)


def test_sums_weigh_documents_by_steps_and_means_do_not():
    short = document_acceptance(np.full(4, 2), [1, 1, 1, 1])  # 3 tokens in 1 step
    long = document_acceptance(np.zeros(10, dtype=np.int64), [1] * 10)  # 9 tokens in 9 steps
    total = sum([short, long], Acceptance())
    assert total.sequential == pytest.approx(12 / 10)
    assert total.per_document_mean == pytest.approx((3 + 1) / 2)
    assert total + Acceptance() == total
