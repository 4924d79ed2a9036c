"""The sizes of a target, read from its config.json alone: no weights, no transformers.

Takes a config as parsed JSON (a multimodal one gives its text part); hands on a `TargetShape`, from
which weights, bytes and FLOPs follow.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hscache.config import TargetConfig
from hscache.errors import ConfigError
from hscache.forward_flops import products

_LINEAR = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
           "linear_value_head_dim")  # fmt: skip
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, kw_only=True)
class TargetShape:
    """Sizes of a decoder-only language model with gated MLPs, named as transformers names them."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tied_head: bool
    attn_output_gate: bool
    """attention has a gate as wide as its queries"""
    layer_types: tuple[str, ...]
    """full_attention or linear_attention, for each block"""
    linear_num_key_heads: int = 0
    """the next four: sizes of the linear attention of a hybrid (Qwen3.5, 3.6)"""
    linear_num_value_heads: int = 0
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0

    @property
    def num_blocks(self) -> int:
        """Decoder blocks."""
        return len(self.layer_types)

    @property
    def embedding_weights(self) -> int:
        """Weights of the embedding; an untied head has as many again."""
        return self.vocab_size * self.hidden_size

    def block_weights(self, num_blocks: int) -> int:
        """Return the weights of the first blocks' matrices; norms, gates' biases and convolutions
        are not products."""
        return sum(p.outputs * p.inputs * p.count for p in products(self, num_blocks))

    def weight_bytes(self, num_blocks: int, dtype_bytes: int = 2) -> int:
        """Return the bytes of embedding and first blocks: what capture holds, without a head."""
        return dtype_bytes * (self.embedding_weights + self.block_weights(num_blocks))

    @property
    def frozen_bytes(self) -> int:
        """Bytes of `frozen/`: embedding, head unless tied, in bf16."""
        return 2 * self.embedding_weights * (1 if self.tied_head else 2)


def shape_of(config: Mapping[str, Any], where: str) -> TargetShape:
    """Return the shape a config describes; `where` names it in errors.

    Raises ConfigError when a size is missing or the target has experts, whose cost depends on the
    router.
    """
    text = config.get("text_config") or config
    if any(text.get(name) for name in _EXPERTS):
        raise ConfigError(
            f"{where} describes a mixture of experts, whose cost `hscache plan` cannot count yet. "
            "Produce a few shards and plan with their measured rate."
        )
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
             "vocab_size")  # fmt: skip
    missing = [name for name in sizes if not isinstance(text.get(name), int)]
    if missing:
        raise ConfigError(
            f"{where} has no {', '.join(missing)}: expected the config.json of a decoder-only "
            "language model."
        )
    heads = text["num_attention_heads"]
    kinds = tuple(text.get("layer_types") or ())
    if not kinds and (interval := text.get("full_attention_interval")):
        kinds = tuple(
            "linear_attention" if (block + 1) % interval else "full_attention"
            for block in range(text["num_hidden_layers"])
        )
    hybrid = "linear_attention" in kinds
    return TargetShape(
        hidden_size=text["hidden_size"],
        intermediate_size=text["intermediate_size"],
        num_attention_heads=heads,
        num_key_value_heads=text.get("num_key_value_heads") or heads,
        head_dim=text.get("head_dim") or text["hidden_size"] // heads,
        vocab_size=text["vocab_size"],
        tied_head=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
        attn_output_gate=hybrid or bool(text.get("attn_output_gate")),
        layer_types=kinds or ("full_attention",) * text["num_hidden_layers"],
        **{name: text[name] for name in _LINEAR if hybrid},
    )


def load_shape(target: TargetConfig, file: Path | None = None) -> TargetShape:
    """Return the shape of a target from its config.json, or from the file given instead.

    Raises ConfigError if there is none. Only a target that is not in a folder here takes seconds.
    """
    found = file or Path(target.path) / "config.json"
    if found.is_file():
        try:
            return shape_of(json.loads(found.read_text()), str(found))
        except (OSError, ValueError, KeyError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{found} cannot be read as a config.json: {error!r}.") from error
    if file is not None:
        raise ConfigError(f"target_config {file} does not exist; expected a config.json.")
    from hscache.pretrained import load_config  # takes seconds, and may download

    return shape_of(load_config(target)[0].to_dict(), target.path)
