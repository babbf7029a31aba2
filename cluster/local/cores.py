"""How one machine divides its cores between a target and a draft model.

A core given to the drafter is a core taken from the target. There are three ways:

- *split*: the drafter has a core of its own and the target all others. Drafting overlaps with verification, so a
  cycle takes as long as the longer of the two.
- *shared*: both compute with all cores. Then they take turns for them, whatever the schedule, so a cycle takes the sum.
- *in turn*: the draft model is in the target's process and drafts before each step. A cycle takes the sum as well, but
  no core is given away, and none of the drafts is made before the outcome is known that it depends on.

With K drafts to a step, each kept with probability a, a cycle brings tokens(K) = (1 - a^(K+1)) / (1 - a) tokens
(Leviathan et al., 2023, equation 1). So

    split     tokens(K) / max(T_target(1 + K), K * T_draft)     target on cores - 1, drafter on 1
    shared    tokens(K) / (T_target(1 + K) + K * T_draft)       both on all cores
    in turn   tokens(K) / (T_target(1 + K) + K * T_draft)       one process, on all cores or on cores - 1

are compared, each at its best K; K = 0, plain decoding, is a candidate. How often drafts will be kept is not known
before anything is served: a is assumed, see :data:`ACCEPTANCE`. All cores have to promise clearly more than fewer, see
:data:`MARGIN`. Pure: knows neither models nor clocks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ACCEPTANCE = 0.8
"""The chance that a draft token is kept, assumed."""
MARGIN = 1.15
"""How many times the speed of fewer cores a step on all of them has to promise. Its threads wait for the slowest one
of them, so what else runs on the cores, the router to begin with, delays such steps most. On two cores of an AMD EPYC a
promise of 1.06 came out as 0.98, and for plain decoding one of 1.14 as 0.75."""
DRAFTS = (0, 2, 4, 8)
"""The K that are compared."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """How long steps take with one number of threads, in milliseconds."""

    target: Mapping[int, float]
    """By K: a step of the target over one token and K drafts. Has all of :data:`DRAFTS`."""
    draft: float
    """A step of the drafter over one token."""

    def __post_init__(self) -> None:
        missing = set(DRAFTS) - self.target.keys()
        if missing:
            raise ValueError(f"no time of a step with {sorted(missing)} drafts")
        for time in (*self.target.values(), self.draft):
            if not 0 < time < math.inf:  # so that nan is refused as well
                raise ValueError(f"a step takes a positive time, not {time} ms")


Measured = Mapping[int, StepTimes]
"""By number of threads, those of :func:`thread_counts`."""


@dataclass(frozen=True, slots=True)
class CoreDivision:
    """Threads of each worker, and the speed in tokens a millisecond that they promise, if it is known."""

    target: int
    draft: int
    """0: the draft model is in the target's process."""
    speed: float = 0.0

    def __str__(self) -> str:
        if not self.draft:
            return f"{self.target} for the target and its draft model, which take turns"
        how = ", which both share" if self.draft > 1 else ""
        return f"{self.target} for the target, {self.draft} for the drafter{how}"


def thread_counts(cores: int) -> tuple[int, ...]:
    """The numbers of threads whose step times are needed."""
    return tuple(sorted({1, cores - 1, cores} - {0}))


def divide(cores: int, measured: Measured) -> CoreDivision:
    """The better of the two ways with a worker for each model. ``measured`` holds the :func:`thread_counts`."""
    assert cores >= 2, f"{cores} cores cannot be divided"
    apart, alone = measured[cores - 1].target, measured[1].draft
    split = max(tokens(k) / max(apart[k], k * alone) for k in DRAFTS)
    shared = _taking_turns(measured[cores])
    return CoreDivision(cores, cores, shared) if shared > MARGIN * split else CoreDivision(cores - 1, 1, split)


def in_turn(cores: int, measured: Measured) -> CoreDivision:
    """For a draft model in the target's process: all of the cores where that clearly pays.

    ``measured`` as in :func:`divide`. With fewer, routers have what is left.
    """
    speeds = {threads: _taking_turns(measured[threads]) for threads in thread_counts(cores)}
    fewer = max((threads for threads in speeds if threads < cores), key=speeds.__getitem__)
    threads = cores if speeds[cores] > MARGIN * speeds[fewer] else fewer
    return CoreDivision(threads, 0, speeds[threads])


def fastest(cores: int, measured: Measured) -> CoreDivision:
    """The best of all three ways. ``measured`` as in :func:`divide`."""
    return max(in_turn(cores, measured), divide(cores, measured), key=lambda division: division.speed)


def _taking_turns(times: StepTimes) -> float:
    return max(tokens(k) / (times.target[k] + k * times.draft) for k in DRAFTS)


def tokens(drafts: int) -> float:
    """Tokens that a step over so many drafts brings, in the mean."""
    return (1 - ACCEPTANCE ** (drafts + 1)) / (1 - ACCEPTANCE)


def encoded(measured: Measured) -> dict[str, Any]:
    """As JSON has it; see :func:`decoded`."""
    return {str(threads): {"target": dict(times.target), "draft": times.draft} for threads, times in measured.items()}


def decoded(value: Any, cores: int) -> Measured:
    """What :func:`encoded` made, after its way through JSON. Raises ValueError if that is not what it is."""
    try:
        measured = {
            int(threads): StepTimes({int(k): float(time) for k, time in times["target"].items()}, float(times["draft"]))
            for threads, times in value.items()
        }
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"not step times: {error!r}") from error
    missing = set(thread_counts(cores)) - measured.keys()
    if missing:
        raise ValueError(f"no step times with {sorted(missing)} threads")
    return measured
