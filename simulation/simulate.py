"""How fast it decodes: a discrete-event model of targets, drafters and the network between them.

One heap, one seeded generator, virtual time. All decisions are taken by the code that serves: the target asks
:class:`speculation.verifying.planner.Planner`, sessions are :class:`speculation.verifying.target_session.TargetSession`
and :class:`speculation.drafting.draft_session.DraftSession`, drafters fill their steps by
:func:`speculation.verifying.budget.best_places`.
Given from outside are what steps and messages take (:mod:`simulation.costs`) and how the models agree
(:mod:`simulation.agreement`), either recorded from a real run or made up.

Left out: what prompts take, caches, the router's own work beyond the delay of a message, faults (for these
see :mod:`tests.faults`). A request's first step stands for its prompt: it verifies no drafts while the drafter gets
ahead, and the pace of a request counts from its end. Messages reach a worker between its steps, as they do in
:mod:`transport.worker`.

Checked in every run: all text is the target's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from random import Random

from simulation.agreement import ReplayedRequest, Replays, Texts
from simulation.costs import Costs
from simulation.simulated_draft import SimulatedDrafter
from simulation.simulated_world import Bounds as Bounds
from simulation.simulated_world import OwnSources, RecordedEagle, SimulatedWorld, SimulationTotals, draft_in_turn
from simulation.simulated_world import SimulationSettings as SimulationSettings
from speculation.drafting.draft_session import Outcome
from speculation.messages import Limits, Open, Proposal, Sampling, Schedule, SessionId, Verification
from speculation.trie import VerificationTree
from speculation.verifying.payoff import DraftTurn
from speculation.verifying.planner import Asked, Planner
from speculation.verifying.target_session import TargetSession

WITHIN = 0.03
"""Throughput this close to the best is as good as the best."""
WARM_UP = 128
"""Tokens a session before anything counts: the workers have learned by then what they cost and whom to believe."""


@dataclass(slots=True, kw_only=True)
class Report(SimulationTotals):
    """What a simulated run came to. Tokens and verifications are those after the first of each request."""

    setting: SimulationSettings
    seconds: float

    @property
    def target_busy(self) -> float:
        """Share of the time in which targets verify: the pipeline efficiency, 1 if drafts are never waited for."""
        return self.verifying / self.seconds / self.setting.targets

    @property
    def draft_busy(self) -> float:
        """The same of drafters."""
        return self.drafting / self.seconds / max(self.setting.drafters, 1)

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
    setting: SimulationSettings,
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
    texts = Replays(outcomes, setting.request_tokens, rng.randrange(len(outcomes)), setting.retention)
    return simulate_texts(setting, costs, texts, rng, tokens=tokens, bounds=bounds)


def simulate_texts(
    setting: SimulationSettings,
    costs: Costs,
    texts: Texts,
    rng: Random,
    *,
    tokens: int = 1000,
    warm_up: int = WARM_UP,
    bounds: Bounds = Bounds(),
) -> Report:
    """As :func:`simulate`, with requests for ``texts``, one after another, after ``warm_up`` tokens a session."""
    return _Run(setting, costs, texts, rng, bounds).run(tokens, warm_up)


def enough(rates: Mapping[int, float], goal: float | None = None) -> int | None:
    """The smallest count whose rate is as good as ``goal`` (the best of ``rates`` if not given); None if none is."""
    goal = max(rates.values()) if goal is None else goal
    return min((count for count, rate in rates.items() if rate >= (1 - WITHIN) * goal), default=None)


class _Run(SimulatedWorld):
    """Requests and workers of one run, too."""

    def __init__(self, setting: SimulationSettings, costs: Costs, texts: Texts, rng: Random, bounds: Bounds) -> None:
        super().__init__(setting, costs, bounds, rng)
        self._texts = texts
        self._opened = 0
        self._targets = [_Target(self) for _ in range(setting.targets)]
        self._drafters = [SimulatedDrafter(self) for _ in range(setting.drafters)]

    def run(self, tokens: int, warm_up: int) -> Report:
        """See :func:`simulate_texts`."""
        for slot in range(self.setting.sessions):
            self.open(slot)
        self.until(warm_up * self.setting.sessions)
        before, started = replace(self.totals), self.now
        self.until(before.tokens + tokens * self.setting.sessions)
        return Report(**asdict(self.totals.less(before)), setting=self.setting, seconds=self.now - started)

    def open(self, slot: int) -> None:
        """Begin the next request of a slot."""
        request = self._texts.request(self._opened, self._rng.getrandbits(64))
        self._opened += 1
        opened = Open(
            SessionId(self._opened),
            epoch=1,
            tokens=request.prompt,
            sampling=Sampling(),
            limits=Limits(end=request.end),
            speculation=self.setting.speculation,
        )
        target = self._targets[slot % len(self._targets)]
        drafter = self._drafters[slot % len(self._drafters)] if self._drafters and self.setting.drafts else None
        if drafter is not None:
            drafter.open(opened, request.text, target.hear)
        target.open(opened, request, slot, drafter)


@dataclass(frozen=True, slots=True)
class _Verified:
    """A session at its target."""

    session: TargetSession
    request: ReplayedRequest
    slot: int
    drafter: SimulatedDrafter | None
    head: RecordedEagle | None
    fed: bool
    """Whether its drafter is sent features of what is committed."""

    @property
    def read(self) -> bool:
        """Whether a head reads the hidden states of its next step."""
        return self.fed or (self.head is not None and self.head.reads)


class _Target:
    """The verify loop over sessions whose prompts are in the cache."""

    def __init__(self, world: _Run) -> None:
        self._world = world
        allowed = world.setting.sources if world.setting.schedule is Schedule.TRIE else frozenset()
        self._planner = Planner(row_classes=world.costs.row_classes)
        self._sources = OwnSources(allowed, world.bounds.suffix_tokens, free=world.costs.level is None)
        self._held: dict[SessionId, _Verified] = {}
        self._inbox: list[tuple[Proposal, float]] = []
        self._idle = True
        self._woken = 0
        self._drafting = 0.0
        """Seconds that heads here took to draft for the step to come, or under way."""

    def open(self, opened: Open, request: ReplayedRequest, slot: int, drafter: SimulatedDrafter | None) -> None:
        head, outputs = self._sources.head(request), self._sources.outputs(request)
        session = self._planner.session(
            opened, request.text.vocabulary, [one for one in (head, outputs) if one is not None]
        )
        session.index(len(opened.tokens), computed=len(opened.tokens))
        fed = drafter is not None and self._world.setting.features
        self._held[opened.session] = _Verified(session, request, slot, drafter, head, fed)
        self._wake()

    def hear(self, proposal: Proposal) -> None:
        self._inbox.append((proposal, self._world.now))
        self._wake()

    def _wake(self) -> None:
        """Step, unless a step is under way: then what has come waits for its end."""
        if self._idle:
            self._idle = False
            self._world.after(0.0, self._turn)

    def _turn(self) -> None:
        """Let heads here draft for the step to come."""
        world, held, drafting = self._world, self._held.values(), 0.0
        heads = [one.head for one in held if one.head is not None and one.session.committed_at is not None]
        if heads and (level := world.costs.level) is not None:
            for one in held:
                one.session.index(one.session.trie.position)
            plain, further = (world.costs.verify_seconds(len(held), len(held) * n, heads=True) for n in (1, 2))
            turn = DraftTurn(len(held), plain + world.costs.verify_pause, (further - plain) / len(held))
            drafting = draft_in_turn(heads, world.setting.max_depth, level, turn)
        self._drafting = world.varied(drafting)
        if self._drafting:
            world.after(self._drafting, self._step)
        else:
            self._step()

    def _step(self) -> None:
        self._woken += 1
        for proposal, at in self._inbox:
            if proposal.session in self._held:
                self._held[proposal.session].session.propose(proposal, at)
        self._inbox.clear()
        held = list(self._held.values())
        each, room = self._world.bounds.room(len(held), self._world.costs.row_classes)
        asked = [Asked(one.session, 0 if one.session.committed_at is None else each) for one in held]
        plan = self._planner.plan(asked, self._world.now - self._drafting, room=room)
        going = [(one, tree) for one, tree in zip(held, plan.trees, strict=True) if tree is not None]
        if not going:
            self._rest(plan.wake)
            return
        tokens = sum(1 + len(tree.nodes) for _, tree in going)
        world = self._world
        world.verifying += 1
        heads = any(one.read for one, _ in going)
        seconds = world.varied(world.costs.verify_seconds(len(going), tokens, heads=heads))
        if any(tree.branched for _, tree in going):
            seconds *= world.costs.branching
        world.after(seconds, lambda: self._end(going, tokens, seconds))

    def _rest(self, wake: float | None) -> None:
        self._idle = True
        if wake is not None:
            assert wake > self._world.now, "a wait until now would never end"
            woken = self._woken
            # A wait that a message has ended meanwhile must not end the next one.
            self._world.after(wake - self._world.now, lambda: self._wake() if self._woken == woken else None)

    def _end(self, going: Sequence[tuple[_Verified, VerificationTree]], tokens: int, seconds: float) -> None:
        """Commit what would be computed by now, or as much later as a drafter has held it up."""
        world = self._world
        held_up = (world.costs.contention - 1.0) * seconds if world.drafted_until > world.now - seconds else 0.0
        world.after(held_up, lambda: self._commit(going, tokens, seconds + held_up))

    def _commit(self, going: Sequence[tuple[_Verified, VerificationTree]], tokens: int, seconds: float) -> None:
        world = self._world
        world.verifying -= 1
        world.totals.verifying += seconds
        committed = 0
        for one, tree in going:
            root = one.session.trie.root
            drawn = [one.request.text.drawn(node.end, node.digest) for node in (root, *tree.nodes)]
            before = one.session.committed_at
            verification = one.session.commit(drawn, world.now).verification
            if one.head is not None:
                one.head.stepped(verified=any(node.source is one.head.source for node in tree.nodes))
            if before is not None:
                world.totals.count(verification, world.now - before)
            committed += len(verification.tokens)
            self._tell(one, verification, committed)
        self._planner.observe(len(going), tokens, seconds, committed, self._drafting)
        world.after(world.costs.verify_pause, self._turn)

    def _tell(self, one: _Verified, verification: Verification, sent: int) -> None:
        """Tell the drafter, and go on with the next request after the last token.

        ``sent``: tokens of the step by then, whose features leave one after the other.
        """
        world = self._world
        own = tuple(one.request.text.token(position) for position in range(verification.position, verification.end))
        assert verification.tokens == own, "the text differs from that of the target alone"
        if one.drafter is not None:
            drafter, way = one.drafter, world.costs.to_draft + world.setting.rtt / 2
            world.after(way, lambda: drafter.hear(verification))
            if one.fed:
                features = way + world.costs.feature_seconds * sent
                world.after(features, lambda: drafter.feed(verification.session, verification.end))
        if verification.finish:
            del self._held[verification.session]
            self._sources.keep(one.request, one.session.tokens)
            world.open(one.slot)
