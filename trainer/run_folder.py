"""The folder of a run: which checkpoints it holds, which is the best, and whether one more fits.

Takes the folder; hands on paths of `checkpoint-<step>/`, oldest first, and keeps the link `best`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from hscache import files
from hscache.errors import ConfigError, DiskFullError
from hscache.report import format_bytes

_NAME = re.compile(r"checkpoint-(\d+)")
MODEL, CONFIG, TRAINING, STATE = (
    "model.safetensors",
    "config.json",
    "training.safetensors",
    "trainer_state.json",
)
"""Files of a checkpoint."""
BEST = "best"
"""The link to the best checkpoint."""


def checkpoint_folder(run_dir: Path, step: int) -> Path:
    """Return where the checkpoint of a step lies, or will lie."""
    return run_dir / f"checkpoint-{step}"


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first."""
    if not run_dir.is_dir():
        return []
    found = [(int(m[1]), p) for p in run_dir.iterdir() if (m := _NAME.fullmatch(p.name))]
    return [path for _, path in sorted(found)]


def best_checkpoint(run_dir: Path) -> Path | None:
    """Return the checkpoint that was best on held-out documents, if one has been marked."""
    link = run_dir / BEST
    return run_dir / link.readlink() if link.is_symlink() and link.exists() else None


def mark_best(checkpoint: Path) -> None:
    """Let the link `best` beside a checkpoint lead to it, atomically."""
    link = checkpoint.parent / BEST
    temporary = link.with_name(f"{files.TEMPORARY_PREFIX}{BEST}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(checkpoint.name)
    temporary.replace(link)


def resolve_checkpoint(path: Path) -> Path:
    """Return a checkpoint folder from itself or from its run's folder (then the last one).

    Raises ConfigError when it is neither.
    """
    if (path / CONFIG).is_file() and (path / MODEL).is_file():
        return path
    checkpoints = list_checkpoints(path)
    if not checkpoints:
        raise ConfigError(
            f"{path} is neither a checkpoint ({CONFIG}, {MODEL}) nor a run folder with "
            "checkpoint-<step> in it."
        )
    return checkpoints[-1]


def require_space(run_dir: Path, size_bytes: int) -> None:
    """Raise DiskFullError when a checkpoint of that size does not fit on the run's disk."""
    folder = run_dir
    while not folder.exists():
        folder = folder.parent
    status = os.statvfs(folder)
    if status.f_bavail * status.f_frsize < size_bytes:
        raise DiskFullError(
            f"disk full: a checkpoint of {run_dir} takes {format_bytes(size_bytes)}, and there are "
            f"{files.free_space(folder)}. The checkpoints before it are intact; free some space "
            "and continue with --resume, or give another --run-dir."
        )
