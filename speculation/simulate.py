"""How fast it decodes: a discrete-event model of targets, drafters and the network between them.

One heap, one seeded generator, virtual time. All decisions are taken by the code that serves: the target asks
:class:`speculation.planner.Planner`, sessions are :class:`speculation.target_session.TargetSession` and
:class:`speculation.draft_session.DraftSession`, drafters fill their steps by
:func:`speculation.draft_session.best_places`.
Given from outside are what steps and messages take (:mod:`speculation.costs`) and how the models agree
(:mod:`speculation.agreement`), either recorded from a real run or made up.

Left out: what prompts take, caches, the router's own work beyond the delay of a message, prompt lookup, faults (for
these see :mod:`speculation.faults`). A request's first step stands for its prompt: it verifies no drafts while the
drafter gets ahead, and the pace of a request counts from its end. Messages reach a worker between its steps, as they do
in :mod:`transport.worker`.

Checked in every run: all text is the target's own.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from random import Random

from speculation.agreement import VOCABULARY, Text
from speculation.budget import StepCost
from speculation.calibration import Calibration
from speculation.costs import Costs
from speculation.draft_session import DraftLimits, DraftSession, Outcome, Sync, best_places
from speculation.messages import (
    Limits,
    Open,
    Proposal,
    Sampling,
    Schedule,
    SessionId,
    Source,
    Speculation,
    Verification,
)
from speculation.planner import Asked, Planner
from speculation.target_session import TargetSession
from speculation.trie import Node, Offer

WITHIN = 0.03
"""Throughput this close to the best is as good as the best."""
WARM_UP = 128
"""Tokens a session before anything counts: the workers have learned by then what they cost and whom to believe."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of the workers, as in :mod:`target_service.scheduler` and :mod:`draft_service.lookahead`."""

    drafts_per_session: int = 12
    verify: int = 64
    """Most tokens of a target's step."""
    places: int = 64
    """Most places of a drafter's step."""
    draft: DraftLimits = DraftLimits()

    def drafts(self, sessions: int) -> int:
        """Room for drafts of so many sessions together in one step."""
        return max(self.verify - sessions, 0)


@dataclass(frozen=True, slots=True)
class Setting:
    """What is simulated: workers, requests that are always running, and how drafts are made."""

    schedule: Schedule | None = Schedule.TRIE
    """None: plain decoding."""
    draft_length: int = 5
    """Tokens of a draft, under the baseline schedules."""
    rtt: float = 0.0
    """Seconds from router to drafter and back, over what costs say."""
    sessions: int = 1
    """Requests at a time; when one ends, the next begins. Spread evenly over targets and over drafters."""
    targets: int = 1
    drafters: int = 1
    request_tokens: int = 128
    """At least 2: a request's pace counts from its first token."""

    def __post_init__(self) -> None:
        assert self.request_tokens > 1, "a request of one token has no pace"

    @property
    def speculation(self) -> Speculation:
        """What every request asks for."""
        if self.schedule is None:
            return Speculation(enabled=False)
        sources = frozenset({Source.DRAFT})
        if self.schedule is Schedule.TRIE:
            return Speculation(sources=sources)
        return Speculation(max_depth=self.draft_length, schedule=self.schedule, sources=sources)


@dataclass(frozen=True, slots=True)
class Report:
    """What a simulated run came to. Tokens and verifications are those after the first of each request."""

    setting: Setting
    seconds: float
    decoding: float
    """Seconds between the commits of a request, of all requests together."""
    tokens: int
    verifications: int
    offered: int
    accepted: int
    target_busy: float
    """Share of the time in which targets verify: the pipeline efficiency, 1 if drafts are never waited for."""
    draft_busy: float

    @property
    def rate(self) -> float:
        """Tokens a second of all requests."""
        return self.rate_per_request * self.setting.sessions

    @property
    def rate_per_request(self) -> float:
        """Tokens a second that one user sees, from the first token on."""
        return self.tokens / self.decoding

    @property
    def rate_per_target(self) -> float:
        """Tokens a second of one target."""
        return self.rate / self.setting.targets

    @property
    def tokens_per_verification(self) -> float:
        """Tokens that a step commits for one session."""
        return self.tokens / self.verifications


