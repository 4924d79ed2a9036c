"""Codecs in torch give the bits that the codecs in numpy give."""

import numpy as np
import pytest
import torch

from hscache.planes import ARRAYS, decode, encode
from hscache.planes_torch import TORCH_DTYPES, decode_states, encode_states, squared_errors

EVERY_BITS = np.arange(1 << 16).astype(np.uint16)
FINITE = EVERY_BITS[(EVERY_BITS & 0x7F80) != 0x7F80]


def states(bits):
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def some_bits():
    rng = np.random.default_rng(0)
    ordinary = rng.standard_normal((40, 3, 32), np.float32) * np.exp(rng.standard_normal((3, 32)))
    bits = torch.from_numpy(ordinary).bfloat16().view(torch.int16).numpy().view(np.uint16).copy()
    bits[0] = 0
    bits[1, :, 3] = 0xC6C3  # -24960, a massive activation of SmolLM2
    return bits


@pytest.mark.parametrize("codec", sorted(ARRAYS))
def test_torch_encodes_as_numpy_does(codec):
    every = FINITE[: len(FINITE) // 96 * 96].reshape(-1, 3, 32)
    for bits_TLH in (some_bits(), every):
        found = encode_states(states(bits_TLH), codec)
        expected = encode(bits_TLH, codec)
        assert set(found) == set(expected)
        for name, array in expected.items():
            assert found[name].dtype == TORCH_DTYPES[array.dtype.name]
            np.testing.assert_array_equal(found[name].numpy().view(array.dtype), array)
        decoded = decode_states(found, codec).view(torch.int16).numpy().view(np.uint16)
        np.testing.assert_array_equal(decoded, decode(expected, codec))


@pytest.mark.parametrize("codec", sorted(ARRAYS))
def test_squared_errors_are_those_of_the_decoded_states(codec):
    bits_TLH = some_bits()
    before = states(bits_TLH)
    after = states(decode(encode(bits_TLH, codec), codec))
    expected = (after.double() - before.double()).square()
    found = squared_errors(before, encode_states(before, codec), codec)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=0)
    assert (found.sum() == 0) == (codec in ("lossless", "none"))
