"""What all simulated workers share: what is simulated, the clock, the sums of what has happened, and sources.

A part of :mod:`simulation.simulate`. The draft sources at a target are those that need more than the text of their
session. What a head says was recorded along the text, or made up; earlier outputs are those of the requests that a
target has ended, in the very store that serves. What indexing takes is left out: an output can be found as soon as its
request has ended.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from functools import reduce
from math import inf
from random import Random

from simulation.agreement import ReplayedRequest, ReplayedText
from simulation.costs import Costs, Curve
from speculation import digest as digests
from speculation.drafting.draft_session import Candidate, DraftLimits
from speculation.messages import ANCHOR, Schedule, Source, Sources, Speculation, Token, Verification
from speculation.sources.suffix import SuffixLookup, SuffixStore
from speculation.verifying.budget import room_for_drafts
from speculation.verifying.payoff import DraftTurn

HEAD_LEVELS, HEAD_WIDTH, HEAD_NODES = 8, 4, 20
"""How deep a head at a target drafts at most, from how many places of a level, and how many drafts are looked at."""
SMOOTHING = 0.05
"""Weight of the latest place in how likely a head is right."""
MIN_CHANCE = 0.05
"""Of a path; below, it is not gone on from."""
PATIENCE, REST = 32, 8
"""Steps without a draft worth verifying after which it rests, and between two tries then."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of the workers as they are served by default (:mod:`cluster.config.config`)."""

    drafts_per_session: int = 12
    verify: int = 64
    """Most tokens of a target's step."""
    places: int = 64
    draft: DraftLimits = DraftLimits()
    suffix_tokens: int = 65_536
    """Of earlier outputs that a target keeps; used where requests allow that source."""

    def room(self, sessions: int, row_classes: Sequence[int]) -> tuple[int, int]:
        """Room for drafts of one of so many sessions in a step, and of all together."""
        return room_for_drafts(
            sessions, self.drafts_per_session, max(max((self.verify, *row_classes)) - sessions, 0), row_classes
        )


@dataclass(frozen=True, slots=True)
class SimulationSettings:
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
    """Of texts that are replayed; at least 2: a request's pace counts from its first token."""
    max_depth: int = Speculation().max_depth
    """Longest path of drafts verified in one step, under the trie."""
    sources: frozenset[Source] = frozenset({Source.DRAFT})
    """Draft sources, under the trie: of those at the target, such as read the text, what was recorded of a head along
    it, or earlier outputs."""
    features: bool = False
    """Whether drafters have an EAGLE head in place of a draft model, which reads what the target sends it."""
    retention: float = 1.0
    """Of a text that is made up: see :class:`simulation.agreement.Replayed`."""
    guesses: bool = False
    """Whether drafters have guesses of lookup at their own text verified beside their drafts (staged drafting)."""

    @property
    def drafts(self) -> bool:
        """Whether drafters have a part in it."""
        return self.schedule is not None and (self.schedule is not Schedule.TRIE or Source.DRAFT in self.sources)

    @property
    def speculation(self) -> Speculation:
        """What every request asks for."""
        if self.schedule is None:
            return Speculation(enabled=False)
        if self.schedule is Schedule.TRIE:
            return Speculation(max_depth=self.max_depth, sources=self.sources)
        return Speculation(max_depth=self.draft_length, schedule=self.schedule, sources=frozenset({Source.DRAFT}))


@dataclass(slots=True)
class SimulationTotals:
    """Since the start."""

    tokens: int = 0
    verifications: int = 0
    offered: int = 0
    accepted: int = 0
    decoding: float = 0.0
    """Seconds between the commits of a request, of all requests together."""
    verifying: float = 0.0
    drafting: float = 0.0

    def count(self, verification: Verification, seconds: float) -> None:
        """Add a verification that ended so long after the one before it."""
        self.tokens += len(verification.tokens)
        self.verifications += 1
        self.offered += verification.offered
        self.accepted += verification.accepted
        self.decoding += seconds

    def less(self, before: SimulationTotals) -> SimulationTotals:
        """What has come since."""
        return SimulationTotals(*(now - then for now, then in zip(astuple(self), astuple(before), strict=True)))


class SimulatedWorld:
    """One heap of what will happen, one seeded generator, virtual time."""

    def __init__(self, setting: SimulationSettings, costs: Costs, bounds: Bounds, rng: Random) -> None:
        """Nothing is going to happen."""
        self.setting, self.costs, self.bounds = setting, costs, bounds
        self.now = 0.0
        self.totals = SimulationTotals()
        self.verifying = 0
        self.drafted_until = -inf
        """When the last step of a drafter ended, or will."""
        self._rng = rng
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = 0

    def until(self, tokens: int) -> None:
        """Let happen what does until so many tokens were committed."""
        while self.totals.tokens < tokens:
            self.now, _, action = heapq.heappop(self._heap)
            action()

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Run ``action`` so much later; what is due at the same time runs in the order of these calls."""
        self._serial += 1
        heapq.heappush(self._heap, (self.now + seconds, self._serial, action))

    def varied(self, seconds: float) -> float:
        """A step's time, which is not always the same."""
        jitter = self.costs.jitter
        return seconds * self._rng.lognormvariate(-(jitter**2) / 2, jitter) if jitter else seconds


_Draft = tuple[Candidate, int, float]
"""With the number of the one before, and the chance of the path."""
_Place = tuple[float, int, tuple[Token, ...]]
"""The chance of the path, the number of its last draft, and its tokens."""


@dataclass(frozen=True, slots=True)
class RecordedTree:
    """A :class:`speculation.sources.registry.Suggestion`."""

    tokens: tuple[Token, ...] = ()
    parents: tuple[int, ...] = ()
    confidence: tuple[float, ...] = ()


