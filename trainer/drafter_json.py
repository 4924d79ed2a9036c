"""config.json of a drafter in z-lab's format, which serving engines read (dflash.md 3.2).

Takes a `DrafterConfig` and hands on the dict, or the other way round, refusing what the trainer
would compute otherwise than the config says.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hscache.errors import ConfigError
from trainer.config import DrafterConfig

# What a drafter's config may say and we would compute; the first is what we write.
_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", None),
    "attention_bias": (False, None),
    "rope_scaling": (None,),
    "is_causal": (False, None),
}


def drafter_json(
    config: DrafterConfig, target_config: dict[str, Any], dtype: torch.dtype
) -> dict[str, Any]:
    """Return z-lab's config.json of a drafter (dflash.md 3.2), keys doubled where readers differ.

    `block_size` and `mask_token_id` are read at the top level by some engines and in
    `dflash_config` by others; `rope_theta` likewise moved between transformers 4 and 5.
    """
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": config.block_size,
        "bos_token_id": target_config.get("bos_token_id"),
        "dflash_config": {
            "block_size": config.block_size,
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
        },
        "dtype": str(dtype).removeprefix("torch."),
        "eos_token_id": target_config.get("eos_token_id"),
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": config.intermediate_size,
        "layer_types": ["full_attention"] * config.num_hidden_layers,
        "max_position_embeddings": config.max_position_embeddings,
        "max_window_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "num_target_layers": config.num_target_layers,
        "pad_token_id": target_config.get("pad_token_id"),
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        "rope_scaling": None,
        "rope_theta": config.rope_theta,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": config.vocab_size,
    }


def drafter_config_from_json(config: dict[str, Any], where: Path) -> DrafterConfig:
    """Read a drafter's config.json.

    Raises ConfigError when a field is missing, or names something this trainer cannot run.
    """
    dflash = config.get("dflash_config") or {}
    kinds = set(config.get("layer_types") or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ConfigError(f"{where}: layer types {sorted(kinds)} are not supported yet.")
    for name, supported in _ONLY.items():
        if config.get(name) not in supported:
            raise ConfigError(
                f"{where}: {name} is {config[name]!r}, which is not supported yet; expected "
                f"{supported[0]!r}."
            )
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        raise ConfigError(f"{where}: rope_type {rope['rope_type']!r} is not supported yet.")
    try:
        return DrafterConfig(
            **{
                name: config[name]
                for name in (
                    "hidden_size", "intermediate_size", "num_hidden_layers",
                    "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps",
                    "max_position_embeddings", "vocab_size", "num_target_layers",
                )
            },
            rope_theta=rope["rope_theta"] if "rope_theta" in rope else config["rope_theta"],
            block_size=config.get("block_size") or dflash["block_size"],
            mask_token_id=dflash["mask_token_id"],
            target_layer_ids=tuple(dflash["target_layer_ids"]),
        )  # fmt: skip
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"{where}: missing or unusable: {error}; expected a DFlash config."
        ) from error
