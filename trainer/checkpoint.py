"""Checkpoints: a folder that other tools load as a DFlash drafter, and what a resume needs.

Takes a `Snapshot` and a position; leaves `checkpoint-<step>/` with `model.safetensors` and
`config.json` (z-lab's format), `training.safetensors` (fp32 masters, moments, RNG), one
`moments-<rank>.safetensors` of each rank where ranks step alone, and `trainer_state.json`
(position, identity, settings, checksums). It appears whole or not at all.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from hscache import files
from hscache.errors import CacheMismatchError, ShardCorruptError
from hscache.zarr_array import canonical_json, checksum_hex
from trainer.drafter_config import DrafterConfig
from trainer.drafter_json import drafter_json
from trainer.masters import Masters
from trainer.run_folder import (
    CONFIG,
    MODEL,
    STATE,
    TRAINING,
    best_checkpoint,
    checkpoint_folder,
    list_checkpoints,
    mark_best,
    require_space,
)
from trainer.schedule import Position
from trainer.sync import OuterStep
from trainer.tensor_file import file_checksum, write_tensors


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
    logged_step: int
    """the step of the last line of metrics"""
    moment_ranks: int
    """files of moments, one of each rank; 0 where the moments are the same on all"""
    total_tokens: int
    cache: dict[str, Any]
    """identity of the cache"""
    schedule: dict[str, Any]
    """shards, passes, stride, anchor rule"""
    settings: dict[str, Any]
    """settings that decide the result"""
    skipped: list[list[int]] = field(default_factory=list)
    """[document, pass] of what could not be read, and was left out of its row"""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Copies on the host of what a rank writes; training may go on while they are written."""

    masters: dict[str, torch.Tensor]
    """fp32 weights by name; empty where another rank writes them"""
    moments: dict[str, torch.Tensor]
    """`optimizer.<key>.<name>`"""
    outer_momenta: dict[str, torch.Tensor]
    """diloco's, by name; its anchors are the masters, since ranks save when they meet"""

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        parts = (self.masters, self.moments, self.outer_momenta)
        return sum(tensor.nbytes for part in parts for tensor in part.values())


def take_snapshot(
    masters: Masters,
    optimizers: Sequence[torch.optim.Optimizer],
    outer: OuterStep | None = None,
    *,
    with_masters: bool = True,
) -> Snapshot:
    """Copy a rank's state to the host; waits for the device."""
    moments = {}
    for name, parameter in masters.by_name.items():
        for optimizer in optimizers:
            for key, value in optimizer.state.get(parameter, {}).items():
                moments[f"optimizer.{key}.{name}"] = _host_copy(value)
    weights = masters.by_name if with_masters else {}
    momenta = zip(masters.by_name, outer.momenta, strict=True) if outer and with_masters else ()
    return Snapshot(
        masters={name: _host_copy(value) for name, value in weights.items()},
        moments=moments,
        outer_momenta={name: _host_copy(value) for name, value in momenta},
    )


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def checkpoint_bytes(
    num_parameters: int, *, dtype_bytes: int, num_moments: int, mode: str, num_ranks: int
) -> int:
    """Predict the size of a checkpoint: weights for serving, fp32 masters, fp32 moments.

    In local modes every rank has moments of its own; diloco adds a momentum (its anchors are the
    masters). AdamW has 2 moments of a parameter, Muon 1 (its norms' second is not counted).
    """
    moments = 4 * num_moments * num_parameters
    weights = (dtype_bytes + 4) * num_parameters
    if num_ranks == 1 or mode == "ddp":
        return weights + moments
    outer = 4 * num_parameters if mode == "diloco" else 0
    return weights + num_ranks * moments + outer


def moments_file(rank: int) -> str:
    """Return the name of a rank's file of moments."""
    return f"moments-{rank:04}.safetensors"


def write_checkpoint(
    run_dir: Path,
    config: DrafterConfig,
    snapshot: Snapshot,
    state: TrainerState,
    *,
    target_config: dict[str, Any],
    dtype: torch.dtype,
    keep: int,
    best: bool = False,
    others: Callable[[Path], dict[str, str]] = lambda folder: {},
) -> Path:
    """Write `checkpoint-<step>` atomically, then delete all but the newest `keep` and the best.

    `best` makes it the one that the link `best` leads to, until another one is.

    `others` lets the other ranks write into the folder meanwhile; it returns when they have, with
    their files' checksums. Raises DiskFullError, or CacheMismatchError when another run writes
    there; the checkpoints before it are then untouched.
    """
    copies = max(1, state.moment_ranks)
    moments_bytes = sum(tensor.nbytes for tensor in snapshot.moments.values())
    served_bytes = sum(tensor.numel() for tensor in snapshot.masters.values()) * dtype.itemsize
    require_space(run_dir, served_bytes + snapshot.size_bytes + (copies - 1) * moments_bytes)
    training = {f"master.{name}": value for name, value in snapshot.masters.items()}
    training |= {f"outer.momentum.{name}": v for name, v in snapshot.outer_momenta.items()}
    training["rng"] = torch.get_rng_state()
    if state.moment_ranks == 0:
        training |= snapshot.moments
    model_config = json.dumps(drafter_json(config, target_config, dtype), indent=2).encode()
    final = checkpoint_folder(run_dir, state.step)
    with files.temporary_folder(run_dir) as folder:
        checksums = {}
        if state.moment_ranks:
            name = moments_file(0)
            checksums[name] = write_tensors(folder / name, snapshot.moments)
        checksums[TRAINING] = write_tensors(folder / TRAINING, training)
        checksums[MODEL] = write_tensors(
            folder / MODEL, snapshot.masters, dtype=dtype, metadata={"format": "pt"}
        )
        files.write_durable(folder / CONFIG, model_config)
        checksums[CONFIG] = checksum_hex(model_config)
        checksums |= others(folder)
        record = {**asdict(state), "checksums": checksums}
        sealed = {**record, "crc32c": checksum_hex(canonical_json(record))}
        files.write_durable(folder / STATE, canonical_json(sealed))
        # A run only goes forward from its newest checkpoint, so the name is free.
        if not files.publish_folder(folder, final):
            raise CacheMismatchError(f"{final} appeared meanwhile: does another run write there?")
    if best:
        mark_best(final)
    for old in list_checkpoints(run_dir)[:-keep]:
        if old != best_checkpoint(run_dir):
            shutil.rmtree(old)
    return final


