"""Settings of `hscache bench ...`: what is measured, and on how much data."""

from dataclasses import dataclass
from pathlib import Path

from hscache.errors import ConfigError
from hscache.planes import Codec


@dataclass(frozen=True, kw_only=True)
class BenchStoreConfig:
    """Measure a disk with a codec: write, read cold and warm, decode, and the tokens/s of each."""

    folder: Path
    """Folder on the disk to measure; a few GB are written beside what is there, then deleted."""
    codec: Codec = "lossless"
    """Codec of the cache."""
    cache: Path | None = None
    """Cache whose states are written; none means random ones that compress as real ones do."""
    size_gb: float = 2.0
    """States to write each time, as bf16."""
    num_layers: int = 5
    """Captured layers of the target whose tokens/s are told."""
    hidden_size: int = 5120
    """Its width. The defaults are Qwen3.6-27B's."""
    threads: int = 4
    """Threads that compress, and threads that read."""
    rounds: int = 3
    """Times that everything is measured; the medians are shown."""
    json: Path | None = None
    """Write all figures to this file too."""

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "threads", "rounds"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected at least 1.")
        if not 0 < self.size_gb < 1e6:
            raise ConfigError(f"size_gb is {self.size_gb}; expected a size above 0, in GB.")


@dataclass(frozen=True, kw_only=True)
class BenchAllConfig:
    """Run every bench at the sizes of a planned run: products, forward, store, training."""

    folder: Path
    """Folder for the result files, on the disk to measure; made if missing."""
    produce: Path
    """Config file of `hscache produce`."""
    fit: Path
    """Config file of `trainer fit`."""
    shards: Path | None = None
    """Cache to train from; without one `trainer bench` is left out."""
    random_weights: int | None = None
    """Seed: the target's forward runs with random weights; only its config is read."""
    seconds: float = 5.0
    """How long products run each time: long enough for the card to reach its power limit. Steps
    from shards run four times as long."""
    json: Path | None = None
    """One file with everything: all results, roofs, causes, and what did not run."""
    picture: Path | None = None
    """Picture of the measured rates under their roofs: .png, .svg or .pdf."""

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ConfigError(f"seconds is {self.seconds}; expected more than 0.")
