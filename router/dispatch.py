"""Runs the sessions of a router: the shell around :class:`speculation.request.session.Session`.

Takes the state machine's effects and performs them: chooses workers, sends, sets timers, hands committed tokens to
whoever iterates. All on one event loop; the state machine decides, this module only carries out.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import assert_never

from router.generation import Committed, Ended, Generation, GenerationError, ServedModel
from router.limits import RetryTurns
from router.sessions.choice import StandbyTargets, blocks_of
from router.sessions.pool import PoolEvents, WorkerPool
from router.sessions.run import EventKind, NullTracer, RunningSession, SpeculationTrace, outside_vocabulary, session_of
from router.sessions.snapshot import Snapshot, Totals
from router.sessions.tally import RouterCounters
from router.telemetry.metrics import RouterMetrics
from speculation import events, messages
from speculation.demand import RouterDemand
from speculation.events import Event, FailureCode, PeerId, Role
from speculation.request.poison_detector import PoisonDetector, PoisonLimits
from speculation.request.session import Phase, SessionLimits
from transport.codec import MalformedMessage, UnknownKind
from transport.tls import Identity
from transport.tracing import SessionLog

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DispatchLimits:
    """Bounds of one router."""

    sessions: int = 1024
    """Sessions at once; more are refused before anything is accepted."""
    unread: int = 4096
    """Commits of a session that wait for its client, by their weight; it ends at so many, since no target waits."""
    session: SessionLimits = SessionLimits()
    poison: PoisonLimits = PoisonLimits()
    standby: Mapping[str, StandbyTargets] = field(default_factory=dict)
    """See :attr:`router.sessions.pool.WorkerPool.standby`."""
    models: Sequence[str] = ()
    """See :attr:`router.sessions.pool.WorkerPool.expected`."""


class Dispatcher:
    """All sessions of a router. Implements :class:`router.generation.Generator`."""

    def __init__(
        self,
        limits: DispatchLimits = DispatchLimits(),
        identity: Identity | None = None,
        traced: Callable[[messages.SessionId], NullTracer] = NullTracer,
    ) -> None:
        """No workers are known yet: see ``pool.set_workers``. ``identity``: see ``WorkerPool``.

        ``traced`` makes what hears of each session; see :class:`router.sessions.run.NullTracer`.
        """
        self._limits, self._traced = limits, traced
        self._runs: dict[messages.SessionId, RunningSession] = {}
        self.reading = 0
        """Generations whose sessions run or have more to read."""
        self._ids = itertools.count(1)
        self._poison_detector = PoisonDetector(limits.poison)
        self._asked_again = False
        self._turns = RetryTurns()
        told = PoolEvents(self._changed, self._lost, self._received, self._malformed)
        self.pool = WorkerPool(told, identity=identity, standby=limits.standby, expected=limits.models)
        self.expected: Collection[str] = limits.models
        self.totals = Totals()
        self.metrics = RouterMetrics(RouterCounters(), self.snapshot)
        if identity is not None:
            self.metrics.certificates = identity.certificates
        self.draining = False
        """Set by the owner before it stops: no new generation begins here."""
        self.unreadable: dict[str, str] = {}
        """Kept by the owner: models whose tokenizer cannot be read, by name, and why. Nobody can be served by them."""
        self.ready = asyncio.Event()
        """Set once a first target worker was up."""

    @property
    def models(self) -> Mapping[str, ServedModel]:
        """The served models by name; known from the first welcome of a target on."""
        return self.pool.models()

    @property
    def loading(self) -> Collection[str]:
        """Names of the models that targets load, as these say."""
        return self.pool.loading()

    def demand(self, model: str = "") -> RouterDemand:
        """What whoever decides how many workers there are should know of one model, or of all."""
        runs = [run for run in self._runs.values() if not model or (run.model and run.model.name == model)]
        undrafted = [run for run in runs if run.session.undrafted and self.pool.speculates(run.session.workers.target)]
        resting = sum(run.session.resting for run in runs)
        return RouterDemand(streams=len(runs), undrafted=len(undrafted), resting=resting)

    async def generate(self, generation: Generation) -> AsyncGenerator[Committed | Ended]:
        """Decode; see :class:`router.generation.Generator`."""
        if self.draining:
            raise GenerationError("draining", "this router is stopping; ask another, or again in a moment")
        if len(self._runs) >= self._limits.sessions:
            text = f"{self._limits.sessions} generations are under way; try again later"
            raise GenerationError("overloaded", text, retry_after=self._until_free())
        number = messages.SessionId(next(self._ids))
        trace = self._traced(number)
        model = generation.model or next(iter(self.models.values()), None)
        began = asyncio.get_running_loop().time()
        run = self._runs[number] = RunningSession(
            session_of(number, generation, self._limits.session, trace.traceparent),
            generation,
            model,
            blocks_of(generation.prompt, generation.request_options.cache_scope),
            began,
            SessionLog(log, number, generation.request_id),
            self.metrics.tally.session(model.name if model else "", len(generation.prompt)),
            trace,
            self.pool.event_log,
            SpeculationTrace(began) if generation.details else None,
        )
        self.totals.sessions += 1
        self.reading += 1
        try:
            self._handle(run, events.Start())
            while True:
                item = await run.items.get()
                if isinstance(item, GenerationError):
                    raise item
                yield replace(item, more=True) if run.items and isinstance(item, Committed) else item
                if isinstance(item, Ended):
                    return
        finally:
            self.reading -= 1
            self._handle(run, events.Stop())

    def give_up(self, why: str) -> None:
        """Fail what is under way: this router ends."""
        for run in list(self._runs.values()):
            self._give_up(run, "draining", why)

    def _give_up(self, run: RunningSession, code: str, why: str) -> None:
        if run.session.session in self._runs:
            self._fail(run, GenerationError(code, why))
            self._handle(run, events.Stop())

    def _until_free(self) -> float:
        """Seconds until one more session can be expected to find a place."""
        now, oldest = asyncio.get_running_loop().time(), next(iter(self._runs.values()), None)
        placing = sum(run.session.phase is Phase.PLACING for run in self._runs.values())
        return self._turns.take(now, len(self._runs) - placing, placing, now - oldest.began if oldest else 0.0)

    def _over(self, run: RunningSession) -> None:
        """A session has ended: it takes no place any more, whenever its client has read what there is."""
        session = run.session
        if self._runs.pop(session.session, None) is None:
            return
        if run.timer is not None:
            run.timer.cancel()
        self.pool.end_session(session.session)
        run.over()
        self.totals.take(session)
        self._turns.durations.add(asyncio.get_running_loop().time() - run.began)
        self._poison_detector.ended(session.session, finished=isinstance(run.ended, messages.FinishReason))
        self._ask_again_soon()

    def snapshot(self) -> Snapshot:
        """The router as of now, with what running sessions have counted."""
        sessions = [run.session for run in self._runs.values()]
        return Snapshot.of(self.pool, sessions, self.totals, draining=self.draining, unreadable=self.unreadable)

    # -- events --------------------------------------------------------------------------------------------------------

    def _changed(self, event: events.Available | events.Draining | events.Stays) -> None:
        match event:
            case events.Available(role=Role.TARGET):
                self.ready.set()
            case events.Draining(peer=peer):
                self._poison_detector.draining(peer)
            case events.Stays(peer=peer):
                self._poison_detector.stays(peer)
        self._handle_all(event)

    def _lost(self, role: Role, peer: PeerId, expected: bool) -> None:
        if role is Role.TARGET:
            self._poison_detector.lost(asyncio.get_running_loop().time(), peer, expected=expected)
        for run in self._runs.values():
            run.trace.closed(peer, "lost")
        self._handle_all(events.Lost(peer))

    def _handle_all(self, event: Event) -> None:
        for run in list(self._runs.values()):
            if run.session.phase is not Phase.ENDED:  # what ended it is being dealt with, and may have led to this
                self._handle(run, event)
        self._ask_again_soon()

    def _received(self, peer: PeerId, message: messages.SessionMessage) -> None:
        run = self._runs.get(message.session)
        if run is None:
            self.totals.stale += 1
        elif (
            isinstance(message, messages.Proposal)
            and run.model
            and (wrong := outside_vocabulary(message, run.model.vocabulary))
        ):
            self._malformed(peer, wrong)
        else:
            known = self.pool.peers.get(peer)
            if isinstance(message, messages.Verification) and known is not None and known.role is Role.TARGET:
                self._poison_detector.heard(peer, message)  # whatever the session makes of it
                if message.lead is not None:
                    run.tally.leads(message.lead)
                self._ask_again_soon()
            self._handle(run, events.Received(peer, message))

    def _malformed(self, peer: PeerId, error: MalformedMessage) -> None:
        self.totals.malformed += not isinstance(error, UnknownKind)
        run = None if error.session is None else self._runs.get(error.session)
        if run is not None:
            self._handle(run, events.Faulted(peer, error.epoch or 0, str(error)))

    def _handle(self, run: RunningSession, event: Event, at: float = 0.0) -> None:
        """Let a session take an event; ``at``: the time is no earlier, whatever the clock says."""
        self._take(run, event, at)
        if run.session.phase is Phase.ENDED:
            self._over(run)
        elif type(event) is events.Lost or (type(event) is events.Received and type(event.message) is messages.Refused):
            # Where another worker takes it, that is noted; but perhaps there is none.
            self.pool.join(run.session.session, *run.session.openings)

    def _take(self, run: RunningSession, event: Event, at: float = 0.0) -> None:
        now = max(asyncio.get_running_loop().time(), at)
        target, draft = run.session.workers
        try:
            effects = run.session.handle(now, event)
        except AssertionError:  # a fault of ours, that is to end nobody else's session
            run.log.exception("its session contradicts itself")
            self._fail(run, GenerationError("internal", "the router lost track of this request, by a fault of its own"))
            effects = run.session.handle(now, events.Stop())
        for effect in effects:
            if isinstance(effect, events.Emit):
                assert target is not None
                self._committed(run, effect, target, draft, now)
            else:
                self._perform(run, effect, now)

    def _ask_again_soon(self) -> None:
        """Let sessions whose turn has come ask for a target again, once what happens now is dealt with."""
        if self._poison_detector.changed and not self._asked_again:
            self._asked_again = True
            asyncio.get_running_loop().call_soon(self._ask_again)

    def _ask_again(self) -> None:
        self._asked_again = False
        for number in self._poison_detector.due():
            if number in self._runs:
                self._handle(self._runs[number], events.Available(Role.TARGET))

    # -- effects -------------------------------------------------------------------------------------------------------

    def _committed(
        self, run: RunningSession, emit: events.Emit, target: PeerId, draft: PeerId | None, now: float
    ) -> None:
        if run.revision is None and (welcome := self.pool.welcome_of(target)):
            run.revision = welcome.revision
        if draft is not None:
            accepted, offered = emit.from_draft_models
            if offered:
                self.pool.drafted(target, draft, accepted, offered)
        run.committed(now, emit, target, draft)
        if run.items.unread >= self._limits.unread:
            why = f"the client is {len(run.items)} commits behind; read faster, or ask for less"
            asyncio.get_running_loop().call_soon(self._give_up, run, "slow_reader", why)

    def _perform(self, run: RunningSession, command: events.Command, now: float) -> None:
        match command:
            case events.Place(role=role, avoid=avoid):
                self._take(run, self._placed(run, role, avoid))
            case events.Send(peer=peer, message=message):
                self._note(run, peer, message)
                self.pool.send(peer, message)
            case events.Relay(peer=peer, message=message, epoch=epoch):
                if message.passed != epoch:  # else the two workers' connections did so
                    self.pool.send(peer, replace(message, epoch=epoch))
                if run.details is not None and isinstance(message, messages.Proposal):
                    run.details.proposed(now, message)
            case events.Wake(at=at):
                self._set_timer(run, at)
            case events.Finish(reason=reason):
                if reason is not None:
                    run.ended = reason
                    run.items.put(Ended(reason, run.session.reopened))
            case events.Fail(code=code, message=message):
                retry_after = self._until_free() if code is FailureCode.OVERLOADED else None
                why = self._why(run, code, message)
                self._fail(run, GenerationError(code.value, why, retry_after=retry_after))
            case _:
                assert_never(command)

    def _fail(self, run: RunningSession, error: GenerationError) -> None:
        self.totals.failed += 1
        run.failed(error)

    def _placed(self, run: RunningSession, role: Role, avoid: frozenset[PeerId]) -> Event:
        """The choice of a worker, but for targets where it is not this session's turn."""

        def choose(avoid: frozenset[PeerId]) -> PeerId | None:
            return self.pool.choose(role, avoid, run.wanted, run.session.workers.target)

        if role is not Role.TARGET:
            return events.Placed(role, choose(avoid))
        answer = self._poison_detector.place(asyncio.get_running_loop().time(), run.session.session, avoid, choose)
        # else it goes on for the time being
        if isinstance(answer, events.PoisonRequest) and run.session.phase is Phase.PLACING:
            self.totals.condemned += 1
            assert run.opened_at is not None
            why = f"was given up: {answer.deaths} targets in a row died of it"
            run.note(EventKind.SESSION_CONDEMNED, why, run.opened_at)
        return answer

    def _note(self, run: RunningSession, peer: PeerId, message: messages.ToWorker) -> None:
        if isinstance(message, messages.Open):
            self.pool.opened(peer, message, run.blocks)
            known = self.pool.peers.get(peer)
            run.opened(peer, known.role if known is not None else None, message)
            if known is not None and known.role is Role.TARGET:
                run.opened_at = peer
                self._poison_detector.opened(message.session, peer, message.epoch)
        elif isinstance(message, messages.Close):
            run.trace.closed(peer, "closed")
            self._poison_detector.closed(message.session, peer)
            self.pool.closed(peer, message.session)
        self.pool.join(run.session.session, *run.session.openings)

    def _why(self, run: RunningSession, code: FailureCode, message: str) -> str:
        """The reason of a failure, with what the session itself cannot know."""
        if code is not FailureCode.UNAVAILABLE or run.model is None:
            return message
        name = run.model.name
        if run.revision is None or not self.pool.revisions(name) - {run.revision}:
            if 0 < self.pool.longest(name) < run.session.end:
                return (
                    f"{message} that takes the {run.session.end} tokens asked of model {name}; ask for fewer, or again"
                )
            return f"{message} for model {name}"
        return (
            f"model {name} was replaced by another revision (weights, number format or ranks) and no target worker of "
            "the one that began this text is left; it would not go on with the same text, so ask again"
        )

    def _set_timer(self, run: RunningSession, at: float) -> None:
        def fire() -> None:
            run.timer = None
            self._handle(run, events.Tick(), at)  # an event loop may be early: uvloop's clock has steps of 1 ms

        if run.timer is not None:
            run.timer.cancel()
        run.timer = asyncio.get_running_loop().call_at(at, fire)
