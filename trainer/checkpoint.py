"""Checkpoints: a folder that other tools load as a DFlash drafter, and what a resume needs.

Takes masters, optimizers and position; leaves `checkpoint-<step>/` with `model.safetensors` and
`config.json` (z-lab's format), `training.safetensors` (fp32 masters, moments, RNG) and
`trainer_state.json` (position, identity, settings, checksums). It appears whole or not at all.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save

from hscache import files
from hscache.errors import CacheMismatchError, ConfigError, ShardCorruptError
from hscache.zarr_array import canonical_json, checksum_hex
from trainer.config import DrafterConfig
from trainer.drafter import Drafter
from trainer.drafter_json import drafter_config_from_json, drafter_json
from trainer.masters import Masters
from trainer.schedule import Position
from trainer.speculators_format import (
    drafter_config_from_speculators,
    drafter_tensor_names,
    is_speculators,
)

_NAME = re.compile(r"checkpoint-(\d+)")
MODEL, CONFIG, TRAINING, STATE = (
    "model.safetensors",
    "config.json",
    "training.safetensors",
    "trainer_state.json",
)


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """Everything of a run that is not a tensor."""

    step: int
    position: Position
    tokens: int
    """context tokens consumed"""
    anchors: int
    empty_windows: int
    window: list[dict[str, Any]]
    """figures of the steps that no line of metrics covers yet"""
    total_tokens: int
    cache: dict[str, Any]
    """identity of the cache"""
    schedule: dict[str, Any]
    """shards, passes, stride, anchor rule"""
    settings: dict[str, Any]
    """settings that decide the result"""


def save_checkpoint(
    run_dir: Path,
    config: DrafterConfig,
    masters: Masters,
    optimizers: list[torch.optim.Optimizer],
    state: TrainerState,
    *,
    target_config: dict[str, Any],
    dtype: torch.dtype,
    keep: int,
) -> Path:
    """Write `checkpoint-<step>` atomically, then delete all but the newest `keep`.

    Raises DiskFullError; the checkpoints before it are then untouched.
    """
    weights = {k: v.detach().cpu().contiguous() for k, v in masters.by_name.items()}
    training = {f"master.{name}": value for name, value in weights.items()}
    for name, parameter in masters.by_name.items():
        for optimizer in optimizers:
            for key, value in optimizer.state.get(parameter, {}).items():
                training[f"optimizer.{key}.{name}"] = value.detach().cpu().contiguous()
    training["rng"] = torch.get_rng_state()
    model = {name: value.to(dtype) for name, value in weights.items()}
    model_config = drafter_json(config, target_config, dtype)
    final = run_dir / f"checkpoint-{state.step}"
    with files.temporary_folder(run_dir) as folder:
        checksums = {}
        for name, data in (
            (TRAINING, save(training)),
            (MODEL, save(model, metadata={"format": "pt"})),
            (CONFIG, json.dumps(model_config, indent=2).encode()),
        ):
            files.write_durable(folder / name, data)
            checksums[name] = checksum_hex(data)
        record = {**asdict(state), "checksums": checksums}
        sealed = {**record, "crc32c": checksum_hex(canonical_json(record))}
        files.write_durable(folder / STATE, canonical_json(sealed))
        # A run only goes forward from its newest checkpoint, so the name is free.
        if not files.publish_folder(folder, final):
            raise CacheMismatchError(f"{final} appeared meanwhile: does another run write there?")
    for old in list_checkpoints(run_dir)[:-keep]:
        shutil.rmtree(old)
    return final


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first."""
    if not run_dir.is_dir():
        return []
    found = [(int(m[1]), p) for p in run_dir.iterdir() if (m := _NAME.fullmatch(p.name))]
    return [path for _, path in sorted(found)]


def resolve_checkpoint(path: Path) -> Path:
    """Return a checkpoint folder from itself or from its run's folder (then the last one)."""
    if (path / CONFIG).is_file() and (path / MODEL).is_file():
        return path
    checkpoints = list_checkpoints(path)
    if not checkpoints:
        raise ConfigError(
            f"{path} is neither a checkpoint ({CONFIG}, {MODEL}) nor a run folder with "
            "checkpoint-<step> in it."
        )
    return checkpoints[-1]


