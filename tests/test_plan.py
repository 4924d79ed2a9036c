"""The plan: every document once, held-out apart, nothing left to chance."""

import shutil

import numpy as np
import pytest
from cache_maker import make_cache, make_documents
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hscache import layout
from hscache.plan import Plan, TokenizedDocument, corpus_sha256, deal_into_shards, write_plan

lengths = st.lists(st.tuples(st.integers(1, 30), st.booleans()), min_size=1, max_size=40)


def documents_of(sides):
    """Documents whose ids are all different, so that a mix-up shows."""
    start, documents = 0, []
    for row, (length, held_out) in enumerate(sides):
        ids_T = np.arange(start, start + length, dtype=np.int32)
        mask_T = (np.arange(length) % 3 > 0).astype(np.uint8)
        documents.append(
            TokenizedDocument(ids_T=ids_T, loss_mask_T=mask_T, source_row=row, held_out=held_out)
        )
        start += length
    return documents


@given(sides=lengths, shard_tokens=st.integers(1, 80), seed=st.integers(0, 3))
def test_every_document_is_dealt_once_and_sides_never_mix(sides, shard_tokens, seed):
    documents = documents_of(sides)
    shards = deal_into_shards(documents, shard_tokens, seed)
    assert sorted(i for shard in shards for i in shard) == list(range(len(documents)))
    kinds = []
    for shard in shards:
        assert shard
        total = sum(len(documents[i].ids_T) for i in shard)
        assert total <= shard_tokens or len(shard) == 1
        (kind,) = {documents[i].held_out for i in shard}
        kinds.append(kind)
    assert kinds == sorted(kinds, reverse=True)  # held-out shards come first
    assert shards == deal_into_shards(documents, shard_tokens, seed)


def test_shards_are_filled_as_far_as_they_go():
    documents = documents_of([(10, False)] * 10)
    assert [len(shard) for shard in deal_into_shards(documents, 35, 0)] == [3, 3, 3, 1]


def test_the_seed_decides_the_order():
    documents = documents_of([(5, False)] * 50)
    assert deal_into_shards(documents, 20, 0) != deal_into_shards(documents, 20, 1)


@pytest.fixture(scope="module")
def plan_parent(tmp_path_factory):
    return tmp_path_factory.mktemp("plan")


@given(sides=lengths, shard_tokens=st.integers(1, 80))
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_plan_is_read_back_as_dealt(plan_parent, sides, shard_tokens):
    shutil.rmtree(plan_parent / "plan", ignore_errors=True)
    documents = documents_of(sides)
    shards = deal_into_shards(documents, shard_tokens, 0)
    write_plan(plan_parent, documents, shards, {"rows in": 3})
    plan = Plan(plan_parent)
    assert plan.manifest.report == {"rows in": 3}
    assert plan.num_documents == len(documents)
    assert plan.num_tokens == sum(length for length, _ in sides)
    row = 0
    for number, shard in enumerate(shards):
        assert plan.shard_documents(number) == range(row, row + len(shard))
        for index in shard:
            document = documents[index]
            np.testing.assert_array_equal(plan.input_ids(row), document.ids_T)
            np.testing.assert_array_equal(plan.loss_mask(row), document.loss_mask_T)
            assert plan.shards[row] == number
            assert plan.keys[row] == document.key
            assert plan.source_rows[row] == index
            assert plan.valid_anchors[row] == document.num_valid_anchors
            assert (number in plan.held_out_shards) == document.held_out
            row += 1
    everything = np.concatenate([documents[i].ids_T for shard in shards for i in shard])
    stored = np.concatenate([plan.input_ids(row) for row in range(plan.num_documents)])
    np.testing.assert_array_equal(stored, everything)


def test_valid_anchors_are_supervised_tokens_followed_by_one():
    mask = [0, 1, 1, 0, 1, 1, 1, 0, 1]
    document = TokenizedDocument(
        ids_T=np.zeros(9, np.int32),
        loss_mask_T=np.array(mask, np.uint8),
        source_row=0,
        held_out=False,
    )
    slow = sum(1 for i in range(len(mask) - 1) if mask[i] and mask[i + 1])
    assert document.num_valid_anchors == slow == 3


def test_hashes_see_ids_mask_order_and_boundaries():
    def document(ids, mask):
        ids_T, mask_T = np.array(ids, np.int32), np.array(mask, np.uint8)
        return TokenizedDocument(ids_T=ids_T, loss_mask_T=mask_T, source_row=0, held_out=False)

    corpora = [
        [document([1, 2], [1, 1]), document([3], [1])],
        [document([1], [1]), document([2, 3], [1, 1])],
        [document([3], [1]), document([1, 2], [1, 1])],
        [document([1, 2], [0, 1]), document([3], [1])],
        [document([1, 4], [1, 1]), document([3], [1])],
    ]
    assert len({corpus_sha256(corpus) for corpus in corpora}) == len(corpora)
    assert document([1, 2], [1, 1]).key == document([1, 2], [1, 1]).key
    assert document([1, 2], [1, 1]).key != document([1, 2], [1, 0]).key


def test_of_two_equal_plans_the_first_stays(tmp_path):
    make_cache(tmp_path)
    documents = make_documents(20)
    path = layout.plan_dir(tmp_path) / "zarr.json"
    before = path.stat().st_mtime_ns
    write_plan(tmp_path, documents, deal_into_shards(documents, 100, 0), {"rows in": 20})
    assert path.stat().st_mtime_ns == before
    assert not list(tmp_path.glob(".tmp-*"))
