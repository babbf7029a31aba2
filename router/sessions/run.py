"""A session under way: its state machine, where it is open, what there is to hand to its client, and who is told of it.

Dispatch says what happens; :class:`RunningSession` tells all who count, trace, log, or show it. None of them has a say
in it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from router.generation import Committed, Details, Ended, Generation, GenerationError, Passed, ServedModel
from router.sessions.choice import WantedWorker
from router.sessions.event_log import EventKind, EventLog
from router.sessions.tally import SessionTally
from speculation import digest as digests
from speculation.events import Emit, PeerId, Role
from speculation.messages import ANCHOR, FinishReason, FromWorker, Limits, Open, Proposal, SessionId, Subscribe, Welcome
from speculation.request.session import Session, SessionLimits, Workers
from transport.client import WorkerConnection
from transport.codec import MalformedMessage
from transport.codec_parts import AskedLogprobs
from transport.incoming import Route
from transport.tracing import SessionLog


class _There(NamedTuple):
    """A session at a worker."""

    epoch: int
    unanswered: int
    asked: AskedLogprobs


class OpenSessions:
    """The sessions that this router has open at one worker: under which epoch, and what of them is still unanswered."""

    def __init__(self) -> None:
        self.unanswered = 0
        """Tokens that the worker was sent and has not answered yet, of all sessions together."""
        self._open: dict[SessionId, _There] = {}

    def __len__(self) -> int:
        return len(self._open)

    def epoch(self, session: SessionId) -> int | None:
        """Under which it is open; None: it is not."""
        opened = self._open.get(session)
        return None if opened is None else opened.epoch

    def asked(self, session: SessionId, epoch: int) -> AskedLogprobs | None:
        """What the worker may tell of the session's tokens; None: it is not open there under this epoch."""
        opened = self._open.get(session)
        return opened.asked if opened is not None and opened.epoch == epoch else None

    def open(self, session: SessionId, epoch: int, unanswered: int, asked: AskedLogprobs) -> None:
        """It is open, perhaps again, and has to answer so many tokens."""
        self.close(session)
        self._open[session] = _There(epoch, unanswered, asked)
        self.unanswered += unanswered

    def answered(self, session: SessionId, *, told_prompt: bool = False) -> None:
        """The worker said something of it, perhaps the prompt's log-probabilities; harmless if it is not open."""
        opened = self._open.get(session)
        if opened is None or not (opened.unanswered or told_prompt):
            return
        self.unanswered -= opened.unanswered
        asked = replace(opened.asked, prompt=None) if told_prompt else opened.asked
        self._open[session] = _There(opened.epoch, 0, asked)

    def close(self, session: SessionId) -> None:
        """It has left; harmless if it was not there."""
        if opened := self._open.pop(session, None):
            self.unanswered -= opened.unanswered


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


MAX_TOKENS = 512
"""Draft tokens kept between two commits; what passes after them is not shown."""
MAX_NUMBERS = 4096
"""Places whose number is known; of more, the newest."""


class SpeculationTrace:
    """What a router sees of one session's speculation, for a request that wants to know.

    Proposals that pass since the last commit are given out with the next one. Drafts are numbered, so that who is told
    of them knows which branch a later proposal continues. Times go in on the router's clock and come out since the
    session began.
    """

    def __init__(self, began: float) -> None:
        self._began = began
        self._passed: list[Passed] = []
        self._tokens = 0
        self._numbers: dict[int, int] = {}
        """Of every draft token, by the digest of the text that ends with it."""
        self._last = 0

    def proposed(self, now: float, proposal: Proposal) -> None:
        """A proposal was passed on to the target."""
        self._tokens += len(proposal.tokens)
        if self._tokens <= MAX_TOKENS:
            after = self._numbers.get(proposal.anchor_digest)
            shown = replace(proposal, q=())
            self._passed.append(Passed(now - self._began, shown, self._numbered(proposal), after))

    def _numbered(self, proposal: Proposal) -> tuple[int, ...]:
        places: list[int] = []
        for token, parent in zip(proposal.tokens, proposal.parents, strict=True):
            places.append(digests.extend(proposal.anchor_digest if parent == ANCHOR else places[parent], token))
        for place in places:
            if place not in self._numbers:
                self._last += 1
                self._numbers[place] = self._last
        numbers = tuple(self._numbers[place] for place in places)
        while len(self._numbers) > MAX_NUMBERS:
            del self._numbers[next(iter(self._numbers))]
        return numbers

    def committed(self, now: float, target: PeerId, draft: PeerId | None, reopened: int) -> Details:
        """Tokens were committed; what is said of them starts over."""
        passed, self._passed, self._tokens = tuple(self._passed), [], 0
        return Details(now - self._began, passed, target, draft, reopened)


