"""Anchor choice: validity, counts, independence of everything but the key, exact coverage."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hscache.errors import DataError
from trainer.anchors import anchor_rate, coverage, sample_anchors, sample_slots, valid_anchors

KEY = {"seed": 3, "pass_index": 0, "document_id": 11}


@given(st.lists(st.booleans(), max_size=40))
def test_valid_anchors_have_a_supervised_token_and_a_supervised_next(mask):
    expected = [a for a in range(len(mask) - 1) if mask[a] and mask[a + 1]]
    valid = valid_anchors(np.array(mask, dtype=bool))
    assert valid.dtype == np.int64
    assert valid.tolist() == expected


def test_rate_fills_the_slots_of_all_rows():
    rate = anchor_rate(
        total_tokens=1001, total_valid_anchors=400, row_tokens=250, anchors_per_row=16
    )
    assert rate == 16 * 5 / 400


def test_rate_of_a_corpus_without_anchors_is_an_error():
    with pytest.raises(DataError, match="No valid anchor"):
        anchor_rate(total_tokens=10, total_valid_anchors=0, row_tokens=5, anchors_per_row=2)


@given(
    st.integers(0, 200),
    st.floats(0, 2),
    st.integers(0, 64),
    st.integers(0, 2**63),
    st.integers(0, 2**31),
)
def test_samples_are_a_sorted_subset_of_the_right_size(num_valid, rate, limit, seed, document_id):
    valid = np.arange(num_valid, dtype=np.int64) * 3 + 1
    key = {"seed": seed, "pass_index": 1, "document_id": document_id}
    sample = sample_anchors(valid, rate=rate, limit=limit, **key)
    assert sample.dtype == np.int64
    assert np.all(np.diff(sample) > 0)
    assert np.isin(sample, valid).all()
    cap = min(num_valid, limit)
    whole = int(rate * num_valid)
    assert len(sample) in {min(cap, whole), min(cap, whole + 1)}


def test_sample_is_a_function_of_its_key_alone():
    valid = np.arange(100)
    first = sample_anchors(valid, rate=0.2, limit=64, **KEY)
    sample_anchors(valid, rate=0.9, limit=64, seed=3, pass_index=0, document_id=12)
    assert np.array_equal(sample_anchors(valid, rate=0.2, limit=64, **KEY), first)
    for change in ({"seed": 4}, {"pass_index": 1}, {"document_id": 12}):
        other = sample_anchors(valid, rate=0.2, limit=64, **(KEY | change))
        assert not np.array_equal(other, first)


def test_sample_of_a_key_never_changes_between_versions():
    # Written down once: another numpy, machine or release must draw the same anchors.
    sample = sample_anchors(np.arange(50), rate=0.2, limit=64, **KEY)
    assert sample.tolist() == [3, 8, 16, 18, 24, 27, 28, 34, 36, 38]


def test_counts_and_positions_are_unbiased():
    valid = np.arange(10)
    hits, total = np.zeros(10), 0
    for document_id in range(4000):
        sample = sample_anchors(
            valid, rate=0.25, limit=64, seed=0, pass_index=0, document_id=document_id
        )
        hits[sample] += 1
        total += len(sample)
    assert abs(total / 4000 - 2.5) < 0.05  # floor(2.5 + u)
    assert np.all(np.abs(hits / 4000 - 0.25) < 0.03)


def test_coverage_is_the_mean_over_many_samples():
    rng = np.random.default_rng(0)
    masks = [rng.random(length) < 0.7 for length in (1, 3, 17, 40)] + [np.zeros(5, bool)]
    rate, limit, block_size = 0.35, 6, 4
    scorings, num_passes = 0, 3000
    for pass_index in range(num_passes):
        for document_id, mask in enumerate(masks):
            anchors = sample_anchors(
                valid_anchors(mask),
                rate=rate,
                limit=limit,
                seed=1,
                pass_index=pass_index,
                document_id=document_id,
            )
            scorings += sum(int(mask[a + 1 : a + block_size].sum()) for a in anchors)
    expected = scorings / num_passes / sum(int(mask.sum()) for mask in masks)
    actual = coverage(masks, rate=rate, limit=limit, keep_K=np.ones(block_size - 1))
    assert actual == pytest.approx(expected, rel=0.02)


def test_coverage_with_every_anchor_is_counted_by_hand():
    # Supervised 1..5; anchors 1..4 score 2,3 | 3,4 | 4,5 | 5 with two predicted slots.
    mask = np.array([0, 1, 1, 1, 1, 1, 0], dtype=bool)
    assert coverage([mask], rate=1.0, limit=99, keep_K=np.ones(2)) == pytest.approx(7 / 5)
    assert coverage([mask], rate=1.0, limit=2, keep_K=np.ones(2)) == pytest.approx(7 / 5 / 2)
    half = coverage([mask], rate=1.0, limit=99, keep_K=np.array([1.0, 0.5]))
    assert half == pytest.approx((4 + 0.5 * 3) / 5)
    assert coverage([np.zeros(4, bool)], rate=1.0, limit=2, keep_K=np.ones(2)) == 0.0


def test_sampled_slots_have_the_decayed_weights_on_average():
    weights_K = np.exp(-np.arange(7) / 1.5).astype(np.float32)
    kept = [
        sample_slots(weights_K, 50, seed=3, pass_index=0, document_id=document)
        for document in range(200)
    ]
    assert set(np.unique(kept)) == {0.0, 1.0}
    np.testing.assert_allclose(np.mean(kept, axis=(0, 1)), weights_K, atol=0.02)


def test_sampled_slots_depend_on_seed_pass_and_document_alone():
    weights_K = np.full(7, 0.5, np.float32)
    key = {"seed": 3, "pass_index": 1, "document_id": 9}
    first = sample_slots(weights_K, 20, **key)
    np.testing.assert_array_equal(first, sample_slots(weights_K, 20, **key))
    for name in key:
        other = sample_slots(weights_K, 20, **{**key, name: key[name] + 1})
        assert (first != other).any()
