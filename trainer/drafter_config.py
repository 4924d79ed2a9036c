"""The whole shape of a drafter: what its weights, its config.json and its cost are made from.

A user chooses a part of it (`trainer.config.DrafterShape`), the cache's target gives the rest.
Everything is checked at construction; nothing here imports torch.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal, get_args

from hscache.errors import ConfigError

LayerType = Literal["full_attention", "sliding_attention"]


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """Shape of a DFlash drafter (arXiv 2602.06036); refuses what could not be trained or served.

    Raises `ConfigError` when a size is not positive, heads do not divide, the mask token lies
    outside the vocabulary, the block predicts nothing, or the target layers cannot be captured.
    """

    hidden_size: int
    """Width of the drafter and of the target: they share the embedding and the head."""
    intermediate_size: int
    """Inner width of the gated MLP."""
    num_hidden_layers: int
    """Decoder layers of the drafter."""
    num_attention_heads: int
    """Query heads; a multiple of `num_key_value_heads`."""
    num_key_value_heads: int
    """Key and value heads (grouped-query attention)."""
    head_dim: int
    """Width of one head; even, because the rotary embedding turns pairs."""
    rms_norm_eps: float
    """Added to the mean square in every RMSNorm."""
    rope_theta: float
    """Base of the rotary frequencies; take the target's."""
    max_position_embeddings: int
    """Longest position it is said to serve; only written down, no tensor depends on it."""
    vocab_size: int
    """Rows of the target's embedding and head."""
    block_size: int
    """Slots of one block: the anchor and `block_size - 1` predicted tokens."""
    mask_token_id: int
    """Id whose frozen embedding fills the slots to predict."""
    target_layer_ids: tuple[int, ...]
    """Target blocks whose output is read: 0-based, before any norm (`hidden_states[i + 1]`)."""
    num_target_layers: int
    """Decoder blocks of the target."""
    layer_types: tuple[LayerType, ...] = ()
    """Of each layer; all full_attention if empty. See `window_of`."""
    sliding_window: int | None = None
    """Positions that a slot of a sliding_attention layer sees, itself included."""

    def __post_init__(self) -> None:
        # A list arrives from JSON and YAML; a tuple keeps the config hashable.
        object.__setattr__(self, "target_layer_ids", tuple(self.target_layer_ids))
        types = tuple(self.layer_types) or ("full_attention",) * self.num_hidden_layers
        object.__setattr__(self, "layer_types", types)
        for name in (
            "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta",
            "max_position_embeddings", "vocab_size", "num_target_layers",
        ):  # fmt: skip
            if not getattr(self, name) > 0:
                raise ConfigError(
                    f"drafter.{name}: found {getattr(self, name)}, expected a number above 0."
                )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"drafter.num_attention_heads: found {self.num_attention_heads}, expected a "
                f"multiple of num_key_value_heads ({self.num_key_value_heads}); every key head "
                "serves the same number of query heads."
            )
        if self.head_dim % 2:
            raise ConfigError(
                f"drafter.head_dim: found {self.head_dim}, expected an even number (rotary pairs)."
            )
        if self.block_size < 2:
            raise ConfigError(
                f"drafter.block_size: found {self.block_size}, expected at least 2: slot 0 is the "
                "known anchor, so a block of 1 predicts nothing."
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ConfigError(
                f"drafter.mask_token_id: found {self.mask_token_id}, expected 0 to "
                f"{self.vocab_size - 1}; it must be a row of the target's embedding."
            )
        _check_target_layer_ids(self.target_layer_ids, self.num_target_layers)
        _check_layer_types(self.layer_types, self.num_hidden_layers, self.sliding_window)

    @property
    def slides(self) -> bool:
        """Whether any layer attends through a sliding window."""
        return "sliding_attention" in self.layer_types

    def window_of(self, layer: int) -> int | None:
        """Return None if a layer is full: its slots see their whole context and block, both ways.

        Else how many positions a slot sees, itself and earlier ones only: z-lab's rule.
        """
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None

    @property
    def num_features(self) -> int:
        """Captured target layers that are fed to `fc`."""
        return len(self.target_layer_ids)


def _check_target_layer_ids(ids: tuple[int, ...], num_target_layers: int) -> None:
    last = num_target_layers - 1
    if not ids or any(b <= a for a, b in itertools.pairwise(ids)):
        raise ConfigError(
            f"target_layer_ids: found {list(ids)}, expected at least one id, strictly increasing; "
            "the order is the input order of the drafter's fc."
        )
    if ids[0] < 0 or ids[-1] > last:
        raise ConfigError(
            f"target_layer_ids: found {list(ids)}, expected ids from 0 to {last - 1} (0-based "
            f"outputs of a target with {num_target_layers} decoder blocks)."
        )
    if ids[-1] == last:
        raise ConfigError(
            f"target_layer_ids: found the last block {last} in {list(ids)}. Hugging Face returns "
            "its output after the final norm and serving engines before it, so no engine could "
            f"serve the drafter. Use ids up to {last - 1}."
        )


def _check_layer_types(types: tuple[str, ...], num_layers: int, window: int | None) -> None:
    if len(types) != num_layers or set(types) - set(get_args(LayerType)):
        raise ConfigError(
            f"layer_types: found {list(types)}, expected {num_layers} items (num_hidden_layers), "
            f"each one of {', '.join(get_args(LayerType))}."
        )
    slides = "sliding_attention" in types
    if slides and (window is None or window < 1):
        raise ConfigError(
            f"sliding_window: found {window}, expected at least 1, because layer_types has "
            "sliding_attention layers; published drafters have 2048."
        )
    if window is not None and not slides:
        raise ConfigError(
            f"sliding_window: found {window}, and no layer slides. Leave it out, or name the "
            "layers that do: layer_types, with sliding_attention for each."
        )