def simulate(
    setting: Setting,
    costs: Costs,
    outcomes: Sequence[Outcome],
    rng: Random,
    *,
    tokens: int = 1000,
    bounds: Bounds = Bounds(),
) -> Report:
    """Run until ``tokens`` are committed for every session, after a warm-up.

    ``outcomes``: the text that is replayed, round and round; each request goes on where the one before it ends.
    """
    return _World(setting, costs, outcomes, rng, bounds).run(tokens)


def enough(rates: Mapping[int, float], goal: float | None = None) -> int | None:
    """The smallest count whose rate is as good as ``goal`` (the best of ``rates`` if not given); None if none is."""
    goal = max(rates.values()) if goal is None else goal
    return min((count for count, rate in rates.items() if rate >= (1 - WITHIN) * goal), default=None)


class _World:
    """Clock, requests and workers of one run."""

    def __init__(
        self, setting: Setting, costs: Costs, outcomes: Sequence[Outcome], rng: Random, bounds: Bounds
    ) -> None:
        self.setting, self.costs, self.bounds = setting, costs, bounds
        self.now = 0.0
        self.totals = _Totals()
        self._outcomes, self._rng = outcomes, rng
        self._start = rng.randrange(len(outcomes))
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = 0
        self._opened = 0
        self._targets = [_Target(self) for _ in range(setting.targets)]
        self._drafters = [_Drafter(self) for _ in range(setting.drafters)]

    def run(self, tokens: int) -> Report:
        """See :func:`simulate`."""
        for slot in range(self.setting.sessions):
            self.open(slot)
        self._until(WARM_UP * self.setting.sessions)
        before, started = replace(self.totals), self.now
        self._until(before.tokens + tokens * self.setting.sessions)
        seconds, done = self.now - started, self.totals.less(before)
        return Report(
            setting=self.setting,
            seconds=seconds,
            decoding=done.decoding,
            tokens=done.tokens,
            verifications=done.verifications,
            offered=done.offered,
            accepted=done.accepted,
            target_busy=done.verifying / seconds / self.setting.targets,
            draft_busy=done.drafting / seconds / self.setting.drafters,
        )

    def _until(self, tokens: int) -> None:
        while self.totals.tokens < tokens:
            self.now, _, action = heapq.heappop(self._heap)
            action()

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Run ``action`` so much later; what is due at the same time runs in the order of these calls."""
        self._serial += 1
        heapq.heappush(self._heap, (self.now + seconds, self._serial, action))

    def open(self, slot: int) -> None:
        """Begin the next request of a slot."""
        first = (self._start + self._opened * self.setting.request_tokens) % len(self._outcomes)
        self._opened += 1
        text = Text(self._outcomes, first, self._rng.getrandbits(64))
        opened = Open(
            SessionId(self._opened),
            epoch=1,
            tokens=(text.token(0),),
            sampling=Sampling(),
            limits=Limits(end=1 + self.setting.request_tokens),
            speculation=self.setting.speculation,
        )
        target = self._targets[slot % len(self._targets)]
        drafter = self._drafters[slot % len(self._drafters)] if opened.speculation.enabled else None
        if drafter is not None:
            drafter.open(opened, text, target)
        target.open(opened, text, slot, drafter)

    def varied(self, seconds: float) -> float:
        """A step's time, which is not always the same."""
        jitter = self.costs.jitter
        return seconds * self._rng.lognormvariate(-(jitter**2) / 2, jitter) if jitter else seconds


