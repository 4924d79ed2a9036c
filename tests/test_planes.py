"""Codecs over every bf16 bit pattern, against the documented formulas done one number at a time."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hscache.planes import (
    ARRAYS,
    bitround,
    decode,
    decode_into,
    empty_arrays,
    encode,
    encode_into,
    merge,
    split,
)

EVERY_BITS = np.arange(1 << 16).astype(np.uint16)
FINITE = EVERY_BITS[(EVERY_BITS & 0x7F80) != 0x7F80]
NORMAL = FINITE[(FINITE & 0x7F80) != 0]


def numbers(bits):
    return bits.view(ml_dtypes.bfloat16).astype(np.float64)


def test_split_and_merge_follow_the_documented_formula():
    exponent, significand = split(EVERY_BITS)
    for value, e, s in zip(
        EVERY_BITS.tolist(), exponent.tolist(), significand.tolist(), strict=True
    ):
        assert e == value >> 7 & 0xFF
        assert s == (value & 0x7F) | (value >> 15 << 7)
        assert value == (e << 7) | (s & 0x7F) | ((s & 0x80) << 8)
    np.testing.assert_array_equal(merge(exponent, significand), EVERY_BITS)


@pytest.mark.parametrize("codec", ["lossless", "none"])
def test_lossless_codecs_keep_every_bit_pattern(codec):
    bits_TLH = EVERY_BITS.reshape(64, 4, 256)
    np.testing.assert_array_equal(decode(encode(bits_TLH, codec), codec), bits_TLH)


@given(
    bits_TLH=hnp.arrays(np.uint16, st.tuples(*[st.integers(1, 4)] * 3)),
    codec=st.sampled_from(["lossless", "none"]),
)
def test_lossless_codecs_keep_any_array_and_leave_it_alone(bits_TLH, codec):
    before = bits_TLH.copy()
    np.testing.assert_array_equal(decode(encode(bits_TLH, codec), codec), before)
    np.testing.assert_array_equal(bits_TLH, before)


def test_bitround_rounds_to_the_nearest_of_16_mantissas():
    kept = NORMAL[(NORMAL & 7) == 0]
    order = np.argsort(numbers(kept))
    grid = numbers(kept)[order]
    rounded, exact = numbers(bitround(NORMAL)), numbers(NORMAL)
    assert np.isin(rounded, grid).all()
    right = np.clip(np.searchsorted(grid, exact), 1, len(grid) - 1)
    # What lies beyond the last kept value is not rounded up to infinity.
    nearest = np.minimum(abs(exact - grid[right - 1]), abs(exact - grid[right]))
    np.testing.assert_array_equal(abs(rounded - exact), nearest)


def test_bitround4_keeps_values_within_their_bound():
    error = abs(numbers(bitround(NORMAL)) - numbers(NORMAL)) / abs(numbers(NORMAL))
    assert error.max() <= 2**-5
    bits_TLH = NORMAL[: len(NORMAL) // 16 * 16].reshape(-1, 2, 8)
    arrays = encode(bits_TLH, "bitround4")
    np.testing.assert_array_equal(decode(arrays, "bitround4"), bitround(bits_TLH))
    assert not (arrays["significand"] & 7).any()  # this is what makes it compress


@given(
    mantissas=hnp.arrays(np.uint16, (3, 2, 16), elements=st.integers(0, 127)),
    below=hnp.arrays(np.int64, (3, 2, 16), elements=st.integers(0, 13)),
    signs=hnp.arrays(np.uint16, (3, 2, 16), elements=st.integers(0, 1)),
    top=st.integers(15, 254),
)
def test_fp8_keeps_values_within_their_bound(mantissas, below, signs, top):
    exponents = top - below
    exponents[:, :, 0] = top
    bits_TLH = (signs << 15 | exponents.astype(np.uint16) << 7 | mantissas).astype(np.uint16)
    arrays = encode(bits_TLH, "fp8")
    exact, found = numbers(bits_TLH), numbers(decode(arrays, "fp8"))
    largest = abs(exact).max(axis=-1, keepdims=True)
    relative = abs(found - exact) / abs(exact)
    assert relative[abs(exact) >= largest * 2.0**-14].max() <= 2**-4
    assert (abs(found - exact) <= np.maximum(abs(exact) * 2**-4, largest * 2.0**-18)).all()


def test_fp8_keeps_zero_rows_and_the_largest_value():
    bits_TLH = np.zeros((2, 1, 8), np.uint16)
    bits_TLH[1, 0, 3] = 0xC6C3  # -24960, a massive activation of SmolLM2
    np.testing.assert_array_equal(decode(encode(bits_TLH, "fp8"), "fp8"), bits_TLH)


def test_fp8_rounds_every_value_as_ml_dtypes_does():
    steps = np.arange(0, 448 * 2**12 + 1, 7, dtype=np.float64) / 2**12
    tiny = np.arange(0, 2**13 + 1, dtype=np.float64) / 2**19  # ties and neighbours of subnormals
    row = np.concatenate([steps, tiny, [448.0]])
    # Each row's largest is 448, so that the scale is 1 and rounding alone is seen.
    bits = np.concatenate([row, -row]).astype(ml_dtypes.bfloat16)[None, None]
    arrays = encode(bits.view(np.uint16), "fp8")
    assert arrays["scale"].tolist() == [[1.0]]
    expected = bits.astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(arrays["fp8"], expected.view(np.uint8))
    np.testing.assert_array_equal(decode(arrays, "fp8"), expected.astype(bits.dtype).view("u2"))


@given(
    shape=st.tuples(st.integers(0, 70), st.integers(1, 3), st.sampled_from([1, 7, 1024])),
    codec=st.sampled_from(sorted(ARRAYS)),
    view=st.sampled_from(["whole", "one layer", "every second token"]),
)
def test_any_view_is_coded_as_its_copy_is(shape, codec, view):
    # 70 x 3 x 1024 values are several blocks; rows of one layer do not lie side by side.
    bits_TLH = np.resize(NORMAL[::-3], shape)
    bits = {
        "whole": bits_TLH,
        "one layer": bits_TLH[:, -1],
        "every second token": bits_TLH[::2],
    }[view]
    out = empty_arrays(bits.shape, codec)
    encode_into(bits, codec, out)
    for name, array in encode(bits.copy(), codec).items():
        np.testing.assert_array_equal(out[name], array)
    target = np.zeros((*bits.shape[:-1], 2, bits.shape[-1]), np.uint16)
    decode_into(out, codec, target[..., 1, :])
    np.testing.assert_array_equal(target[..., 1, :], decode(out, codec))
    assert not target[..., 0, :].any()


@pytest.mark.parametrize("codec", sorted(ARRAYS))
def test_arrays_have_the_declared_dtypes_and_axes(codec):
    arrays = encode(NORMAL[:240].reshape(5, 3, 16), codec)
    assert set(arrays) == set(ARRAYS[codec])
    for name, stored in ARRAYS[codec].items():
        assert arrays[name].dtype == stored.dtype
        assert arrays[name].shape == ((5, 3, 16) if stored.per_hidden else (5, 3))


@pytest.mark.parametrize("codec", sorted(ARRAYS))
def test_a_slice_decodes_to_the_slice(codec):
    arrays = encode(NORMAL[-240:].reshape(5, 3, 16), codec)
    part = {name: array[1:4, 2:3] for name, array in arrays.items()}
    np.testing.assert_array_equal(decode(part, codec), decode(arrays, codec)[1:4, 2:3])
