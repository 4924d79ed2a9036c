"""How long this process has been running hscache: what start-up costs is counted from here.

`hscache` imports this first of all, so only the interpreter's own start (some 40 ms) is left out.
"""

import time

_BEGAN_S = time.perf_counter()


def running_s() -> float:
    """Return the seconds since this process imported hscache."""
    return time.perf_counter() - _BEGAN_S
