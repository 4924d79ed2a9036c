"""Producer and trainer die at random on one bounded cache, and every document is seen P times.

`tools/soak.py` runs many more seeds; what is checked is in `dance`.
"""

import dance
import forked
import pytest


@pytest.fixture(scope="module")
def server():
    return forked.context()


@pytest.fixture(scope="module")
def floor(server, tmp_path_factory):
    """About 20 shards to train on."""
    folder = tmp_path_factory.mktemp("dance")
    floor = dance.Dance(server, dance.make_world(folder / "world", 80), folder / "caches")
    yield floor
    floor.close()


def test_a_producer_dies_with_the_lowest_shard_while_the_window_is_full(floor):
    for seed in (0, 10, 20, 30):  # which shard it holds when it stalls is up to the machine
        report = floor.dance(seed, 6, 6, producers=2, lowest_dies=True, every=4)
        assert report.kills["lowest claim"] > 0
        assert report.freed > 0
        if report.lowest_dies:
            break
    assert report.lowest_dies


def test_either_side_is_killed_at_random(floor):
    report = floor.dance(1, 7, 3, kills=4, every=8)
    assert sum(report.kills.values()) > 0
    assert report.freed > 0


def test_a_plan_of_fewer_shards_than_the_window(server, tmp_path):
    floor = dance.Dance(server, dance.make_world(tmp_path / "world", 16), tmp_path / "caches")
    try:
        report = floor.dance(2, 6, 6, kills=3)
    finally:
        floor.close()
    assert report.shards < 6


def test_several_ranks_follow(floor):
    """They step alone and meet: one that starves calls the others."""
    report = floor.dance(3, 6, 6, ranks=2, mode="average", kills=2, every=4)
    assert report.freed > 0
