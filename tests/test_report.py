"""Sizes, durations and tables read as a person would write them."""

import pytest

from hscache.report import format_bytes, format_number, format_seconds, format_table


@pytest.mark.parametrize(
    ("size_bytes", "expected"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (51_200, "51.2 kB"),
        (999_499, "999 kB"),
        (999_500, "1.00 MB"),
        (95.5e12, "95.5 TB"),
        (2e18, "2000 PB"),
    ],
)
def test_sizes_have_three_digits_and_decimal_units(size_bytes, expected):
    assert format_bytes(size_bytes) == expected


@pytest.mark.parametrize(
    ("duration_s", "expected"),
    [
        (0.0031, "3.1 ms"),
        (0.42, "0.42 s"),
        (9.96, "10 s"),
        (59.6, "1 min 00 s"),
        (184, "3 min 04 s"),
        (3599.7, "1 h 00 min"),
        (93_600, "1 d 02 h"),
    ],
)
def test_durations_show_the_two_largest_units(duration_s, expected):
    assert format_seconds(duration_s) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1_866_000_000, "1,866,000,000"),
        (41_200.7, "41,201"),
        (3.9149, "3.91"),
        (0.5, "0.50"),
        (0.0006, "0.0006"),
        (float("nan"), "nan"),
        (True, "True"),
        ("zstd", "zstd"),
    ],
)
def test_numbers_keep_the_digits_that_matter(value, expected):
    assert format_number(value) == expected


def test_table_aligns_numbers_right_and_text_left():
    rows = [("kept", 32_145, "3.20 GB"), ("dropped: too long", 7, "12 kB"), ("empty", None, None)]
    assert format_table(["rows", "count", "size"], rows).splitlines() == [
        "rows                count     size",
        "-----------------  ------  -------",
        "kept               32,145  3.20 GB",
        "dropped: too long       7    12 kB",
        "empty",
    ]


def test_table_without_rows_is_its_header():
    assert format_table(["a", "bc"], []) == "a  bc\n-  --"
