"""Turn Ctrl-C and SIGTERM into an orderly stop; a second signal kills at once."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType

from hscache.errors import StoppedBySignal

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def stop_requested(repeats_s: float = 0.0) -> Iterator[Callable[[], int | None]]:
    """Yield a function that returns the signal received so far, or None; the work polls it.

    For `repeats_s` seconds further signals count as the same one: a launcher passes on what its
    processes have also received from the terminal or from SLURM.
    """
    received: list[int] = []
    first_s = 0.0

    def remember(signum: int, frame: FrameType | None) -> None:
        nonlocal first_s
        if not received:
            received.append(signum)
            first_s = time.monotonic()
        elif time.monotonic() - first_s > repeats_s:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)

    with _handlers(remember):
        yield lambda: received[0] if received else None


@contextlib.contextmanager
def raise_on_stop() -> Iterator[Callable[[], None]]:
    """Raise StoppedBySignal in the main thread when a signal comes; `finally` blocks clean up.

    Yields a function that raises it again: some library may have swallowed the first one in a
    broad `except`, so long work calls it now and then.
    """
    received: list[int] = []

    def raise_if_stopped() -> None:
        if received:
            name = signal.Signals(received[0]).name
            raise StoppedBySignal(
                f"stopped by {name}; what was published stays.", signum=received[0]
            )

    def stop(signum: int, frame: FrameType | None) -> None:
        signal.signal(signum, signal.SIG_DFL)
        received.append(signum)
        raise_if_stopped()

    with _handlers(stop):
        yield raise_if_stopped


@contextlib.contextmanager
def _handlers(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    previous = {signum: signal.signal(signum, handler) for signum in _SIGNALS}
    try:
        yield
    finally:
        for signum, old in previous.items():
            signal.signal(signum, old)
