"""A drafter read from a folder: one of our checkpoints, or one in z-lab's or speculators' format.

Takes the folder, or that of a run; hands on a `Drafter` with fp32 weights. Names, shapes and dtypes
must fit strictly; those of our own checkpoints are under checksums.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from hscache.errors import ConfigError
from trainer.checkpoint import read_record, require_checksum
from trainer.drafter import Drafter
from trainer.drafter_json import drafter_config_from_json
from trainer.run_folder import CONFIG, MODEL, STATE, resolve_checkpoint
from trainer.speculators_format import (
    drafter_config_from_speculators,
    drafter_tensor_names,
    is_speculators,
)


def load_drafter(checkpoint: Path, *, num_target_layers: int | None = None) -> Drafter:
    """Build a drafter from a checkpoint, or a published folder in z-lab's or speculators' format.

    Weights become fp32 masters. `num_target_layers` is for speculators' format, which does not say
    how many blocks the target has. Raises ConfigError when config and weights do not fit together,
    strictly, and ShardCorruptError when one of our own checkpoints is damaged.
    """
    path = resolve_checkpoint(checkpoint)
    if (path / STATE).exists():
        checksums = read_record(path)["checksums"]
        for name in (CONFIG, MODEL):
            require_checksum(path / name, checksums[name])
    config = read_config(path)
    if is_speculators(config):
        shape = drafter_config_from_speculators(config, path / CONFIG, num_target_layers)
    else:
        shape = drafter_config_from_json(config, path / CONFIG)
    drafter = Drafter(shape)
    try:
        with safe_open(path / MODEL, framework="pt") as tensors:
            names = drafter_tensor_names(tensors.keys(), config, path / MODEL)
            stored = {name: tensors.get_tensor(name) for name in names}
        _require_plain_weights(stored, path / MODEL)
        drafter.load_state_dict({k: v.float() for k, v in stored.items()}, strict=True)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"{path / MODEL} does not fit {path / CONFIG}: {error}") from error
    return drafter.eval()


def _require_plain_weights(weights: dict[str, torch.Tensor], where: Path) -> None:
    for name, weight in weights.items():
        if weight.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise ConfigError(
                f"{where}: {name} is of {weight.dtype}; expected bfloat16, float16 or float32. "
                "Quantised drafters are not supported; give the one it was made from."
            )
        if not weight.isfinite().all():
            raise ConfigError(
                f"{where}: {name} holds NaN or infinity: the drafter is damaged, or its training "
                "went wrong. Give an earlier checkpoint, or fetch the folder again."
            )


def read_config(checkpoint: Path) -> dict[str, Any]:
    """Return the config.json of a drafter's folder; raise ConfigError if it is no JSON object."""
    path = checkpoint / CONFIG
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds {type(config).__name__}, expected the config of a model.")
    return config
