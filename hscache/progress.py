"""Progress of long stages: a bar on a terminal, otherwise a plain line every few seconds.

Takes counts as work is done, hands on rate, time left and any figures given with them. Rates count
only what this process did, so they stay true after a resume. Also sets up logging for the command
lines, so that log lines and a bar share stderr without tearing each other.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any

from tqdm import tqdm

from hscache.report import format_number, format_seconds

logger = logging.getLogger(__name__)


class Progress:
    """Show how far a stage of `total` units has come.

        with Progress(1_000_000, unit="tokens", label="produce", initial=250_000) as progress:
            for pack in packs:
                ...
                progress.advance(pack.num_tokens, **{"GB/s": 1.2, "ratio": 1.45})

    `initial` units were done before this process started: they count towards the total and never
    towards a rate. The rate shown is that of about the last minute, at the end the mean.
    Other ranks than 0 pass `enabled=False` and print nothing.
    """

    def __init__(
        self,
        total: int,
        *,
        unit: str,
        label: str,
        initial: int = 0,
        enabled: bool = True,
        interval_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total = total
        self.initial = initial
        self.done = initial
        """Units done, those before a resume included."""
        self._unit = unit
        self._label = label
        self._enabled = enabled
        self._interval_s = interval_s
        self._clock = clock
        self._figures: dict[str, Any] = {}
        self._bar: tqdm | None = None
        self._start_s = self._reported_s = clock()
        # (time, done) at the latest lines: the recent rate is measured over these
        self._marks: deque[tuple[float, int]] = deque([(self._start_s, initial)], maxlen=7)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the stage was entered."""
        return self._clock() - self._start_s

    @property
    def mean_rate(self) -> float:
        """Units per second done by this process."""
        return (self.done - self.initial) / max(self.elapsed_s, 1e-9)

    def __enter__(self) -> Progress:
        self._start_s = self._reported_s = self._clock()
        self._marks.clear()
        self._marks.append((self._start_s, self.initial))
        if not self._enabled:
            return self
        if _stderr_is_terminal():
            self._bar = tqdm(
                total=self.total,
                initial=self.initial,
                desc=self._label,
                unit=f" {self._unit}",
                unit_scale=True,
                dynamic_ncols=True,
                smoothing=0.1,
                leave=False,
                file=sys.stderr,
            )
        else:
            before = f", {format_number(self.initial)} of them done before" if self.initial else ""
            total = f"{format_number(self.total)} {self._unit}"
            logger.info("%s: starting, %s%s", self._label, total, before)
        return self

    def advance(self, n: int = 1, **figures: Any) -> None:
        """Count `n` more units; `figures` (name to number or text) stay until given again."""
        self.done += n
        self._figures.update(figures)
        if self._bar is not None:
            self._bar.set_postfix_str(self._figures_text(), refresh=False)
            self._bar.update(n)
        elif self._enabled and self._clock() - self._reported_s >= self._interval_s:
            self._report()

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()
        if not self._enabled:
            return
        end = "done" if error_type is None else "stopped"
        count = f"{format_number(self.done)} {self._unit}"
        if self.done != self.total:
            count = f"{format_number(self.done)} of {format_number(self.total)} {self._unit}"
        here = f" ({format_number(self.done - self.initial)} in this run)" if self.initial else ""
        rate = f"{format_number(float(self.mean_rate))} {self._unit}/s on average"
        parts = [f"{count}{here}", format_seconds(self.elapsed_s), rate, self._figures_text()]
        logger.info("%s: %s, %s", self._label, end, ", ".join(filter(None, parts)))

    def _report(self) -> None:
        now_s = self._clock()
        then_s, then_done = self._marks[0]
        rate = (self.done - then_done) / max(now_s - then_s, 1e-9)
        self._marks.append((now_s, self.done))
        self._reported_s = now_s
        share = f"{100 * self.done / self.total:.1f} %" if self.total else ""
        left = self.total - self.done
        eta = f"{format_seconds(left / rate)} left" if rate > 0 and left > 0 else ""
        parts = [
            f"{format_number(self.done)}/{format_number(self.total)} {self._unit}",
            share,
            f"{format_number(float(rate))} {self._unit}/s",
            eta,
            self._figures_text(),
        ]
        logger.info("%s: %s", self._label, ", ".join(filter(None, parts)))

    def _figures_text(self) -> str:
        return ", ".join(f"{name} {format_number(value)}" for name, value in self._figures.items())


def _stderr_is_terminal() -> bool:
    """Say whether a bar can be drawn; some containers hand out terminals of width 0."""
    return sys.stderr.isatty() and os.get_terminal_size(sys.stderr.fileno()).columns > 0


def configure_logging(rank: int = 0) -> None:
    """Send log lines to stderr; call it once, from a command line, never from a library.

    Our own packages log from INFO on rank 0 and from WARNING on others, everyone else's from
    WARNING. Calling it again replaces the earlier set-up.
    """
    handler = _BarSafeHandler(sys.stderr)
    handler.setFormatter(_Formatter(rank))
    root = logging.getLogger()
    for old in [h for h in root.handlers if isinstance(h, _BarSafeHandler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    for package in ("hscache", "trainer"):
        logging.getLogger(package).setLevel(logging.INFO if rank == 0 else logging.WARNING)


class _BarSafeHandler(logging.StreamHandler):
    """Writes a line above any bar that is shown, not through it."""

    def emit(self, record: logging.LogRecord) -> None:
        with tqdm.external_write_mode(file=self.stream):
            super().emit(record)


class _Formatter(logging.Formatter):
    """`12:03:04 text`, with the level where it is not INFO and the rank where it is not 0."""

    def __init__(self, rank: int) -> None:
        super().__init__("%(asctime)s %(message)s", datefmt="%H:%M:%S")
        self._rank = rank

    def formatMessage(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        rank = f"[rank {self._rank}] " if self._rank else ""
        return f"{record.asctime} {rank}{level}{record.message}"
