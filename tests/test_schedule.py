"""Every training shard is visited P times, and rows follow from plan, seed and tick alone."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_cache import documents, make_cache

from hscache.errors import ConfigError, DataError
from hscache.reader import open_cache
from trainer.schedule import (
    Position,
    Schedule,
    Visit,
    anchor_rule,
    expected_tokens,
    positions,
    tick_rows,
)


@st.composite
def schedules(draw) -> Schedule:
    num_shards, passes = draw(st.integers(1, 30)), draw(st.integers(1, 7))
    shards = tuple(
        sorted(draw(st.sets(st.integers(0, 99), min_size=num_shards, max_size=num_shards)))
    )
    return Schedule(shards=shards, passes=passes, stride=draw(st.integers(1, num_shards)))


@given(schedules())
def test_every_shard_is_visited_once_in_every_pass(schedule):
    visits = [visit for tick in range(schedule.num_ticks) for visit in schedule.visits(tick)]
    expected = [(shard, p) for shard in schedule.shards for p in range(schedule.passes)]
    assert sorted((v.shard, v.pass_index) for v in visits) == sorted(expected)
    assert schedule.visits(0)  # no tick at either end is empty
    assert schedule.visits(schedule.num_ticks - 1)


@given(schedules())
def test_a_tick_visits_shards_k_and_k_minus_multiples_of_the_stride(schedule):
    for tick in range(schedule.num_ticks):
        expected = [
            Visit(shard=schedule.shards[tick - p * schedule.stride], pass_index=p)
            for p in range(schedule.passes)
            if 0 <= tick - p * schedule.stride < len(schedule.shards)
        ]
        assert schedule.visits(tick) == expected


@given(schedules())
def test_a_window_of_the_stride_times_passes_shards_is_enough(schedule):
    for tick in range(schedule.num_ticks):
        numbers = [schedule.shards.index(visit.shard) for visit in schedule.visits(tick)]
        span = max(numbers, default=0) - min(numbers, default=0)
        assert span <= (schedule.passes - 1) * schedule.stride


def test_stride_of_all_shards_gives_ordinary_epochs():
    schedule = Schedule(shards=(3, 4, 7), passes=2, stride=3)
    order = [schedule.visits(tick) for tick in range(schedule.num_ticks)]
    assert [(v.shard, v.pass_index) for (v,) in order] == [
        (3, 0), (4, 0), (7, 0), (3, 1), (4, 1), (7, 1),
    ]  # fmt: skip


@given(rows=st.integers(1, 20), before=st.integers(0, 100), tick=st.integers(0, 9), data=st.data())
def test_positions_count_rows_and_end_at_the_next_tick(rows, before, tick, data):
    done = data.draw(st.integers(0, rows - 1))
    start = Position(rows=before + done, tick=tick, row_in_tick=done)
    reached = list(positions(rows, start))
    assert [p.rows for p in reached] == list(range(start.rows + 1, before + rows + 1))
    assert reached[-1] == Position(rows=before + rows, tick=tick + 1, row_in_tick=0)
    for middle in reached[:-1]:  # from any of them, the same positions follow
        rest = [p for p in reached if p.rows > middle.rows]
        assert list(positions(rows, middle)) == rest


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    lengths = np.random.default_rng(1).integers(6, 50, 40)
    corpus = documents(lengths.tolist(), held_out=(3, 17, 20))
    folder = make_cache(tmp_path_factory.mktemp("schedule") / "cache", corpus, leave_out=range(99))
    return open_cache(folder).plan  # rows need no states


def rule_of(plan, **changes):
    rows = [row for shard in plan.training_shards for row in plan.shard_documents(shard)]
    rule = anchor_rule(plan, rows, row_tokens=64, anchors_per_row=12, seed=5)
    return dataclasses.replace(rule, **changes)


def all_rows(plan, schedule, rule, **changes):
    return [
        tick_rows(plan, schedule.visits(t), rule, tick=t, **{"row_tokens": 64, **changes})
        for t in range(schedule.num_ticks)
    ]


def as_numbers(rows):
    return [(r.documents, r.pass_indices, [a.tolist() for a in r.anchors]) for r in rows]


@settings(max_examples=20, deadline=None)
@given(passes=st.integers(1, 4), data=st.data())
def test_rows_hold_each_document_once_a_pass_and_never_a_held_out_one(plan, passes, data):
    shards = tuple(plan.training_shards)
    stride = data.draw(st.integers(1, len(shards)))
    schedule = Schedule(shards=shards, passes=passes, stride=stride)
    ticks = all_rows(plan, schedule, rule_of(plan, rate=1.0, limit=99))
    seen = [
        pair
        for rows in ticks
        for row in rows
        for pair in zip(row.documents, row.pass_indices, strict=True)
    ]
    training = [d for shard in shards for d in plan.shard_documents(shard)]
    assert sorted(seen) == sorted((d, p) for d in training for p in range(passes))


def test_no_row_holds_documents_of_another_tick(plan):
    schedule = Schedule(shards=tuple(plan.training_shards), passes=2, stride=2)
    for tick, rows in enumerate(all_rows(plan, schedule, rule_of(plan))):
        visited = {(v.shard, v.pass_index) for v in schedule.visits(tick)}
        for row in rows:
            pairs = zip(row.documents, row.pass_indices, strict=True)
            assert {(int(plan.shards[d]), p) for d, p in pairs} <= visited


def test_rows_are_pure_and_differ_by_seed_and_tick(plan):
    visits = [Visit(shard=shard, pass_index=0) for shard in plan.training_shards]
    first = as_numbers(tick_rows(plan, visits, rule_of(plan), tick=0, row_tokens=64))
    np.random.default_rng().random()  # nothing global takes part
    np.random.seed(3)  # noqa: NPY002
    assert as_numbers(tick_rows(plan, visits, rule_of(plan), tick=0, row_tokens=64)) == first
    assert as_numbers(tick_rows(plan, visits, rule_of(plan), tick=1, row_tokens=64)) != first
    other = rule_of(plan, seed=6)
    assert as_numbers(tick_rows(plan, visits, other, tick=0, row_tokens=64)) != first


def test_order_is_pinned(plan):
    """A change here would break the resume of every run that is under way."""
    visits = [Visit(shard=plan.training_shards[0], pass_index=0)]
    rows = tick_rows(plan, visits, rule_of(plan, rate=1.0, limit=99), tick=0, row_tokens=64)
    assert [row.documents for row in rows] == [(5, 3), (6, 4)]


def test_anchors_of_a_document_change_from_pass_to_pass_only(plan):
    shard = plan.training_shards[0]
    rule = rule_of(plan)

    def anchors(pass_index, tick, row_tokens):
        visits = [Visit(shard=shard, pass_index=pass_index)]
        rows = tick_rows(plan, visits, rule, tick=tick, row_tokens=row_tokens)
        return {
            d: a.tolist() for row in rows for d, a in zip(row.documents, row.anchors, strict=True)
        }

    assert anchors(0, 0, 64) == anchors(0, 5, 128)
    assert anchors(0, 0, 64) != anchors(1, 0, 64)


def test_skipped_documents_leave_the_others_as_they_are(plan):
    visits = [Visit(shard=plan.training_shards[0], pass_index=0)]
    gone = plan.shard_documents(plan.training_shards[0])[1]
    rule = rule_of(plan, rate=1.0, limit=99)
    whole = tick_rows(plan, visits, rule, tick=0, row_tokens=64)
    rest = tick_rows(plan, visits, rule, tick=0, row_tokens=64, skip=frozenset([gone]))
    assert {d for row in whole for d in row.documents} - {
        d for row in rest for d in row.documents
    } == {gone}


def test_document_longer_than_a_row_is_refused(plan):
    visits = [Visit(shard=plan.training_shards[0], pass_index=0)]
    with pytest.raises(ConfigError, match="row_tokens"):
        tick_rows(plan, visits, rule_of(plan), tick=0, row_tokens=5)


def test_expected_tokens_equal_the_mean_over_seeds(plan):
    rows = [row for shard in plan.training_shards for row in plan.shard_documents(shard)]
    rule = rule_of(plan, rate=0.04)  # many documents draw no anchor
    schedule = Schedule(shards=tuple(plan.training_shards), passes=1, stride=1)
    drawn = [
        sum(
            int(plan.lengths[list(row.documents)].sum())
            for rows in all_rows(plan, schedule, dataclasses.replace(rule, seed=seed))
            for row in rows
        )
        for seed in range(60)
    ]
    mean, error = np.mean(drawn), np.std(drawn) / np.sqrt(len(drawn))
    assert abs(expected_tokens(plan, rows, rule) - mean) < 4 * error
    assert expected_tokens(plan, rows, rule) < 0.9 * plan.lengths[rows].sum()


def test_corpus_without_supervision_is_refused(tmp_path):
    folder = make_cache(tmp_path / "c", documents([20, 30], prompt=40), leave_out=range(9))
    plan = open_cache(folder).plan
    with pytest.raises(DataError, match="two consecutive"):
        anchor_rule(plan, [0, 1], row_tokens=64, anchors_per_row=8, seed=0)
