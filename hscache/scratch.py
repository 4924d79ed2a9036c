"""Memory that a thread uses again and again, because fresh pages cost more than the work on them.

Takes a name and a size; hands on bytes that are the caller's until the same thread asks for that
name once more. Nothing in it may be kept longer: copy it, or decode out of it.
"""

import threading

import numpy as np
import numpy.typing as npt

_local = threading.local()


def scratch(name: str, size_bytes: int) -> npt.NDArray[np.uint8]:
    """Return this thread's bytes of that name, uninitialised, `size_bytes` of them."""
    held: npt.NDArray[np.uint8] | None = getattr(_local, name, None)
    if held is None or len(held) < size_bytes:
        held = np.empty(size_bytes, np.uint8)
        setattr(_local, name, held)
    return held[:size_bytes]
