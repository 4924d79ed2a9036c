"""Broken captures are recognised by what they leave in the states."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hscache.content import ContentCheck, facts


def states(num_tokens=6, seed=0, scale=1.0):
    values = np.random.default_rng(seed).normal(size=(num_tokens, 3, 16)) * scale
    return values.astype(ml_dtypes.bfloat16)


def problem(values, earlier=0):
    check = ContentCheck()
    for seed in range(earlier):
        assert check.problem(states(seed=100 + seed).view(np.uint16)) is None
    return check.problem(values.view(np.uint16))


@pytest.mark.parametrize("earlier", [0, 20])
def test_ordinary_states_pass(earlier):
    assert problem(states(), earlier) is None
    assert problem(states(num_tokens=1), earlier) is None


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [(0, 0, 0), (5, 2, 15), (3, 1, 7)])
def test_one_value_that_is_not_finite_is_found(bad, place):
    values = states()
    values[place] = bad
    assert problem(values) == "states that are not finite"


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_a_state_that_was_never_written_is_found(zero):
    values = states()
    values[4, 1] = zero
    assert problem(values) == "an all-zero state"


def test_the_same_state_everywhere_is_found():
    values = states()
    values[:, 2] = values[0, 2]
    assert problem(values) == "the same state at every position"


def test_a_constant_state_is_found():
    values = states()
    values[2, 0] = 1.5
    assert problem(values) == "a state with one value in all channels"


@pytest.mark.parametrize("factor", [12.0, 1 / 12])
def test_norms_far_from_those_of_earlier_documents_are_found(factor):
    values = states()
    values[:, 1] *= factor
    assert problem(values) is None  # nothing to compare with yet
    assert problem(values, earlier=20).startswith("norms out of band: median")
    assert "at captured layer 1" in problem(values, earlier=20)


def test_norms_that_overflow_are_found():
    assert problem(states(scale=1e30)) == "states too large for fp32 sums"


def test_refused_documents_do_not_move_the_band():
    check = ContentCheck()
    for seed in range(10):
        assert check.problem(states(seed=seed).view(np.uint16)) is None
    for seed in range(50):
        assert check.problem(states(seed=seed, scale=50).view(np.uint16)) is not None
    assert check.problem(states(seed=99).view(np.uint16)) is None


@given(
    bits_TLH=hnp.arrays(
        np.uint16,
        st.tuples(st.integers(1, 5), st.integers(1, 3), st.sampled_from([1, 3, 9, 20])),
        elements=st.sampled_from([0, 0x8000, 1, 0x3F80, 0x4000, 0x7F80, 0xFFFF]),
    )
)
def test_facts_are_what_the_plain_formulas_say(bits_TLH):
    found = facts(bits_TLH)
    values = bits_TLH.view(ml_dtypes.bfloat16).astype(np.float32)
    assert found.finite == bool(np.isfinite(values).all())
    assert found.zero_row == bool((values == 0).all(axis=2).any())
    assert found.flat_row == bool((bits_TLH == bits_TLH[:, :, :1]).all(axis=2).any())
    same = (bits_TLH == bits_TLH[:1]).all(axis=(0, 2)).any()
    assert found.repeated == bool(len(bits_TLH) > 1 and same)
    if found.finite:
        expected = np.linalg.norm(values.astype(np.float64), axis=2)
        np.testing.assert_allclose(found.norms_TL, expected, rtol=1e-5, atol=1e-20)
