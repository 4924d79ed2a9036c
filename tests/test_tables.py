"""Table drafters against brute-force counting and searching on tiny corpora."""

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.tables import NGramTable, PromptLookup, evaluate_table


@dataclass(frozen=True, kw_only=True)
class Document:
    input_ids: np.ndarray
    loss_mask: np.ndarray


def document(ids, mask=None):
    mask = [1] * len(ids) if mask is None else mask
    return Document(input_ids=np.array(ids), loss_mask=np.array(mask, dtype=np.uint8))


tokens = st.integers(0, 3)
contexts = st.lists(tokens, min_size=1, max_size=12)


@st.composite
def corpora(draw):
    """Up to four documents over four symbols; the last token of each is supervised."""
    docs = []
    for _ in range(draw(st.integers(1, 4))):
        ids = draw(st.lists(tokens, min_size=1, max_size=15))
        mask = [draw(st.booleans()) for _ in ids[:-1]] + [True]
        docs.append(document(ids, mask))
    return docs


def slow_followers(docs, wanted):
    """Scan the whole corpus for the supervised tokens that follow `wanted`."""
    size = len(wanted)
    return Counter(
        int(doc.input_ids[position])
        for doc in docs
        for position in range(size, len(doc.input_ids))
        if doc.loss_mask[position] and doc.input_ids[position - size : position].tolist() == wanted
    )


def slow_next(docs, order, context):
    suffixes = [context[len(context) - size :] for size in range(min(order - 1, len(context)) + 1)]
    found = [slow_followers(docs, suffix) for suffix in reversed(suffixes)]  # longest first
    seen = [counter for counter in found if counter]
    return min(seen[0], key=lambda token: ([-counter[token] for counter in seen], token))


def slow_lookup(context, max_match, min_match, num_tokens):
    for size in range(min(max_match, len(context) - 1), min_match - 1, -1):
        suffix = context[-size:]
        for start in range(len(context) - size - 1, -1, -1):
            if context[start : start + size] == suffix:
                drafted = list(context)
                for offset in range(num_tokens):
                    drafted.append(drafted[start + size + offset])
                return drafted[len(context) :]
    return []


@pytest.mark.parametrize("order", [2, 3, 4])
@given(docs=corpora(), context=contexts)
def test_ngram_drafts_equal_brute_force_counting(order, docs, context):
    expected = list(context)
    for _ in range(5):
        expected.append(slow_next(docs, order, expected))
    assert NGramTable.count(docs, order).propose(context, 5) == expected[len(context) :]


@given(context=contexts, min_match=st.integers(1, 2), max_match=st.integers(2, 4))
def test_lookup_equals_brute_force_search(context, min_match, max_match):
    got = PromptLookup(max_match=max_match, min_match=min_match).propose(context, 6)
    assert got == slow_lookup(context, max_match, min_match, 6)


def test_prompt_tokens_are_context_but_never_predicted():
    table = NGramTable.count([document([9, 9, 9, 1, 2], [0, 0, 0, 1, 1])], order=2)
    assert table.propose([9], 2) == [1, 2]


def test_ties_go_to_the_smaller_id():
    docs = [document([5, 8]), document([5, 3])]
    assert NGramTable.count(docs, order=2).propose([5], 1) == [3]
    assert NGramTable.count(docs[::-1], order=2).propose([5], 1) == [3]


def test_ties_are_first_broken_by_the_shorter_context():
    docs = [document([1, 5, 3]), document([1, 5, 8]), document([2, 5, 8])]
    assert NGramTable.count(docs, order=3).propose([1, 5], 1) == [8]


def test_contexts_do_not_reach_into_the_next_document():
    table = NGramTable.count([document([1, 2]), document([3, 3, 3])], order=3)
    assert table.propose([1, 2], 1) == [3]  # by unigram count; 2 never had a successor
    assert table.propose([7, 1], 1) == [2]


def test_lookup_goes_on_copying_its_own_draft():
    assert PromptLookup().propose([4, 7, 8, 7, 8], 5) == [7, 8, 7, 8, 7]


def test_lookup_proposes_nothing_without_a_repeat():
    assert PromptLookup().propose([1, 2, 3], 4) == []


def test_table_that_knows_the_document_commits_whole_blocks():
    known = document(range(25))  # 24 tokens after the free one: three blocks of eight
    got = evaluate_table(NGramTable.count([known], order=2), [known], block_size=8)
    assert (got.committed, got.steps) == (24, 3)


@given(docs=corpora(), block_size=st.integers(2, 5))
def test_evaluation_equals_decoding_with_the_drafter(docs, block_size):
    drafter = NGramTable.count(docs, order=3)
    committed = steps = 0
    for doc in docs:
        ids, mask = doc.input_ids.tolist(), doc.loss_mask.tolist()
        anchor = 0
        while anchor + 1 < len(ids):
            if not (mask[anchor] and mask[anchor + 1]):
                anchor += 1
                continue
            taken = 0
            for guess in [*drafter.propose(ids[: anchor + 1], block_size - 1), None]:
                position = anchor + 1 + taken
                if position == len(ids) or not mask[position]:
                    break
                taken += 1
                if guess != ids[position]:
                    break
            anchor += taken
            committed += taken
            steps += 1
    got = evaluate_table(drafter, docs, block_size)
    assert (got.committed, got.steps) == (committed, steps)
