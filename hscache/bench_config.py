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
