"""Looks at held-out documents while a run goes on: when, what is written, and which is the best.

Takes the run's `MetricsLog` and drafter; adds `eval/` lines to metrics.jsonl. A look is due once
`eval_every_tokens` more context tokens have been consumed, at every regular checkpoint, so that it
can be compared, and at the end. All of it follows from the consumed tokens and the lines of
metrics, so a resumed run looks when one that never stopped would. Training is not touched.
"""

from __future__ import annotations

import logging
import math
import time
from pathlib import Path
from typing import Any

import torch

from hscache.device import DTYPES
from hscache.errors import HscacheError
from trainer.drafter import Drafter
from trainer.drafter_folder import load_drafter
from trainer.held_out import HeldOutFigures, evaluate_held_out
from trainer.masters import Masters
from trainer.metrics import MetricsLog
from trainer.run_folder import best_checkpoint
from trainer.run_plan import RunPlan
from trainer.training import Training

log = logging.getLogger(__name__)


class HeldOutWatch:
    """Make it when the metrics are open; it does nothing for a run without held-out documents."""

    def __init__(self, run: RunPlan, training: Training, metrics: MetricsLog) -> None:
        self._run, self._metrics = run, metrics
        self._every_tokens = run.config.eval_every_tokens
        self._mark = training.tokens // max(1, self._every_tokens)
        # Lines about another number of documents cannot be compared with this run's.
        self._lines: dict[int, dict[str, Any]] = {
            line["step"]: line
            for line in metrics.evaluations
            if line["eval/documents"] == len(run.held_out) and _is_whole(line)
        }
        self._rescored: dict[Path, float] = {}

    def look(self, training: Training, *, saving: bool) -> dict[str, str]:
        """Evaluate if that is due at this step; return what the progress line shows from then on.

        `saving` says that a regular checkpoint is written at this step, or that it is the last.
        """
        if not self._run.held_out or training.step in self._lines:
            return {}
        mark = training.tokens // self._every_tokens
        if mark == self._mark and not saving:
            return {}
        self._mark = mark
        training.window.read()  # weights that are no longer finite are not worth a look
        line = self._evaluate(training)
        self._lines[training.step] = {"step": training.step, **line}
        self._metrics.log(training.step, **line)
        return {"acceptance": f"{line['eval/sequential']:.3f}"}

    def is_best(self, training: Training) -> bool:
        """Say whether this step's drafter accepts more than that of the `best` checkpoint."""
        step = training.step
        if not self._run.config.keep_best or step not in self._lines:
            return False
        best = best_checkpoint(self._run.config.run_dir)
        if best is None:
            return True
        return bool(self._lines[step]["eval/sequential"] > self._score(training, best))

    def _score(self, training: Training, checkpoint: Path) -> float:
        """Return a checkpoint's acceptance on this run's documents; look again without a line."""
        if line := self._lines.get(_step(checkpoint)):
            return float(line["eval/sequential"])
        if checkpoint not in self._rescored:
            log.warning(
                "metrics.jsonl has no line on these documents for the best checkpoint %s: looking "
                "at them with it again", checkpoint.name,
            )  # fmt: skip
            try:
                drafter = load_drafter(checkpoint).to(training.frozen.head_VH.device)
            except HscacheError as error:
                log.warning("it cannot be the best any more: %s", error)
                return 0.0
            Masters(drafter, DTYPES[self._run.config.dtype])  # lowers the matrices, as in training
            found = look_at_held_out(self._run, training, drafter).acceptance.sequential
            self._rescored[checkpoint] = found or 0.0
        return self._rescored[checkpoint]

    def summary(self) -> list[list[str]]:
        """Return rows for the table at the end."""
        if not self._lines:
            return []
        last = self._lines[max(self._lines)]
        slots = [v for k, v in last.items() if k.startswith("eval/accuracy_slot_")]
        rows = [
            [
                "held out",
                f"acceptance {last['eval/sequential']:.3f} sequential, {last['eval/dense']:.3f} "
                f"dense; loss {last['eval/loss']:.3f} ({last['eval/documents']} documents)",
            ],
            [
                "accuracy by slot",
                " ".join("-" if v is None else f"{100 * v:.0f}" for v in slots) + " %",
            ],
        ]
        best = best_checkpoint(self._run.config.run_dir)
        if best is not None and (line := self._lines.get(_step(best))):
            rows.append(["best checkpoint", f"{best} ({line['eval/sequential']:.3f})"])
        return rows

    def _evaluate(self, training: Training) -> dict[str, float | None]:
        device = training.frozen.head_VH.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # steps under way are not the evaluation's time
        started_s = time.perf_counter()
        figures = look_at_held_out(self._run, training, training.drafter)
        seconds = time.perf_counter() - started_s
        training.window.leave_out(seconds)
        if figures.loss is not None and not math.isfinite(figures.loss):
            raise HscacheError(
                f"the loss on held-out documents is {figures.loss} at step {training.step}: "
                "weights or states are not finite. `hscache verify --deep` checks the states; else "
                "continue from an earlier checkpoint with a lower learning rate."
            )
        return {
            "eval/tokens": training.tokens,
            **metrics_of(figures),
            "eval/seconds": seconds,
        }


def look_at_held_out(run: RunPlan, training: Training, drafter: Drafter) -> HeldOutFigures:
    """Score the run's held-out documents with a drafter, in rows of the training shape."""
    return evaluate_held_out(
        drafter,
        training.frozen,
        run.held_out,
        gamma=run.row.gamma,
        row_tokens=run.row.row_tokens,
        anchors_per_row=run.row.anchors_per_row,
        device=training.frozen.head_VH.device,
        dtype=DTYPES[run.config.dtype],
        chunk_size=training.chunk_size,
        backend=training.backend,
    )


def metrics_of(figures: HeldOutFigures) -> dict[str, float | None]:
    """Return the figures under their names in metrics.jsonl."""
    acceptance = figures.acceptance
    slots = {
        f"eval/accuracy_slot_{slot:02}": value
        for slot, value in enumerate(figures.slot_accuracy_K, start=1)
    }
    return {
        "eval/loss": figures.loss,
        "eval/sequential": acceptance.sequential,
        "eval/dense": acceptance.dense,
        "eval/per_document_mean": acceptance.per_document_mean,
        "eval/accuracy": figures.accuracy,
        **slots,
        "eval/documents": figures.num_documents,
        "eval/anchors": figures.num_anchors,
    }


def _is_whole(line: dict[str, Any]) -> bool:
    # The file may have been edited: what is compared or shown later must be there.
    names = ("eval/sequential", "eval/dense", "eval/loss")
    return all(isinstance(line.get(name), int | float) for name in names)


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])
