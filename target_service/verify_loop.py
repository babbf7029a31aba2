"""The verify loop of a target worker: every step commits at least one token for every session in it that decodes.

A step picks its chunks (:mod:`target_service.scheduler`) and, of the drafts at hand, those that pay
(:mod:`speculation.planner`), runs all in one forward, draws the target's token on every row, and lets each session
decide what is kept (:mod:`speculation.target_session`). With no drafts it is plain decoding.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass, field, replace

import torch
from torch import Tensor

from engine.interface import StepEngine
from engine.kv_cache import CachedSequence
from engine.recorder import Recorder
from engine.rejection import verify_chains
from engine.sampling import Draw, sample
from engine.step import Chunk
from speculation.acceptance import Chosen, Draft, Sampled, Walk, walk
from speculation.messages import (
    ANCHOR,
    Close,
    Load,
    Open,
    Proposal,
    RefusalCode,
    Refused,
    Rule,
    SessionId,
    Source,
    ToWorker,
    Verification,
    Welcome,
)
from speculation.planner import Asked, Planner
from speculation.target_session import Commit, TargetSession
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
    computed: int = 0
    """Committed tokens that were fed for it since it was opened."""

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
    drafts: int | None
    """Room for drafts; None while the prompt is not complete: then nothing is drawn."""
    offer: Offer | None = None
    outcome: dict[str, object] | None = None
    """For the record."""

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

    @property
    def rows(self) -> int:
        """How many tokens are drawn."""
        return 0 if self.offer is None else len(self.offer.nodes) + 1

    @property
    def by_rejection(self) -> bool:
        """Whether drafts are accepted by the rejection rule. Without randomness both rules come to the same."""
        opened = self.running.session.opened
        return opened.speculation.rule is Rule.REJECTION and not opened.sampling.greedy

    def drafted(self) -> list[Draft]:
        """The offer, a chain, as the rejection rule takes it."""
        assert self.offer is not None
        return [Chosen(node.token) if node.q is None else Sampled(node.token, node.q) for node in self.offer.nodes]


@dataclass(slots=True)
class Counters:
    """Monotone totals since the start."""

    steps: int = 0
    step_microseconds: int = 0
    forward_microseconds: int = 0
    waits: int = 0
    """Steps put off because drafts were expected."""
    wait_microseconds: int = 0
    prefilled: int = 0
    reused: int = 0
    """Tokens taken over from the cache instead of being computed."""
    committed: int = 0
    offered: int = 0
    accepted: int = 0
    preempted: int = 0
    refused: int = 0
    proposals: dict[Fate, int] = field(default_factory=lambda: dict.fromkeys(Fate, 0))
    offered_from: dict[Source, int] = field(default_factory=lambda: dict.fromkeys(Source, 0))
    accepted_from: dict[Source, int] = field(default_factory=lambda: dict.fromkeys(Source, 0))

    def count(self, offer: Offer, commit: Commit) -> None:
        """Add what a session's step came to; each draft source gets its own credit."""
        self.committed += len(commit.verification.tokens)
        self.offered += len(offer.nodes)
        self.accepted += len(commit.kept)
        for node in offer.nodes:
            self.offered_from[node.source] += 1
        for i in commit.kept:
            self.accepted_from[offer.nodes[i].source] += 1

    def flat(self) -> dict[str, int]:
        """By name."""
        totals: dict[str, int] = {}
        for name, value in asdict(self).items():
            parts = (
                {name: value} if isinstance(value, int) else {f"{name}_{key}": count for key, count in value.items()}
            )
            totals |= parts
        return totals


