"""Ranks together do what one rank does, and ranks that step alone obey the identities of local SGD.

Every check runs on two or three gloo processes of one pool.
"""

import itertools

import numpy as np
import pytest
from trainer_cache import documents, make_cache

from trainer.ranks import Ranks

ROWS = [[0], [1], [2], [3]]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    # unequal lengths, so that a mean of means differs
    return make_cache(tmp_path_factory.mktemp("sync") / "cache", documents((9, 30, 17, 24)))


@pytest.fixture(scope="module")
def alone(cache):
    """One rank, one step over all rows."""
    import rank_checks

    return rank_checks.one_step(Ranks(), cache, [ROWS], mode="ddp")


def assert_close(found, expected, name):
    for key, value in expected[name].items():
        np.testing.assert_allclose(found[name][key], value, rtol=0, atol=1e-6, err_msg=key)


@pytest.mark.parametrize(
    "rows",
    [
        [[[0, 1]], [[2, 3]]],  # 2 ranks x 1 row
        [[[0], [1]], [[2], [3]]],  # 2 ranks x 2 rows
        [[[3]], [[0], [1], [2]]],  # unequal shares
        [ROWS, []],  # an empty rank
        [[[0]], [[1], [2]], [[3]]],
    ],
)
def test_ddp_gives_the_gradient_loss_and_norm_of_one_rank(pool, cache, alone, rows):
    for found in pool("one_step", len(rows), cache=cache, rows=rows, mode="ddp"):
        assert_close(found, alone, "gradients")
        assert found["loss"] == pytest.approx(alone["loss"], rel=1e-12)
        assert found["norm"] == pytest.approx(alone["norm"], rel=1e-9)
        assert found["tokens"] == 100


@pytest.mark.parametrize("variant", ["dpace", "soft"])
def test_other_losses_are_summed_over_ranks_alike(pool, cache, alone, variant):
    """However documents are cut into rows and ranks; and it is another loss than the plain one."""
    import rank_checks

    expected = rank_checks.one_step(Ranks(), cache, [ROWS], mode="ddp", variant=variant)
    assert expected["loss"] != pytest.approx(alone["loss"], rel=1e-3)
    for mode in ("ddp", "average"):
        rows = [[[3], [1]], [[0, 2]]]
        for found in pool("one_step", 2, cache=cache, rows=rows, mode=mode, variant=variant):
            assert_close(found, expected, "weights")
            assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)


@pytest.mark.parametrize("rows", [[[[0], [1]], [[2], [3]]], [[[3]], [[0, 1]], [[2]]]])
def test_average_with_sgd_at_every_step_is_the_weighted_mean_of_the_updates(
    pool, cache, alone, rows
):
    """That mean is the step on all rows, for a step divides by its weight."""
    for found in pool("one_step", len(rows), cache=cache, rows=rows, mode="average"):
        assert_close(found, alone, "weights")
        assert found["loss"] == pytest.approx(alone["loss"], rel=1e-12)


def test_same_rows_on_all_ranks_equal_one_rank(pool, cache, alone):
    for mode in ("average", "broadcast"):
        for found in pool("one_step", 2, cache=cache, rows=[ROWS, ROWS], mode=mode):
            for name, value in alone["weights"].items():
                np.testing.assert_array_equal(found["weights"][name], value)


def test_diloco_without_momentum_at_rate_1_is_the_average(pool, cache, alone):
    settings = {"mode": "diloco", "outer_lr": 1.0, "outer_momentum": 0.0}
    for found in pool("one_step", 2, cache=cache, rows=[[[0], [1]], [[2], [3]]], **settings):
        assert_close(found, alone, "weights")


def test_broadcast_takes_the_weights_of_rank_0(pool, cache):
    import rank_checks

    first = rank_checks.one_step(Ranks(), cache, [[[1]]], mode="ddp")
    for found in pool("one_step", 3, cache=cache, rows=[[[1]], [[0]], [[2]]], mode="broadcast"):
        for name, value in first["weights"].items():
            np.testing.assert_array_equal(found["weights"][name], value)


@pytest.mark.parametrize("mode", ["ddp", "average", "diloco", "broadcast"])
def test_where_no_rank_is_supervised_nothing_changes_and_it_is_counted(pool, cache, mode):
    rows = [[[0], [1]], [[2]]]
    found = pool("one_step", 2, cache=cache, rows=rows, supervised=False, mode=mode)
    start = pool("one_step", 2, cache=cache, rows=[[], []], mode="ddp")[0]["weights"]
    for rank in found:
        assert rank["empty"] == (1 if mode == "ddp" else 2)
        assert rank["loss"] is None
        assert rank["step"] == 1
        for name, value in start.items():
            np.testing.assert_array_equal(rank["weights"][name], value)


def test_average_is_weighted(pool):
    for found in pool("weighted_average", 3, weights=[1.0, 0.0, 3.0]):
        assert found == [[2.5], [2.5]]
    for rank, found in enumerate(pool("weighted_average", 2, weights=[0.0, 0.0])):
        assert found == [[rank + 1.0]] * 2


def test_sums_return_to_their_places(pool):
    """Buckets of 16: some hold several tensors, some are too small for one."""
    shapes = [(3,), (2, 3), (4, 5), (), (4, 4), (16,), (17,), (1,)]
    first, second = pool("add_in_buckets", 2, shapes=shapes)
    for shape, a, b in zip(shapes, first, second, strict=False):
        plain = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        np.testing.assert_array_equal(a, 2 * plain + 1)
        np.testing.assert_array_equal(b, a)
    np.testing.assert_array_equal(first[-1], 2 * np.arange(6.0).reshape(2, 3).T)


def test_a_quadratic_falls_at_every_outer_step(pool):
    for losses in pool("quadratic", 3, outer_steps=8):
        assert all(b < a for a, b in itertools.pairwise(losses))


def test_weights_that_differ_stop_every_rank(pool, cache):
    for _, (text, _) in pool.errors("differ_and_meet", 3, cache=cache):
        assert "HscacheError" in text
        assert "ranks [1] differ from those of rank 0" in text
