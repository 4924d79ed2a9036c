"""A mapped file of which only what is in memory already is read: the disk cannot fail then.

Takes an open file and its size; hands on bytes that lie in the page cache, without the copy through
the kernel that costs more than the bytes. For what must come from the disk it hands on None: a read
error would end the process, where pread tells of it. A file that is cut between the look at its
size and the copy still would: nobody but a repair or a fault cuts a published shard.
"""

import ctypes
import functools
import mmap
import os
from typing import Any

import numpy as np
import numpy.typing as npt

from hscache.scratch import scratch

_PAGE_BYTES = mmap.PAGESIZE


class MappedFile:
    """A mapping of a whole file, made when it is first asked for."""

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        self._descriptor = descriptor
        self._size_bytes = size_bytes
        # Of files of others the kernel says that all of it is in memory, whatever is.
        self._told = os.geteuid() in (0, os.fstat(descriptor).st_uid)
        self._bytes: npt.NDArray[np.uint8] | None = None
        self._address = 0

    def bytes_in_memory(self, offset: int, size_bytes: int) -> npt.NDArray[np.uint8] | None:
        """Return bytes of the file if all of them are in memory and the file has its size."""
        mincore = _mincore()
        if mincore is None or not self._told:
            return None
        if os.fstat(self._descriptor).st_size != self._size_bytes:
            return None
        if self._bytes is None:
            try:
                mapped = mmap.mmap(self._descriptor, self._size_bytes, prot=mmap.PROT_READ)
            except (OSError, ValueError):  # a filesystem without mappings, or no address space
                return None
            self._bytes = np.frombuffer(mapped, np.uint8)
            self._address = self._bytes.ctypes.data
        first = offset // _PAGE_BYTES * _PAGE_BYTES
        last = offset + size_bytes
        pages = scratch("pages", -(-(last - first) // _PAGE_BYTES))
        found = mincore(self._address + first, last - first, pages.ctypes.data)
        if found != 0 or not (pages & 1).all():
            return None
        return self._bytes[offset:last]


@functools.cache
def _mincore() -> Any:
    """Return the system call that says which pages are in memory, or None where there is none."""
    try:
        mincore = ctypes.CDLL(None).mincore
    except (OSError, AttributeError):
        return None
    mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    return mincore
