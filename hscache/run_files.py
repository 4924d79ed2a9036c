"""The files of a training run, read by others while it goes on: metrics, checkpoints, lock.

Takes a run folder; hands on plain dictionaries and numbers. No torch: both status commands answer
at once and never touch what they look at.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

_TAIL_BYTES = 1 << 16
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


def last_metrics(run_dir: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the last lines of metrics.jsonl about steps and about held-out documents, or {}.

    Only the file's end is read; a line that is half written is left out.
    """
    try:
        with (run_dir / "metrics.jsonl").open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().splitlines(keepends=True)
    except OSError:
        return {}, {}
    step: dict[str, Any] = {}
    look: dict[str, Any] = {}
    for text in lines:
        try:
            line = json.loads(text) if text.endswith(b"\n") else None
        except ValueError:
            continue
        if isinstance(line, dict) and "eval/documents" in line:
            look = line
        elif isinstance(line, dict) and "train/tokens" in line:
            step = line
    return step, look


def metrics_age_s(run_dir: Path, now_s: float) -> float | None:
    """Return the seconds since the last line of metrics, None if there is none."""
    try:
        return max(0.0, now_s - (run_dir / "metrics.jsonl").stat().st_mtime)
    except OSError:
        return None


def checkpoints(run_dir: Path) -> list[Path]:
    """Return the checkpoint folders, the oldest first."""
    if not run_dir.is_dir():
        return []
    found = [
        (int(match[1]), path)
        for path in run_dir.iterdir()
        if (match := _CHECKPOINT.fullmatch(path.name))
    ]
    return [path for _, path in sorted(found)]


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object, {} where there is none to be read (it may be replaced right now)."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def writer_pid(run_dir: Path) -> int | None:
    """Return the process on this machine that holds the run's lock, None if none does.

    /proc/locks is read instead of trying the lock: a trainer that starts in that instant would be
    refused.
    """
    try:
        status = (run_dir / "lock").stat()
        locks = Path("/proc/locks").read_text()
    except OSError:
        return None
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    for line in locks.splitlines():
        words = line.split()
        if "FLOCK" in words and "->" not in words and device in words:
            return int(words[words.index(device) - 1])
    return None
