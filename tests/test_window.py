"""Window arithmetic, and that no order of events can deadlock it or make it too large."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hscache.errors import ConfigError
from hscache.manifest import WindowIdentity
from hscache.window import (
    DiskNeeds,
    choose_window,
    first_closed,
    num_acknowledged,
    num_freeable,
    slots_needed,
    visit_stride,
)
from trainer.schedule import Schedule


def needs_of(num_shards, *, shard=1000, fixed=500, held_out=300) -> DiskNeeds:
    return DiskNeeds(
        fixed_bytes=fixed,
        held_out_bytes=held_out,
        shard_bytes=shard,
        num_shards=num_shards,
        shard_tokens=4096,
    )


@st.composite
def windows(draw) -> tuple[WindowIdentity, int]:
    """A window, and the number of training shards."""
    num_shards, passes = draw(st.integers(1, 40)), draw(st.integers(1, 7))
    shards = draw(st.integers(min(passes, num_shards), num_shards))
    reserve = draw(st.integers(1, 4))
    return WindowIdentity(shards=shards, passes=passes, reserve=reserve), num_shards


@pytest.mark.parametrize(
    ("shards", "num_shards", "passes", "stride"),
    [(6, 40, 6, 1), (7, 40, 3, 2), (12, 40, 3, 4), (9, 4, 6, 1), (40, 40, 1, 40), (5, 40, 2, 2)],
)
def test_stride_is_the_window_over_the_passes_and_at_least_one(shards, num_shards, passes, stride):
    assert visit_stride(shards, num_shards, passes) == stride


@given(st.integers(0, 60_000), st.integers(1, 40), st.integers(1, 7), st.integers(1, 4))
def test_the_largest_window_that_fits_is_chosen_or_the_least_disk_is_named(
    disk, num_shards, passes, reserve
):
    needs = needs_of(num_shards)
    least = needs.with_shards(min(passes, num_shards) + reserve)
    if disk < least:
        with pytest.raises(ConfigError, match=f"--max-disk {least} "):
            choose_window(disk, needs, passes=passes, reserve=reserve)
        disk = least
    window = choose_window(disk, needs, passes=passes, reserve=reserve)
    slots = window.shards + reserve
    assert needs.with_shards(slots) <= disk
    assert window.shards == num_shards or needs.with_shards(slots + 1) > disk


def test_a_window_smaller_than_the_passes_names_a_smaller_shard():
    needs = needs_of(40)
    with pytest.raises(ConfigError) as caught:
        choose_window(needs.with_shards(6), needs, passes=6, reserve=3)
    assert "holds a window of 3 shards" in str(caught.value)
    assert "store.shard_tokens of at most 2,730" in str(caught.value)  # 4096 * 6 / 9


@given(windows(), st.integers(0, 99))
def test_acknowledged_are_the_shards_without_a_visit_to_come(case, ticks):
    window, num_shards = case
    stride = visit_stride(window.shards, num_shards, window.passes)
    schedule = Schedule(shards=tuple(range(num_shards)), passes=window.passes, stride=stride)
    ticks = min(ticks, schedule.num_ticks)
    to_come = {v.shard for t in range(ticks, schedule.num_ticks) for v in schedule.visits(t)}
    done = num_acknowledged(ticks, num_shards, passes=window.passes, stride=stride)
    assert set(range(num_shards)) - to_come == set(range(done))


def test_nothing_is_freed_before_everybody_registered_is_done_with_it():
    assert num_freeable([]) == 0
    assert num_freeable([5]) == 5
    assert num_freeable([5, 2, 9]) == 2


@settings(max_examples=60, deadline=None)
@given(windows(), st.integers(0, 3), st.integers(0, 2**32))
def test_no_order_of_events_deadlocks_or_fills_more_than_the_slots(case, behind, seed):
    """A slow reference: producers, consumers and deaths in any order, one event at a time."""
    window, num_shards = case
    stride = visit_stride(window.shards, num_shards, window.passes)
    schedule = Schedule(shards=tuple(range(num_shards)), passes=window.passes, stride=stride)
    behind = min(behind, window.reserve - 1)  # of what is consumed, by checkpoints
    needed = slots_needed([1] * num_shards, behind, window, num_shards)
    assert needed <= window.shards + window.reserve
    published: set[int] = set()
    claims: dict[int, int] = {}
    freed, consumed, saved = 0, 0, 0
    chance, idle = random.Random(seed), 0
    events = ["claim0", "claim1", "publish0", "publish1", "die0", "die1", "tick", "save", "free"]
    while saved < schedule.num_ticks:
        event = chance.choice(events)
        who = int(event[-1]) if event[-1].isdigit() else 0
        before = (len(published), freed, consumed, saved)
        if event.startswith("claim") and who not in claims:
            taken = published | set(claims.values())
            free_ids = (j for j in range(num_shards) if j not in taken)
            shard = next(free_ids, num_shards)
            if shard < min(num_shards, first_closed(freed, window)):
                claims[who] = shard
        elif event.startswith("publish") and who in claims:
            published.add(claims.pop(who))
        elif event.startswith("die"):
            claims.pop(who, None)
        elif event == "tick" and consumed < schedule.num_ticks:
            if all(v.shard in published for v in schedule.visits(consumed)):
                assert all(v.shard >= freed for v in schedule.visits(consumed))
                consumed += 1
        elif event == "save":  # a step may span ticks, so the last ones may not be in it
            done = consumed if consumed == schedule.num_ticks else consumed - behind
            saved = max(saved, done)
        elif event == "free":
            done = num_acknowledged(saved, num_shards, passes=window.passes, stride=stride)
            freed = max(freed, num_freeable([done]))
        on_disk = len([j for j in published if j >= freed]) + len(claims)
        assert on_disk <= window.shards + window.reserve
        progress = (len(published), freed, consumed, saved)
        idle = idle + 1 if before == progress else 0
        assert idle < 2000, "nothing can happen any more"


@given(windows(), st.integers(0, 12), st.data())
def test_slots_needed_are_those_of_the_worst_moment(case, rows_behind, data):
    """The slow reference goes through every row at which a checkpoint may have ended."""
    window, num_shards = case
    passes, stride = window.passes, visit_stride(window.shards, num_shards, window.passes)
    rows = data.draw(st.lists(st.integers(1, 4), min_size=num_shards, max_size=num_shards))
    starts = [sum(rows[:tick]) for tick in range(num_shards + 1)]
    needed = 1
    for saved in range(starts[-1]):
        tick = max(t for t in range(num_shards) if starts[t] <= saved)
        f = num_acknowledged(tick, num_shards, passes=passes, stride=stride)
        for consumed in range(saved, saved + rows_behind + 1):
            if consumed in starts[:-1]:  # it wants the shard of the next tick
                needed = max(needed, starts.index(consumed) - f + 1)
    found = slots_needed(rows, rows_behind, window, num_shards)
    assert needed <= found
    if min(rows) > 1 or rows_behind == 0:
        assert found == needed
