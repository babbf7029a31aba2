"""The verify loop of a target worker: every step commits at least one token for every session in it that decodes.

A step takes the sessions' shares from the scheduler (:mod:`target_service.scheduler`) and, of the drafts at hand, those
that pay (:mod:`speculation.planner`), runs all in one forward, draws the target's token on every row
(:mod:`target_service.verdicts`), and lets each session decide what is kept (:mod:`speculation.target_session`). With no
drafts it is plain decoding.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from engine.interface import StepEngine
from engine.recorder import Recorder
from speculation.acceptance import Walk
from speculation.demand import TargetDemand
from speculation.messages import (
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
from speculation.planner import Asked, Planner
from target_service.counters import Counters
from target_service.held import Held
from target_service.piece import Piece
from target_service.scheduler import Budget, Scheduler
from target_service.step_time import StepTime
from target_service.verdicts import Fault, Verdict, verdicts
from transport.worker import Outgoing

log = logging.getLogger(__name__)


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
        self._held: dict[tuple[Hashable, SessionId], Held] = {}
        self._scheduler: Scheduler[Held] = Scheduler(
            limits.running, limits.budget, free=lambda: engine.cache.ledger.free
        )
        self._numbers = itertools.count()
        self.counters = Counters()
        self._planner = Planner(adaptive=limits.adaptive)
        self._step_time = StepTime()
        self._recorder = recorder
        self._due: float | None = None
        self._waiting_since: float | None = None

    def welcome(self) -> Welcome:
        """How the worker introduces itself."""
        return self._welcome

    def load(self) -> Load:
        """How busy it is."""
        return Load(
            sessions=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            free_tokens=self._engine.cache.free_tokens,
            capacity_tokens=self._engine.cache.capacity,
            counters=self.counters.flat(),
        )

    def demand(self) -> TargetDemand:
        """What waits and runs, against what it can compute."""
        running, waiting = list(self._scheduler.running), list(self._scheduler.waiting)
        cache, most = self._engine.cache, self._limits.budget.tokens
        seconds = self._step_time(most)
        return TargetDemand(
            queued_tokens=sum(held.uncached - 1 for held in running)
            + sum(len(held.session.tokens) for held in waiting),
            running_tokens=cache.capacity - cache.free_tokens,
            capacity_tokens=cache.capacity,
            sessions=len(running) + len(waiting),
            places=self._limits.running,
            speed=most / seconds if seconds else 0.0,
            computed=self.counters.prefilled + self.counters.committed,
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
                return self._open(link, message, held, at)
            case Proposal():
                if held is not None:
                    self.counters.proposals[held.session.propose(message, at).fate] += 1
            case Close():
                if held is not None and held.session.opened.epoch <= message.epoch:
                    self._drop(held)
            case Verification():
                log.warning("a router sent a verification to a target; ignored")
        return []

    def _open(self, link: Hashable, opened: Open, held: Held | None, at: float) -> Outgoing:
        if held is not None and held.session.opened.epoch >= opened.epoch:
            return []
        refusal = self._objection(opened, replaces=held is not None)
        if held is not None:
            self._drop(held)
        if refusal is not None:
            self.counters.refused += 1
            return [(link, refusal)]
        if not self._engine.speculates:
            opened = replace(opened, speculation=replace(opened.speculation, enabled=False))
        session = self._planner.session(opened, self._welcome.vocabulary)
        # A session that is opened again keeps its place.
        arrived = (at - opened.age_ms / 1000, next(self._numbers)) if held is None else held.arrived
        self._held[link, opened.session] = taken = Held(link, session, self._engine.cache, arrived, self.counters)
        self._scheduler.add(taken)
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
        if not replaces and len(self._held) >= self._limits.running + self._limits.waiting:
            most = f"{self._limits.running} running and {self._limits.waiting} waiting"
            return refuse(RefusalCode.OVERLOADED, f"all places are taken: {most} sessions")
        return None

    def forget(self, link: Hashable) -> None:
        """Drop all sessions of a link."""
        for held in [held for (owner, _), held in self._held.items() if owner is link]:
            self._drop(held)

    def _drop(self, held: Held) -> None:
        held.cached.free()
        del self._held[held.link, held.session.opened.session]
        self._scheduler.remove(held)

    # -- one step ------------------------------------------------------------------------------------------------------

    def step(self) -> Outgoing | None:
        """Compute once over all running sessions but those that wait for drafts; None if there is nothing to do."""
        started = time.perf_counter()
        self._due = None
        pieces = self._plan(started)
        self.counters.preempted = self._scheduler.preempted
        if not pieces:
            self._pause(started)
            return None
        self._resume(started)
        outgoing = self._compute(pieces)
        self._account(pieces, started, time.perf_counter())
        return outgoing

    def _plan(self, now: float) -> list[Piece]:
        """Divide the step and settle what each session verifies; those that wait for drafts sit it out."""
        step = self._scheduler.step(self._beside)
        pieces = [Piece.of(held, share) for held, share in step.parts]
        drawing = [piece for piece in pieces if piece.drafts is not None]
        asked = [Asked(piece.held.session, piece.drafts or 0) for piece in drawing]
        prefilled = sum(piece.feed for piece in pieces) - len(drawing)
        plan = self._planner.plan(asked, now, prefilled, step.drafts)
        for piece, offer in zip(drawing, plan.offers, strict=True):
            piece.offer = offer
        self._due = plan.wake
        return [piece for piece in pieces if piece.drafts is None or piece.offer is not None]

    def _beside(self, decoding: int) -> int:
        """How many prompt tokens a step may compute beside so many sessions that decode."""
        budget = self._limits.budget
        return self._step_time.beside(decoding, budget.tokens, slowdown=budget.slowdown, seconds=budget.seconds)

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
        tokens = sum(piece.tokens for piece in pieces)
        if all(piece.decodes for piece in pieces):
            self._planner.observe(len(pieces), tokens, ended - started)
        self._step_time.observe(tokens, ended - started)
        if self._recorder:
            self._recorder.write(
                role="target",
                start=started,
                end=ended,
                forward=self._engine.forward_seconds,
                tokens=tokens,
                sessions=[piece.outcome for piece in pieces if piece.outcome],
            )

    def _compute(self, pieces: Sequence[Piece]) -> Outgoing:
        """Run the pieces in one forward. If that fails, each alone, so that a fault hits only its own session."""
        try:
            decided = verdicts(self._engine.run([piece.chunk() for piece in pieces]), pieces)
        except Exception as error:  # whatever a model may raise; the culprit is found below
            if len(pieces) == 1:
                log.exception("a step failed for session %d", pieces[0].held.session.opened.session)
                return self._give_up(pieces[0].held, f"{type(error).__name__}: {error}")
            for piece in pieces:
                piece.held.cached.rollback()
            return [message for piece in pieces for message in self._compute([piece])]
        now = time.perf_counter()
        return [
            message
            for piece, verdict in zip(pieces, decided, strict=True)
            for message in self._settle(piece, verdict, now)
        ]

    def _give_up(self, held: Held, why: str) -> Outgoing:
        self._drop(held)
        self.counters.refused += 1
        return [held.refused(RefusalCode.INTERNAL, why)]

    def _settle(self, piece: Piece, verdict: Verdict, now: float) -> Outgoing:
        """Commit what a session decides, in its tokens and in its cache."""
        held, cached = piece.held, piece.held.cached
        held.computed += piece.feed
        match verdict:
            case Fault(why):
                log.error("session %d was given up: %s", held.session.opened.session, why)
                return self._give_up(held, why)
            case Walk():
                assert piece.offer is not None
                commit = held.session.settle(verdict, now)
                cached.advance([*range(piece.feed), *(piece.feed + i for i in commit.kept)])
                cached.rollback()
                self.counters.count(piece.offer, commit)
                self.counters.prefilled += piece.feed - 1
                if self._recorder:
                    piece.record(commit)
                if commit.verification.finish:
                    self._drop(held)
                return [(held.link, held.said(commit.verification))]
            case None:
                cached.advance(range(piece.feed))
                held.session.index(cached.length)
                self.counters.prefilled += piece.feed
                return []
