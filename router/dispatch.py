"""Runs the sessions of a router: the shell around :class:`speculation.session.Session`.

Takes the state machine's effects and performs them: chooses workers, sends, sets timers, hands committed tokens to
whoever iterates. All on one event loop; the state machine decides, this module only carries out.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace
from typing import assert_never

from router.generation import Committed, Ended, Generation, GenerationError, ServedModel
from router.metrics import RouterMetrics
from router.pool import PoolEvents, WorkerPool
from router.session_log import SessionLog
from router.snapshot import Snapshot, WorkerView
from router.tally import SessionTally, Tally
from speculation.demand import RouterDemand
from speculation.events import (
    Available,
    Effect,
    Emit,
    Event,
    Fail,
    Faulted,
    Finish,
    Lost,
    PeerId,
    Place,
    Placed,
    Received,
    Role,
    Send,
    Start,
    Stop,
    Tick,
    Wake,
)
from speculation.messages import Close, FromWorker, Limits, Load, Open, SessionId, ToWorker, Verification, Welcome
from speculation.session import Phase, Session, SessionLimits
from transport.codec import MalformedMessage
from transport.tls import Identity

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DispatchLimits:
    """Bounds of one router."""

    sessions: int = 1024
    """Sessions at once; more are refused before anything is accepted."""
    session: SessionLimits = SessionLimits()


@dataclass(slots=True)
class Totals:
    """Monotone totals since the start. What sessions count themselves is added when they end."""

    sessions: int = 0
    committed: int = 0
    accepted: int = 0
    offered: int = 0
    reopened: int = 0
    failed: int = 0
    malformed: int = 0
    """Messages of workers that break the protocol; all were dropped."""
    stale: int = 0
    """Messages of workers that came too late to matter, or about no session known here."""
    strikes: int = 0
    """Malformed messages held against a drafter by its session."""
    quarantined: int = 0
    """Drafters that a session was done with; each counts once for every such session."""

    def take(self, session: Session) -> None:
        """Add what a session counts itself."""
        self.reopened += session.reopened
        self.stale += session.stale
        self.strikes += sum(map(len, session.strikes.values()))
        self.quarantined += len(session.quarantined)


@dataclass(eq=False, slots=True)
class _Run:
    """A session under way and what it has for its client."""

    session: Session
    tally: SessionTally
    log: SessionLog
    items: asyncio.Queue[Committed | Ended | GenerationError] = field(default_factory=asyncio.Queue)
    timers: set[asyncio.TimerHandle] = field(default_factory=set)
    opened_at: list[PeerId] = field(default_factory=list)


class Dispatcher:
    """All sessions of a router. Implements :class:`router.generation.Generator`."""

    def __init__(self, limits: DispatchLimits = DispatchLimits(), identity: Identity | None = None) -> None:
        """No workers are known yet: see ``pool.set_workers``. ``identity``: see :class:`router.pool.WorkerPool`."""
        self._limits = limits
        self._runs: dict[SessionId, _Run] = {}
        self._ids = itertools.count(1)
        events = PoolEvents(self._available, self._lost, self._received, self._malformed)
        self.pool = WorkerPool(events, identity=identity)
        self.totals = Totals()
        self.metrics = RouterMetrics(Tally(), self.snapshot)
        if identity is not None:
            self.metrics.certificates = (identity.certificate,)
        self.draining = False
        """Set by the owner before it stops: says that no new request should come here. Refuses none."""
        self.ready = asyncio.Event()
        """Set once a first target worker was up."""

    @property
    def model(self) -> ServedModel | None:
        """The served model; known from the first target's welcome on."""
        known = self.pool.model
        return ServedModel(known.model, known.vocabulary, known.context, known.tokenizer) if known else None

    @property
    def running(self) -> int:
        """Sessions under way."""
        return len(self._runs)

    @property
    def demand(self) -> RouterDemand:
        """What whoever decides how many workers there are should know."""
        sessions = [run.session for run in self._runs.values()]
        speculates = self.pool.model is not None and self.pool.model.speculates
        return RouterDemand(
            streams=len(sessions),
            undrafted=sum(session.undrafted for session in sessions) if speculates else 0,
            resting=sum(session.resting for session in sessions),
        )

    async def generate(self, generation: Generation) -> AsyncGenerator[Committed | Ended]:
        """Decode; see :class:`router.generation.Generator`."""
        if len(self._runs) >= self._limits.sessions:
            raise GenerationError("overloaded", f"{self._limits.sessions} generations are under way; try again later")
        number = SessionId(next(self._ids))
        session = Session(
            number,
            generation.prompt,
            generation.sampling,
            Limits(len(generation.prompt) + generation.max_tokens, generation.stop_tokens),
            generation.speculation,
            self._limits.session,
            generation.priority,
        )
        model = self.model.name if self.model else ""
        tally = self.metrics.tally.session(model, len(generation.prompt))
        run = self._runs[number] = _Run(session, tally, SessionLog(log, number, generation.request_id))
        self.totals.sessions += 1
        try:
            self._handle(run, Start())
            while True:
                item = await run.items.get()
                if isinstance(item, GenerationError):
                    raise item
                yield item
                if isinstance(item, Ended):
                    return
        finally:
            self._handle(run, Stop())
            for timer in run.timers:
                timer.cancel()
            for peer in run.opened_at:
                self.pool.count(peer, -1)
            self._add_up(run)
            del self._runs[number]

    def _add_up(self, run: _Run) -> None:
        """Take over what a session that ended has counted."""
        session = run.session
        self.totals.take(session)
        for peer in session.quarantined:
            run.log.warning("done with drafter %s: %s", peer, session.strikes[peer][-1])

    def snapshot(self) -> Snapshot:
        """The router as of now, with what running sessions have counted."""
        totals = replace(self.totals)
        for run in self._runs.values():
            totals.take(run.session)
        running = sum(run.session.phase is Phase.RUNNING for run in self._runs.values())
        return Snapshot(
            workers=tuple(WorkerView.of(peer) for peer in self.pool.peers.values()),
            placing=len(self._runs) - running,
            running=running,
            reopened=totals.reopened,
            malformed=totals.malformed,
            stale=totals.stale,
            strikes=totals.strikes,
            quarantined=totals.quarantined,
            traffic={role: self.pool.traffic(role) for role in Role},
            draining=self.draining,
        )

    # -- events --------------------------------------------------------------------------------------------------------

    def _available(self, role: Role) -> None:
        if role is Role.TARGET:
            self.ready.set()
        for run in list(self._runs.values()):
            self._handle(run, Available(role))

    def _lost(self, peer: PeerId, why: str) -> None:  # noqa: ARG002 - the pool has logged why
        for run in list(self._runs.values()):
            self._handle(run, Lost(peer))

    def _received(self, peer: PeerId, message: FromWorker) -> None:
        if isinstance(message, Load | Welcome):
            return
        run = self._runs.get(message.session)
        if run is None:
            self.totals.stale += 1
        else:
            if isinstance(message, Verification) and message.lead is not None:
                run.tally.leads(message.lead)
            self._handle(run, Received(peer, message))

    def _malformed(self, peer: PeerId, error: MalformedMessage) -> None:
        self.totals.malformed += 1
        run = None if error.session is None else self._runs.get(error.session)
        if run is not None:
            self._handle(run, Faulted(peer, error.epoch or 0, str(error)))

    def _handle(self, run: _Run, event: Event) -> None:
        now = asyncio.get_running_loop().time()
        for effect in run.session.handle(now, event):
            self._perform(run, effect)

    # -- effects -------------------------------------------------------------------------------------------------------

    def _perform(self, run: _Run, effect: Effect) -> None:
        match effect:
            case Place(role=role, avoid=avoid):
                self._handle(run, Placed(role, self.pool.choose(role, avoid)))
            case Send(peer=peer, message=message):
                self._count(run, peer, message)
                self.pool.send(peer, message)
            case Emit(tokens=tokens, accepted=accepted, offered=offered, cached=cached):
                self.totals.committed += len(tokens)
                self.totals.accepted += accepted
                self.totals.offered += offered
                run.tally.committed(asyncio.get_running_loop().time(), len(tokens), accepted, offered, cached)
                run.items.put_nowait(Committed(tokens, accepted, offered, cached))
            case Wake(at=at):
                self._set_timer(run, at)
            case Finish(reason=reason):
                if reason is not None:
                    run.items.put_nowait(Ended(reason, run.session.reopened))
            case Fail(code=code, message=message):
                self.totals.failed += 1
                run.log.warning("failed (%s): %s", code.value, message)
                run.items.put_nowait(GenerationError(code.value, message))
            case _:
                assert_never(effect)

    def _count(self, run: _Run, peer: PeerId, message: ToWorker) -> None:
        """Keep the pool's count of sessions per worker."""
        if isinstance(message, Open):
            run.tally.opened(peer, self.pool.peers[peer].role)
            run.log.info("opened at %s with %d tokens, epoch %d", peer, len(message.tokens), message.epoch)
            run.opened_at.append(peer)
            self.pool.count(peer, 1)
        elif isinstance(message, Close) and peer in run.opened_at:
            run.opened_at.remove(peer)
            self.pool.count(peer, -1)

    def _set_timer(self, run: _Run, at: float) -> None:
        def fire() -> None:
            run.timers.discard(handle)
            if run.session.phase is not Phase.ENDED:
                self._handle(run, Tick())

        handle = asyncio.get_running_loop().call_at(at, fire)
        run.timers.add(handle)
