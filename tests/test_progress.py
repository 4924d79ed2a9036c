"""Progress tells the truth about rates, also after a resume, on a terminal and off it."""

import logging
import os
import pty
import subprocess
import sys
import termios
from pathlib import Path

import pytest

import hscache.progress
from hscache.progress import Progress, configure_logging

PROJECT = Path(hscache.progress.__file__).parents[1]


class Clock:
    """A clock that tests turn by hand."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, logger="hscache")

    def read() -> list[str]:
        return [record.getMessage() for record in caplog.records]

    return read


def test_lines_come_at_start_then_every_interval_then_at_the_end(clock, lines):
    with Progress(100, unit="tokens", label="produce", interval_s=10, clock=clock) as progress:
        for _ in range(50):
            clock.now_s += 1
            progress.advance(2)
    assert len(lines()) == 1 + 5 + 1
    assert lines()[0] == "produce: starting, 100 tokens"
    assert lines()[1] == "produce: 20/100 tokens, 20.0 %, 2.00 tokens/s, 40 s left"
    assert lines()[-1] == "produce: done, 100 tokens, 50 s, 2.00 tokens/s on average"


def test_work_done_before_a_resume_counts_in_the_total_but_in_no_rate(clock, lines):
    with Progress(1000, unit="rows", label="r", initial=900, clock=clock) as progress:
        clock.now_s += 10
        progress.advance(50)
        assert progress.mean_rate == pytest.approx(5)
        clock.now_s += 10
        progress.advance(50)
    assert lines() == [
        "r: starting, 1,000 rows, 900 of them done before",
        "r: 950/1,000 rows, 95.0 %, 5.00 rows/s, 10 s left",
        "r: 1,000/1,000 rows, 100.0 %, 5.00 rows/s",
        "r: done, 1,000 rows (100 in this run), 20 s, 5.00 rows/s on average",
    ]


def test_the_rate_follows_the_last_minute_and_the_end_gives_the_mean(clock, lines):
    with Progress(10_000, unit="steps", label="fit", clock=clock) as progress:
        for rate in [1] * 10 + [9] * 10:  # a slow warm-up, then full speed
            clock.now_s += 10
            progress.advance(10 * rate)
    assert "9.00 steps/s" in lines()[-2]
    assert lines()[-1].endswith("1,000 of 10,000 steps, 3 min 20 s, 5.00 steps/s on average")


def test_time_spent_before_entering_does_not_count(clock):
    progress = Progress(10, unit="rows", label="x", clock=clock)
    clock.now_s += 1000
    with progress:
        clock.now_s += 1
        progress.advance(7)
        assert progress.mean_rate == pytest.approx(7)


def test_figures_stay_until_given_again(clock, lines):
    with Progress(4, unit="packs", label="p", interval_s=0, clock=clock) as progress:
        clock.now_s += 1
        progress.advance(1, **{"GB/s": 1.234, "codec": "zstd"})
        progress.advance(1, codec="none")
    assert lines()[1].endswith("GB/s 1.23, codec zstd")
    assert lines()[2].endswith("GB/s 1.23, codec none")


def test_an_error_ends_with_the_count_reached(clock, lines):
    def fail() -> None:
        with Progress(9, unit="rows", label="p", clock=clock) as progress:
            clock.now_s += 2
            progress.advance(4)
            raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        fail()
    assert lines()[-1] == "p: stopped, 4 of 9 rows, 2 s, 2.00 rows/s on average"


def test_other_ranks_and_empty_stages_are_quiet_and_whole(clock, lines):
    with Progress(9, unit="rows", label="p", enabled=False, interval_s=0, clock=clock) as progress:
        progress.advance(4)
    assert progress.done == 4
    assert lines() == []
    with Progress(0, unit="rows", label="none", clock=clock):
        pass
    assert lines()[-1].startswith("none: done, 0 rows")


SCRIPT = """
import logging
from hscache.progress import Progress, configure_logging
configure_logging()
with Progress(1000, unit="tokens", label="produce", initial=500) as progress:
    progress.advance(250, speed="fast")
    logging.getLogger("hscache").info("shard 3 published")
    progress.advance(250)
logging.getLogger("elsewhere").info("not ours")
logging.getLogger("elsewhere").warning("theirs")
"""


def shown_on_terminal(num_columns: int) -> str:
    """Run SCRIPT with a terminal of this width as its stderr and return what it wrote there."""
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (24, num_columns))
    env = {**os.environ, "PYTHONPATH": str(PROJECT)}
    with subprocess.Popen([sys.executable, "-c", SCRIPT], stderr=slave, env=env) as process:
        os.close(slave)
        shown = b""
        while True:
            try:
                part = os.read(master, 4096)
            except OSError:  # how Linux says that the other end is closed
                break
            if not part:
                break
            shown += part
    os.close(master)
    assert process.returncode == 0
    return shown.decode()


def test_a_terminal_gets_a_bar_and_whole_log_lines():
    text = shown_on_terminal(100)
    assert "produce:  50%|" in text
    assert "500/1.00k" in text
    assert "speed fast" in text
    notes = [line for line in text.split("\r") if "shard 3 published" in line]
    assert [note.strip().endswith(" shard 3 published") for note in notes] == [True]
    assert "produce: done, 1,000 tokens (500 in this run)" in text
    assert "warning: theirs" in text
    assert "not ours" not in text


def test_a_terminal_of_unknown_width_gets_plain_lines():
    assert "produce: starting, 1,000 tokens, 500 of them done before" in shown_on_terminal(0)


@pytest.fixture
def restored_loggers():
    loggers = [logging.getLogger(name) for name in (None, "hscache", "trainer")]
    before = [(logger, logger.level, list(logger.handlers)) for logger in loggers]
    yield
    for logger, level, handlers in before:
        logger.setLevel(level)
        logger.handlers[:] = handlers


@pytest.mark.usefixtures("restored_loggers")
def test_rank_0_logs_info_and_other_ranks_only_warnings(capsys):
    for rank in (0, 3):
        configure_logging(rank)
        logging.getLogger("trainer.fit").info("step 1")
        logging.getLogger("hscache.reader").warning("slow disk")
    first, second, third = capsys.readouterr().err.splitlines()
    assert first.endswith(" step 1")
    assert second.endswith(" warning: slow disk")
    assert third.endswith(" [rank 3] warning: slow disk")
