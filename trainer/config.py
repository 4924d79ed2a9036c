"""Settings of the `trainer` commands, as frozen dataclasses.

A YAML file and flags are parsed into these by `hscache.settings`; the text under a field is its
help. Everything is checked at construction; nothing here imports torch.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hscache.config import Device, Dtype
from hscache.errors import ConfigError
from trainer.drafter_config import LayerType


@dataclass(frozen=True, kw_only=True)
class DrafterShape:
    """What a user chooses of the drafter; the rest comes from the cache's target."""

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
    """Slots of a block: the anchor and block_size - 1 predicted tokens."""
    mask_token_id: int
    """Id whose embedding fills the slots to predict; never the target's pad or eos."""
    layer_types: tuple[LayerType, ...] | None = None
    """full_attention or sliding_attention for each layer; all full if not given."""
    sliding_window: int | None = None
    """Positions a slot sees in sliding_attention layers; these see no later slot of the block."""
    rope_theta: float | None = None
    """Base of the rotary frequencies; the target's if not given."""
    rms_norm_eps: float | None = None
    """Epsilon of the norms; the target's if not given."""
    hidden_size: int | None = None
    """Checked against the cache when given."""
    target_layer_ids: tuple[int, ...] | None = None
    """Checked against the cache when given."""


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Weighted cross-entropy, or divergence from the target, through the frozen head."""

    labels: Literal["hard", "soft"] = "hard"
    """hard: the text's tokens; soft: KL to the target's distribution (needs target.last_hidden)."""
    weighting: Literal["decay", "dpace"] = "decay"
    """decay: by gamma; dpace: by the drafter's own confidence (D-PACE, arXiv 2605.18810)."""
    gamma: float | None = None
    """Slot k weighs exp(-(k - 1) / gamma); by block size if not given: 16: 7, 10: 5, 8: 4."""
    sample_slots: bool = False
    """Score slot k with that probability at weight 1: same expected loss, fewer head products."""
    chunk_size: int | None = None
    """Slots whose logits are in memory at once; 512 on a CPU and 8,192 on a GPU if not given."""

    def slots_per_chunk(self, device_type: str) -> int:
        """Return `chunk_size`, or what suits the device if it is not given."""
        # A CPU keeps a chunk's logits near its caches. A GPU wants products with as many rows as
        # fit: all of a row's slots at the published sizes (512 x 15), 4 GB of logits at a
        # vocabulary of 248,320.
        return self.chunk_size or (512 if device_type == "cpu" else 8192)

    def __post_init__(self) -> None:
        if self.gamma is not None and not self.gamma > 0:
            raise ConfigError(f"gamma: found {self.gamma}, expected a number above 0.")
        if self.chunk_size is not None and self.chunk_size < 1:
            raise ConfigError(f"chunk_size: found {self.chunk_size}, expected at least 1.")
        if self.weighting == "dpace":
            self._refuse_beside_dpace()

    def _refuse_beside_dpace(self) -> None:
        for name, needless, why in (
            ("labels", self.labels == "soft", "D-PACE weighs by the probability of the text"),
            ("sample_slots", self.sample_slots, "D-PACE needs the losses of all slots of a block"),
            ("gamma", self.gamma is not None, "D-PACE replaces the decay"),
        ):
            if needless:
                raise ConfigError(
                    f"loss.{name} {getattr(self, name)} and loss.weighting dpace: {why}. Leave "
                    "one of them out."
                )


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Optimizer over fp32 masters, and a learning rate that is a function of the run's tokens."""

    name: Literal["adamw", "muon"] = "adamw"
    """muon orthogonalises the updates of matrices: more progress a step, and more work."""
    lr: float = 6e-4
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of the moments."""
    weight_decay: float = 0.0
    """On matrices only."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """After the warm-up: cosine falls all the way; wsd stays at the peak, then falls linearly."""
    warmup_fraction: float = 0.04
    """Share of the run's tokens in which the rate rises, linearly."""
    decay_fraction: float = 0.2
    """With wsd: share of the run's tokens, the last ones, in which the rate falls."""
    final_fraction: float = 0.0
    """Learning rate at the end, as a share of the peak."""
    clip: float = 1.0
    """Largest joint gradient norm."""

    def __post_init__(self) -> None:
        for name in ("lr", "clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name}: found {getattr(self, name)}, expected more than 0.")
        for name in ("warmup_fraction", "decay_fraction", "final_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name}: found {getattr(self, name)}, expected 0 to 1.")
        if self.schedule == "wsd" and self.warmup_fraction + self.decay_fraction > 1:
            raise ConfigError(
                f"warmup_fraction {self.warmup_fraction} and decay_fraction {self.decay_fraction} "
                "are more than the whole run. Lower one of them."
            )
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"betas: found {self.betas}, expected numbers from 0 to below 1.")
        if not 0 <= self.weight_decay < math.inf:
            raise ConfigError(f"weight_decay: found {self.weight_decay}, expected 0 or more.")