class RecordedEagle:
    """An EAGLE head at the target, which drafts the levels that pay, or to its full depth where they cost nothing.

    Like the one that serves it goes on from the likeliest paths of a level, and of all its drafts the likeliest are
    looked at. A :class:`speculation.sources.registry.LocalSource`.
    """

    source, depth = Source.EAGLE, HEAD_LEVELS

    def __init__(self, first: int, text: ReplayedText, *, free: bool = True) -> None:
        """``text``: what it says; it has something to read behind position ``first``.

        ``free``: it drafts when it is asked to propose; else :func:`draft_in_turn` says what it drafts.
        """
        self._first, self._text, self._free = first, text, free
        self._end = 0
        self._drafts: list[_Draft] = []
        self._places: list[_Place] = []
        self._right = 0.8  # chance that it is, of a place that it has not gone on from
        self._unused = 0  # steps since a draft of its was verified last

    @property
    def reads(self) -> bool:
        """Whether there is something to read, and it does not rest."""
        rests = self._unused >= PATIENCE and (self._unused - PATIENCE) % REST != 0
        return self._end > self._first and not rests

    def stepped(self, *, verified: bool) -> None:
        """A step is over; ``verified``: whether drafts of its were worth verifying in it."""
        self._unused = 0 if verified else self._unused + 1

    def extend(self, tokens: Sequence[Token]) -> None:
        """These were committed; what matters is how many."""
        self._end += len(tokens)
        self._drafts, self._places = [], []

    def begin(self) -> None:
        """Nothing is drafted behind the text as it is."""
        self._drafts, self._places = [], [(1.0, ANCHOR, ())] if self.reads else []
        if self._places and (said := self._said(())):
            self._right += SMOOTHING * (said[0].confidence - self._right)

    def gains(self, depth: int) -> list[float]:
        """Tokens that one more draft at each place of the next level brings, most first; none beyond ``depth``."""
        deep = self._places and len(self._places[0][2]) >= min(depth, self.depth)
        return [] if deep else [chance * self._right for chance, _, _ in self._places]

    def grow(self, count: int) -> None:
        """Go on by a level from the likeliest ``count`` places."""
        fresh: list[_Place] = []
        for chance, node, path in self._places[:count]:
            for said in self._said(path)[:HEAD_WIDTH]:
                fresh.append((chance * said.confidence, len(self._drafts), (*path, said.token)))
                self._drafts.append((said, node, chance * said.confidence))
        likeliest = sorted(fresh, key=lambda place: -place[0])[:HEAD_WIDTH]
        self._places = [place for place in likeliest if place[0] >= MIN_CHANCE]

    def propose(self, depth: int) -> RecordedTree:
        """The likeliest of what it says behind this very place."""
        if self._free:
            self.begin()
            while count := len(self.gains(depth)):
                self.grow(count)
        drafts = self._drafts
        # Of equals the first, which is never behind what follows it.
        chosen = sorted(sorted(range(len(drafts)), key=lambda node: -drafts[node][2])[:HEAD_NODES])
        index = {node: i for i, node in enumerate(chosen)} | {ANCHOR: ANCHOR}
        return RecordedTree(
            tuple(drafts[node][0].token for node in chosen),
            tuple(index[drafts[node][1]] for node in chosen),
            tuple(drafts[node][0].confidence for node in chosen),
        )

    def _said(self, path: Sequence[Token]) -> Sequence[Candidate]:
        digest = reduce(digests.extend, path, self._text.digest(self._end))
        return self._text.candidates(self._end + len(path), digest, age=len(path))


def draft_in_turn(heads: Sequence[RecordedEagle], depth: int, level: Curve, turn: DraftTurn) -> float:
    """Let heads draft before a step as many levels as pay, all of them in a forward each; returns the seconds it takes.

    ``turn``: the step without drafts. A level is a launch.
    """
    drafting = 0.0
    for head in heads:
        head.begin()
    while True:
        places = sorted(((gain, i) for i, head in enumerate(heads) for gain in head.gains(depth)), reverse=True)
        chosen, _ = turn.extend([(gain, 0.0, 1) for gain, _ in places], 1, level, 0.0)
        if not chosen:
            return drafting
        drafting += level(chosen)
        taken = Counter(i for _, i in places[:chosen])
        for i, head in enumerate(heads):
            head.grow(taken[i])


class OwnSources:
    """What the sessions of one target draft with there, beside what their text and their request give them."""

    def __init__(self, allowed: Sources, capacity: int, *, free: bool = True) -> None:
        """``allowed``: what their requests ask for; ``capacity``: tokens of earlier outputs that are kept.

        ``free``: see :class:`RecordedEagle`.
        """
        self._allowed, self._free = allowed, free
        self._store = SuffixStore(capacity) if Source.SUFFIX in allowed else None

    def head(self, request: ReplayedRequest) -> RecordedEagle | None:
        """What the head says for a request that is opened, if there is one."""
        if Source.EAGLE not in self._allowed or request.head is None:
            return None
        return RecordedEagle(len(request.prompt), request.head, free=self._free)

    def outputs(self, request: ReplayedRequest) -> SuffixLookup | None:
        """What it can find in earlier outputs, if any are kept."""
        return None if self._store is None else SuffixLookup(self._store, request.scope)

    def keep(self, request: ReplayedRequest, tokens: Sequence[Token]) -> None:
        """A request has ended, with all these tokens."""
        if self._store is not None:
            self._store.record(request.scope, tokens, len(request.prompt))
            while not self._store.idle:
                self._store.work(len(tokens))
