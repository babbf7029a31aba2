"""Runs the sessions of a router: the shell around :class:`speculation.session.Session`.

Takes the state machine's effects and performs them: chooses workers, sends, sets timers, hands committed tokens to
whoever iterates. All on one event loop; the state machine decides, this module only carries out.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field, replace
from typing import assert_never

from router.choice import Wanted
from router.generation import Committed, Ended, Generation, GenerationError, ServedModel
from router.metrics import RouterMetrics
from router.pool import PoolEvents, WorkerPool, outside_vocabulary
from router.prefixes import blocks_of
from router.session_log import SessionLog
from router.snapshot import Snapshot, WorkerView
from router.tally import SessionTally, Tally
from speculation.demand import RouterDemand
from speculation.events import (
    Available,
    Condemned,
    Draining,
    Effect,
    Emit,
    Event,
    Fail,
    FailureCode,
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
from speculation.messages import (
    Close,
    FromWorker,
    Limits,
    Load,
    Open,
    SessionId,
    ToWorker,
    Verification,
    Welcome,
)
from speculation.reopening import ReopeningLimits, Reopenings
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
    reopening: ReopeningLimits = ReopeningLimits()


@dataclass(slots=True)
class Totals:
    """Monotone totals since the start. What sessions count themselves is added when they end."""

    sessions: int = 0
    committed: int = 0
    accepted: int = 0
    offered: int = 0
    reopened: int = 0
    moved: int = 0
    """Sessions that went to another target without a fault, each time."""
    condemned: int = 0
    """Sessions failed because targets died of them."""
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
        self.moved += session.moved
        self.stale += session.stale
        self.strikes += sum(map(len, session.strikes.values()))
        self.quarantined += len(session.quarantined)


@dataclass(eq=False, slots=True)
class _Run:
    """A session under way and what it has for its client."""

    session: Session
    tally: SessionTally
    log: SessionLog
    model: ServedModel | None
    blocks: tuple[int, ...]
    """Of the prompt; see :mod:`router.prefixes`."""
    items: asyncio.Queue[Committed | Ended | GenerationError] = field(default_factory=asyncio.Queue)
    timers: set[asyncio.TimerHandle] = field(default_factory=set)
    at: dict[Role, PeerId] = field(default_factory=dict)
    """Where it was last opened."""
    revision: int | None = None
    """That the text began with. Another would go on with another text."""
    finished: bool = False
    """Whether the session came to its end, and was not stopped or failed."""

    @property
    def wanted(self) -> Wanted:
        """What it needs of a worker now."""
        name, tokenizer = (self.model.name, self.model.tokenizer) if self.model else ("", 0)
        tokens = self.session.prompt_length + len(self.session.output)
        return Wanted(name, tokenizer, self.revision, tokens, self.blocks)


class Dispatcher:
    """All sessions of a router. Implements :class:`router.generation.Generator`."""

    def __init__(self, limits: DispatchLimits = DispatchLimits(), identity: Identity | None = None) -> None:
        """No workers are known yet: see ``pool.set_workers``. ``identity``: see :class:`router.pool.WorkerPool`."""
        self._limits = limits
        self._runs: dict[SessionId, _Run] = {}
        self._ids = itertools.count(1)
        self._reopenings = Reopenings(limits.reopening)
        self._asked_again = False
        events = PoolEvents(self._available, self._lost, self._draining, self._received, self._malformed)
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
    def models(self) -> Mapping[str, ServedModel]:
        """The served models by name; known from the first welcome of a target on."""
        return self.pool.models()

    @property
    def running(self) -> int:
        """Sessions under way."""
        return len(self._runs)

    def demand(self, model: str = "") -> RouterDemand:
        """What whoever decides how many workers there are should know of one model, or of all."""
        runs = [run for run in self._runs.values() if not model or (run.model and run.model.name == model)]
        undrafted = [run for run in runs if run.session.undrafted and self.pool.speculates(run.at.get(Role.TARGET))]
        resting = sum(run.session.resting for run in runs)
        return RouterDemand(streams=len(runs), undrafted=len(undrafted), resting=resting)

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
        model = generation.model or next(iter(self.models.values()), None)
        tally = self.metrics.tally.session(model.name if model else "", len(generation.prompt))
        session_log = SessionLog(log, number, generation.request_id)
        run = self._runs[number] = _Run(session, tally, session_log, model, blocks_of(generation.prompt))
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
            self._add_up(run)
            del self._runs[number]
            self._reopenings.ended(number, finished=run.finished)
            self._ask_again_soon()

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
            moved=totals.moved,
            condemned=totals.condemned,
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

    def _lost(self, role: Role, peer: PeerId, expected: bool) -> None:
        if role is Role.TARGET:
            self._reopenings.lost(asyncio.get_running_loop().time(), peer, expected=expected)
        for run in list(self._runs.values()):
            self._handle(run, Lost(peer))
        self._ask_again_soon()

    def _draining(self, peer: PeerId) -> None:
        for run in list(self._runs.values()):
            self._handle(run, Draining(peer))

    def _received(self, peer: PeerId, message: FromWorker) -> None:
        if isinstance(message, Load | Welcome):
            return
        run = self._runs.get(message.session)
        if run is None:
            self.totals.stale += 1
        elif run.model and (wrong := outside_vocabulary(message, run.model.vocabulary)):
            self._malformed(peer, wrong)
        else:
            if isinstance(message, Verification):
                self._reopenings.heard(peer, message)
                if message.lead is not None:
                    run.tally.leads(message.lead)
            self._handle(run, Received(peer, message))
            self._ask_again_soon()

    def _malformed(self, peer: PeerId, error: MalformedMessage) -> None:
        self.totals.malformed += 1
        run = None if error.session is None else self._runs.get(error.session)
        if run is not None:
            self._handle(run, Faulted(peer, error.epoch or 0, str(error)))

    def _handle(self, run: _Run, event: Event) -> None:
        now = asyncio.get_running_loop().time()
        for effect in run.session.handle(now, event):
            self._perform(run, effect)

    def _ask_again_soon(self) -> None:
        """Let sessions whose turn has come ask for a target again, once what happens now is dealt with."""
        if self._reopenings.changed and not self._asked_again:
            self._asked_again = True
            asyncio.get_running_loop().call_soon(self._ask_again)

    def _ask_again(self) -> None:
        self._asked_again = False
        for number in self._reopenings.due():
            if number in self._runs:
                self._handle(self._runs[number], Available(Role.TARGET))

    # -- effects -------------------------------------------------------------------------------------------------------

    def _perform(self, run: _Run, effect: Effect) -> None:
        match effect:
            case Place(role=role, avoid=avoid):
                self._handle(run, self._placed(run, role, avoid))
            case Send(peer=peer, message=message):
                self._note(run, peer, message)
                self.pool.send(peer, message)
            case Emit(tokens=tokens, accepted=accepted, offered=offered, cached=cached):
                self._learn(run, accepted, offered)
                self.totals.committed += len(tokens)
                self.totals.accepted += accepted
                self.totals.offered += offered
                run.tally.committed(asyncio.get_running_loop().time(), len(tokens), accepted, offered, cached)
                run.items.put_nowait(Committed(tokens, accepted, offered, cached))
            case Wake(at=at):
                self._set_timer(run, at)
            case Finish(reason=reason):
                if reason is not None:
                    run.finished = True
                    run.items.put_nowait(Ended(reason, run.session.reopened))
            case Fail(code=code, message=message):
                self.totals.failed += 1
                why = self._why(run, code, message)
                run.log.warning("failed (%s): %s", code.value, why)
                run.items.put_nowait(GenerationError(code.value, why))
            case _:
                assert_never(effect)

    def _placed(self, run: _Run, role: Role, avoid: frozenset[PeerId]) -> Placed | Condemned:
        """The choice of a worker, but for targets where it is not this session's turn."""

        def choose(avoid: frozenset[PeerId]) -> PeerId | None:
            return self.pool.choose(role, avoid, run.wanted, run.at.get(Role.TARGET))

        if role is not Role.TARGET:
            return Placed(role, choose(avoid))
        answer = self._reopenings.place(asyncio.get_running_loop().time(), run.session.session, avoid, choose)
        self.totals.condemned += isinstance(answer, Condemned)
        return answer

    def _note(self, run: _Run, peer: PeerId, message: ToWorker) -> None:
        """Keep the accounts of which session is open where."""
        if isinstance(message, Open):
            self.pool.opened(peer, message, run.blocks)
            known = self.pool.peers.get(peer)
            if known is not None:
                run.at[known.role] = peer
                run.tally.opened(peer, known.role)
                if known.role is Role.TARGET:
                    self._reopenings.opened(message.session, peer, message.epoch)
            run.log.info("opened at %s with %d tokens, epoch %d", peer, len(message.tokens), message.epoch)
        elif isinstance(message, Close):
            self._reopenings.closed(message.session, peer)
            self.pool.closed(peer, message.session)

    def _learn(self, run: _Run, accepted: int, offered: int) -> None:
        """What a step of a session says about its workers."""
        target = run.at[Role.TARGET]
        known = self.pool.peers.get(target)
        if run.revision is None and known is not None and known.welcome is not None:
            run.revision = known.welcome.revision
        if offered and Role.DRAFT in run.at:
            self.pool.drafted(target, run.at[Role.DRAFT], accepted, offered)

    def _why(self, run: _Run, code: FailureCode, message: str) -> str:
        """The reason of a failure, with what the session itself cannot know."""
        if code is not FailureCode.UNAVAILABLE or run.model is None:
            return message
        if run.revision is not None and self.pool.revisions(run.model.name) - {run.revision}:
            return (
                f"model {run.model.name} was replaced by another revision and no target worker of the one that began "
                "this text is left; it would not go on with the same text, so ask again"
            )
        return f"{message} for model {run.model.name}"

    def _set_timer(self, run: _Run, at: float) -> None:
        def fire() -> None:
            run.timers.discard(handle)
            if run.session.phase is not Phase.ENDED:
                self._handle(run, Tick())

        handle = asyncio.get_running_loop().call_at(at, fire)
        run.timers.add(handle)
