"""Whichever library is installed, crc32c is crc32c."""

import crc32c as other
import numpy as np
import pytest

from hscache import checksum


def test_the_published_check_value():
    assert checksum.crc32c(b"123456789") == 0xE3069283


@pytest.mark.parametrize("size", [0, 1, 3, 255, 100_003])
def test_all_libraries_agree_also_piece_by_piece(size):
    data = np.random.default_rng(size).integers(0, 256, size).astype(np.uint8)
    expected = other.crc32c(data.tobytes())
    for given in (data, data.data, data.tobytes()):
        assert checksum.crc32c(given) == expected
    first = checksum.crc32c(data[: size // 3])
    assert checksum.crc32c(data[size // 3 :], first) == expected