def read_state(checkpoint: Path, *, rank: int = 0, num_ranks: int = 1) -> TrainerState:
    """Read a checkpoint's state, and check its files against their checksums.

    Rank 0 checks all of them, the others what they load. Raises ShardCorruptError naming the file
    that is missing, cut or changed, CacheMismatchError for one of another version of trainer.
    """
    record = read_record(checkpoint)
    checksums = record.pop("checksums")
    try:
        state = TrainerState(**{**record, "position": Position(**record["position"])})
    except TypeError as error:
        raise CacheMismatchError(
            f"{checkpoint} was written by another version of trainer ({error}). Resume it with "
            "that version, or start anew with --init-from."
        ) from error
    loaded = {TRAINING, *_moment_files(state, rank, num_ranks)}
    for name in sorted(checksums):
        if rank == 0 or name in loaded:
            require_checksum(checkpoint / name, checksums[name])
    return state


def _moment_files(state: TrainerState, rank: int, num_ranks: int) -> list[str]:
    if state.moment_ranks == 0:
        return [TRAINING]
    if state.moment_ranks == num_ranks:
        return [moments_file(rank)]
    return [moments_file(other) for other in range(state.moment_ranks)]


def read_record(checkpoint: Path) -> dict[str, Any]:
    """Return what `trainer_state.json` holds; raises ShardCorruptError unless it is whole."""
    path = checkpoint / STATE
    try:
        record = json.loads(path.read_bytes())
        if record.pop("crc32c") != checksum_hex(canonical_json(record)):
            raise ValueError("its checksum does not match")
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise _damaged(path, str(error)) from error
    return record


def require_checksum(path: Path, checksum: str) -> None:
    """Raise ShardCorruptError unless a file is there with that checksum."""
    try:
        found = file_checksum(path)
    except OSError as error:
        raise _damaged(path, str(error)) from error
    if found != checksum:
        raise _damaged(path, "its checksum does not match")


def _damaged(path: Path, reason: str) -> ShardCorruptError:
    return ShardCorruptError(
        f"{path} is damaged ({reason}). Delete {path.parent} to go on from the checkpoint before "
        "it."
    )


def restore(
    checkpoint: Path,
    state: TrainerState,
    masters: Masters,
    optimizers: Sequence[torch.optim.Optimizer],
    outer: OuterStep | None = None,
    *,
    rank: int = 0,
    num_ranks: int = 1,
) -> None:
    """Load masters, moments, RNG and outer momentum.

    As many ranks as wrote the checkpoint get their own moments back, another number their mean.
    """
    tensors = load_file(checkpoint / TRAINING)
    masters.load(_with_prefix(tensors, "master."))
    owner = {id(p): o for o in optimizers for group in o.param_groups for p in group["params"]}
    moments = _mean_moments([checkpoint / n for n in _moment_files(state, rank, num_ranks)])
    for full_name, value in moments.items():
        _, key, name = full_name.split(".", 2)
        parameter = masters.by_name[name]
        owner[id(parameter)].state[parameter][key] = value.to(parameter.device)
    torch.set_rng_state(tensors["rng"])
    if outer is not None:
        outer.reset(masters.parameters)
        momenta = _with_prefix(tensors, "outer.momentum.")
        for name, momentum in zip(masters.by_name, outer.momenta, strict=True):
            if name in momenta:  # a run of one rank had none
                momentum.copy_(momenta[name])


def _with_prefix(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def _mean_moments(paths: list[Path]) -> dict[str, torch.Tensor]:
    # A rank that has never made a step has no moments, and does not count.
    sums: dict[str, torch.Tensor] = {}
    counts: dict[str, int] = {}
    for path in paths:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  it is no dict
                if name.startswith("optimizer."):
                    value = file.get_tensor(name)
                    sums[name] = sums[name] + value if name in sums else value
                    counts[name] = counts.get(name, 0) + 1
    return {name: value / counts[name] for name, value in sums.items()}


def recorded_states(checkpoint: Path) -> dict[str, Any] | None:
    """Return the identity of the states a checkpoint was trained on, None if it has no record."""
    if not (checkpoint / STATE).exists():
        return None
    return read_record(checkpoint)["cache"]["states"]


def require_same_run(found: TrainerState, expected: TrainerState, checkpoint: Path) -> None:
    """Raise CacheMismatchError, listing each field, under another cache, schedule or setting."""
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
    if a == b or (name.startswith("cache.") and name.endswith("states.target")):
        return []
    if isinstance(a, dict) or isinstance(b, dict):  # the other caches, and one has none
        found, here = (f"{len(x)} in it" if x else "none" for x in (a, b))
        return [f"  {name}: the checkpoint has {found}, this run {here}"]
    return [f"  {name}: the checkpoint has {a!r}, this run {b!r}"]
