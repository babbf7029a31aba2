"""What is told of a session, and to whom: to those who count, trace, log, or show it, all from here.

Dispatch says what happens; :class:`SessionObserver` tells everybody who is to know. None of them has a say in it.
"""

from __future__ import annotations

from dataclasses import dataclass

from router.generation import Committed, GenerationError
from router.sessions.event_log import EventKind, EventLog
from router.sessions.speculation_trace import SpeculationTrace
from router.sessions.tally import SessionTally
from speculation.events import Emit, PeerId, Role
from speculation.messages import FinishReason, Open, Proposal, SessionId
from speculation.request.session import Session, Workers
from transport.session_log import SessionLog


class NullTracer:
    """A session without spans: what those of :mod:`router.http.tracing` are made from, where tracing is on."""

    traceparent = ""
    """What its workers' spans belong to."""

    def __init__(self, session: SessionId) -> None:
        """It begins to look for a target."""

    def opened(self, peer: PeerId, role: Role, opening: Open) -> None:
        """It was opened at a worker."""

    def closed(self, peer: PeerId, why: str) -> None:
        """It is open there no more; harmless if it was not."""

    def committed(self, tokens: int, accepted: int, offered: int) -> None:
        """So many tokens came, so many of them drafted, of so many drafts verified."""

    def ended(self, why: FinishReason | GenerationError | None) -> None:
        """It is over; None: it was given up."""


@dataclass(eq=False, slots=True)
class SessionObserver:
    """Of one session."""

    session: Session
    log: SessionLog
    tally: SessionTally
    trace: NullTracer
    event_log: EventLog
    request: str
    """Its id."""
    details: SpeculationTrace | None = None
    """For a request that wants them."""
    _told: tuple[int, int] = (0, 0)
    """How often it was opened again and moved, as far as the event log says so."""

    def opened(self, peer: PeerId, role: Role | None, opening: Open) -> None:
        """It was opened at a worker, perhaps the one it will move to; None: one that is gone already."""
        self.log.info("opened at %s with %d tokens, epoch %d", peer, len(opening.tokens), opening.epoch)
        if role is None:
            return
        if peer in self.session.workers:
            self.tally.opened(peer, role)
        self.trace.opened(peer, role, opening)
        if role is not Role.TARGET:
            return
        session, (reopened, moved) = self.session, self._told
        self._told = session.reopened, session.moved
        after = f"after {len(session.output)} tokens"
        if session.reopened > reopened:
            self._note(EventKind.SESSION_REOPENED, f"was opened again at {peer} {after}", peer)
        elif session.moved > moved:
            self._note(EventKind.SESSION_MOVED, f"moved to {peer} {after}", peer)

    def closed(self, peer: PeerId, why: str) -> None:
        """It is open there no more; harmless if it was not."""
        self.trace.closed(peer, why)

    def leads(self, tokens: int) -> None:
        """The target said how far ahead drafting is worth its while."""
        self.tally.leads(tokens)

    def proposed(self, now: float, proposal: Proposal) -> None:
        """A proposal was passed on to the target."""
        if self.details is not None:
            self.details.proposed(now, proposal)

    def committed(self, now: float, emit: Emit, of_drafter: tuple[int, int], workers: Workers) -> Committed:
        """What its client is told of a commit at ``now``.

        ``of_drafter``: how many drafts of draft models were accepted, of how many offered. ``workers``: where the
        session was.
        """
        tokens, accepted, offered = emit.tokens, emit.accepted, emit.offered
        self.tally.committed(now, len(tokens), accepted, offered, emit.cached, of_drafter)
        self.trace.committed(len(tokens), accepted, offered)
        details = None
        if self.details is not None:
            assert workers.target is not None
            details = self.details.committed(now, workers.target, workers.draft, self.session.reopened)
        return Committed(tokens, accepted, offered, emit.cached, emit.metadata, details)

    def condemned(self, target: PeerId, deaths: int) -> None:
        """Too many targets died of it; ``target`` was the last."""
        self._note(EventKind.SESSION_CONDEMNED, f"was given up: {deaths} targets in a row died of it", target)

    def contradicted(self) -> None:
        """It broke one of its own rules, which is being raised."""
        self.log.exception("its session contradicts itself")

    def failed(self, error: GenerationError) -> None:
        """It has no whole text."""
        self.log.warning("failed (%s): %s", error.code, error.message)

    def ended(self, why: FinishReason | GenerationError | None) -> None:
        """It is over; None: it was given up."""
        self.trace.ended(why)
        for peer in self.session.quarantined:
            reason = self.session.strikes[peer][-1]
            self.log.warning("done with drafter %s: %s", peer, reason)
            self._note(EventKind.DRAFTER_QUARANTINED, f"is done with {peer}: {reason}", peer)

    def _note(self, kind: EventKind, text: str, worker: PeerId) -> None:
        number = self.session.session
        self.event_log.note(kind, f"session {number} {text}", worker, number, self.request)
