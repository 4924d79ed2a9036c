"""What the drafter borrows of the target: embedding, head and final norm, from the cache alone.

Takes a cache; reads `frozen/weights.safetensors`, checks its hash against the identity, and builds
the drafter's config from the user's shape and the target's.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open

from hscache.errors import CacheMismatchError, ConfigError, ShardCorruptError
from hscache.fingerprint import config_sha256
from hscache.layout import frozen_weights, target_config_file
from hscache.reader import Cache
from hscache.zarr_reader import is_there, open_regular, read_small_file, regular_sha256
from trainer.config import DrafterShape
from trainer.drafter_config import DrafterConfig


@dataclass(frozen=True, kw_only=True)
class FrozenTarget:
    """Frozen tensors [vocab, hidden], [vocab, hidden], [hidden] and how the norm applies."""

    embedding_VH: torch.Tensor
    head_VH: torch.Tensor
    norm_H: torch.Tensor
    """the factor of the final RMSNorm, whatever form the target stores it in"""
    norm_eps: float

    def final_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """Apply the target's final norm to outputs of its last block [..., H], in the head's dtype.

        Computed in fp32; the target itself may round once more in between.
        """
        normed = F.rms_norm(hidden.float(), self.norm_H.shape, self.norm_H, self.norm_eps)
        return normed.to(self.head_VH.dtype)

    def to(self, device: torch.device, dtype: torch.dtype) -> FrozenTarget:
        """Return a copy on a device, embedding and head in the compute dtype."""
        embedding = self.embedding_VH.to(device, dtype)
        tied = self.head_VH is self.embedding_VH
        return FrozenTarget(
            embedding_VH=embedding,
            head_VH=embedding if tied else self.head_VH.to(device, dtype),
            norm_H=self.norm_H.to(device),
            norm_eps=self.norm_eps,
        )


def load_frozen(cache: Cache) -> FrozenTarget:
    """Load the target's frozen parts.

    Raises ShardCorruptError when the file is not the one the cache's identity names.
    """
    path = _weights_file(cache)
    if regular_sha256(path) != cache.identity.states.frozen_sha256:
        raise ShardCorruptError(
            f"{path} does not have the hash that the cache's identity names: it was damaged or "
            "replaced. Delete frozen/ and run `hscache produce` again."
        )
    with safe_open(path, framework="pt") as tensors:
        metadata = tensors.metadata()
        embedding = tensors.get_tensor("embed_tokens.weight")
        head = embedding if metadata["head"] == "tied" else tensors.get_tensor(metadata["head"])
        norm = tensors.get_tensor("norm.weight").float()
    if metadata["norm_form"] == "1+w":
        norm = 1 + norm
    return FrozenTarget(
        embedding_VH=embedding,
        head_VH=head,
        norm_H=norm,
        norm_eps=float(metadata["norm_eps"]),
    )


def head_is_tied(cache: Cache) -> bool:
    """Say whether the target's head is its embedding; reads no weights.

    Raises ShardCorruptError when the file is missing or no safetensors file.
    """
    path = _weights_file(cache)
    os.close(open_regular(path))  # a pipe in its place would wait for a writer for ever
    try:
        with safe_open(path, framework="pt") as tensors:
            return tensors.metadata()["head"] == "tied"
    except SafetensorError as error:
        raise ShardCorruptError(
            f"{path} is damaged ({error}). Delete frozen/ and run `hscache produce` again."
        ) from error


def _weights_file(cache: Cache) -> Path:
    path = frozen_weights(cache.path)
    if not is_there(path):
        raise ShardCorruptError(f"{path} is missing; run `hscache produce` again to restore it.")
    return path


def initial_norm(frozen: FrozenTarget) -> torch.Tensor:
    """Return the drafter's first final-norm weight [hidden]: the target's, scaled down.

    The head expects vectors shaped by the target's own final norm; the scale makes the logits of a
    random direction have unit variance. With ones instead, the first loss is several times log V
    (SmolLM2: 72), gradients are clipped to nothing, and the first hundreds of steps are lost.
    """
    logit_std = (frozen.head_VH.float() * frozen.norm_H).square().sum(1).mean().sqrt()
    return frozen.norm_H / logit_std


def target_config(cache: Cache) -> dict[str, Any]:
    """Return the target's text config as it was when the cache was made.

    Raises ShardCorruptError when it is not the one that the cache's identity names.
    """
    path = target_config_file(cache.path)
    try:
        config = json.loads(read_small_file(path))
        same = config_sha256(config) == cache.identity.states.config_sha256
    except (ShardCorruptError, ValueError, AttributeError):
        same = False
    if not same:
        raise ShardCorruptError(
            f"{path} is missing, damaged or replaced: it does not have the hash that the cache's "
            "identity names. Delete frozen/ and run `hscache produce` again."
        )
    return config


def drafter_config(shape: DrafterShape, cache: Cache) -> DrafterConfig:
    """Complete the user's shape with what the target fixes.

    Raises CacheMismatchError when the shape contradicts the cache, ConfigError when the mask token
    is the target's pad or eos (a padding id would teach the drafter to ignore its blanks).
    """
    states, config = cache.identity.states, target_config(cache)
    for name in ("hidden_size", "target_layer_ids"):
        asked, cached = getattr(shape, name), getattr(states, name)
        if asked is not None and asked != cached:
            raise CacheMismatchError(
                f"drafter.{name} is {asked}, and the cache {cache.path} has {cached}. The drafter "
                "reads what was captured: change the setting, or produce another cache."
            )
    for name in ("pad_token_id", "eos_token_id"):
        ids = config.get(name)
        if shape.mask_token_id in (ids if isinstance(ids, list) else [ids]):
            raise ConfigError(
                f"drafter.mask_token_id {shape.mask_token_id} is the target's {name}. Take an id "
                "that never occurs in text, such as an unused special token."
            )
    rope = config.get("rope_parameters") or {}
    theta = shape.rope_theta or rope.get("rope_theta") or config.get("rope_theta")
    if theta is None:
        raise ConfigError("the target's config has no rope_theta; give drafter.rope_theta.")
    return DrafterConfig(
        hidden_size=states.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_hidden_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.rms_norm_eps or float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=float(theta),
        max_position_embeddings=int(config.get("max_position_embeddings", 32768)),
        vocab_size=states.vocab_size,
        block_size=shape.block_size,
        mask_token_id=shape.mask_token_id,
        target_layer_ids=states.target_layer_ids,
        num_target_layers=states.num_target_layers,
        layer_types=shape.layer_types or (),
        sliding_window=shape.sliding_window,
    )
