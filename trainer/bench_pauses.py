"""What a run pays beside its steps, for `trainer bench`: looks at held-out documents, checkpoints.

Takes a run and its training, as they are after some steps; hands on seconds.
"""

from __future__ import annotations

import logging
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from hscache.errors import DiskFullError
from trainer.checkpoint_writer import CheckpointWriter
from trainer.run_plan import RunPlan
from trainer.run_state import save_training
from trainer.training import Training
from trainer.watch import look_at_held_out

log = logging.getLogger(__name__)


def look_seconds(run: RunPlan, training: Training) -> dict[str, float] | None:
    """Return what the first look at the run's held-out documents takes, and each one after it."""
    if not run.held_out:
        return None
    seconds = []
    for _ in range(2):  # the first compiles
        started = time.perf_counter()
        look_at_held_out(run, training, training.drafter)
        seconds.append(time.perf_counter() - started)
    return {"first_s": seconds[0], "again_s": seconds[1], "documents": len(run.held_out)}


def checkpoint_seconds(
    run: RunPlan, training: Training, beside: Path | None
) -> dict[str, float] | None:
    """Return how long a checkpoint stops training (a copy), and how long until it is on disk.

    It is written beside a file, and deleted again; None without a file, or without room.
    """
    if beside is None:
        return None
    folder = beside.parent.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=folder) as run_dir:
        saved = replace(run, config=replace(run.config, run_dir=Path(run_dir)))
        started = time.perf_counter()
        try:
            with CheckpointWriter() as writer:
                save_training(saved, training, writer)
                copied = time.perf_counter()
        except DiskFullError as error:
            log.warning("no checkpoint was measured: %s", error)
            return None
        written = time.perf_counter()
    return {"copy_s": copied - started, "whole_s": written - started}


def describe_pauses(figures: dict[str, Any]) -> list[list[str]]:
    """Return rows of the bench's table."""
    rows = []
    if (looks := figures["looks"]) is not None:
        rows.append(["look", f"{looks['again_s']:.2f} s at {looks['documents']} documents, the "
                     f"first {looks['first_s']:.2f} s"])  # fmt: skip
    if (saved := figures["checkpoint"]) is not None:
        rows.append(["checkpoint", f"training stops for {saved['copy_s']:.2f} s, on disk after "
                     f"{saved['whole_s']:.2f} s"])  # fmt: skip
    return rows