class VerifyLoop:
    """All sessions of a target worker. Implements :class:`transport.worker.Machine`."""

    def __init__(
        self,
        engine: StepEngine,
        welcome: Welcome,
        limits: TargetLimits = TargetLimits(),
        recorder: Recorder | None = None,
    ) -> None:
        """Nothing is open. The loop owns ``engine`` and its cache."""
        self._engine, self._welcome, self._limits = engine, welcome, limits
        self._held: dict[tuple[Hashable, SessionId], Running] = {}
        self._running: list[Running] = []  # oldest first
        self._waiting: deque[Running] = deque()
        self.counters = Counters()
        self._planner = Planner(adaptive=limits.adaptive)
        self._recorder = recorder
        self._due: float | None = None
        self._waiting_since: float | None = None

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

    def due(self) -> float | None:
        """When to step although no message came: a session may have stopped waiting for drafts by then."""
        return self._due

    def receive(self, link: Hashable, message: ToWorker, at: float = 0.0) -> Outgoing:
        """Take one message of a router."""
        held = self._held.get((link, message.session))
        match message:
            case Open():
                return self._open(link, message, held)
            case Proposal():
                if held is not None:
                    self.counters.proposals[held.session.propose(message, at).fate] += 1
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
        if not self._engine.speculates:
            opened = replace(opened, speculation=replace(opened.speculation, enabled=False))
        session = self._planner.session(opened, self._welcome.vocabulary)
        if held is not None:
            # Opened again: the place in the queue stays, the cache is computed anew.
            held.cached.free()
            held.session, held.cached = session, self._engine.cache.sequence(session.tokens)
            held.computed = 0
            return []
        running = Running(link, session, self._engine.cache.sequence(session.tokens))
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
        """Compute once over all running sessions but those that wait for drafts; None if there is nothing to do."""
        started = time.perf_counter()
        self._due = None
        self._admit()
        pieces = self._offer(self._plan(), started)
        if not pieces:
            self._pause(started)
            return None
        self._resume(started)
        outgoing = self._compute(pieces)
        self._account(pieces, started, time.perf_counter())
        return outgoing

    def _offer(self, pieces: Sequence[Piece], now: float) -> list[Piece]:
        """Settle what each session verifies; those that wait for drafts sit this step out."""
        drawing = [piece for piece in pieces if piece.drafts is not None]
        asked = [Asked(piece.running.session, piece.drafts or 0) for piece in drawing]
        prefilled = sum(piece.feed for piece in pieces) - sum(piece.drafts is not None for piece in pieces)
        plan = self._planner.plan(asked, now, prefilled)
        for piece, offer in zip(drawing, plan.offers, strict=True):
            piece.offer = offer
        self._due = plan.wake
        return [piece for piece in pieces if piece.drafts is None or piece.offer is not None]

    def _pause(self, now: float) -> None:
        """Nothing to compute: either nothing is open, or all wait for drafts."""
        if self._due is None:
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since = now
        if self._recorder:
            self._recorder.flush()

    def _resume(self, now: float) -> None:
        if self._waiting_since is None:
            return
        self.counters.waits += 1
        self.counters.wait_microseconds += round((now - self._waiting_since) * 1e6)
        if self._recorder:
            self._recorder.write(role="target", wait=[self._waiting_since, now])
        self._waiting_since = None

    def _account(self, pieces: Sequence[Piece], started: float, ended: float) -> None:
        """Learn and tell what the step took."""
        self.counters.steps += 1
        self.counters.step_microseconds += round((ended - started) * 1e6)
        self.counters.forward_microseconds += round(self._engine.forward_seconds * 1e6)
        tokens = sum(piece.feed + max(piece.rows - 1, 0) for piece in pieces)
        if all(piece.feed == 1 and piece.offer is not None for piece in pieces):
            self._planner.observe(len(pieces), tokens, ended - started)
        if self._recorder:
            self._recorder.write(
                role="target",
                start=started,
                end=ended,
                forward=self._engine.forward_seconds,
                tokens=tokens,
                sessions=[piece.outcome for piece in pieces if piece.outcome],
            )

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
        for running in self._running:
            if running.uncached > 1:
                self.counters.reused += running.cached.reuse()
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
        running.cached = self._engine.cache.sequence(running.session.tokens)
        self._waiting.appendleft(running)

    @staticmethod
    def _piece(running: Running, share: Share) -> Piece:
        return Piece(running, share.feed, share.drafts if share.feed == running.uncached else None)

    def _compute(self, pieces: Sequence[Piece]) -> Outgoing:
        """Run the pieces in one forward. If that fails, each alone, so that a fault hits only its own session."""
        try:
            outcomes = self._draw(pieces)
        except Exception as error:  # whatever a model may raise; the culprit is found below
            if len(pieces) == 1:
                log.exception("a step failed for session %d", pieces[0].running.session.opened.session)
                self._drop(pieces[0].running)
                self.counters.refused += 1
                return [pieces[0].running.refused(RefusalCode.INTERNAL, f"{type(error).__name__}: {error}")]
            for piece in pieces:
                piece.running.cached.rollback()
            return [message for piece in pieces for message in self._compute([piece])]
        now = time.perf_counter()
        return [
            message
            for piece, outcome in zip(pieces, outcomes, strict=True)
            for message in self._settle(piece, outcome, now)
        ]

    def _draw(self, pieces: Sequence[Piece]) -> list[Walk | None]:
        """The forward, the target's draws, and what they make of each session's offer."""
        logits_RV = self._engine.run([piece.chunk() for piece in pieces])
        parts = torch.split(logits_RV, [piece.rows for piece in pieces])
        outcomes = dict(self._by_coupling(pieces, parts) + self._by_rejection(pieces, parts))
        return [outcomes.get(i) for i in range(len(pieces))]

    @staticmethod
    def _by_coupling(pieces: Sequence[Piece], parts: Sequence[Tensor]) -> list[tuple[int, Walk]]:
        """What the target's own draws make of the offers, whatever was drafted."""
        chosen = [i for i, piece in enumerate(pieces) if piece.offer is not None and not piece.by_rejection]
        if not chosen:
            return []
        draws = [draw for i in chosen for draw in pieces[i].draws()]
        drawn = iter(sample(torch.cat([parts[i] for i in chosen]), draws))
        outcomes: list[tuple[int, Walk]] = []
        for i in chosen:
            offer = pieces[i].offer
            assert offer is not None
            outcomes.append((i, walk(offer.tokens, offer.parents, list(itertools.islice(drawn, pieces[i].rows)))))
        return outcomes

    @staticmethod
    def _by_rejection(pieces: Sequence[Piece], parts: Sequence[Tensor]) -> list[tuple[int, Walk]]:
        """What p and q make of the offers."""
        chosen = [i for i, piece in enumerate(pieces) if piece.offer is not None and piece.by_rejection]
        if not chosen:
            return []
        draws = [draw for i in chosen for draw in pieces[i].draws()]
        walks = verify_chains(torch.cat([parts[i] for i in chosen]), draws, [pieces[i].drafted() for i in chosen])
        return list(zip(chosen, walks, strict=True))

    def _settle(self, piece: Piece, outcome: Walk | None, now: float) -> Outgoing:
        """Commit what a session decides, in its tokens and in its cache."""
        running, cached = piece.running, piece.running.cached
        running.computed += piece.feed
        if piece.offer is None or outcome is None:
            cached.advance(range(piece.feed))
            running.session.index(cached.length)
            self.counters.prefilled += piece.feed
            return []
        commit = running.session.settle(outcome, now)
        cached.advance([*range(piece.feed), *(piece.feed + i for i in commit.kept)])
        cached.rollback()
        verification = commit.verification
        if verification.position == (opened := len(running.session.opened.tokens)):
            verification = replace(verification, cached=max(opened - running.computed, 0))
        self.counters.count(piece.offer, commit)
        self.counters.prefilled += piece.feed - 1
        if self._recorder:
            piece.outcome = _record(piece, commit)
        if verification.finish:
            self._drop(running)
        return [(running.link, verification)]


def _record(piece: Piece, commit: Commit) -> dict[str, object]:
    """What the recorder keeps of one session's step."""
    assert piece.offer is not None
    verification = commit.verification
    return {
        "session": verification.session,
        "position": verification.position,
        "feed": piece.feed,
        "offered": verification.offered,
        "accepted": verification.accepted,
        "committed": len(verification.tokens),
        "depths": [node.end - verification.position for node in piece.offer.nodes],
        "parents": list(piece.offer.parents),
        "odds": [round(node.weight, 4) for node in piece.offer.nodes],
        "kept": list(commit.kept),
    }
