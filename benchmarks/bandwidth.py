"""How fast a core reads memory, and how measurements share it.

A step of decoding reads every weight once, so it cannot be faster than the same core reads as many bytes. What the core
can read is measured in several ways over a buffer that no cache holds, in turn with the steps it is compared with, so
that whatever else the machine does slows both.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from random import Random

import torch

from engine.huge_pages import collapse

SEED = 0
TRIES = 4
"""How often a step is timed in a round, one after the other as in decoding. The fastest counts, as it does of reads."""
Work = Callable[[], object]


def reads(size: int) -> dict[str, Work]:
    """Ways to read a buffer of ``size`` bytes once."""
    # Written to, because memory that never was is backed by a single page of zeros.
    bytes_S = torch.ones(size, dtype=torch.uint8)
    collapse(bytes_S.data_ptr(), size)  # as the weights are, or the floor would be too easy
    floats_S = bytes_S.view(torch.float32)
    integers_S = bytes_S.view(torch.int64)
    return {
        "sum int64": integers_S.sum,
        "sum float32": floats_S.sum,
        "max uint8": bytes_S.amax,
        "dot float32": lambda: torch.dot(floats_S, floats_S),
    }


def in_turn(
    works: Mapping[str, Work], rounds: int, warm_up: int = 1, tries: Mapping[str, int] | None = None
) -> dict[str, list[float]]:
    """Seconds of every work in every round, the fastest of its ``tries`` (1 if not named).

    The order is another one in every round, so that none has a best place.
    """
    order, shuffle = list(works), Random(SEED).shuffle
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for number in range(warm_up + rounds):
        shuffle(order)
        for name in order:
            fastest = min(_timed(works[name]) for _ in range((tries or {}).get(name, 1)))
            if number >= warm_up:
                seconds[name].append(fastest)
    return seconds


def _timed(work: Work) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


@contextmanager
def pinned(cores: int) -> Iterator[None]:
    """Keep this thread, and those it starts meanwhile, on the first usable cores. Where that cannot be: nothing."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    usable = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(usable)[:cores])
    try:
        yield
    finally:
        os.sched_setaffinity(0, usable)
