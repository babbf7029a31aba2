"""The policies on a simulated fleet: what they would have done under a trace, what requests had to wait, what it cost.

The decisions are taken by the code that serves (:mod:`cluster.autoscaling.policy` and ``hysteresis``), from reports
averaged as Ray Serve averages them. The fleet is :mod:`tests.scaled_fleet`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields
from itertools import pairwise
from math import inf
from random import Random
from typing import TypeVar

from cluster.autoscaling import policy
from cluster.autoscaling.hysteresis import HoldReason, ScaledPool, State, steer
from cluster.autoscaling.policy import DesiredReplicas
from cluster.config.config import AutoscalingConfig
from simulation.costs import Costs
from speculation.demand import PRESENT, TOTALS, DraftDemand, RouterDemand, TargetDemand
from tests.scaled_fleet import TICK, Arrival, Fleet, FleetLimits, FleetRequest, Speculating, seconds_of

POOLS = ("target", "draft", "router")
LONGEST_TAIL = 3600.0
"""Seconds after the last arrival in which all must be done."""

Steer = Callable[[float, ScaledPool, DesiredReplicas, State, AutoscalingConfig], tuple[int, HoldReason, State]]


@dataclass(frozen=True, slots=True)
class Size:
    """How many replicas a pool may have; it begins with the least."""

    min_replicas: int
    max_replicas: int


@dataclass(frozen=True, slots=True)
class Setup:
    """What is simulated."""

    costs: Costs
    acceptance: float
    sizes: Mapping[str, Size]
    """By the names of :data:`POOLS`."""
    settings: AutoscalingConfig = AutoscalingConfig()
    limits: FleetLimits = FleetLimits()
    max_draft: int = 12
    """0: requests ask for no drafts."""
    tail: float = 0.0
    """Seconds to go on for when all is done, to see pools shrink."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Change:
    """A decision that changed a pool."""

    at: float
    pool: str
    before: int
    replicas: int
    wanted: DesiredReplicas


@dataclass(frozen=True, slots=True)
class Sample:
    """The fleet at one moment."""

    at: float
    streams: int
    running: Mapping[str, int]
    """Replicas that are there, by pool."""
    replicas: Mapping[str, int]
    """Those that are paid for: also while they start."""
    queued_tokens: float
    busy: float
    """Share of the targets that compute."""


@dataclass(slots=True)
class ScalingOutcome:
    """A simulated run."""

    samples: list[Sample] = field(default_factory=list)
    """One for every second; of a run of less than one, one at its end."""
    changes: list[Change] = field(default_factory=list)
    finished: list[FleetRequest] = field(default_factory=list)
    unfinished: list[FleetRequest] = field(default_factory=list)
    """Still under way when the run was ended, :data:`LONGEST_TAIL` after the last came."""
    ended: float = 0.0

    def waits(self, start: float = 0.0, end: float = inf) -> list[float]:
        """Seconds until the first token, of all requests that came in that time; of those without one, until the end.

        So a wait that was not over counts as less than it would have become.
        """
        return [
            (self.ended if one.first_at is None else one.first_at) - one.arrival.at
            for one in (*self.finished, *self.unfinished)
            if start <= one.arrival.at < end
        ]

    def reversals(self, within: float) -> list[tuple[Change, Change]]:
        """Changes of a pool that were taken back within so many seconds: signs of flapping."""
        found = []
        for pool in POOLS:
            changes = [change for change in self.changes if change.pool == pool]
            for first, then in pairwise(changes):
                opposite = (first.replicas > first.before) != (then.replicas > then.before)
                if opposite and then.at - first.at < within:
                    found.append((first, then))
        return found


def simulate(arrivals: Sequence[Arrival], setup: Setup, steering: Steer = steer) -> ScalingOutcome:
    """Run until all requests are done, then for ``setup.tail`` seconds more. Those not done in time are given up."""
    return _ScalingRun(arrivals, setup, steering).run()


