"""metrics.jsonl: one JSON object a line, always; and accelerate's trackers on request.

Takes dicts of numbers with the step they belong to. On resume, lines from beyond the checkpoint are
cut off, so the file reads as if the run had never stopped.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any

from hscache import files


class MetricsLog:
    """Append metrics of a run; a context manager."""

    def __init__(
        self, run_dir: Path, *, after_step: int, log_with: str, config: dict[str, Any]
    ) -> None:
        self.path = run_dir / "metrics.jsonl"
        kept = [line for line in _lines(self.path) if json.loads(line)["step"] <= after_step]
        files.replace_atomically(self.path, "".join(kept).encode())
        self._file = self.path.open("a", buffering=1)
        self._accelerator = None
        if log_with != "none":
            from accelerate import Accelerator

            self._accelerator = Accelerator(
                cpu=True, log_with=log_with, project_dir=str(run_dir / "tracker")
            )
            self._accelerator.init_trackers("hscache", config=_flat(config))

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
        if self._accelerator is not None:
            self._accelerator.end_training()

    def log(self, step: int, **values: float | None) -> None:
        """Write one line; a value of None means there was nothing to measure (never 0)."""
        with files.disk_full_named(self.path):
            self._file.write(json.dumps({"step": step, **values}) + "\n")
        if self._accelerator is not None:
            numbers = {k: v for k, v in values.items() if v is not None}
            self._accelerator.log(numbers, step=step)


def _lines(path: Path) -> list[str]:
    if not path.exists():
        return []
    # A line cut by a crash has no newline and is dropped.
    return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            simple = isinstance(value, (int, float, str, bool))
            flat[f"{prefix}{key}"] = value if simple else str(value)
    return flat