@dataclass(slots=True)
class _Totals:
    """Since the start."""

    tokens: int = 0
    verifications: int = 0
    offered: int = 0
    accepted: int = 0
    decoding: float = 0.0
    verifying: float = 0.0
    drafting: float = 0.0

    def count(self, verification: Verification, seconds: float) -> None:
        """Add a verification that ended so long after the one before it."""
        self.tokens += len(verification.tokens)
        self.verifications += 1
        self.offered += verification.offered
        self.accepted += verification.accepted
        self.decoding += seconds

    def less(self, before: _Totals) -> _Totals:
        return _Totals(*(now - then for now, then in zip(astuple(self), astuple(before), strict=True)))


@dataclass(frozen=True, slots=True)
class _Verified:
    """A session at its target."""

    session: TargetSession
    text: Text
    slot: int
    drafter: _Drafter | None


class _Target:
    """The verify loop over sessions whose prompts are in the cache."""

    def __init__(self, world: _World) -> None:
        self._world = world
        self._planner = Planner()
        self._held: dict[SessionId, _Verified] = {}
        self._inbox: list[tuple[Proposal, float]] = []
        self._idle = True
        self._woken = 0

    def open(self, opened: Open, text: Text, slot: int, drafter: _Drafter | None) -> None:
        self._held[opened.session] = _Verified(self._planner.session(opened, VOCABULARY), text, slot, drafter)
        self._wake()

    def hear(self, proposal: Proposal) -> None:
        self._inbox.append((proposal, self._world.now))
        self._wake()

    def _wake(self) -> None:
        """Step, unless a step is under way: then what has come waits for its end."""
        if self._idle:
            self._idle = False
            self._world.after(0.0, self._step)

    def _step(self) -> None:
        self._woken += 1
        for proposal, at in self._inbox:
            if proposal.session in self._held:
                self._held[proposal.session].session.propose(proposal, at)
        self._inbox.clear()
        held = list(self._held.values())
        bounds = self._world.bounds
        asked = [
            Asked(one.session, 0 if one.session.committed_at is None else bounds.drafts_per_session) for one in held
        ]
        plan = self._planner.plan(asked, self._world.now, room=bounds.drafts(len(held)))
        going = [(one, offer) for one, offer in zip(held, plan.offers, strict=True) if offer is not None]
        if not going:
            self._rest(plan.wake)
            return
        tokens = sum(1 + len(offer.nodes) for _, offer in going)
        seconds = self._world.varied(self._world.costs.verify_seconds(len(going), tokens))
        self._world.after(seconds, lambda: self._commit(going, tokens, seconds))

    def _rest(self, wake: float | None) -> None:
        self._idle = True
        if wake is not None:
            assert wake > self._world.now, "a wait until now would never end"
            woken = self._woken
            # A wait that a message has ended meanwhile must not end the next one.
            self._world.after(wake - self._world.now, lambda: self._wake() if self._woken == woken else None)

    def _commit(self, going: Sequence[tuple[_Verified, Offer]], tokens: int, seconds: float) -> None:
        world = self._world
        self._planner.observe(len(going), tokens, seconds)
        world.totals.verifying += seconds
        for one, offer in going:
            root = one.session.trie.root
            drawn = [one.text.drawn(node.end, node.digest) for node in (root, *offer.nodes)]
            before = one.session.committed_at
            verification = one.session.commit(drawn, world.now).verification
            if before is not None:
                world.totals.count(verification, world.now - before)
            self._tell(one, verification)
        world.after(world.costs.verify_pause, self._step)

    def _tell(self, one: _Verified, verification: Verification) -> None:
        """Tell the drafter, and go on with the next request after the last token."""
        world = self._world
        own = tuple(one.text.token(position) for position in range(verification.position, verification.end))
        assert verification.tokens == own, "the text differs from that of the target alone"
        if one.drafter is not None:
            drafter = one.drafter
            world.after(world.costs.to_draft + world.setting.rtt / 2, lambda: drafter.hear(verification))
        if verification.finish:
            del self._held[verification.session]
            world.open(one.slot)


