"""A simulated fleet under a trace: targets, drafters and routers that come and go, in steps of a tenth of a second.

Requests are counted one by one, tokens flow: in each tick a target takes as many steps as fit, of the cost that
:class:`simulation.costs.Costs` gives them. Prompts share its steps with running text as in
:mod:`target_service.scheduler`. A replica takes its time to start; one that is taken away hands its sessions over,
which compute their tokens again elsewhere. Drafters are as good as one: their work is spread evenly.

What drafting is worth there are averages, where :mod:`simulation.simulate` draws and compares tokens: a draft token is
kept with the chance ``alpha`` if all before it were. The rules are those that serve, in small: a target verifies as
many drafts as make the most tokens a second, and asks for no lead when that is none; else for a lead whose last token
still has a fair chance (:mod:`speculation.verifying.payoff`).

Knows nothing of policies: :mod:`tests.scaled_run` asks it for reports and resizes its pools.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from random import Random

from simulation.costs import Costs, expected_tokens
from speculation.demand import DraftDemand, RouterDemand, TargetDemand
from speculation.verifying.payoff import FAIR_CHANCE

TICK = 0.1
STRETCH = 2.0
"""How many times as long as alone a step of running text may take for the sake of prompts ..."""
STRETCH_SECONDS = 0.05
"""... or how long, if that is more."""
MIN_PREFILL = 16
"""Prompt tokens that any step takes."""
MAX_PLACES = 64
"""Of a drafter's step."""


