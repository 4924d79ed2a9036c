"""A stop is remembered, repeats of it within a grace are one, and a later one kills."""

import os
import signal
import subprocess
import sys

import pytest

from hscache.signals import stop_requested


def test_a_signal_is_remembered_and_handlers_are_restored():
    before = signal.getsignal(signal.SIGTERM)
    with stop_requested(60.0) as stop:
        assert stop() is None
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop() == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(("repeats_s", "code"), [(0.0, -signal.SIGTERM), (60.0, 0)])
def test_the_second_signal_kills_unless_it_repeats_the_first(repeats_s, code):
    script = (
        "import os, signal; from hscache.signals import stop_requested\n"
        f"with stop_requested({repeats_s}):\n"
        "    for _ in range(2): os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == code