@dataclass(slots=True)
class _Drafted:
    """A session at its drafter."""

    session: DraftSession
    text: Text
    target: _Target
    fed: set[Node] = field(default_factory=set)
    """Drafts that the model has read."""
    cached: int = 0
    """Committed tokens that it has read."""

    def verified(self, verification: Verification) -> Sync:
        """Follow the target; what the model has read along the way it need not read again."""
        node: Node | None = self.session.trie.root
        for token in verification.tokens:
            node = node.children.get(token) if node else None
            self.cached += node in self.fed
        sync = self.session.verified(verification)
        self.fed.intersection_update(self.session.trie)
        return sync

    @property
    def uncached(self) -> int:
        """Tokens that a step which expands the end of the text computes: at least the last one, for its logits."""
        return max(len(self.session.tokens) - self.cached, 1)

    def expand(self, node: Node) -> None:
        """The model has read up to ``node`` and says what follows."""
        if node is self.session.trie.root:
            self.cached = len(self.session.tokens)
        else:
            self.fed.add(node)
        self.session.expand(node, self.text.candidates(node.end, node.digest))


class _Drafter:
    """The lookahead over sessions whose prompts are in the cache."""

    def __init__(self, world: _World) -> None:
        self._world = world
        self._held: dict[SessionId, _Drafted] = {}
        self._inbox: list[Verification] = []
        self._calibration = Calibration()
        self._cost = StepCost()
        self._idle = True

    def open(self, opened: Open, text: Text, target: _Target) -> None:
        session = DraftSession(
            opened, vocabulary=VOCABULARY, limits=self._world.bounds.draft, calibration=self._calibration
        )
        self._held[opened.session] = _Drafted(session, text, target)
        self._wake()

    def hear(self, verification: Verification) -> None:
        self._inbox.append(verification)
        self._wake()

    def _wake(self) -> None:
        if self._idle:
            self._idle = False
            self._world.after(0.0, self._step)

    def _step(self) -> None:
        for verification in self._inbox:
            self._follow(verification)
        self._inbox.clear()
        places = self._places()
        if places:
            tokens = sum(held.uncached if node is held.session.trie.root else 1 for held, node in places)
            seconds = self._world.varied(self._world.costs.draft(tokens))
            self._world.after(seconds, lambda: self._expand(places, tokens, seconds))
        else:
            self._idle = True
            self._push(self._held.values())

    def _follow(self, verification: Verification) -> None:
        """Take a verification, and answer with what is drafted already."""
        held = self._held[verification.session]
        sync = held.verified(verification)
        assert sync in (Sync.ADVANCED, Sync.FINISHED), f"the drafter lost its place: {sync}"
        if sync is Sync.FINISHED:
            del self._held[verification.session]
        else:
            self._push([held])

    def _places(self) -> list[tuple[_Drafted, Node]]:
        """What to expand, by the rule of :mod:`draft_service.lookahead`: ends of texts first, then what pays."""
        ends: list[tuple[_Drafted, Node]] = []
        further: list[tuple[_Drafted, Sequence[Node]]] = []
        for held in self._held.values():
            frontier = held.session.frontier()
            if frontier and frontier[0] is held.session.trie.root:
                ends.append((held, frontier[0]))
            else:
                further.append((held, frontier))
        fed = sum(held.uncached for held, _ in ends)
        return ends + best_places(further, self._world.bounds.places, fed, len(ends), self._cost)

    def _expand(self, places: Sequence[tuple[_Drafted, Node]], tokens: int, seconds: float) -> None:
        world = self._world
        if tokens == len(places):
            self._cost.observe(tokens, seconds)
        world.totals.drafting += seconds
        for held, node in places:
            held.expand(node)
        self._push(self._held.values())
        world.after(world.costs.draft_pause, self._step)

    def _push(self, sessions: Iterable[_Drafted]) -> None:
        world = self._world
        for held in sessions:
            for proposal in held.session.pushes():
                world.after(world.costs.to_target + world.setting.rtt / 2, _delivery(held.target, proposal))


def _delivery(target: _Target, proposal: Proposal) -> Callable[[], None]:
    return lambda: target.hear(proposal)
