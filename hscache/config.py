"""Settings of the `hscache` commands, as frozen dataclasses; no torch.

A YAML file and flags are parsed into these by `hscache.settings`; the text under a field is its
help.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hscache.errors import ConfigError
from hscache.planes import Codec
from hscache.sizes import parse_size
from hscache.template_kwargs import parse_template_kwargs

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["bfloat16", "float32"]
Answers = Literal["all", "last"]
OverLong = Literal["drop", "truncate"]


def spaced_layer_ids(num_target_layers: int, num_features: int) -> tuple[int, ...]:
    """Return DFlash's choice of layers: block 1 to block L-3, evenly spaced, rounded half to even.

    Source: z-lab/dflash, also SpecForge, TorchSpec, ModelOpt and SGLang. 64 layers, 5 features:
    (1, 16, 31, 46, 61). Raises ConfigError when the target has not so many blocks.
    """
    if num_features == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    ids = tuple(round(1 + i * span / (num_features - 1)) for i in range(num_features))
    if len(set(ids)) < num_features or list(ids) != sorted(ids):
        raise ConfigError(
            f"a target of {num_target_layers} blocks has no {num_features} evenly spaced ones to "
            "capture; give target.target_layer_ids, or a smaller target.num_features."
        )
    return ids


@dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """The frozen model whose hidden states are cached."""

    path: str
    """Hugging Face id or local folder."""
    revision: str | None = None
    """Commit, tag or branch of a hub model; the resolved commit is recorded."""
    num_features: int = 5
    """Number of captured layers, spaced by DFlash's formula, when target_layer_ids is not given."""
    target_layer_ids: tuple[int, ...] | None = None
    """0-based decoder blocks whose output is captured (Hugging Face hidden_states[i + 1])."""
    last_hidden: bool = False
    """Also store the last block's output, from which soft labels are made; then all blocks run."""
    dtype: Dtype = "bfloat16"
    """Dtype the target runs in; states are stored as bfloat16."""
    device: Device = "auto"
    """auto takes the GPU of LOCAL_RANK if there is one."""
    trust_remote_code: bool = False
    """Run code shipped with the model. Recorded in the cache; a cache never switches it on."""
    chat_template_kwargs: str | None = None
    """JSON object of variables of the chat template, such as {"enable_thinking": false}: those the
    answers were made with. Recorded in the cache."""

    def __post_init__(self) -> None:
        if self.num_features < 1:
            raise ConfigError(f"target.num_features is {self.num_features}; expected at least 1.")
        parse_template_kwargs(self.chat_template_kwargs)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The corpus: rows of JSONL (also .gz, .zst), parquet or Arrow files; what a row may be is in
    the README."""

    train: tuple[str, ...]
    """Files, folders or patterns to train on."""
    held_out: tuple[str, ...] = ()
    """Likewise, for evaluation: these documents are kept out of training."""
    held_out_fraction: float = 0.0
    """Share of the training documents to hold out, chosen by a hash of their content."""
    max_tokens: int = 4096
    """Longest document, in tokens."""
    over_long: OverLong = "truncate"
    """What to do with a longer one; both are counted."""
    max_documents: int | None = None
    """Take only this many rows of the training files (a seeded sample over all of them)."""
    answers: Answers = "all"
    """Supervise all answers of a conversation, or the last: then the template may rewrite turns."""
    workers: int | None = None
    """Processes that tokenise; 0 or 1: this one. By default one a core, fewer if the corpus is
    small."""
    min_supervised_share: float = 0.01
    """Stop when a smaller share of the tokens is supervised: the loss mask is likely wrong."""

    def __post_init__(self) -> None:
        if not self.train:
            raise ConfigError("data.train is empty: name at least one file.")
        if not 0 <= self.held_out_fraction < 1:
            raise ConfigError(
                f"data.held_out_fraction is {self.held_out_fraction}; expected 0 <= share < 1."
            )
        if self.max_tokens < 2:
            raise ConfigError(f"data.max_tokens is {self.max_tokens}; expected at least 2.")
        if self.max_documents is not None and self.max_documents < 1:
            raise ConfigError(f"data.max_documents is {self.max_documents}; expected at least 1.")
        if self.workers is not None and self.workers < 0:
            raise ConfigError(f"data.workers is {self.workers}; expected at least 0.")
        if not 0 <= self.min_supervised_share <= 1:
            raise ConfigError(
                f"data.min_supervised_share is {self.min_supervised_share}; expected a share "
                "between 0 and 1."
            )


@dataclass(frozen=True, kw_only=True)
class StoreConfig:
    """How the cache is written."""

    codec: Codec = "lossless"
    """lossless (1.43x smaller), none, bitround4 (2.0x, 1.4 % error) or fp8 (2.2x, 2.6 % error)."""
    shard_tokens: int = 262_144
    """Tokens in a shard; about 9 GB for a 27B target."""
    seed: int = 0
    """Seed of the shuffle that deals documents into shards."""
    max_quarantined_share: float = 0.01
    """Stop when more than this share of the documents gave unusable states."""
    threads: int = 4
    """Threads that compress."""

    def __post_init__(self) -> None:
        if self.shard_tokens < 1:
            raise ConfigError(f"store.shard_tokens is {self.shard_tokens}; expected at least 1.")
        if self.threads < 1:
            raise ConfigError(f"store.threads is {self.threads}; expected at least 1.")
        if self.seed < 0:
            raise ConfigError(f"store.seed is {self.seed}; expected at least 0.")
        if not 0 <= self.max_quarantined_share <= 1:
            raise ConfigError(
                f"store.max_quarantined_share is {self.max_quarantined_share}; expected a share "
                "between 0 and 1."
            )


Retain = Literal["all", "window"]
DEFAULT_RESERVE = 3


@dataclass(frozen=True, kw_only=True)
class ProduceConfig:
    """Run the target once over a corpus and write its hidden states into a cache."""

    shard_dir: Path
    """Folder of the cache; made if missing, continued if it holds the same cache unfinished."""
    target: TargetConfig
    """The model."""
    data: DataConfig
    """The corpus."""
    store: StoreConfig = field(default_factory=StoreConfig)
    """The files."""
    token_budget: int = 65_536
    """Tokens in one packed forward; documents are packed without padding."""
    max_disk: str | None = None
    """Bytes that the cache may take at any time, such as 2TB, or a share of its filesystem, such as
    80%. Producing pauses where it would take more."""
    retain: Retain = "all"
    """all keeps every shard. window frees a shard once each trainer that follows (trainer fit
    --follow) is done with it; needs max_disk and passes, which are fixed at the first start."""
    passes: int | None = None
    """With retain window: how often the trainers visit each shard."""
    reserve: int | None = None
    """With retain window: shards beside those that a visit needs, for those being written and those
    read since the last checkpoint; 3 if not given."""

    def __post_init__(self) -> None:
        self._check_window()
        if self.token_budget < self.data.max_tokens:
            raise ConfigError(
                f"token_budget is {self.token_budget} and data.max_tokens {self.data.max_tokens}: "
                "a document must fit into one pack. Raise the first or lower the second."
            )

    def _check_window(self) -> None:
        if self.max_disk is not None:
            parse_size(self.max_disk, "max_disk", filesystem_bytes=0)
        for name in ("passes", "reserve"):
            value = getattr(self, name)
            if value is None:
                continue
            if self.retain == "all":
                raise ConfigError(f"{name} is {value}, which only --retain window uses.")
            if value < 1:
                raise ConfigError(f"{name} is {value}; expected at least 1.")
        if self.retain == "window" and (self.max_disk is None or self.passes is None):
            raise ConfigError(
                "retain window needs max_disk and passes: a shard is freed after that many visits, "
                "as in --max-disk 2TB --passes 6."
            )


@dataclass(frozen=True, kw_only=True)
class InspectConfig:
    """Show what is in a cache: identity, shards, statistics; reads metadata only."""

    cache: Path
    """Folder of the cache."""
    doc: int | None = None
    """Show one document: tokens, loss mask, norms."""
    html: Path | None = None
    """Write everything as one page with pictures, for a browser; with doc that document, else the
    first one to train on. It needs no network and no other file."""


@dataclass(frozen=True, kw_only=True)
class ConsumersConfig:
    """Show which trainers follow a cache that is produced in a window, and drop lost ones."""

    cache: Path
    """Folder of the cache."""
    drop: tuple[str, ...] = ()
    """Names of consumers that will never come back: no shard is kept for them any more."""


@dataclass(frozen=True, kw_only=True)
class RooflineConfig:
    """Draw result files of benches under the roofs of their GPU, and where the time goes."""

    results: tuple[Path, ...]
    """Files of trainer bench --json and of hscache's benches, all of one kind of GPU."""
    picture: Path | None = None
    """Picture to write: .png, .svg or .pdf."""
    json: Path | None = None
    """One file with everything: roofs, points, causes, and the results themselves."""


