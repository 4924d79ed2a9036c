"""Settings of `hscache plan`, and what it reads of the files of `produce` and `trainer fit`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hscache.config import DataConfig, Dtype, StoreConfig, TargetConfig
from hscache.errors import ConfigError
from hscache.gpus import GPUS, GpuName
from hscache.planes import Codec
from hscache.sizes import parse_size


@dataclass(frozen=True, kw_only=True)
class CostConfig:
    """Say what a run costs before it is started: disk, FLOPs, days, and what limits it."""

    produce: Path
    """Config file of `hscache produce`."""
    fit: Path
    """Config file of `trainer fit`."""
    gpu: GpuName
    """The kind of GPU; other needs ceiling_tflops and gpu_memory."""
    gpus: int = 1
    """How many of them."""
    tokens: int | None = None
    """Tokens of the corpus. If not given, the files that the produce config names are tokenised."""
    mean_tokens: float | None = None
    """With tokens: mean length of a document; the lengths are taken for log-normal."""
    lengths: Path | None = None
    """With tokens: a text file with the length of a document a line (a sample is enough)."""
    held_out_fraction: float | None = None
    """Share of the tokens that is held out; the produce config's if not given."""
    target_config: Path | None = None
    """config.json of the target, if it is not in a folder here: nothing is downloaded then."""
    disk: str | None = None
    """Bytes for the cache, such as 4TB; what is free where shard_dir is if not given."""
    shard_dir: Path = Path()
    """Where the cache would be."""
    codec: Codec | None = None
    """Instead of the produce config's."""
    passes: int | None = None
    """Instead of the fit config's."""
    anchors_per_row: int | None = None
    """Instead of the fit config's."""
    fewer_anchors: int = 128
    """Every pipeline is shown again with this many anchors a row."""
    ceiling_tflops: float | None = None
    """Measured rate of sustained bf16 products on this GPU; the table's if not given."""
    gpu_memory: str | None = None
    """Memory of a GPU that is not in the table, such as 48GB."""
    measured: tuple[Path, ...] = ()
    """Result files of benches (trainer bench --json, and the like) and caches that were produced:
    their rates on this kind of GPU, and their ratio, replace the defaults. A cache's rate is that
    of all of produce, so it goes before that of the forward alone."""
    json: Path | None = None
    """Also write all figures to this file."""

    def __post_init__(self) -> None:
        for name in ("gpus", "tokens", "mean_tokens", "passes", "anchors_per_row", "fewer_anchors",
                     "ceiling_tflops"):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"{name} is {value}; expected more than 0.")
        if self.held_out_fraction is not None and not 0 <= self.held_out_fraction < 1:
            raise ConfigError(
                f"held_out_fraction is {self.held_out_fraction}; expected 0 <= share < 1."
            )
        for name in ("disk", "gpu_memory"):
            if (text := getattr(self, name)) is not None:
                parse_size(text, name)
        if self.tokens is not None and (self.mean_tokens is None) == (self.lengths is None):
            raise ConfigError(
                "tokens needs the documents' lengths as well: --mean-tokens 1700, or --lengths "
                "FILE with one a line (only one of the two)."
            )
        if self.tokens is None and (self.mean_tokens is not None or self.lengths is not None):
            raise ConfigError("mean_tokens and lengths describe a corpus of --tokens; give that.")
        if self.gpu == "other" and (self.ceiling_tflops is None or self.gpu_memory is None):
            raise ConfigError(
                "gpu other needs --ceiling-tflops, the rate of sustained bf16 products that you "
                f"measured, and --gpu-memory. The table knows {', '.join(GPUS)}."
            )


@dataclass(frozen=True, kw_only=True)
class PlannedProduce:
    """What of a produce config decides the cost."""

    target: TargetConfig
    """The model."""
    data: DataConfig
    """The corpus."""
    store: StoreConfig = field(default_factory=StoreConfig)
    """The files."""
    token_budget: int = 65_536
    """Tokens in one packed forward."""


@dataclass(frozen=True, kw_only=True)
class PlannedDrafter:
    """What of the drafter's shape decides the cost; defaults are those of `trainer fit`."""

    num_hidden_layers: int = 5
    """Decoder layers."""
    intermediate_size: int
    """Inner width of the gated MLP."""
    num_attention_heads: int = 32
    """Query heads."""
    num_key_value_heads: int = 8
    """Key and value heads."""
    head_dim: int = 128
    """Width of one head."""
    block_size: int = 16
    """Slots of a block."""


@dataclass(frozen=True, kw_only=True)
class PlannedOptim:
    """What of the optimizer decides the memory."""

    name: Literal["adamw", "muon"] = "adamw"
    """adamw keeps two moments, muon one."""


@dataclass(frozen=True, kw_only=True)
class PlannedLoss:
    """What of the loss decides the memory."""

    labels: Literal["hard", "soft"] = "hard"
    """soft: the target's last states are read too."""
    chunk_size: int | None = None
    """Slots whose logits are in memory at once; 8,192 if not given."""


@dataclass(frozen=True, kw_only=True)
class PlannedFit:
    """What of a fit config decides the cost; defaults are those of `trainer fit`."""

    drafter: PlannedDrafter
    """The model."""
    loss: PlannedLoss = field(default_factory=PlannedLoss)
    """The loss."""
    optim: PlannedOptim = field(default_factory=PlannedOptim)
    """The optimizer."""
    passes: int = 6
    """How often every shard is read."""
    row_tokens: int = 4096
    """Context tokens in a row."""
    anchors_per_row: int = 512
    """Blocks trained per row."""
    global_batch_rows: int = 8
    """Rows in an optimizer step, over all GPUs."""
    dtype: Dtype = "bfloat16"
    """Dtype of the matrix products."""
    checkpoint_every: int = 1000
    """Optimizer steps between checkpoints."""
    eval_every_tokens: int = 0
    """Context tokens between two looks at held-out documents; 0: none."""
