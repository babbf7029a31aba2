"""The verify loop of a target worker: every step commits at least one token for every session that decodes.

A step picks its chunks (:mod:`target_service.scheduler`) and, of the drafts at hand, those that pay
(:mod:`speculation.budget`), runs all in one forward, draws the target's token on every row, and lets each session
decide what is kept (:mod:`speculation.target_session`). With no drafts it is plain decoding. It never waits for one.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass, field

from engine.kv_cache import CachedSequence
from engine.sampling import Draw, sample
from engine.step import Chunk, Engine
from speculation.budget import Calibration, StepCost, choose
from speculation.messages import (
    ANCHOR,
    Close,
    Load,
    Open,
    Proposal,
    RefusalCode,
    Refused,
    SessionId,
    ToWorker,
    Verification,
    Welcome,
)
from speculation.target_session import TargetSession
from speculation.trie import Fate, Offer
from target_service.scheduler import Budget, Demand, Share, preempt, shares
from transport.worker import Outgoing

log = logging.getLogger(__name__)

ADMISSION_HEADROOM = 32
"""Tokens each session must be able to grow by before another one starts; keeps a full cache from thrashing."""


@dataclass(frozen=True, slots=True)
class TargetLimits:
    """Bounds on what one worker takes on."""

    running: int = 64
    """Sessions computed in one step."""
    waiting: int = 1024
    """Sessions queued behind them; more are refused as overload."""
    budget: Budget = Budget()
    adaptive: bool = True
    """Verify as many drafts as pay, by measured cost and acceptance; else as many as the budget allows."""


@dataclass(eq=False, slots=True)
class Running:
    """A session that this worker holds; its cache entries are empty while it waits."""

    link: Hashable
    session: TargetSession
    cached: CachedSequence

    @property
    def uncached(self) -> int:
        """Committed tokens that the cache does not hold: always at least the last one."""
        return len(self.session.tokens) - self.cached.length

    def refused(self, code: RefusalCode, message: str) -> tuple[Hashable, Refused]:
        """What tells the router that this session is given up."""
        opened = self.session.opened
        return self.link, Refused(opened.session, opened.epoch, code, message)


@dataclass(slots=True)
class Piece:
    """One session's part of a step: tokens to feed, then the drafts offered behind them."""

    running: Running
    feed: int
    candidates: Offer | None
    """None while the prompt is not complete: then nothing is drawn."""
    offer: Offer | None = None
    """The first part of the candidates that is verified; None with them."""

    def odds(self, calibration: Calibration) -> list[float]:
        """Probability of each candidate to be kept with all above it; falling, so that any first part is the best."""
        assert self.candidates is not None
        odds: list[float] = []
        for node, parent in zip(self.candidates.nodes, self.candidates.parents, strict=True):
            above = 1.0 if parent == ANCHOR else odds[parent]
            odds.append(min(above * calibration(node.confidence), odds[-1] if odds else 1.0))
        return odds

    def chunk(self) -> Chunk:
        """What the engine computes: a chain of fed tokens, the offered tree hanging from its end."""
        start = self.running.cached.length
        fed = self.running.session.tokens[start : start + self.feed]
        chain = range(ANCHOR, self.feed - 1)
        if self.offer is None:
            return Chunk(self.running.cached, fed, list(chain))
        last = self.feed - 1
        parents = [*chain, *(last if parent == ANCHOR else self.feed + parent for parent in self.offer.parents)]
        rows = range(last, self.feed + len(self.offer.nodes))
        return Chunk(self.running.cached, [*fed, *self.offer.tokens], parents, rows)

    def draws(self) -> list[Draw]:
        """How each wanted row is drawn: after the last fed token, then after each draft."""
        if self.offer is None:
            return []
        session = self.running.session
        positions = [session.trie.position, *(node.end for node in self.offer.nodes)]
        return [Draw(session.opened.sampling, position) for position in positions]


@dataclass(slots=True)
class Counters:
    """Monotone totals since the start."""

    steps: int = 0
    step_microseconds: int = 0
    prefilled: int = 0
    committed: int = 0
    offered: int = 0
    accepted: int = 0
    preempted: int = 0
    refused: int = 0
    proposals: dict[Fate, int] = field(default_factory=lambda: dict.fromkeys(Fate, 0))

    def flat(self) -> dict[str, int]:
        """By name."""
        totals = asdict(self)
        fates: dict[Fate, int] = totals.pop("proposals")
        return totals | {f"proposals_{fate}": count for fate, count in fates.items()}


