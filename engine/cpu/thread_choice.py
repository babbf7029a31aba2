"""With how many threads each C++ step is computed: few, or all that the worker may use.

A worker that has the machine, or shares it with a draft worker that leaves its core idle for most of the time, gains
from more threads in steps of many rows, which are bound by arithmetic. Whether it does depends on what else runs at the
moment, so it is measured as it goes. No bit of a result depends on it.

A worker has one thread by default: several usually share a machine, and threads that outnumber the cores make every
step slower for all of them. One with the machine to itself passes ``threads`` to :func:`engine.loading.loader.load`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

MIN_ROWS = 8
"""Of a step that more threads are tried for: fewer take as long as reading the weights, of which one core does most."""
SMOOTHING, SHORTER = 0.25, 0.75
"""Weight of a new measurement, and of one that is shorter than expected: what disturbs a step makes it longer."""
PROBE_AFTER, MAX_PROBE_AFTER = 16, 1024
"""Steps of a size after which the slower number is tried again; twice as many each time that it is slower still."""


@dataclass(slots=True)
class ThreadCounts:
    """Of this process, as torch's own number is."""

    few: int = 1
    """Threads of a step."""
    most: int = 1
    """Threads of a step of many rows, where that is measured to be faster."""
    of_torch: bool = False
    """Whether a model of this process computes with torch's threads, and not in C++ alone."""


COUNTS = ThreadCounts()


@dataclass(slots=True)
class _Size:
    """Steps of about the same number of rows."""

    seconds: dict[int, float] = field(default_factory=dict)
    """Of a row, smoothed, by number of threads."""
    fastest: int = 0
    probe_after: int = PROBE_AFTER
    steps: int = 0


class ThreadChoice:
    """With how many threads a model computes its next step: as few as are given to it, or all."""

    def __init__(self) -> None:
        """Nothing is known."""
        self._sizes: dict[int, _Size] = {}

    def choose(self, rows: int) -> int:
        """For a step of so many rows."""
        few, most = COUNTS.few, COUNTS.most
        if rows < MIN_ROWS or few == most:
            return few
        size = self._sizes.setdefault(rows.bit_length(), _Size())
        for untried in (most, few):
            if untried not in size.seconds:
                return untried
        fastest, slower = sorted((most, few), key=size.seconds.__getitem__)
        size.steps += 1
        if size.steps <= size.probe_after:
            return fastest
        size.steps = 0
        size.probe_after = min(2 * size.probe_after, MAX_PROBE_AFTER) if fastest == size.fastest else PROBE_AFTER
        size.fastest = fastest
        return slower

    def observe(self, rows: int, threads: int, seconds: float) -> None:
        """A step took so long."""
        if (size := self._sizes.get(rows.bit_length())) is not None:
            known, new = size.seconds.get(threads), seconds / rows
            if known is None:
                size.seconds[threads] = new
            else:
                size.seconds[threads] = known + (SHORTER if new < known else SMOOTHING) * (new - known)


def set_threads(threads: int, max_threads: int = 0) -> None:
    """Set the process-wide thread count of torch and of the C++ steps.

    ``max_threads``: of C++ steps with many rows (0: as many as of others).
    """
    if threads < 1:
        raise ValueError(f"threads must be at least 1, got {threads}")
    torch.set_num_threads(threads)
    COUNTS.few, COUNTS.most = threads, max(threads, max_threads)


def leave_cores_to_steps(*, in_cpp: bool = True) -> None:
    """Have torch use one thread from now on, where every model that was loaded in this process is computed in C++.

    Two teams would meet on the same cores; then, now and then, each thread of one waits for the other's slice of time.
    ``in_cpp``: whether the model loaded last is.
    """
    COUNTS.of_torch |= not in_cpp
    if not COUNTS.of_torch:
        torch.set_num_threads(1)