@dataclass(eq=False, slots=True)
class RunningSession:
    """A session under way, what it has for its client, and who hears of it."""

    session: Session
    generation: Generation
    model: ServedModel | None
    blocks: tuple[int, ...]
    """Of the prompt; see :mod:`router.sessions.choice`."""
    began: float
    """On the event loop's clock, in seconds."""
    log: SessionLog
    tally: SessionTally
    trace: NullTracer
    event_log: EventLog
    details: SpeculationTrace | None = None
    timer: asyncio.TimerHandle | None = None
    """The one wake-up that its session has asked for."""
    opened_at: PeerId | None = None
    revision: int | None = None
    """That the text began with. Another would go on with another text."""
    ended: FinishReason | GenerationError | None = None
    """Why, once it is over; None if it was stopped."""
    items: asyncio.Queue[tuple[Committed | Ended | GenerationError, int]] = field(default_factory=asyncio.Queue)
    """What the client has still to read, and what each weighs."""
    unread: int = 0
    """What they weigh together."""
    _told: tuple[int, int] = (0, 0)
    """How often it was opened again and moved, as far as the event log says so."""

    @property
    def wanted(self) -> WantedWorker:
        """What it needs of a worker now."""
        name, tokenizer = (self.model.name, self.model.tokenizer) if self.model else ("", 0)
        return WantedWorker(name, tokenizer, self.revision, self.session.position, self.session.end, self.blocks)

    def put(self, item: Committed | Ended | GenerationError, weight: int = 0) -> None:
        """Hand it to the client."""
        self.unread += weight
        self.items.put_nowait((item, weight))

    def opened(self, peer: PeerId, role: Role | None, opening: Open) -> None:
        """It was opened at a worker, perhaps the one it will move to; None: one that is gone already."""
        self.log.info("opened at %s with %d tokens, epoch %d", peer, len(opening.tokens), opening.epoch)
        if role is None:
            return
        self.trace.opened(peer, role, opening)
        if role is not Role.TARGET:
            return
        session, (reopened, moved) = self.session, self._told
        self._told = session.reopened, session.moved
        after = f"after {len(session.output)} tokens"
        if session.reopened > reopened:
            self.note(EventKind.SESSION_REOPENED, f"was opened again at {peer} {after}", peer)
        elif session.moved > moved:
            self.note(EventKind.SESSION_MOVED, f"moved to {peer} {after}", peer)

    def committed(self, now: float, emit: Emit, workers: Workers) -> None:
        """Tokens were committed at ``now``. ``workers``: where the session was."""
        tokens, accepted, offered = emit.tokens, emit.accepted, emit.offered
        self.tally.committed(now, len(tokens), accepted, offered, emit.cached)
        self.trace.committed(len(tokens), accepted, offered)
        details = None
        if self.details is not None:
            assert workers.target is not None
            details = self.details.committed(now, workers.target, workers.draft, self.session.reopened)
        committed = Committed(tokens, accepted, offered, emit.cached, emit.metadata, details)
        self.put(committed, committed.weight)

    def failed(self, error: GenerationError) -> None:
        """It has no whole text."""
        self.ended = error
        self.log.warning("failed (%s): %s", error.code, error.message)
        self.put(error)

    def over(self) -> None:
        """Nothing more happens to it."""
        self.trace.ended(self.ended)
        for peer in self.session.drafting.quarantined:
            reason = self.session.drafting.strikes[peer][-1]
            self.log.warning("done with drafter %s: %s", peer, reason)
            self.note(EventKind.DRAFTER_QUARANTINED, f"is done with {peer}: {reason}", peer)

    def note(self, kind: EventKind, text: str, worker: PeerId) -> None:
        """It is worth an entry in the event log."""
        number = self.session.session
        self.event_log.note(kind, f"session {number} {text}", worker, number, self.generation.request_id)


