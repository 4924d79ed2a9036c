"""Processes forked from a server that has imported everything: a start costs a tenth of a second.

A fresh `python -m hscache.cli produce` spends three seconds on imports. Imported by the tests that
kill and stop such processes; that the command lines start by themselves is tested elsewhere.
"""

import contextlib
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

PRELOADED = ["transformers", "hscache.produce", "hscache.regenerate", "trainer.fit"]


def context():
    """Return the server to fork from; there is one in a process."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(
        [
            "torch.distributed",
            "transformers",
            "hscache.produce",
            "hscache.regenerate",
            "trainer.fit",
        ]
    )
    return server


class Forked:
    """A command line in a process of its own; has what the tests use of `subprocess.Popen`."""

    def __init__(self, program: str, argv: list[str]) -> None:
        descriptor, self._log = tempfile.mkstemp()
        os.close(descriptor)
        arguments = (os.getpid(), program, argv, self._log)
        self._process = context().Process(target=_run, args=arguments, daemon=True)
        self._process.start()

    @property
    def returncode(self) -> int | None:
        """The exit code, minus the signal that killed it, or None."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Return `returncode`."""
        return self._process.exitcode

    def send_signal(self, signum: int) -> None:
        """Send a signal, if it still runs."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signum)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """Wait for the end; return what it printed, on stdout and stderr."""
        self._process.join(timeout)
        assert self._process.exitcode is not None, "it does not end"
        return Path(self._log).read_text(), None


def print_to(log: str | Path) -> None:
    """Let what this process prints, and what it starts, go to the end of a file."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def end_with(owner: int) -> None:
    """End this process soon after the one that asked for it: a killed test leaves none behind."""
    threading.Thread(target=_end_with, args=(owner,), daemon=True).start()


def _end_with(owner: int) -> None:
    while Path(f"/proc/{owner}").exists():
        time.sleep(1)
    os._exit(1)


def _run(owner: int, program: str, argv: list[str], log: str) -> None:
    end_with(owner)
    print_to(log)
    import torch

    torch.set_num_threads(1)
    code = importlib.import_module(f"{program}.cli").main(argv)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
