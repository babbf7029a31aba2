"""How many CPU threads one worker computes with.

One by default: several workers usually share a machine, and threads that outnumber the cores make every step slower
for all of them. A worker with the machine to itself passes ``threads`` to :func:`engine.loading.loader.load` instead.
"""

from __future__ import annotations

import torch

from engine.cpu.thread_choice import COUNTS

DEFAULT_THREADS = 1


def set_threads(threads: int | None, max_threads: int | None = None) -> int:
    """Set the process-wide thread count of torch and of the C++ steps (None: the default) and return it.

    ``max_threads``: of C++ steps with many rows (None: as many as of others).
    """
    count = DEFAULT_THREADS if threads is None else threads
    if count < 1:
        raise ValueError(f"threads must be at least 1, got {threads}")
    torch.set_num_threads(count)
    COUNTS.few, COUNTS.most = count, max(count, max_threads or 0)
    return count
