"""Looks at held-out documents while a run goes on: when, what is written, and which is the best.

Takes the run's `MetricsLog` and drafter; adds `eval/` lines to metrics.jsonl. A look is due once
`eval_every_tokens` more context tokens have been consumed, at every regular checkpoint, so that it
can be compared, and at the end. All of it follows from the consumed tokens and the lines of
metrics, so a resumed run looks when one that never stopped would. Training is not touched.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from hscache.device import DTYPES
from trainer.checkpoint import best_checkpoint
from trainer.held_out import HeldOutFigures, evaluate_held_out
from trainer.metrics import MetricsLog
from trainer.run_plan import RunPlan
from trainer.training import Training


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
            if line["eval/documents"] == len(run.held_out)
        }

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
        line = self._evaluate(training)
        self._lines[training.step] = {"step": training.step, **line}
        self._metrics.log(training.step, **line)
        return {"acceptance": f"{line['eval/sequential']:.3f}"}

    def is_best(self, step: int) -> bool:
        """Say whether this step's drafter accepts more than that of the `best` checkpoint."""
        if not self._run.config.keep_best or step not in self._lines:
            return False
        best = best_checkpoint(self._run.config.run_dir)
        before = self._lines.get(_step(best)) if best else None
        return before is None or self._lines[step]["eval/sequential"] > before["eval/sequential"]

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
        run, device = self._run, training.frozen.head_VH.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # steps under way are not the evaluation's time
        started_s = time.perf_counter()
        figures = evaluate_held_out(
            training.drafter,
            training.frozen,
            run.held_out,
            gamma=run.row.gamma,
            row_tokens=run.row.row_tokens,
            anchors_per_row=run.row.anchors_per_row,
            device=device,
            dtype=DTYPES[run.config.dtype],
            chunk_size=training.chunk_size,
            backend=training.backend,
        )
        seconds = time.perf_counter() - started_s
        training.window.leave_out(seconds)
        return {
            "eval/tokens": training.tokens,
            **metrics_of(figures),
            "eval/seconds": seconds,
        }


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


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])
