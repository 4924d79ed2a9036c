"""Settings of `hscache import`, as a frozen dataclass; no torch."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hscache.config import Device, Dtype, StoreConfig
from hscache.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ImportConfig:
    """Turn the hidden states that another program saved into a cache."""

    shard_dir: Path
    """Folder of the cache; made if missing, continued if it holds the same import unfinished."""
    format: Literal["specforge", "speculators", "deepspec"]
    """Who wrote the source: SpecForge (data_*.ckpt), speculators (hs_*.safetensors), DeepSpec."""
    source: Path
    """Folder of the other program's files; only read."""
    target: str
    """Hugging Face id or local folder of the model whose states these are."""
    layer_convention: Literal["block", "hidden_states"] | None = None
    """What a layer id in layer_ids (DeepSpec: in its manifest) means. block: i is the output of
    decoder block i, 0-based. hidden_states: j is transformers' hidden_states[j], vLLM's aux id j,
    which is the output of block j - 1."""
    layer_ids: tuple[int, ...] | None = None
    """The stored layers, in stored order; DeepSpec's manifest names them."""
    rows: Path | None = None
    """speculators: the dataset its prepare_data.py saved; default: the folder above source."""
    allow_pickle: bool = False
    """SpecForge's files are pickles; read them, restricted to tensors (torch's weights_only)."""
    check_documents: int = 4
    """Documents that are run through the target and compared with their imported states; 0: none,
    and a wrong layer goes unnoticed."""
    held_out_fraction: float = 0.0
    """Share of the documents to hold out, chosen by a hash of their content."""
    store: StoreConfig = field(default_factory=StoreConfig)
    """The files."""
    revision: str | None = None
    """Commit, tag or branch of a hub model; the resolved commit is recorded."""
    dtype: Dtype = "bfloat16"
    """Dtype the target runs in for the check."""
    device: Device = "auto"
    """auto takes the GPU of LOCAL_RANK if there is one."""
    trust_remote_code: bool = False
    """Run code shipped with the model. Recorded in the cache; a cache never switches it on."""

    def __post_init__(self) -> None:
        if self.layer_convention is None:
            raise ConfigError(
                "layer_convention is missing. The files do not say what a layer id means, programs "
                "differ by one, and a drafter trained on shifted layers is silently bad. Give "
                "--layer-convention block if id i is the output of decoder block i, 0-based "
                "(SpecForge's DFlash, DeepSpec, z-lab), or hidden_states if it is an index into "
                "transformers' hidden_states or a vLLM aux id, the output of block i - 1 "
                "(speculators)."
            )
        if self.layer_ids is None and self.format != "deepspec":
            raise ConfigError(
                f"layer_ids is missing: {self.format} does not store which layers it captured. "
                "Give those of its configuration, in their order, as in --layer-ids 1 9 17."
            )
        if self.format == "specforge" and not self.allow_pickle:
            raise ConfigError(
                "SpecForge's .ckpt files are pickles, which can hold code. Give --allow-pickle to "
                "read them restricted to tensors (torch.load with weights_only); files with "
                "anything else are refused."
            )
        if self.check_documents < 0:
            raise ConfigError(f"check_documents is {self.check_documents}; expected 0 or more.")
        if not 0 <= self.held_out_fraction < 1:
            raise ConfigError(
                f"held_out_fraction is {self.held_out_fraction}; expected 0 <= share < 1."
            )
