"""Settings of `hscache bench gemm` and `hscache bench forward`; no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hscache.config import Device, Dtype, TargetConfig
from hscache.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class BenchGemmConfig:
    """Measure the matrix products of a target's blocks alone: what no forward can beat for long."""

    target: str
    """Hugging Face id or folder; only its config.json is read."""
    blocks: int | None = None
    """Decoder blocks whose products count; all if not given."""
    rows: tuple[int, ...] = (8_192, 16_384, 65_536)
    """Tokens of a product; the best counts."""
    seconds: float = 5.0
    """How long each product runs: long enough for the card to reach its power limit."""
    dtype: Dtype = "bfloat16"
    """Dtype of the products."""
    device: Device = "auto"
    """cpu, cuda, or auto."""
    json: Path | None = None
    """Also write the figures to this file."""

    def __post_init__(self) -> None:
        _require_positive(self, ("seconds", "blocks"))
        _require_sizes("rows", self.rows)


@dataclass(frozen=True, kw_only=True)
class BenchForwardConfig:
    """Measure how fast a target's states could be made on this machine, and whether they are right.

    Packs of documents of 64 to 8,191 tokens run through the blocks up to the last captured one.
    """

    target: TargetConfig
    random_weights: int | None = None
    """Seed: build the model of the config on the device with random weights; none are read."""
    budgets: tuple[int, ...] = (65_536, 16_384, 32_768, 131_072)
    """Tokens of a pack; the first is measured in turns with the products."""
    mean_tokens: int = 1_700
    """Mean length of the documents."""
    repeats: int = 3
    """Forwards per measurement; the median counts."""
    gemm_seconds: float = 5.0
    """How long the products alone run, each turn."""
    compare: Literal["none", "transformers"] = "none"
    """transformers: its own forward of the same blocks, equal lengths and padded batches."""
    equal_tokens: int = 2_048
    """Length of the documents where all are equal."""
    padded_batches: tuple[int, ...] = (3, 4, 8, 16)
    """Documents of a padded batch, in the order of the corpus."""
    json: Path | None = None
    """Also write the figures to this file."""

    def __post_init__(self) -> None:
        _require_positive(self, ("repeats", "gemm_seconds", "mean_tokens", "equal_tokens"))
        _require_sizes("budgets", self.budgets)
        _require_sizes("padded_batches", self.padded_batches)


def _require_positive(config: object, names: tuple[str, ...]) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and not value > 0:
            raise ConfigError(f"{name}: found {value}, expected more than 0.")


def _require_sizes(name: str, sizes: tuple[int, ...]) -> None:
    if not sizes or min(sizes) < 1:
        raise ConfigError(f"{name}: found {list(sizes)}, expected at least one number above 0.")
