"""metrics.jsonl: one JSON object a line, always; and accelerate's trackers on request.

Takes the figures of optimizer steps, gathered in a `Window` until a line is due, and those of looks
at held-out documents (lines of `eval/` figures). On resume, lines from beyond the checkpoint are
cut off and the checkpoint's window is continued, so the file reads as if the run had never stopped.
"""

from __future__ import annotations

import errno
import importlib.util
import json
import math
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hscache import files
from hscache.errors import ConfigError, HscacheError


@dataclass(frozen=True, kw_only=True)
class StepFigures:
    """Sums of one optimizer step, as plain numbers."""

    step: int
    weight_sum: float
    num_scored: int
    loss_sum: float = 0.0
    num_correct: float = 0.0
    grad_norm: float | None = None
    """before clipping; None when nothing was supervised and no update was made"""


class Window:
    """The steps since the last line. Their figures stay on the device until they are read."""

    def __init__(self, figures: Iterable[StepFigures] = ()) -> None:
        self._read = list(figures)
        self._pending: list[tuple[StepFigures, torch.Tensor | None]] = []
        self._started = time.perf_counter()
        # Rates count this process alone, not what a checkpoint's window brought along.
        self._tokens = self._anchors = 0

    @property
    def num_steps(self) -> int:
        """Steps that no line covers yet."""
        return len(self._read) + len(self._pending)

    def add(
        self,
        step: int,
        *,
        tokens: int,
        anchors: int,
        weight_sum: float,
        num_scored: int,
        sums: torch.Tensor | None,
    ) -> None:
        """Add a step; `sums` is [loss sum, right predictions, gradient norm], None if skipped."""
        figures = StepFigures(step=step, weight_sum=weight_sum, num_scored=num_scored)
        self._pending.append((figures, sums))
        self._tokens += tokens
        self._anchors += anchors

    def leave_out(self, seconds: float) -> None:
        """Do not count time that was not spent on training."""
        self._started += seconds

    def read(self) -> list[StepFigures]:
        """Return every step's figures as numbers (synchronises with the device).

        Raises HscacheError naming the first step whose loss or gradient norm is not finite.
        """
        tensors = [sums for _, sums in self._pending if sums is not None]
        numbers = iter(torch.stack(tensors).tolist() if tensors else [])
        for figures, sums in self._pending:
            if sums is None:
                self._read.append(figures)
                continue
            loss_sum, num_correct, grad_norm = next(numbers)
            if not (math.isfinite(loss_sum) and math.isfinite(grad_norm)):
                raise HscacheError(
                    f"the loss or its gradient is not finite at step {figures.step}: loss "
                    f"{loss_sum / figures.weight_sum:g}, gradient norm {grad_norm:g}. No "
                    "checkpoint was written since. Check the states with `hscache inspect`, or "
                    "lower optim.lr in a new run."
                )
            self._read.append(
                StepFigures(
                    step=figures.step,
                    weight_sum=figures.weight_sum,
                    num_scored=figures.num_scored,
                    loss_sum=loss_sum,
                    num_correct=num_correct,
                    grad_norm=grad_norm,
                )
            )
        self._pending = []
        return self._read

    def values(self, wait_s: float) -> dict[str, float | None]:
        """Return the line's figures; None where there was nothing to measure, never 0."""
        steps = self.read()
        weight_sum = math.fsum(step.weight_sum for step in steps)
        num_scored = sum(step.num_scored for step in steps)
        seconds = time.perf_counter() - self._started
        loss_sum = math.fsum(step.loss_sum for step in steps)
        num_correct = math.fsum(step.num_correct for step in steps)
        norms = [step.grad_norm for step in steps if step.grad_norm is not None]
        return {
            "train/loss": loss_sum / weight_sum if weight_sum else None,
            "train/accuracy": num_correct / num_scored if num_scored else None,
            "train/grad_norm_max": max(norms, default=None),
            "perf/tokens_per_s": self._tokens / seconds if self._tokens else None,
            "perf/anchors_per_s": self._anchors / seconds if self._anchors else None,
            "perf/data_wait": wait_s / seconds,
        }


class MetricsLog:
    """Append metrics of a run; a context manager.

    Of a run that is resumed, lines of steps are kept up to `after_step`, the last one that the
    checkpoint's window does not cover, and `eval/` lines up to `eval_after_step`, its own step
    (a look comes before the checkpoint of its step is written).
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        after_step: int,
        log_with: str,
        config: dict[str, Any],
        eval_after_step: int = 0,
    ) -> None:
        if log_with != "none" and importlib.util.find_spec(log_with) is None:
            raise ConfigError(
                f"log_with is {log_with}, and {log_with} is not installed. Install it, or use "
                "--log-with none: metrics.jsonl is written in any case."
            )
        self.path = run_dir / "metrics.jsonl"
        self._after_step, self._eval_after_step = after_step, eval_after_step
        self.evaluations: list[dict[str, Any]] = []
        """Lines of `eval/` figures from before, as they are in the file."""
        self._log_with = log_with
        self._config = config
        self._accelerator: Any = None

    def __enter__(self) -> MetricsLog:
        kept = [line for line in read_metrics(self.path) if self._stays(line)]
        self.evaluations = [line for line in kept if is_evaluation(line)]
        text = "".join(json.dumps(line) + "\n" for line in kept)
        files.replace_atomically(self.path, text.encode())
        # Unbuffered: after a full disk there is nothing left that closing would try to write again.
        self._file = self.path.open("ab", buffering=0)
        if self._log_with != "none":
            from accelerate import Accelerator

            self._accelerator = Accelerator(
                cpu=True, log_with=self._log_with, project_dir=str(self.path.parent / "tracker")
            )
            self._accelerator.init_trackers("hscache", config=_flat(self._config))
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        if self._accelerator is not None:
            self._accelerator.end_training()

    def _stays(self, line: dict[str, Any]) -> bool:
        last = self._eval_after_step if is_evaluation(line) else self._after_step
        return line["step"] <= last

    def log(self, step: int, **values: float | None) -> None:
        """Write one line; a value of None means there was nothing to measure (never 0).

        Raises DiskFullError.
        """
        line = json.dumps({"step": step, **values}).encode() + b"\n"
        with files.disk_full_named(self.path):
            if self._file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        if self._accelerator is not None:
            numbers = {k: v for k, v in values.items() if v is not None}
            self._accelerator.log(numbers, step=step)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics.jsonl, none if there is no file.

    A line that was damaged, or cut by a crash, is dropped: metrics can be spared.
    """
    if not path.exists():
        return []
    lines = []
    for text in path.read_text(errors="replace").splitlines(keepends=True):
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if text.endswith("\n") and isinstance(line, dict) and isinstance(line.get("step"), int):
            lines.append(line)
    return lines


def is_evaluation(line: dict[str, Any]) -> bool:
    """Say whether a line is about held-out documents rather than steps."""
    return "eval/documents" in line


def _flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            simple = isinstance(value, (int, float, str, bool))
            flat[f"{prefix}{key}"] = value if simple else str(value)
    return flat