MAX_LOOKAHEAD = 48
PROMPT, OUTPUT = 400.0, 200.0
"""Tokens of made-up requests: the median of a log-normal distribution."""
SPREAD = 0.7


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request."""

    at: float
    """Seconds since the start of the trace."""
    prompt: int
    """Tokens, as is ``output``; at least 1."""
    output: int


@dataclass(frozen=True, slots=True)
class FleetLimits:
    """What one target has room for, and how long replicas take to start."""

    places: int = 64
    cache_tokens: int = 200_000
    step_tokens: int = 320
    prompt_tokens: int = 1024
    """Of a step in which no text runs, if more."""
    target_start: float = 60.0
    draft_start: float = 20.0
    router_start: float = 5.0


@dataclass(eq=False, slots=True)
class FleetRequest:
    """One under way."""

    arrival: Arrival
    to_compute: float
    """Tokens that are not in the cache of its target."""
    produced: float = 0.0
    first_at: float | None = None
    """When its first token came."""

    @property
    def wait(self) -> float:
        """Seconds until its first token came."""
        assert self.first_at is not None, "asked of those that are done"
        return self.first_at - self.arrival.at

    @property
    def held(self) -> float:
        """Tokens it has, computed or not."""
        return self.arrival.prompt + self.produced


@dataclass(eq=False, slots=True)
class FleetTarget:
    """One target worker."""

    ready_at: float
    running: list[FleetRequest] = field(default_factory=list)
    waiting: deque[FleetRequest] = field(default_factory=deque)
    busy: float = 0.0
    """Seconds, of the last tick."""
    step: float = 0.0
    """Seconds of a step, in the last tick; 0 if there was none."""
    decoding: int = 0
    """Sessions of such a step that were past their prompt."""

    @property
    def sessions(self) -> int:
        """Running and waiting."""
        return len(self.running) + len(self.waiting)


@dataclass(slots=True)
class Starting:
    """A pool whose replicas are all alike: when each of them is there."""

    ready_at: list[float]

    def running(self, now: float) -> int:
        """How many are there."""
        return bisect_right(self.ready_at, now)


class Fleet:
    """All replicas, and the requests they work on."""

    def __init__(self, costs: Costs, speculating: Speculating, limits: FleetLimits, sizes: Mapping[str, int]) -> None:
        """``sizes``: replicas of each pool that are there from the start; at least one target."""
        assert sizes["target"], "requests need a target"
        self.now = 0.0
        self.finished: list[FleetRequest] = []
        self.targets = [FleetTarget(0.0) for _ in range(sizes["target"])]
        self.drafters, self.routers = Starting([0.0] * sizes["draft"]), Starting([0.0] * sizes["router"])
        self.speed = limits.step_tokens / costs.verify_seconds(1, limits.step_tokens)
        """Prompt tokens a second of a target that does nothing else."""
        self._costs, self._speculating, self._limits = costs, speculating, limits
        self._delivery = 0.0
        """Share of the lead asked for that is there."""
        self._computed = 0.0
        """Prompt tokens computed and tokens committed since the start."""
        self._drafted = DraftDemand()

    # -- reports -------------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> list[FleetTarget]:
        """Targets that are there."""
        return [target for target in self.targets if target.ready_at <= self.now]

    @property
    def requests(self) -> Iterator[FleetRequest]:
        """Under way."""
        return (request for target in self.targets for request in (*target.running, *target.waiting))

    @property
    def streams(self) -> int:
        """How many."""
        return sum(target.sessions for target in self.targets)

    def target_report(self) -> TargetDemand:
        """What all targets together say of their work."""
        running = [request for target in self.ready for request in target.running]
        return TargetDemand(
            queued_tokens=sum(request.to_compute for request in self.requests),
            running_tokens=sum(request.held for request in running),
            sessions=self.streams,
            computed=self._computed,
        )

    def equipped(self, report: TargetDemand) -> TargetDemand:
        """The same of one target, with what it can do."""
        limits = self._limits
        return replace(report, capacity_tokens=limits.cache_tokens, places=limits.places, speed=self.speed)

    def draft_report(self) -> DraftDemand:
        """What all drafters together say."""
        return self._drafted

    def router_report(self) -> RouterDemand:
        """What all routers together say. Without drafters nobody knows whether targets would want them."""
        if not self.drafters.running(self.now):
            return RouterDemand(self.streams, undrafted=self.streams if self._speculating.allowed else 0)
        wanted = self._speculating.wanted
        resting = [target for target in self.targets if target.decoding and not wanted(target.decoding).lead]
        return RouterDemand(self.streams, resting=sum(target.sessions for target in resting))

    # -- sizes ---------------------------------------------------------------------------------------------------------

    def resize(self, pool: str, replicas: int) -> None:
        """Start replicas of ``target``, ``draft`` or ``router``, or take some away: those not there yet first."""
        if pool == "target":
            self._resize_targets(replicas)
            return
        held, start = (
            (self.drafters, self._limits.draft_start) if pool == "draft" else (self.routers, self._limits.router_start)
        )
        missing = replicas - len(held.ready_at)
        held.ready_at = [*held.ready_at, *[self.now + start] * missing][:replicas]

    def _resize_targets(self, replicas: int) -> None:
        missing = replicas - len(self.targets)
        self.targets += [FleetTarget(self.now + self._limits.target_start) for _ in range(missing)]
        for target in sorted(self.targets, key=lambda one: (one.ready_at <= self.now, one.sessions))[
            : max(-missing, 0)
        ]:
            self.targets.remove(target)
            for request in (*target.running, *target.waiting):
                request.to_compute = request.held
                self._place(request)

    # -- work ----------------------------------------------------------------------------------------------------------

    def open(self, arrival: Arrival) -> None:
        """A request comes."""
        self._place(FleetRequest(arrival, arrival.prompt))

    def _place(self, request: FleetRequest) -> None:
        min(self.ready or self.targets, key=lambda target: target.sessions).waiting.append(request)

    def tick(self, speedup: float = 1.0) -> None:
        """Let :data:`TICK` seconds pass, in which steps take ``1 / speedup`` of what they cost."""
        self.now += TICK
        for target in self.ready:
            self._work(target, TICK * speedup)
        self._draft()

    def _work(self, target: FleetTarget, seconds: float) -> None:
        self._admit(target)
        decoding = [request for request in target.running if request.to_compute <= 0]
        prompts = [request for request in target.running if request.to_compute > 0]
        target.decoding = len(decoding)
        if not target.running:
            target.busy = target.step = 0.0
            return
        drafts = 0.0
        if decoding:
            drafting = self._speculating.wanted(len(decoding))
            drafts = min(drafting.verified, self._delivery * drafting.lead)
        tokens = round(len(decoding) * (1 + drafts))
        fed = self._fed(len(decoding), tokens, sum(request.to_compute for request in prompts))
        target.step = self._costs.verify_seconds(max(len(decoding), 1), max(tokens + round(fed), 1))
        steps = seconds / target.step
        target.busy = TICK
        taken = self._prefill(prompts, steps * fed)
        committed = steps * self._speculating.committed(drafts)
        self._computed += taken + len(decoding) * committed
        for request in decoding:
            request.produced += committed
        for request in [request for request in decoding if request.produced >= request.arrival.output]:
            target.running.remove(request)
            self.finished.append(request)

    def _admit(self, target: FleetTarget) -> None:
        """Start waiting requests while there are places, and room in the cache."""
        room = self._limits.cache_tokens - sum(request.held for request in target.running)
        while target.waiting and len(target.running) < self._limits.places:
            room -= target.waiting[0].held
            if target.running and room < 0:
                return
            target.running.append(target.waiting.popleft())

    def _fed(self, decoding: int, tokens: int, queued: float) -> float:
        """Prompt tokens that a step takes beside what is decoded."""
        limits = self._limits
        if not decoding:
            return min(max(limits.step_tokens, limits.prompt_tokens), queued)
        max_tokens = min(limits.step_tokens - min(tokens, limits.step_tokens // 2), queued)
        if max_tokens <= MIN_PREFILL:
            return max(max_tokens, 0.0)
        alone = self._costs.verify_seconds(decoding, tokens)
        patience = max(STRETCH * alone, STRETCH_SECONDS)
        sizes = range(MIN_PREFILL, int(max_tokens) + 1)
        fitting = bisect_right(sizes, patience, key=lambda fed: self._costs.verify_seconds(decoding, tokens + fed))
        return float(sizes[max(fitting - 1, 0)])

    def _prefill(self, prompts: list[FleetRequest], max_tokens: float) -> float:
        """Compute prompts, up to so many tokens; returns how many there were."""
        left = max_tokens
        for request in prompts:
            taken = min(request.to_compute, left)
            request.to_compute -= taken
            left -= taken
            if request.to_compute <= 0 and request.first_at is None:
                request.first_at, request.produced = self.now, 1.0
        return max_tokens - left

    def _draft(self) -> None:
        """Divide what drafters can do among all sessions; the next tick verifies what comes of it."""
        asked = needed = sessions = 0.0
        for target in self.targets:
            drafting = self._speculating.wanted(target.decoding) if target.decoding and target.step else None
            if drafting is not None and drafting.lead:
                verifications = target.decoding * TICK / target.step
                asked += verifications * drafting.lead
                needed += verifications * self._speculating.places(drafting)
                sessions += target.decoding
        drafters = self.drafters.running(self.now)
        if not drafters or not needed:
            self._delivery = 0.0
            return
        together = min(max(round(sessions / drafters), 1), MAX_PLACES)
        able = drafters * together / self._costs.draft(together) * TICK
        self._delivery = min(able / needed, 1.0)
        self._drafted = DraftDemand(
            asked=self._drafted.asked + asked,
            delivered=self._drafted.delivered + asked * self._delivery,
            busy=self._drafted.busy + drafters * TICK * min(needed / able, 1.0),
        )


@dataclass(frozen=True, slots=True)
class DraftingPlan:
    """What a target wants of drafters while it decodes so many sessions."""

    lead: int
    """Tokens; 0: nothing."""
    verified: int
    """Draft tokens a step for every session, if they are there."""


class Speculating:
    """What drafting is worth in one set-up: how much is verified, how far drafters run ahead, what that costs them."""

    def __init__(self, costs: Costs, alpha: float, max_lookahead: int) -> None:
        """``max_lookahead``: draft tokens verified for a session in one step; 0: requests ask for no drafts."""
        self.allowed = max_lookahead > 0
        self._costs, self._alpha, self._max_lookahead = costs, min(alpha, 0.99), max_lookahead
        self.wanted = cache(self._wanted)

    def committed(self, drafts: float) -> float:
        """Tokens that a step commits for a session that verifies so many drafts."""
        return expected_tokens(self._alpha, drafts)

    def _wanted(self, sessions: int) -> DraftingPlan:
        """For a step of so many sessions that decode."""

        def rate(drafts: int) -> float:
            return self.committed(drafts) / self._costs.verify_seconds(sessions, sessions * (1 + drafts))

        best = max(range(self._max_lookahead + 1), key=rate)
        if not best or not self._alpha:
            return DraftingPlan(0, 0)
        return DraftingPlan(min(math.ceil(math.log(FAIR_CHANCE) / math.log(self._alpha)), MAX_LOOKAHEAD), best)

    def places(self, drafting: DraftingPlan) -> float:
        """Places that a drafter expands for each verification to keep the lead: all of it after a refusal."""
        refused = 1.0 - float(self._alpha**drafting.verified)
        return refused * drafting.lead + self.committed(drafting.verified)


# -- made up -----------------------------------------------------------------------------------------------------------

Rate = Callable[[float], float]
"""Requests a second, by the time as a share of the trace."""

HIGHEST_RATE = 12.0

MADE_UP: Mapping[str, tuple[float, Rate]] = {
    "steady": (1200.0, lambda _: 6.0),
    "ramp": (1200.0, lambda x: HIGHEST_RATE * max(1.0 - abs(2.0 * x - 1.0), 0.0)),
    "burst": (1200.0, lambda x: HIGHEST_RATE if 0.2 <= x < 0.35 else 1.0),
    "day": (7200.0, lambda x: 4.0 * (1.0 - math.cos(2.0 * math.pi * x))),
}
"""Seconds and rate by name: as even as chance allows; up from nothing and back; a sudden rush; a day in two hours."""


def made_up(name: str, rng: Random, scale: float = 1.0) -> list[Arrival]:
    """A trace of :data:`MADE_UP`, with ``scale`` times as many requests: a Poisson process of that rate."""
    seconds, rate = MADE_UP[name]
    found: list[Arrival] = []
    at = 0.0
    while (at := at + rng.expovariate(HIGHEST_RATE * scale)) < seconds:
        if rng.random() * HIGHEST_RATE < rate(at / seconds):
            found.append(Arrival(at, _length(rng, PROMPT), _length(rng, OUTPUT)))
    return found


def _length(rng: Random, median: float) -> int:
    return max(round(median * rng.lognormvariate(0.0, SPREAD)), 1)


def seconds_of(arrivals: Sequence[Arrival]) -> float:
    """How long a trace lasts: until its last request comes."""
    return arrivals[-1].at if arrivals else 0.0