@dataclass(frozen=True, kw_only=True)
class SyncConfig:
    """How several ranks keep one drafter; with one rank every mode is plain training."""

    mode: Literal["ddp", "average", "broadcast", "diloco"] = "average"
    """ddp adds gradients at every step. In the others ranks step alone, meet every local_steps, and
    average weights, take rank 0's (the others' work is lost), or step along the average (diloco).
    """
    local_steps: int = 100
    """Optimizer steps between two meetings; ddp ignores it."""
    outer_lr: float = 0.7
    """Learning rate of diloco's outer step."""
    outer_momentum: float = 0.9
    """Nesterov momentum of diloco's outer step."""
    timeout_s: float = 600.0
    """Ranks that wait longer than this for another end the run; allow local_steps of the
    slowest."""

    def __post_init__(self) -> None:
        if self.local_steps < 1:
            raise ConfigError(f"local_steps: found {self.local_steps}, expected at least 1.")
        if not 0 < self.outer_lr < math.inf:
            raise ConfigError(f"outer_lr: found {self.outer_lr}, expected a number above 0.")
        if not 0 <= self.outer_momentum < 1:
            raise ConfigError(
                f"outer_momentum: found {self.outer_momentum}, expected 0 to below 1."
            )
        if not 1 <= self.timeout_s < math.inf:
            raise ConfigError(f"timeout_s: found {self.timeout_s}, expected at least 1.")


