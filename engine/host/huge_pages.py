"""Memory in pages of 2 MB, where the operating system gives them.

A step reads every weight once, in order. With pages of 4 KB the processor looks up a new one for every 64 lines, and
its prefetcher stops at the end of each; in huge pages the same products run some percent faster. Linux makes them of
memory that is there already (madvise(2), MADV_COLLAPSE, from 6.1 on), so nothing is allocated or rounded up for it.

Decides nothing: it asks, and where the answer is no the memory stays as it is.
"""

from __future__ import annotations

import ctypes
import mmap
import sys

HUGE = 2 << 20
"""Bytes of a huge page: on x86-64, and on arm64 with pages of 4 KB."""

MADV_COLLAPSE = 25
"""As in Linux's ``mman-common.h``; Python's mmap module does not know it."""


def collapse(address: int, size: int) -> int:
    """Ask for huge pages, as far as whole ones fit into ``size`` bytes at ``address``; return how many bytes got them.

    What the memory holds does not change; what of it was never written to is taken up by zeros.
    """
    first, end = -(-address // HUGE) * HUGE, (address + size) // HUGE * HUGE
    if sys.platform != "linux" or mmap.PAGESIZE > 4096 or end <= first:
        return 0
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    refused: int = madvise(first, end - first, MADV_COLLAPSE)
    return 0 if refused else end - first
