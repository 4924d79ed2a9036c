"""Packing and rows against the obvious loops."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hscache.errors import ConfigError
from trainer.rows import RowDocument, build_row, decayed_weights, pack_rows


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(0, 6)), max_size=30), st.randoms())
def test_rows_hold_every_document_with_anchors_once_and_leave_no_room_for_a_later_one(
    documents, random
):
    lengths, anchors = [d[0] for d in documents], [d[1] for d in documents]
    order = list(range(len(documents)))
    random.shuffle(order)
    rows = pack_rows(lengths, anchors, order, row_tokens=20, anchors_per_row=6)
    assert sorted(d for row in rows for d in row) == [d for d in sorted(order) if anchors[d]]
    for row in rows:
        assert row
        assert sum(lengths[d] for d in row) <= 20
        assert sum(anchors[d] for d in row) <= 6
    places = [order.index(row[0]) for row in rows]
    assert places == sorted(places)

    def key(d):
        return -max(lengths[d] / 20, anchors[d] / 6), order.index(d)

    for row in rows:
        assert sorted(row, key=key) == list(row)
    opened = sorted(rows, key=lambda row: key(row[0]))
    for i, row in enumerate(opened):
        for d in row:
            for earlier in opened[:i]:  # it fitted into none of them when its turn came
                there = [e for e in earlier if key(e) < key(d)]
                full = sum(lengths[e] for e in there) + lengths[d] > 20
                assert full or sum(anchors[e] for e in there) + anchors[d] > 6


def test_rows_of_conversations_are_filled():
    """Log-normal lengths, shards of 262,144 tokens; places that stay empty cost a GPU as much."""
    rng = np.random.default_rng(0)
    num_rows = num_anchors = 0
    for _ in range(8):
        lengths = np.clip(rng.lognormal(6.9, 0.8, 210), 20, 4096).astype(int)
        valid = (lengths * rng.uniform(0.4, 0.9, len(lengths))).astype(int)
        rate = 512 * math.ceil(lengths.sum() / 4096) / valid.sum()
        anchors = np.minimum(512, np.floor(rate * valid + rng.random(len(lengths)))).astype(int)
        order = rng.permutation(len(lengths))
        rows = pack_rows(lengths, anchors, order, row_tokens=4096, anchors_per_row=512)
        num_rows += len(rows)
        num_anchors += anchors.sum()
    assert num_anchors / (512 * num_rows) > 0.9


def test_document_longer_than_a_row_is_named():
    with pytest.raises(ConfigError, match="document 1 has 21 tokens"):
        pack_rows([5, 21], [1, 1], [0, 1], row_tokens=20, anchors_per_row=6)


def test_document_with_more_anchors_than_a_row_is_named():
    with pytest.raises(ConfigError, match="document 0 has 7 anchors"):
        pack_rows([5], [7], [0], row_tokens=20, anchors_per_row=6)


def test_weights_decay_from_one():
    expected = [math.exp(-(k - 1) / 4.0) for k in range(1, 8)]
    assert decayed_weights(8, 4.0).dtype == np.float32
    np.testing.assert_allclose(decayed_weights(8, 4.0), expected, rtol=1e-6)
    np.testing.assert_array_equal(decayed_weights(8, None), np.ones(7, np.float32))


def reference_row(documents, anchors, *, anchors_per_row, block_size, gamma):
    starts, ends, anchor_ids, labels, weights, offset = [], [], [], [], [], 0
    for document, positions in zip(documents, anchors, strict=True):
        length = len(document.input_ids_T)
        for a in positions:
            starts.append(offset)
            ends.append(offset + a)
            anchor_ids.append(document.input_ids_T[a])
            inside = [a + k < length for k in range(1, block_size)]
            labels.append(
                [document.input_ids_T[a + k] if inside[k - 1] else 0 for k in range(1, block_size)]
            )
            weights.append(
                [
                    math.exp(-(k - 1) / gamma)
                    if inside[k - 1] and document.loss_mask_T[a + k]
                    else 0.0
                    for k in range(1, block_size)
                ]
            )
        offset += length
    num_empty = anchors_per_row - len(starts)
    empty = [[0] * (block_size - 1)] * num_empty
    zeros = [0] * num_empty
    return starts + zeros, ends + zeros, anchor_ids + zeros, labels + empty, weights + empty


@given(st.data())
def test_row_equals_the_obvious_loops(data):
    block_size = data.draw(st.integers(2, 6))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    documents, anchors = [], []
    for document_id in range(data.draw(st.integers(0, 3))):
        length = int(rng.integers(2, 12))
        documents.append(
            RowDocument(
                document_id=100 + document_id,
                input_ids_T=rng.integers(1, 1000, length).astype(np.int32),
                loss_mask_T=rng.random(length) < 0.6,
            )
        )
        num_anchors = int(rng.integers(0, min(4, length)))
        anchors.append(np.sort(rng.choice(length - 1, num_anchors, replace=False)).astype(np.int64))
    row = build_row(
        documents,
        anchors,
        row_tokens=40,
        anchors_per_row=12,
        block_size=block_size,
        slot_weights=[decayed_weights(block_size, 3.0)] * len(documents),
    )
    starts, ends, anchor_ids, labels, weights = reference_row(
        documents, anchors, anchors_per_row=12, block_size=block_size, gamma=3.0
    )
    assert row.context_start_N.tolist() == starts
    assert row.context_end_N.tolist() == ends
    assert row.anchor_ids_N.tolist() == anchor_ids
    assert row.labels_NK.tolist() == labels
    np.testing.assert_allclose(row.weights_NK, weights, rtol=1e-6)
    lengths = [len(document.input_ids_T) for document in documents]
    ids = [i for document in documents for i in document.input_ids_T.tolist()]
    places = [p for length in lengths for p in range(length)]
    assert row.num_tokens == len(ids)
    assert row.num_anchors == sum(map(len, anchors))
    assert row.input_ids_S.tolist() == ids + [0] * (40 - len(ids))
    assert row.position_ids_S.tolist() == places + [0] * (40 - len(ids))
    assert row.document_ids == tuple(document.document_id for document in documents)
    assert row.document_offsets == tuple(np.cumsum([0, *lengths]).tolist())
    flat = [(n, k) for n in range(12) for k in range(1, block_size) if weights[n][k - 1] > 0]
    assert row.scored_M.tolist() == [n * (block_size - 1) + k - 1 for n, k in flat]


def test_padding_changes_only_empty_slots():
    document = RowDocument(
        document_id=0, input_ids_T=np.arange(1, 7), loss_mask_T=np.ones(6, dtype=bool)
    )
    anchors = [np.array([1, 4])]
    shape = {"block_size": 4, "slot_weights": [decayed_weights(4, 4.0)]}
    small = build_row([document], anchors, row_tokens=6, anchors_per_row=2, **shape)
    large = build_row([document], anchors, row_tokens=99, anchors_per_row=9, **shape)
    assert large.weights_NK.sum() == small.weights_NK.sum()
    assert np.array_equal(large.weights_NK[:2], small.weights_NK)
    assert np.array_equal(large.scored_M, small.scored_M)
    assert small.labels_NK.tolist() == [[3, 4, 5], [6, 0, 0]]