def read_state(checkpoint: Path) -> TrainerState:
    """Read a checkpoint's state, and check all of its files against their checksums.

    Raises ShardCorruptError naming the file that is missing, cut or changed.
    """
    record = _read_record(checkpoint)
    checksums = record.pop("checksums")
    for name in (CONFIG, MODEL, TRAINING):
        _require_checksum(checkpoint / name, checksums[name])
    return TrainerState(**{**record, "position": Position(**record["position"])})


def _read_record(checkpoint: Path) -> dict[str, Any]:
    path = checkpoint / STATE
    try:
        record = json.loads(path.read_bytes())
        if record.pop("crc32c") != checksum_hex(canonical_json(record)):
            raise ValueError("its checksum does not match")
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise _damaged(path, str(error)) from error
    return record


def _require_checksum(path: Path, checksum: str) -> None:
    try:
        found = checksum_hex(path.read_bytes())
    except OSError as error:
        raise _damaged(path, str(error)) from error
    if found != checksum:
        raise _damaged(path, "its checksum does not match")


def _damaged(path: Path, reason: str) -> ShardCorruptError:
    return ShardCorruptError(
        f"{path} is damaged ({reason}). Delete {path.parent} to go on from the checkpoint before "
        "it."
    )


def restore(checkpoint: Path, masters: Masters, optimizers: list[torch.optim.Optimizer]) -> None:
    """Load masters, moments and RNG."""
    tensors = load_file(checkpoint / TRAINING)
    masters.load(
        {k.removeprefix("master."): v for k, v in tensors.items() if k.startswith("master.")}
    )
    owner = {id(p): o for o in optimizers for group in o.param_groups for p in group["params"]}
    for full_name, value in tensors.items():
        if full_name.startswith("optimizer."):
            _, key, name = full_name.split(".", 2)
            parameter = masters.by_name[name]
            owner[id(parameter)].state[parameter][key] = value.to(parameter.device)
    torch.set_rng_state(tensors["rng"])


def load_drafter(checkpoint: Path, *, num_target_layers: int | None = None) -> Drafter:
    """Build a drafter from a checkpoint, or a published folder in z-lab's or speculators' format.

    Weights become fp32 masters. `num_target_layers` is for speculators' format, which does not say
    how many blocks the target has. Raises ConfigError when config and weights do not fit together,
    strictly, and ShardCorruptError when one of our own checkpoints is damaged.
    """
    path = resolve_checkpoint(checkpoint)
    if (path / STATE).exists():
        checksums = _read_record(path)["checksums"]
        for name in (CONFIG, MODEL):
            _require_checksum(path / name, checksums[name])
    config = read_config(path)
    if is_speculators(config):
        shape = drafter_config_from_speculators(config, path / CONFIG, num_target_layers)
    else:
        shape = drafter_config_from_json(config, path / CONFIG)
    drafter = Drafter(shape)
    try:
        with safe_open(path / MODEL, framework="pt") as tensors:
            names = drafter_tensor_names(tensors.keys(), config, path / MODEL)
            weights = {name: tensors.get_tensor(name).float() for name in names}
        drafter.load_state_dict(weights, strict=True)
    except (RuntimeError, SafetensorError) as error:
        raise ConfigError(f"{path / MODEL} does not fit {path / CONFIG}: {error}") from error
    return drafter.eval()


def read_config(checkpoint: Path) -> dict[str, Any]:
    """Return the config.json of a drafter's folder."""
    path = checkpoint / CONFIG
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds {type(config).__name__}, expected the config of a model.")
    return config


def recorded_states(checkpoint: Path) -> dict[str, Any] | None:
    """Return the identity of the states a checkpoint was trained on, None if it has no record."""
    if not (checkpoint / STATE).exists():
        return None
    return _read_record(checkpoint)["cache"]["states"]


def require_same_run(found: TrainerState, expected: TrainerState, checkpoint: Path) -> None:
    """Refuse to resume under another cache, schedule or setting; the message lists each field."""
    lines = []
    for part in ("cache", "schedule", "settings"):
        lines += _diff(getattr(found, part), getattr(expected, part), part)
    if lines:
        raise CacheMismatchError(
            f"{checkpoint} was made by another run:\n"
            + "\n".join(lines)
            + "\nResume with the settings of the checkpoint, or start anew in another --run-dir."
        )


def _diff(a: Any, b: Any, name: str) -> list[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        keys = sorted(set(a) | set(b))
        return [line for key in keys for line in _diff(a.get(key), b.get(key), f"{name}.{key}")]
    if a == b or name == "cache.states.target":
        return []
    return [f"  {name}: the checkpoint has {a!r}, this run {b!r}"]