def session_of(number: SessionId, generation: Generation, limits: SessionLimits, traceparent: str) -> Session:
    """The session that a generation gets. ``traceparent``: of its trace; empty if it is not traced."""
    prompt = len(generation.prompt)
    if generation.timeout is not None:
        limits = replace(limits, unavailable_timeout=generation.timeout)
    request = Open(
        number,
        epoch=0,
        tokens=generation.prompt,
        sampling=generation.sampling,
        limits=Limits(prompt + generation.max_tokens, generation.stop_tokens, prompt + generation.min_tokens),
        speculation=generation.speculation,
        priority=generation.priority,
        request_options=replace(generation.request_options, request=generation.request_id, trace=traceparent),
    )
    return Session(request, limits)


def outside_vocabulary(message: FromWorker, vocabulary: int) -> MalformedMessage | None:
    """What is wrong with a proposal of tokens that the model of its session does not have."""
    if not isinstance(message, Proposal):
        return None
    worst = max(itertools.chain(message.tokens, *(support.tokens for support in message.q)), default=-1)
    if worst < vocabulary:
        return None
    why = f"token {worst} is outside the vocabulary of {vocabulary}"
    return MalformedMessage(why, message.session, message.epoch)


class JoinedEnd(NamedTuple):
    """A session as it is open at one worker."""

    connection: WorkerConnection
    epoch: int
    welcome: Welcome | None


@dataclass(slots=True)
class JoinedWorkers:
    """The two workers of each session, joined: what one says of it is passed on to the other at once.

    And the target is told whether the drafter it is joined to has an EAGLE head, for which it then sends features. No
    drafter can ask for features of a session that is not open at it.
    """

    _pairs: dict[SessionId, tuple[JoinedEnd | None, JoinedEnd | None]] = field(default_factory=dict)
    """Targets and drafters."""

    def join(
        self, session: SessionId, target: JoinedEnd | None, draft: JoinedEnd | None
    ) -> Iterator[tuple[WorkerConnection, Subscribe]]:
        """From now on, have what these two say passed on to each other, and nobody else's word.

        What has to be said to targets for that.
        """
        before = self._pairs.pop(session, (None, None))
        for end in before:
            if end is not None:
                end.connection.routes.pop(session, None)
        if target is not None or draft is not None:
            self._pairs[session] = target, draft
        if target is not None and draft is not None:
            target.connection.routes[session] = Route(target.epoch, draft.connection, draft.epoch)
            draft.connection.routes[session] = Route(draft.epoch, target.connection, target.epoch)
        if before == (target, draft) or target is None:
            return
        if drafter := _with_head(draft):
            # For another drafter too: what the target has kept of the text is sent again.
            yield target.connection, Subscribe(session, target.epoch, drafter.head, drafter.features)
        elif before[0] == target and _with_head(before[1]):
            yield target.connection, Subscribe(session, target.epoch, 0)


def _with_head(draft: JoinedEnd | None) -> Welcome | None:
    return draft.welcome if draft is not None and draft.welcome is not None and draft.welcome.head else None