@dataclass(frozen=True, kw_only=True)
class FitConfig:
    """Train a drafter from a cache, without the target."""

    shards: tuple[Path, ...]
    """Folder of the cache; several if their states mean the same."""
    run_dir: Path
    """Where checkpoints, metrics.jsonl and the resolved config go."""
    drafter: DrafterShape
    """The model."""
    loss: LossConfig = field(default_factory=LossConfig)
    """The loss."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """The optimizer."""
    sync: SyncConfig = field(default_factory=SyncConfig)
    """Several ranks (torchrun, accelerate launch, srun)."""
    passes: int = 6
    """How often every training shard is read, each time with fresh anchors."""
    weights: tuple[float, ...] = ()
    """With several caches: factor on the passes of each; with 6 passes and weights 1 0.5 the second
    is read 3 times. All 1 if not given."""
    row_tokens: int = 4096
    """Context tokens in a row; at least the cache's longest document."""
    anchors_per_row: int = 512
    """Blocks trained per row."""
    global_batch_rows: int = 8
    """Rows in an optimizer step, over all ranks and in every sync mode: each of R ranks takes one
    in R and accumulates its rows one by one."""
    seed: int = 0
    """Seed of initial weights, order and anchors."""
    dtype: Dtype = "bfloat16"
    """Dtype of the matrix products; masters, gradients and moments are fp32."""
    device: Device = "auto"
    """cpu, cuda, or auto."""
    attention: Literal["auto", "sdpa"] = "auto"
    """auto compiles for the GPU; sdpa is a slow reference without any compiler."""
    threads: int = 4
    """Threads that decode shards."""
    init_from: Path | None = None
    """Start from this drafter's weights: a checkpoint, or a folder of z-lab's or speculators'."""
    resume: bool = False
    """Continue the last checkpoint in run_dir."""
    allow_partial: bool = False
    """Train on the published shards of an unfinished cache; says so and records which."""
    on_bad_shard: Literal["stop", "skip"] = "stop"
    """At documents whose states cannot be read: stop after a checkpoint, or go on without them and
    record which."""
    follow: bool = False
    """Train while hscache produce works: wait for shards, and let it free those this run is done
    with (--retain window). Writes its progress into the cache's consumers/."""
    window: int | None = None
    """Visit shards as a window of this many would, on a cache that keeps them all: a cache made
    with --retain window says it itself. None: ordinary passes, one after the other."""
    checkpoint_every: int = 1000
    """Optimizer steps between checkpoints, which wait for the next meeting of the ranks; the last
    step always writes one."""
    keep_checkpoints: int = 2
    """Older ones are deleted."""
    keep_best: bool = True
    """Also keep the checkpoint with the best sequential acceptance on held-out documents; `best` in
    run_dir leads to it. Needs eval_every_tokens."""
    eval_every_tokens: int = 0
    """Context tokens between two looks at held-out documents; every regular checkpoint has one too.
    0: none."""
    eval_documents: int = 64
    """Held-out documents to look at: the first of the plan, which is shuffled."""
    log_every: int = 10
    """Optimizer steps between lines of metrics.jsonl; ranks that step alone write at meetings."""
    log_with: Literal["none", "tensorboard", "wandb", "trackio", "mlflow"] = "none"
    """Also report to one of accelerate's trackers."""

    def __post_init__(self) -> None:
        shards = (self.shards,) if isinstance(self.shards, Path) else tuple(self.shards)
        object.__setattr__(self, "shards", shards)
        if not shards:
            raise ConfigError("shards is empty: name the folder of a cache.")
        if self.weights and len(shards) == 1:
            raise ConfigError("weights: one cache needs none; passes says how often it is read.")
        if self.weights and len(self.weights) != len(shards):
            raise ConfigError(
                f"weights: found {len(self.weights)}, expected one for each of the {len(shards)} "
                "caches in shards, in their order."
            )
        if not all(0 < weight < math.inf for weight in self.weights):
            raise ConfigError(
                f"weights: found {list(self.weights)}, expected numbers above 0; leave a cache "
                "that is not to be read out of shards."
            )
        for name in (
            "passes", "row_tokens", "anchors_per_row", "global_batch_rows", "threads",
            "checkpoint_every", "keep_checkpoints", "log_every", "eval_documents",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: found {getattr(self, name)}, expected at least 1.")
        if len(shards) > 1 and (self.follow or self.window is not None):
            raise ConfigError(
                f"{'follow' if self.follow else 'window'}: it is for one cache, and shards names "
                f"{len(shards)}."
            )
        if self.window is not None and self.window < 1:
            raise ConfigError(f"window: found {self.window}, expected at least 1.")
        if self.allow_partial and (self.follow or self.window is not None):
            other = "follow" if self.follow else "window"
            raise ConfigError(
                f"allow_partial and {other}: one trains on what is there, the other on every shard "
                "in its turn. Leave one of them out."
            )
        if self.eval_every_tokens < 0:
            raise ConfigError(
                f"eval_every_tokens: found {self.eval_every_tokens}, expected 0 (none) or more."
            )
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed: found {self.seed}, expected 0 to 2**63 - 1.")


@dataclass(frozen=True, kw_only=True)
class BenchConfig(FitConfig):
    """Measure how fast a fit would run here; takes the same settings and writes no run folder."""

    run_dir: Path = Path(os.devnull)
    """Not used."""
    compare: Literal["none", "naive"] = "none"
    """naive: also time the same rows without a compiler."""
    repeats: int = 5
    """Optimizer steps per measurement."""
    gemm_seconds: float = 5.0
    """How long the products alone run: long enough for the card to reach its power limit."""
    shard_seconds: float = 20.0
    """How long steps run from shards."""
    json: Path | None = None
    """Also write the figures to this file."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("repeats", "gemm_seconds", "shard_seconds"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}: found {getattr(self, name)}, expected more than 0.")


@dataclass(frozen=True, kw_only=True)
class PlotConfig:
    """Draw the curves of runs, from their metrics.jsonl alone; a run may still be going."""

    runs: tuple[Path, ...]
    """Run folders, overlaid."""
    output: Path
    """Picture to write: .png, .svg or .pdf."""


@dataclass(frozen=True, kw_only=True)
class StatusConfig:
    """Show how far a run is, from its files alone; changes nothing."""

    run: Path
    """Run folder."""
    watch: bool = False
    """Again and again, until the run ends."""
    every_s: float = 2.0
    """Seconds between two looks."""

    def __post_init__(self) -> None:
        if not self.every_s > 0:
            raise ConfigError(f"every_s: found {self.every_s}, expected more than 0.")


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Measure a drafter: acceptance length from held-out shards, and by real decoding."""

    checkpoint: Path
    """A checkpoint folder, or a run folder (its last checkpoint)."""
    shards: Path
    """The cache it was trained on."""
    prompts: tuple[str, ...] = ()
    """Files (or folders, or patterns) of conversations; the last user turn is answered by
    speculative decoding."""
    target: str | None = None
    """Folder or hub id of the target; the one the cache names if not given."""
    dtype: Dtype = "float32"
    """Dtype target and drafter decode in; in float32 the text must equal plain greedy exactly."""
    max_prompts: int = 12
    """Prompts to decode."""
    max_new_tokens: int = 64
    """Tokens per prompt."""
    tables: bool = True
    """Compare with table drafters counted on the training documents."""
    device: Device = "auto"
    """cpu, cuda, or auto."""
    json: Path | None = None
    """Also write the figures to this file."""

    def __post_init__(self) -> None:
        for name in ("max_prompts", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: found {getattr(self, name)}, expected at least 1.")


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Write a drafter as a folder that serving engines and other trainers load."""

    checkpoint: Path
    """A checkpoint folder, a run folder (its last checkpoint), or a published drafter."""
    format: Literal["zlab", "speculators"]
    """zlab is read by vLLM, SGLang and z-lab's code; speculators by vLLM and speculators."""
    output: Path
    """New folder to write."""
    shards: Path | None = None
    """The cache it was trained on: checked against it; speculators needs it."""
    target: str | None = None
    """Hub id or folder of the target to name in speculators' format; the cache's if not given."""

    def __post_init__(self) -> None:
        if self.format == "speculators" and self.shards is None:
            raise ConfigError(
                "--format speculators needs --shards: the folder also holds the target's embedding "
                "and head, and names the target; all come from the cache."
            )
        if self.format == "zlab" and self.target is not None:
            raise ConfigError("--target: z-lab's format names no target. Leave it out.")