class VerifyLoop:
    """All sessions of a target worker. Implements :class:`transport.worker.Machine`."""

    def __init__(self, engine: Engine, welcome: Welcome, limits: TargetLimits = TargetLimits()) -> None:
        """Nothing is open. The loop owns ``engine`` and its cache."""
        self._engine, self._welcome, self._limits = engine, welcome, limits
        self._held: dict[tuple[Hashable, SessionId], Running] = {}
        self._running: list[Running] = []  # oldest first
        self._waiting: deque[Running] = deque()
        self.counters = Counters()
        self._calibration = Calibration()
        self._costs: defaultdict[int, StepCost] = defaultdict(StepCost)  # by size class of the batch

    def welcome(self) -> Welcome:
        """How the worker introduces itself."""
        return self._welcome

    def load(self) -> Load:
        """How busy it is."""
        return Load(
            sessions=len(self._running),
            waiting=len(self._waiting),
            free_tokens=self._engine.cache.free_tokens,
            capacity_tokens=self._engine.cache.capacity,
            counters=self.counters.flat(),
        )

    # -- messages ------------------------------------------------------------------------------------------------------

    def receive(self, link: Hashable, message: ToWorker) -> Outgoing:
        """Take one message of a router."""
        held = self._held.get((link, message.session))
        match message:
            case Open():
                return self._open(link, message, held)
            case Proposal():
                if held is not None:
                    self.counters.proposals[held.session.propose(message).fate] += 1
            case Close():
                if held is not None and held.session.opened.epoch <= message.epoch:
                    self._drop(held)
            case Verification():
                log.warning("a router sent a verification to a target; ignored")
        return []

    def _open(self, link: Hashable, opened: Open, held: Running | None) -> Outgoing:
        if held is not None and held.session.opened.epoch >= opened.epoch:
            return []
        refusal = self._objection(opened, replaces=held is not None)
        if refusal is not None:
            if held is not None:
                self._drop(held)
            self.counters.refused += 1
            return [(link, refusal)]
        session = TargetSession(opened, vocabulary=self._welcome.vocabulary)
        if held is not None:
            # Opened again: the place in the queue stays, the cache is computed anew.
            held.cached.free()
            held.session, held.cached = session, self._engine.cache.sequence()
            return []
        running = Running(link, session, self._engine.cache.sequence())
        self._held[link, opened.session] = running
        self._waiting.append(running)
        return []

    def _objection(self, opened: Open, *, replaces: bool) -> Refused | None:
        """Why this session cannot be served, if so."""

        def refuse(code: RefusalCode, message: str) -> Refused:
            return Refused(opened.session, opened.epoch, code, message)

        vocabulary, context = self._welcome.vocabulary, self._welcome.context
        if (worst := max(opened.tokens)) >= vocabulary:
            return refuse(RefusalCode.INVALID, f"token {worst} is outside the vocabulary of {vocabulary}")
        if opened.limits.end > context:
            return refuse(RefusalCode.INVALID, f"{opened.limits.end} tokens exceed the model's context of {context}")
        if opened.limits.end > (capacity := self._engine.cache.capacity):
            return refuse(RefusalCode.INVALID, f"{opened.limits.end} tokens exceed the cache of {capacity}")
        if not replaces and len(self._waiting) >= self._limits.waiting:
            return refuse(RefusalCode.OVERLOADED, f"{self._limits.waiting} sessions wait already")
        return None

    def forget(self, link: Hashable) -> None:
        """Drop all sessions of a link."""
        for held in [held for (owner, _), held in self._held.items() if owner is link]:
            self._drop(held)

    def _drop(self, held: Running) -> None:
        held.cached.free()
        del self._held[held.link, held.session.opened.session]
        if held in self._running:
            self._running.remove(held)
        else:
            self._waiting.remove(held)

    # -- one step ------------------------------------------------------------------------------------------------------

    def step(self) -> Outgoing | None:
        """Compute once over all running sessions."""
        self._admit()
        pieces = self._plan()
        if not pieces:
            return None
        cost = self._costs[len(pieces).bit_length()]
        self._choose(pieces, cost)
        started = time.perf_counter()
        outgoing = self._compute(pieces)
        seconds = time.perf_counter() - started
        self.counters.steps += 1
        self.counters.step_microseconds += round(seconds * 1e6)
        if all(piece.feed == 1 for piece in pieces):
            cost.observe(sum(1 + len(piece.offer.nodes) for piece in pieces if piece.offer is not None), seconds)
        self._calibration.fade()
        return outgoing

    def _choose(self, pieces: Sequence[Piece], cost: StepCost) -> None:
        """Settle what each session offers."""
        drawing = [piece for piece in pieces if piece.candidates is not None]
        if self._limits.adaptive:
            fed = sum(piece.feed for piece in pieces)
            counts = choose([piece.odds(self._calibration) for piece in drawing], fed, cost)
        else:
            counts = [len(piece.candidates.nodes) for piece in drawing if piece.candidates is not None]
        for piece, count in zip(drawing, counts, strict=True):
            assert piece.candidates is not None
            piece.offer = piece.running.session.offer(piece.candidates.first(count))

    def _admit(self) -> None:
        """Start waiting sessions while there is room for all they have so far."""
        room = self._engine.cache.free_tokens
        for running in self._running:
            room -= running.uncached + ADMISSION_HEADROOM
        while self._waiting and len(self._running) < self._limits.running:
            needed = self._waiting[0].uncached + ADMISSION_HEADROOM
            if needed > room and self._running:
                return
            room -= needed
            self._running.append(self._waiting.popleft())

    def _plan(self) -> list[Piece]:
        """Share out the step; sessions for which the cache has no room are preempted."""
        while self._running:
            plan = shares([Demand(running.uncached) for running in self._running], self._limits.budget)
            needs = [
                running.cached.blocks_needed(share.feed + share.drafts)
                for running, share in zip(self._running, plan, strict=True)
            ]
            victims = preempt(needs, self._engine.cache.ledger.free)
            if victims == 0:
                return [self._piece(*pair) for pair in zip(self._running, plan, strict=True) if pair[1].feed]
            if victims == len(self._running) == 1:
                # A lone session always fits (its end was checked against the capacity), if need be without drafts.
                return [self._piece(self._running[0], Share(plan[0].feed))]
            for _ in range(min(victims, len(self._running) - 1)):
                self._preempt(self._running.pop())
        return []

    def _preempt(self, running: Running) -> None:
        self.counters.preempted += 1
        running.cached.free()
        running.cached = self._engine.cache.sequence()
        self._waiting.appendleft(running)

    @staticmethod
    def _piece(running: Running, share: Share) -> Piece:
        complete = share.feed == running.uncached
        return Piece(running, share.feed, running.session.candidates(share.drafts) if complete else None)

    def _compute(self, pieces: Sequence[Piece]) -> Outgoing:
        """Run the pieces in one forward. If that fails, each alone, so that a fault hits only its own session."""
        try:
            drawn = self._draw(pieces)
        except Exception as error:  # whatever a model may raise; the culprit is found below
            if len(pieces) == 1:
                log.exception("a step failed for session %d", pieces[0].running.session.opened.session)
                self._drop(pieces[0].running)
                self.counters.refused += 1
                return [pieces[0].running.refused(RefusalCode.INTERNAL, f"{type(error).__name__}: {error}")]
            return [message for piece in pieces for message in self._compute([piece])]
        outgoing: Outgoing = []
        at = 0
        for piece in pieces:
            rows = 0 if piece.offer is None else len(piece.offer.nodes) + 1
            outgoing += self._settle(piece, drawn[at : at + rows])
            at += rows
        return outgoing

    def _draw(self, pieces: Sequence[Piece]) -> list[int]:
        logits_RV = self._engine.run([piece.chunk() for piece in pieces])
        return sample(logits_RV, [draw for piece in pieces for draw in piece.draws()])

    def _settle(self, piece: Piece, drawn: Sequence[int]) -> Outgoing:
        """Commit what a session decides, in its tokens and in its cache."""
        running, cached = piece.running, piece.running.cached
        if piece.offer is None:
            cached.advance(range(piece.feed))
            self.counters.prefilled += piece.feed
            return []
        commit = running.session.commit(drawn)
        for i, (node, parent) in enumerate(zip(piece.offer.nodes, piece.offer.parents, strict=True)):
            if parent == ANCHOR or parent in commit.kept:
                self._calibration.observe(node.confidence, i in commit.kept)
        cached.advance([*range(piece.feed), *(piece.feed + i for i in commit.kept)])
        cached.rollback()
        verification = commit.verification
        self.counters.prefilled += piece.feed - 1
        self.counters.committed += len(verification.tokens)
        self.counters.offered += verification.offered
        self.counters.accepted += verification.accepted
        if verification.finish:
            self._drop(running)
        return [(running.link, verification)]
