"""What the workers' step records say: pipeline efficiency, where the time of a step goes, acceptance by depth.

A worker started with ``--record FILE`` writes one JSON line a step. Target, drafter and benchmark read the same
monotonic clock, so a step belongs to a run when it ended within it. Only this module knows the format.

Pipeline efficiency compares the pace with that of a target that does nothing but verify: tokens a second over
(tokens a verification / T), where T(n) is the mean time of the forward of a step that verifies n draft tokens. With
the tokens cancelled it is the sum of T over the steps of the run, divided by the run's duration.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from simulation.recorded import Line

Span = tuple[float, float]
"""A stretch of time: a wait of the target, or a step of the drafter."""


@dataclass(frozen=True, slots=True)
class WorkerLog:
    """What the workers recorded; times in seconds."""

    steps: tuple[Line, ...] = ()
    """Of the target: planning, forward, sampling and acceptance."""
    waits: tuple[Span, ...] = ()
    """When the target waited for drafts although it could have gone on."""
    drafting: tuple[Span, ...] = ()

    def during(self, start: float, end: float) -> WorkerLog:
        """What ended within a run. The step that brought the run's first tokens ended before it."""
        return WorkerLog(
            tuple(step for step in self.steps if start < step["end"] <= end),
            tuple(wait for wait in self.waits if start < wait[1] <= end),
            tuple((began, ended) for began, ended in self.drafting if start < ended and began < end),
        )


def read_log(paths: Iterable[Path]) -> WorkerLog:
    """The records of all workers. A line cut short, by ``kill -9`` say, ends its file."""
    steps: list[Line] = []
    waits: list[Span] = []
    drafting: list[Span] = []
    for path in paths:
        texts = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        for line in (json.loads(text) for text in texts if text.endswith("\n")):
            if line["role"] == "draft":
                drafting.append((line["start"], line["end"]))
            elif "wait" in line:
                waits.append(tuple(line["wait"]))
            else:
                steps.append(line)
    return WorkerLog(tuple(steps), tuple(waits), tuple(drafting))


def offered(step: Line) -> int:
    """Draft tokens verified."""
    return sum(session["offered"] for session in step["sessions"])


def verify_seconds(steps: Iterable[Line]) -> dict[int, float]:
    """T(n): mean seconds of the forward of a step that verifies n draft tokens, for every n that occurred."""
    by_size: defaultdict[int, list[float]] = defaultdict(list)
    for step in steps:
        by_size[offered(step)].append(step["forward"])
    return {size: fmean(seconds) for size, seconds in sorted(by_size.items())}


def efficiency(steps: Sequence[Line], seconds_by_size: Mapping[int, float], wall: float) -> float:
    """Share of the run's ``wall`` seconds that verification itself would have taken; 1: a target that never waits."""
    return sum(seconds_by_size[offered(step)] for step in steps) / wall


@dataclass(frozen=True, slots=True)
class Profile:
    """Where the time goes: mean milliseconds for each step of the target. Forward, own, wait and between are all."""

    steps: int
    forward_ms: float
    own_ms: float
    """The rest of a step: planning, sampling, acceptance, cache."""
    wait_ms: float
    """Waits for drafts, which all schedules bound."""
    longest_wait_ms: float
    """Of a single one. A wait that ran into its bound tells that a contender was not at its best."""
    between_ms: float
    """Neither step nor wait: messages on their way."""
    draft_busy: float
    """Share of the time in which the drafter computed."""

    @property
    def own_share(self) -> float:
        """Share of a step that is not the model."""
        return self.own_ms / (self.own_ms + self.forward_ms)


def profile(parts: Sequence[tuple[WorkerLog, float, float]]) -> Profile | None:
    """Profile of runs, each given as its log, start and end; None if there were no steps."""
    steps = [step for log, _, _ in parts for step in log.steps]
    if not steps:
        return None
    wall = sum(end - start for _, start, end in parts)
    forward = sum(step["forward"] for step in steps)
    own = sum(step["end"] - step["start"] for step in steps) - forward
    waits = [ended - began for log, _, _ in parts for began, ended in log.waits]
    wait = sum(waits)
    busy = sum(min(ended, end) - max(began, start) for log, start, end in parts for began, ended in log.drafting)
    between = max(wall - forward - own - wait, 0.0)
    forward, own, wait, between = (1000 * seconds / len(steps) for seconds in (forward, own, wait, between))
    return Profile(len(steps), forward, own, wait, 1000 * max(waits, default=0.0), between, busy / wall)


@dataclass(frozen=True, slots=True)
class Depth:
    """How drafts of one depth fared."""

    depth: int
    tried: int
    """Steps that kept everything above and had something to offer at this depth."""
    kept: int


def acceptance_by_depth(steps: Iterable[Line]) -> tuple[Depth, ...]:
    """What was tried and kept at every depth, from 1."""
    tried: defaultdict[int, int] = defaultdict(int)
    kept: defaultdict[int, int] = defaultdict(int)
    for session in (session for step in steps for session in step["sessions"]):
        for depth in set(session["depths"]):  # 1 hangs from the committed prefix
            # Of a tree, one path at most is kept, and it ends at the depth of what was accepted.
            tried[depth] += session["accepted"] >= depth - 1
            kept[depth] += session["accepted"] >= depth
    return tuple(Depth(depth, tried[depth], kept[depth]) for depth in sorted(tried) if tried[depth])
