"""config.json of a drafter in z-lab's format, which serving engines read (dflash.md 3.2).

Takes a `DrafterConfig` and hands on the dict, or the other way round, refusing what the trainer
would compute otherwise than the config says.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hscache.errors import ConfigError
from trainer.drafter_config import DrafterConfig

_FULL, _SLIDING = "full_attention", "sliding_attention"
# What a drafter's config may say and we would compute; the first is what we write.
_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", None),
    "attention_bias": (False, None),
    "rope_scaling": (None,),
    "is_neox_style": (True, None),
    "partial_rotary_factor": (1.0, None),
}
# The same inside `dflash_config`; those of DFlash 2 (dflash.md 5) change what is computed.
_ONLY_DFLASH: dict[str, tuple[Any, ...]] = {
    "use_swa": (False, None),
    "attention_sink_bias": (False, None),
    "attention_value_scale": (1.0, None),
    "selector_top_k": (None,),
    "conv_kernel_size": (None,),
    "input_embedding_scale": (1.0, None),
    "output_multiplier": (1.0, None),
    "final_logit_softcapping": (None,),
}


_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings"),
    *("vocab_size", "num_target_layers"),
)


def drafter_json(
    config: DrafterConfig, target_config: dict[str, Any], dtype: torch.dtype
) -> dict[str, Any]:
    """Return z-lab's config.json of a drafter (dflash.md 3.2), keys doubled where readers differ.

    `block_size` is read at the top level by some and in `dflash_config` by others; `rope_theta`
    moved between transformers 4 and 5; that a block is not causal is read by vLLM from `is_causal`,
    `dflash_config.causal` or, as by SGLang, `layer_types`, whichever its version knows first. A
    drafter with sliding layers leaves the first two out: they would speak of all of its layers.
    """
    causal = {} if config.slides else {"causal": False}
    return {
        **layer_json(config, target_config),
        "architectures": ["DFlashDraftModel"],
        "block_size": config.block_size,
        "dflash_config": {
            "block_size": config.block_size,
            **causal,
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
        },
        "dtype": dtype_name(dtype),
        "num_target_layers": config.num_target_layers,
    }


def layer_json(config: DrafterConfig, target_config: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a drafter's config that a Qwen3 decoder of transformers also has."""
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": target_config.get("bos_token_id"),
        "eos_token_id": target_config.get("eos_token_id"),
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": config.intermediate_size,
        **({} if config.slides else {"is_causal": False}),
        "layer_types": list(config.layer_types),
        "max_position_embeddings": config.max_position_embeddings,
        "max_window_layers": config.num_hidden_layers,
        "model_type": "qwen3",
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "pad_token_id": target_config.get("pad_token_id"),
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        "rope_scaling": None,
        "rope_theta": config.rope_theta,
        "sliding_window": config.sliding_window,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": config.slides,
        "vocab_size": config.vocab_size,
    }


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name by which a config.json calls a dtype."""
    return str(dtype).removeprefix("torch.")


def drafter_config_from_json(config: dict[str, Any], where: Path) -> DrafterConfig:
    """Read a drafter's config.json.

    Raises ConfigError when a field is missing, or names something this trainer cannot run.
    """
    dflash = config.get("dflash_config")
    if not isinstance(dflash, dict):
        raise ConfigError(
            f"{where} (model_type {config.get('model_type')!r}) is no DFlash config: it has no "
            "dflash_config with mask_token_id and target_layer_ids, as drafters in z-lab's format "
            "have, and no speculators_model_type. Give the folder of a DFlash drafter."
        )
    _require_kinds(config, dflash, where)
    slides = _require_known_layers(config, dflash, where)
    for values, prefix, only in ((config, "", _ONLY), (dflash, "dflash_config.", _ONLY_DFLASH)):
        for name, supported in only.items():
            if values.get(name) not in supported:
                raise ConfigError(
                    f"{where}: {prefix}{name} is {values[name]!r}, which is not supported yet; "
                    f"expected {supported[0]!r}."
                )
    rope = config.get("rope_parameters") or {}
    for name, expected in (("rope_type", "default"), ("partial_rotary_factor", 1.0)):
        if rope.get(name, expected) != expected:
            raise ConfigError(
                f"{where}: {name} {rope[name]!r} is not supported yet; expected {expected!r}."
            )
    if dflash.get("block_size", config.get("block_size")) != config.get(
        "block_size", dflash.get("block_size")
    ):
        raise ConfigError(
            f"{where}: block_size is {config['block_size']} at the top and "
            f"{dflash['block_size']} in dflash_config; readers differ in which they take. Make "
            "them equal."
        )
    values = {
        name: config.get(name)
        for name in (*_SIZES, "rms_norm_eps")
    } | {
        "rope_theta": rope.get("rope_theta", config.get("rope_theta")),
        "block_size": config.get("block_size") or dflash.get("block_size"),
        "mask_token_id": dflash.get("mask_token_id"),
        "target_layer_ids": dflash.get("target_layer_ids"),
        "layer_types": config.get("layer_types") or (),
    }  # fmt: skip
    if missing := sorted(name for name, value in values.items() if value is None):
        raise ConfigError(f"{where} does not say {', '.join(missing)}; expected a DFlash config.")
    try:
        return DrafterConfig(
            **values, sliding_window=config.get("sliding_window") if slides else None
        )
    except TypeError as error:
        raise ConfigError(f"{where} is unusable: {error}; expected a DFlash config.") from error


def _require_kinds(config: dict[str, Any], dflash: dict[str, Any], where: Path) -> None:
    """Refuse JSON of the wrong kind: 2.0 would be a layer and a text a list of letters."""

    def require(name: str, value: Any, fits: bool, expected: str) -> None:
        if value is not None and not fits:
            raise ConfigError(f"{where}: {name} is {value!r}; expected {expected}.")

    for prefix, values in (("", config), ("dflash_config.", dflash)):
        for name in (*_SIZES, "block_size", "mask_token_id", "sliding_window"):
            value = values.get(name)
            require(prefix + name, value, type(value) is int, "a whole number")
    rope = config.get("rope_parameters")
    require("rope_parameters", rope, isinstance(rope, dict), "an object")
    for name, value in (
        ("rms_norm_eps", config.get("rms_norm_eps")),
        ("rope_theta", config.get("rope_theta")),
        ("rope_parameters.rope_theta", (rope or {}).get("rope_theta")),
    ):
        require(name, value, type(value) in (int, float), "a number")
    ids, types = dflash.get("target_layer_ids"), config.get("layer_types")
    whole = isinstance(ids, list) and all(type(i) is int for i in ids)
    require("dflash_config.target_layer_ids", ids, whole, "a list of whole numbers")
    texts = isinstance(types, list) and all(isinstance(kind, str) for kind in types)
    require("layer_types", types, texts, "a list of texts")


def _require_known_layers(config: dict[str, Any], dflash: dict[str, Any], where: Path) -> bool:
    """Tell whether layers slide; raise ConfigError for masks that we would not compute."""
    kinds = set(config.get("layer_types") or [_FULL])
    if unknown := sorted(kinds - {_FULL, _SLIDING}):
        raise ConfigError(
            f"{where}: layer types {unknown} are not supported yet; expected {_FULL} or {_SLIDING}."
        )
    slides = _SLIDING in kinds
    if config.get("use_sliding_window") and not config.get("layer_types"):
        raise ConfigError(
            f"{where}: use_sliding_window is true and layer_types does not say which layers slide. "
            "Write layer_types."
        )
    if slides and not config.get("use_sliding_window"):
        raise ConfigError(
            f"{where}: layer_types has {_SLIDING}, and use_sliding_window is not true: then "
            "transformers drops the window. Set it to true."
        )
    for name, value in (
        ("is_causal", config.get("is_causal")),
        ("dflash_config.causal", dflash.get("causal")),
    ):
        if value is not None and (slides or value is not False):
            raise ConfigError(
                f"{where}: {name} is {value!r} for all layers, which is not supported yet: here "
                f"blocks are causal in {_SLIDING} and not in {_FULL}. Expected "
                + ("no such key." if slides else "False.")
            )
    return slides