@dataclass(frozen=True, kw_only=True)
class StatusConfig:
    """Show how far producing and training are right now, from files alone; changes nothing."""

    cache: Path
    """Folder of the cache."""
    watch: bool = False
    """Again and again, until nothing is left to do."""
    every_s: float = 2.0
    """Seconds between two looks."""

    def __post_init__(self) -> None:
        if not self.every_s > 0:
            raise ConfigError(f"every_s is {self.every_s}; expected more than 0.")


@dataclass(frozen=True, kw_only=True)
class VerifyConfig:
    """Check that a cache still holds what was written; changes nothing."""

    cache: Path
    """Folder of the cache."""
    deep: bool = False
    """Read every byte: all checksums, and the content of all states."""
    replay: int = 0
    """Run the target again on the packs that hold this many random documents, and compare."""
    target: str | None = None
    """With replay: hub id or folder of the target; the one that the cache names if not given."""
    device: Device = "auto"
    """With replay: cpu, cuda, or auto."""
    trust_remote_code: bool = False
    """With replay: run code shipped with the model; a cache never switches it on."""
    seed: int = 0
    """With replay: which documents are drawn."""
    threads: int = 4
    """Shards checked at the same time."""

    def __post_init__(self) -> None:
        if self.replay < 0 or self.seed < 0:
            name = "replay" if self.replay < 0 else "seed"
            raise ConfigError(f"{name} is {getattr(self, name)}; expected 0 or more.")
        if self.target is not None and not self.replay:
            raise ConfigError("--target does nothing without --replay N: documents to run again.")


@dataclass(frozen=True, kw_only=True)
class RepairConfig:
    """Take damaged shards out of a cache, so that the next `hscache produce` makes them again."""

    cache: Path
    """Folder of the cache."""
    deep: bool = False
    """Read every byte, as `verify --deep` does; else only what is seen from metadata and sizes."""
    quarantined: bool = False
    """Also requeue sound shards with documents that were quarantined for their content."""
    threads: int = 4
    """Shards checked at the same time."""
