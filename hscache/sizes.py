"""Sizes as people write them: `4TB`, `1.5 TiB`, `800e9`, `80%` of a filesystem."""

from __future__ import annotations

import re

from hscache.errors import ConfigError

_UNITS = {unit: 1000**power for power, unit in enumerate(("", "k", "m", "g", "t", "p"))} | {
    f"{unit}i": 1024**power for power, unit in enumerate(("k", "m", "g", "t", "p"), start=1)
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?(?:e\d+)?)\s*(?:([kmgtp]i?)?b?|(%))", re.IGNORECASE)


def parse_size(text: str, setting: str, filesystem_bytes: int | None = None) -> int:
    """Return the bytes that a text such as `4TB` (decimal) or `4TiB` (binary) means.

    With `filesystem_bytes` also what share of them `80%` is. Raises ConfigError naming the setting.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or (match[3] and filesystem_bytes is None):
        share = "" if filesystem_bytes is None else ", or a share of the filesystem such as 80%"
        raise ConfigError(
            f"{setting} is {text!r}; expected a size such as 4TB, 3.5TiB or 4e12{share}."
        )
    number = float(match[1])
    if number <= 0:
        raise ConfigError(f"{setting} is {text!r}; expected more than 0.")
    if not match[3]:
        return int(number * _UNITS[(match[2] or "").lower()])
    if number > 100:
        raise ConfigError(f"{setting} is {text!r}; expected at most 100 %.")
    assert filesystem_bytes is not None
    return int(filesystem_bytes * number / 100)