class _ScalingRun:
    def __init__(self, arrivals: Sequence[Arrival], setup: Setup, steering: Steer) -> None:
        self._replicas = {pool: setup.sizes[pool].min_replicas for pool in POOLS}
        self._setup, self._steer = setup, steering
        self._coming = deque(arrivals)
        self._deadline = seconds_of(arrivals) + LONGEST_TAIL
        self._rng = Random(setup.seed)
        speculating = Speculating(setup.costs, setup.acceptance, setup.max_draft)
        self._fleet = Fleet(setup.costs, speculating, setup.limits, self._replicas)
        self._states = dict.fromkeys(POOLS, State())
        self._reports = _Reports(self._fleet, setup.settings)
        self._outcome = ScalingOutcome()

    def run(self) -> ScalingOutcome:
        fleet, settings = self._fleet, self._setup.settings
        every = max(round(settings.interval_s / TICK), 1)
        ticks, done_at = 0, None
        while done_at is None or fleet.now < done_at + self._setup.tail:
            while self._coming and self._coming[0].at <= fleet.now:
                fleet.open(self._coming.popleft())
            fleet.tick(self._speedup())
            ticks += 1
            if ticks % round(1 / TICK) == 0:
                self._outcome.samples.append(self._sample())
            if ticks % every == 0:
                self._decide()
            if done_at is None and not self._coming and not fleet.streams:
                done_at = fleet.now
            elif done_at is None and fleet.now > self._deadline:
                break
        self._outcome.finished, self._outcome.unfinished = fleet.finished, list(fleet.requests)
        self._outcome.ended = fleet.now
        if not self._outcome.samples:
            self._outcome.samples.append(self._sample())
        return self._outcome

    def _speedup(self) -> float:
        """Steps do not always take the same."""
        jitter = self._setup.costs.jitter
        return self._rng.lognormvariate(-(jitter**2) / 2, jitter) if jitter else 1.0

    def _decide(self) -> None:
        now, settings = self._fleet.now, self._setup.settings
        self._reports.add()
        running = self._running()
        for pool, wanted in self._reports.wanted().items():
            size = self._setup.sizes[pool]
            before = self._replicas[pool]
            known = ScaledPool(before, running[pool], size.min_replicas, size.max_replicas)
            replicas, _, self._states[pool] = self._steer(now, known, wanted, self._states[pool], settings)
            if replicas != before:
                self._outcome.changes.append(Change(now, pool, before, replicas, wanted))
                self._fleet.resize(pool, replicas)
                self._replicas[pool] = replicas

    def _running(self) -> dict[str, int]:
        fleet = self._fleet
        counts = (len(fleet.ready), fleet.drafters.running(fleet.now), fleet.routers.running(fleet.now))
        return dict(zip(POOLS, counts, strict=True))

    def _sample(self) -> Sample:
        ready = self._fleet.ready
        return Sample(
            at=self._fleet.now,
            streams=self._fleet.streams,
            running=self._running(),
            replicas=dict(self._replicas),
            queued_tokens=sum(request.to_compute for request in self._fleet.requests),
            busy=sum(target.busy for target in ready) / TICK / max(len(ready), 1),
        )


class _Reports:
    """What replicas report, averaged over ``window_s`` and spread evenly over those of a pool that are there now."""

    def __init__(self, fleet: Fleet, settings: AutoscalingConfig) -> None:
        self._fleet, self._settings = fleet, settings
        kept = max(round(settings.window_s / settings.interval_s), 1)
        self._heard: deque[tuple[float, TargetDemand, DraftDemand, RouterDemand]] = deque(maxlen=kept + 1)
        self.add()

    def add(self) -> None:
        """Hear all replicas."""
        fleet = self._fleet
        self._heard.append((fleet.now, fleet.target_report(), fleet.draft_report(), fleet.router_report()))

    def wanted(self) -> dict[str, DesiredReplicas]:
        """What the policies make of it, by pool."""
        times, *heard = zip(*self._heard, strict=True)
        now, settings, seconds = self._fleet.now, self._settings, times[-1] - times[0]
        counts = (len(self._fleet.ready), self._fleet.drafters.running(now), self._fleet.routers.running(now))
        targets, drafters, routers = (
            [_average(moments, seconds, count, PRESENT if counts[1] else frozenset())] * count
            for moments, count in zip(heard, counts, strict=True)
        )
        return {
            "target": policy.targets([self._fleet.equipped(one) for one in targets], settings),
            "draft": policy.drafters(drafters, routers, settings),
            "router": policy.routers(routers, settings),
        }


Demand = TypeVar("Demand", TargetDemand, DraftDemand, RouterDemand)


def _average(moments: Sequence[Demand], seconds: float, replicas: int, present: Set[str]) -> Demand:
    """One of so many ``replicas`` which together reported ``moments``: totals as their growth a second.

    Of what is ``present``, no more than the last figure.
    """

    def figure(name: str) -> float:
        values = [float(getattr(moment, name)) for moment in moments]
        if name in TOTALS:
            return (values[-1] - values[0]) / seconds / max(replicas, 1)
        mean = sum(values) / len(values)
        return (min(mean, values[-1]) if name in present else mean) / max(replicas, 1)

    return type(moments[0])(**{entry.name: figure(entry.name) for entry in fields(moments[0])})
