"""The loop of `trainer fit`: take rows, step, meet, write metrics and checkpoints, until the end.

Takes a `RunPlan` and a `Training`; leaves the last checkpoint. In `ddp`, and with one rank, every
step is one of all ranks. In the other modes ranks step alone and meet after `local_steps`; one that
has run out of rows comes early and waits, one that cannot go on calls the others to come at once.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import logging
import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch

from hscache.device import DTYPES
from hscache.errors import HscacheError, StoppedBySignal
from hscache.progress import Progress
from hscache.report import format_table
from hscache.settings import to_dict
from hscache.signals import stop_requested
from trainer.bad_shards import describe_skipped
from trainer.batches import Batch, Loader, StepEnd
from trainer.checkpoint_writer import CheckpointWriter
from trainer.follow import PATIENCE_S, Follower
from trainer.metrics import MetricsLog, Window
from trainer.run_folder import mark_best
from trainer.run_plan import RunPlan
from trainer.run_state import save_training
from trainer.schedule import Share
from trainer.training import Training
from trainer.watch import HeldOutWatch

log = logging.getLogger(__name__)

_POLL_S = 0.25
_SAME_SIGNAL_S = 5.0
_PATIENCE_S = 30.0
"""How long a rank waits for rows before it calls the others to meet without its next step."""


class State(enum.IntEnum):
    """Why a rank comes to the others; of several the largest decides."""

    RUNNING = 0
    FINISHED = 1
    STARVED = 2
    STOPPED = 3
    FAILED = 4


def train(run: RunPlan, training: Training, device: torch.device, saved: Path | None) -> Path:
    """Step through the rows that are left and return the last checkpoint.

    `saved` is the checkpoint the run starts from. Raises StoppedBySignal on every rank after a
    checkpoint when SIGTERM or Ctrl-C came to any, HscacheError when the loss is no longer finite.
    """
    config, ranks = run.config, training.ranks
    share = Share(
        rank=ranks.rank, num_ranks=ranks.num_ranks, rows_per_step=config.global_batch_rows
    )
    task = run.row_task(training.position, share)
    loader = Loader(run.cache, task, device=device, dtype=DTYPES[config.dtype])
    progress = Progress(
        run.total_tokens,
        unit="tokens",
        label="fit",
        initial=training.tokens,
        enabled=ranks.is_first,
    )
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(stop_requested(0.0 if ranks.alone else _SAME_SIGNAL_S))
        metrics = None
        if ranks.is_first:
            metrics = MetricsLog(
                config.run_dir,
                after_step=training.logged_step,
                log_with=config.log_with,
                config=to_dict(config),
                eval_after_step=training.step,
            )
            stack.enter_context(metrics)
        follower = None
        if config.follow and ranks.is_first:
            follower = Follower(run, training.position, ranks.num_ranks)
            stack.enter_context(follower)
        writer = stack.enter_context(CheckpointWriter())
        stack.enter_context(loader)
        stack.enter_context(progress)
        loop = _Loop(
            run,
            training,
            loader=loader,
            stop=stop,
            metrics=metrics,
            writer=writer,
            progress=progress,
            follower=follower,
            saved=saved,
        )
        return loop.run()


class _Loop:
    def __init__(
        self,
        run: RunPlan,
        training: Training,
        *,
        loader: Loader,
        stop: Callable[[], int | None],
        metrics: MetricsLog | None,
        writer: CheckpointWriter,
        progress: Progress,
        follower: Follower | None,
        saved: Path | None,
    ) -> None:
        self._run, self._training, self._ranks = run, training, training.ranks
        self._loader, self._metrics, self._writer = loader, metrics, writer
        self._progress, self._stop, self._follower = progress, stop, follower
        self._saved, self._saved_step = saved, training.step
        self._steps = loader.steps(_POLL_S)
        self._next: tuple[list[Batch], StepEnd] | None = None
        self._error: Exception | None = None
        self._starving = False
        self._fed_s = time.monotonic()
        self._shown: dict[str, float | str] = {}
        self._watch = HeldOutWatch(run, training, metrics) if metrics else None

    def run(self) -> Path:
        """Go on to the end; return the last checkpoint."""
        training = self._training
        if training.together:
            self._step_together()
        else:
            self._step_alone_and_meet()
        if training.window.num_steps:
            self._log()
        self._look(saving=True)
        if self._saved is None or self._saved_step != training.step:
            self._save()
        self._writer.finish()
        assert self._saved is not None
        if self._follower is not None:
            self._follower.finish(training.step)
        if self._watch is not None:
            if self._watch.is_best(training):  # saved before it was looked at
                mark_best(self._saved)
            rate, held_out = self._progress.mean_rate, self._watch.summary()
            print(_summary(self._run, training, self._saved, rate, held_out))
        self._ranks.gather([0])  # leave together: the others' store may live in rank 0
        return self._saved

    def _step_together(self) -> None:
        patience_s = self._patience_s()
        while True:
            state = self._fetch(lambda waited_s: waited_s > patience_s)
            why_save = self._why_save() if state == State.STARVED else ""
            found = self._ranks.gather([state, self._stop() or 0, why_save != ""])
            worst = max(int(state) for state, *_ in found)
            if worst >= State.STOPPED:
                self._halt([[int(state), int(signum)] for state, signum, _ in found])
            if worst == State.FINISHED:
                return
            if any(asked for *_, asked in found):
                self._save_early(why_save)
            if worst == State.RUNNING:
                self._update()
                self._settle()

    def _step_alone_and_meet(self) -> None:
        meeting = 0
        while True:
            state = self._step_alone(meeting)
            self._ranks.call(f"here-{meeting}", str(self._ranks.rank))
            signum = (self._stop() or 0) if state == State.STOPPED else 0
            why_save = self._why_save()
            found = self._training.meet(state, signum, int(why_save != ""))
            if self._ranks.is_first and (cause := self._ranks.called(f"call-{meeting}")):
                log.warning("met early, after step %d: %s", self._training.step, cause)
            self._settle()
            if max(state for state, *_ in found) >= State.STOPPED:
                self._halt([flags[:2] for flags in found])
            if any(asked for *_, asked in found):
                self._save_early(why_save)
            if all(state == State.FINISHED for state, *_ in found):
                return
            meeting += 1

    def _step_alone(self, meeting: int) -> State:
        """Step until a meeting is due or called for; return why this rank comes."""
        ranks, patience_s = self._ranks, self._patience_s()

        def give_up(waited_s: float) -> bool:
            # Having starved once, this rank no longer calls; it comes when others have.
            starved = ranks.called(f"here-{meeting}") if self._starving else waited_s > patience_s
            return bool(starved or ranks.called(f"call-{meeting}") or self._why_save())

        while self._training.work.num_steps < self._run.config.sync.local_steps:
            if ranks.called(f"call-{meeting}"):
                return State.RUNNING
            state = self._fetch(give_up)
            if state == State.FINISHED:
                return state
            if state != State.RUNNING:
                known = state == State.STARVED and self._starving and not self._why_save()
                if not known and not ranks.called(f"call-{meeting}"):
                    why = {
                        State.STARVED: f"has no rows after {patience_s:g} s of waiting",
                        State.STOPPED: "was told to stop by a signal",
                        State.FAILED: f"cannot read its rows ({self._error})",
                    }
                    ranks.call(f"call-{meeting}", f"rank {ranks.rank} {why[state]}")
                self._starving = state == State.STARVED
                return state
            self._starving = False
            self._update()
        return State.RUNNING

    def _why_save(self) -> str:
        """Return why this rank asks for a checkpoint now, as the one that follows a producer."""
        starved_s = time.monotonic() - self._fed_s
        if self._follower is None or starved_s < PATIENCE_S:
            return ""
        return self._follower.why_save(self._training.position, starved_s)

    def _patience_s(self) -> float:
        if self._run.config.follow and self._training.together:
            return PATIENCE_S
        return min(_PATIENCE_S, self._ranks.timeout_s / 3)

    def _fetch(self, give_up: Callable[[float], bool]) -> State:
        """Have the next step's rows in `_next`, or say why not; `give_up` gets the seconds waited.

        Looks for a signal and asks `give_up` several times a second.
        """
        started_s = time.monotonic()
        while True:
            if self._stop() is not None:
                return State.STOPPED
            if self._next is not None:
                return State.RUNNING
            try:
                self._next = next(self._steps)
            except StopIteration:
                return State.FAILED if self._error else State.FINISHED
            except (HscacheError, OSError) as error:
                self._error = error
                return State.FAILED
            if self._next is None and give_up(time.monotonic() - started_s):
                return State.STARVED

    def _update(self) -> None:
        assert self._next is not None
        (rows, end), self._next = self._next, None
        if self._follower is not None:
            self._follower.fed(time.monotonic() - self._fed_s)
        self._fed_s = time.monotonic()
        self._training.update(rows, end)
        self._progress.advance(end.num_tokens, **self._shown)

    def _settle(self) -> None:
        """Write a line and a checkpoint where they are due; the ranks agree at this point."""
        config, step = self._run.config, self._training.step
        if step // config.log_every > self._training.logged_step // config.log_every:
            self._log()
        self._writer.check()
        save = step // config.checkpoint_every > self._saved_step // config.checkpoint_every
        self._look(saving=save)
        if save:
            self._save()

    def _look(self, *, saving: bool) -> None:
        """Let rank 0 look at held-out documents if that is due; the others wait for it later."""
        if self._watch is not None:
            self._shown |= self._watch.look(self._training, saving=saving)

    def _save(self) -> None:
        self._agree_on_skipped()
        self._writer.finish()  # it may still be about to mark another one as the best
        best = self._watch is not None and self._watch.is_best(self._training)
        durable = lambda: None  # noqa: E731
        if self._follower is not None:
            progress = self._follower.saving(self._training.position, self._training.step)
            durable = functools.partial(self._follower.acknowledge, progress)
        self._saved = save_training(
            self._run, self._training, self._writer, best=best, durable=durable
        )
        self._saved_step = self._training.step

    def _agree_on_skipped(self) -> None:
        if self._run.config.on_bad_shard == "skip":
            self._training.agree_on_skipped()

    def _save_early(self, why: str) -> None:
        if why:
            log.info("saving step %d early: %s", self._training.step, why)
        if self._training.step > self._saved_step:
            self._look(saving=True)
            self._save()
        elif self._follower is not None:  # only ticks without rows came since
            self._writer.finish()
            position = self._training.position
            self._follower.acknowledge(self._follower.saving(position, self._saved_step))

    def _log(self) -> None:
        """Write a line of metrics and start a new window."""
        training, ranks = self._training, self._ranks
        training.require_equal_weights()
        self._agree_on_skipped()
        if self._run.config.on_bad_shard == "skip":
            self._shown["skipped"] = str(len(training.skipped))
        values = training.window.values(self._loader.wait_s)
        if self._metrics is not None:
            self._metrics.log(
                training.step,
                **values,
                **{
                    "perf/sync_s": None if ranks.alone else ranks.wait_s,
                    "train/lr": training.rate,
                    "train/tokens": training.tokens,
                    "train/empty_windows": training.empty_windows,
                    **self._skipped(),
                },
            )
        training.window, training.logged_step = Window(), training.step
        self._loader.wait_s = ranks.wait_s = 0.0
        loss = values["train/loss"]
        self._shown |= {
            "loss": "-" if loss is None else f"{loss:.3f}",
            "lr": f"{training.rate:.1e}",
        }

    def _skipped(self) -> dict[str, int]:
        if self._run.config.on_bad_shard == "stop":
            return {}
        return {"train/skipped_documents": len(self._training.skipped)}

    def _halt(self, found: list[list[int]]) -> None:
        """Save what all ranks have reached and raise; `found` are their states and signals."""
        step = self._training.step
        if step > self._saved_step:
            if self._error is not None:
                log.error("the next rows cannot be read; saving step %d first", step)
            self._save()
        self._writer.finish()
        self._ranks.gather([0])  # only now is it true on every rank that all is saved
        if self._error is not None:
            raise self._error
        where = "there is no checkpoint yet"
        if self._saved is not None:
            where = f"saved {self._saved}. Continue with --resume"
        if failed := [rank for rank, (state, _) in enumerate(found) if state == State.FAILED]:
            raise HscacheError(
                f"ranks {failed} could not read their rows, so all stopped after step {step}; "
                f"{where} once that is mended."
            )
        signum = max(signum for _, signum in found)
        raise StoppedBySignal(
            f"stopped by {signal.Signals(signum).name} after step {step}; {where}.", signum=signum
        )


def _summary(
    run: RunPlan, training: Training, saved: Path, rate: float, held_out: list[list[str]]
) -> str:
    return format_table(
        ["trained", str(run.config.run_dir)],
        [
            ["steps", f"{training.step:,}"],
            ["tokens", f"{training.tokens:,} context tokens, {training.anchors:,} anchors"],
            ["tokens/s", f"{rate:,.0f}"],
            ["updates skipped", f"{training.empty_windows} (nothing supervised)"],
            *_describe_skipped(run, training),
            *held_out,
            ["checkpoint", str(saved)],
        ],
    )


def _describe_skipped(run: RunPlan, training: Training) -> list[list[str]]:
    if run.config.on_bad_shard == "stop" and not training.skipped:
        return []
    return [["documents skipped", describe_skipped(run.cache, training.skipped)]]
