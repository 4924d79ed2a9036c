"""Sizes as people write them: `4TB`, `1.5 TiB`, `800e9`."""

from __future__ import annotations

import re

from hscache.errors import ConfigError

_UNITS = {unit: 1000**power for power, unit in enumerate(("", "k", "m", "g", "t", "p"))} | {
    f"{unit}i": 1024**power for power, unit in enumerate(("k", "m", "g", "t", "p"), start=1)
}
_SIZE = re.compile(r"([0-9_.]+(?:e[0-9]+)?)\s*([kmgtp]?i?)b?", re.IGNORECASE)


def parse_bytes(text: str, setting: str) -> int:
    """Return the bytes that a text such as `4TB` (decimal) or `4TiB` (binary) means.

    Raises ConfigError naming the setting.
    """
    match = _SIZE.fullmatch(text.strip())
    try:
        if match is None or match[2].lower() == "i":
            raise ValueError(text)
        return int(float(match[1]) * _UNITS[match[2].lower()])
    except ValueError as error:
        raise ConfigError(
            f"{setting} is `{text}`; expected a size such as 4TB, 3.5TiB or 4e12."
        ) from error
