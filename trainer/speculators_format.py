"""A DFlash drafter in the format of the speculators library: config.json and tensor names.

Takes a `DrafterConfig` and hands on the dict, or the other way round; says which tensors of such a
folder are the drafter's and refuses what it cannot read. The layout is that of speculators 0.9.0
(its dflash/config.py and dflash/core.py; dflash.md 3.3).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from hscache.errors import ConfigError
from trainer.drafter_config import DrafterConfig
from trainer.drafter_json import drafter_config_from_json, dtype_name, layer_json

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
"""The target's, beside the drafter's own tensors; speculators leaves them out or writes them."""


def is_speculators(config: dict[str, Any]) -> bool:
    """Tell whether a config.json is in speculators' format."""
    return "speculators_model_type" in config


def speculators_json(
    config: DrafterConfig,
    target_config: dict[str, Any],
    dtype: torch.dtype,
    *,
    verifier: str,
) -> dict[str, Any]:
    """Return speculators' config.json of a drafter for the target `verifier` (hub id or folder).

    Their layer ids count from the embedding's output: id i + 1 is the output of block i. vLLM takes
    `sliding_window_non_causal` for every layer, full ones too (vllm#56692), so it is true here
    where no layer slides; a drafter of both kinds it would therefore run wrongly from this format.
    speculators itself starts every slot's window at the anchor, and so lets slot k of a sliding
    layer see k + 1 positions more than we and the engines do.
    """
    return {
        "architectures": ["DFlashDraftModel"],
        "aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
        "block_size": config.block_size,
        "draft_vocab_size": config.vocab_size,
        "dtype": dtype_name(dtype),
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": False,
        "sliding_window_non_causal": not config.slides,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": config.block_size - 1}
            ],
            "verifier": {
                "architectures": target_config.get("architectures") or [],
                "name_or_path": verifier,
            },
        },
        "speculators_model_type": "dflash",
        "speculators_version": "0.9.0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": layer_json(config, target_config),
    }


def drafter_config_from_speculators(
    config: dict[str, Any], where: Path, num_target_layers: int | None
) -> DrafterConfig:
    """Read speculators' config.json of a DFlash drafter.

    Raises ConfigError when a field is missing, or names something this trainer cannot run: another
    algorithm, a pruned vocabulary, sampling from the anchor, sliding layers that are not causal.
    """
    layer = config.get("transformer_layer_config") or {}
    if not isinstance(layer, dict):
        raise ConfigError(f"{where}: transformer_layer_config is {layer!r}; expected an object.")
    if "sliding_attention" in (layer.get("layer_types") or ()) and config.get(
        "sliding_window_non_causal"
    ):
        raise ConfigError(
            f"{where}: sliding_window_non_causal is true and layers slide, which is not supported "
            "yet; expected sliding layers whose blocks are causal."
        )
    for name, expected in (
        ("speculators_model_type", ("dflash",)),
        ("sample_from_anchor", (False, None)),
        ("target_hidden_size", (None, layer.get("hidden_size"))),
    ):
        if config.get(name) not in expected:
            raise ConfigError(
                f"{where}: {name} is {config[name]!r}, which is not supported; expected "
                f"{expected[0]!r}."
            )
    if not layer:
        raise ConfigError(f"{where}: transformer_layer_config is missing; expected a Qwen3 config.")
    vocab_size = layer.get("vocab_size")
    if config.get("draft_vocab_size") != vocab_size:
        raise ConfigError(
            f"{where}: draft_vocab_size is {config.get('draft_vocab_size')} and the target's "
            f"vocabulary {vocab_size}: drafters of a pruned vocabulary (d2t) are not supported. "
            "Train one with the whole vocabulary."
        )
    ids = config.get("aux_hidden_state_layer_ids")
    if not isinstance(ids, list) or not all(type(i) is int and i > 0 for i in ids):
        raise ConfigError(
            f"{where}: aux_hidden_state_layer_ids is {ids!r}; expected numbers from 1 (the output "
            "of block 0), because id 0, the embedding, is in no cache."
        )
    if num_target_layers is None:
        raise ConfigError(
            f"{where} is in speculators' format, which does not say how many blocks the target "
            "has. Give the cache with --shards."
        )
    return drafter_config_from_json(
        {
            **layer,
            "block_size": config.get("block_size"),
            "num_target_layers": num_target_layers,
            "dflash_config": {
                "mask_token_id": config.get("mask_token_id"),
                "target_layer_ids": [i - 1 for i in ids],
            },
        },
        where,
    )


def drafter_tensor_names(names: Iterable[str], config: dict[str, Any], where: Path) -> list[str]:
    """Return which tensors of a folder are the drafter's own, in either format.

    Raises ConfigError for one with a pruned vocabulary.
    """
    names = list(names)
    if pruned := {"d2t", "t2d"} & set(names):
        raise ConfigError(
            f"{where} holds {', '.join(sorted(pruned))}: drafters of a pruned vocabulary are not "
            "supported. Train one with the whole vocabulary."
        )
    theirs = {EMBEDDING, HEAD} if is_speculators(config) else set()
    return [name for name in names if name not in theirs]
