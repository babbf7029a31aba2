"""A session under way: its state machine, where it is open, what there is to hand to its client, and who is told of it.

Dispatch says what happens; :class:`RunningSession` tells all who count, trace, log, or show it. None of them has a say
in it.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

from router.generation import Committed, Details, Ended, Generation, GenerationError, Passed, ServedModel
from router.sessions.choice import WantedWorker
from router.sessions.tally import SessionTally
from speculation import digest as digests
from speculation.events import Emit, PeerId, Role
from speculation.messages import ANCHOR, FinishReason, Limits, Open, Proposal, SessionId, Welcome
from speculation.request.session import Session, SessionLimits
from transport.client import WorkerConnection
from transport.codec import MalformedMessage
from transport.codec_parts import AskedLogprobs
from transport.tracing import SessionLog

MAX_EVENTS = 100
TOGETHER_SECONDS = 1.0
LONGEST = 300
"""Characters of a line."""
LOOK_BACK = 16
"""Lines among which the same is looked for."""


class EventKind(StrEnum):
    """What happened. Stable names."""

    WORKER_UP = "worker_up"
    WORKER_DRAINING = "worker_draining"
    WORKER_GONE = "worker_gone"
    """As it was expected to."""
    WORKER_LOST = "worker_lost"
    SESSION_REOPENED = "session_reopened"
    SESSION_MOVED = "session_moved"
    SESSION_CONDEMNED = "session_condemned"
    DRAFTER_QUARANTINED = "drafter_quarantined"


OF_WORKERS = (EventKind.WORKER_UP, EventKind.WORKER_DRAINING, EventKind.WORKER_GONE, EventKind.WORKER_LOST)
"""Each says how a worker is from then on."""


@dataclass(frozen=True, slots=True)
class LoggedEvent:
    """One line, with the fields that ``GET /cluster`` shows of it."""

    number: int
    """Counted from 1, also those that have left the ring."""
    time: float
    """Seconds since 1970."""
    kind: EventKind
    text: str
    worker: PeerId
    session: int | None = None
    request: str = ""
    times: int = 1
    """How often it happened within a second; the rest is said of the first, or of the last where a worker's state
    changed in between."""


class EventLog:
    """What lately happened to the workers and sessions of a router, one line each, for views of the cluster.

    A ring of bounded length. A lost target can take a thousand sessions with it: the same thing happening again at the
    same worker within a second counts as once, several times over, so that it does not push the reason for it out. The
    last line about a worker itself says how it is.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lines: deque[LoggedEvent] = deque(maxlen=MAX_EVENTS)
        self._number = 0

    @property
    def lines(self) -> tuple[LoggedEvent, ...]:
        """Oldest first."""
        return tuple(self._lines)

    def note(self, kind: EventKind, text: str, worker: PeerId, session: int | None = None, request: str = "") -> None:
        """It happens now."""
        now, times, changed = self._clock(), 1, False
        for back in range(1, min(len(self._lines), LOOK_BACK) + 1):
            line = self._lines[-back]
            if line.kind is kind and line.worker == worker and abs(now - line.time) < TOGETHER_SECONDS:
                times += line.times
                if not changed:
                    self._lines[-back] = replace(line, times=times)
                    return
                del self._lines[-back]
                break
            changed |= line.worker == worker and kind in OF_WORKERS and line.kind in OF_WORKERS
        self._number += 1
        shortened = " ".join(text.split())[:LONGEST]
        self._lines.append(LoggedEvent(self._number, now, kind, shortened, worker, session, request, times))


NUMBERS_PER_COMMIT = 8
"""Log-probabilities, or draft tokens in details, that take as much memory as a commit without: under 1 KB."""


class JoinedEnd(NamedTuple):
    """A session as it is open at one worker."""

    connection: WorkerConnection
    epoch: int
    head: Welcome | None
    """What it says of itself, if it has an EAGLE head."""


@dataclass(slots=True)
class OpenSession:
    """A session that this router has open at a worker."""

    epoch: int
    unanswered: int
    """Tokens that the worker was sent and has not answered yet."""
    asked: AskedLogprobs


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
        """It is over; None: it was stopped."""


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
        self._numbers: defaultdict[int, int] = defaultdict(itertools.count(1).__next__)
        """Of every draft token, by the digest of the text that ends with it."""

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
        numbers = tuple(self._numbers[place] for place in places)
        while len(self._numbers) > MAX_NUMBERS:
            del self._numbers[next(iter(self._numbers))]
        return numbers

    def committed(self, now: float, target: PeerId, draft: PeerId | None, reopened: int) -> Details:
        """Tokens were committed; what is said of them starts over."""
        passed, self._passed, self._tokens = tuple(self._passed), [], 0
        return Details(now - self._began, passed, target, draft, reopened)


class ClientQueue:
    """What a session has for its client, who alone reads it. asyncio's queue, for many, takes three times as long."""

    __slots__ = ("_items", "_wanted", "unread")

    def __init__(self) -> None:
        self.unread = 0
        """What all that waits weighs together."""
        self._items: deque[tuple[Committed | Ended | GenerationError, int]] = deque()
        self._wanted: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: Committed | Ended | GenerationError, weight: int = 0) -> None:
        """One more, and what it weighs."""
        self._items.append((item, weight))
        self.unread += weight
        if self._wanted is not None and not self._wanted.done():
            self._wanted.set_result(None)

    async def get(self) -> Committed | Ended | GenerationError:
        """The oldest, as soon as there is one."""
        while not self._items:
            self._wanted = asyncio.get_running_loop().create_future()
            await self._wanted
        item, weight = self._items.popleft()
        self.unread -= weight
        return item


@dataclass(eq=False, slots=True)
class RunningSession:
    """A session under way, what it has for its client, and who hears of it."""

    session: Session
    generation: Generation
    model: ServedModel | None
    blocks: tuple[int, ...]
    """Of the prompt; see :func:`router.sessions.choice.blocks_of`."""
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
    items: ClientQueue = field(default_factory=ClientQueue)
    _told: tuple[int, int] = (0, 0)
    """How often it was opened again and moved, as far as the event log says so."""

    @property
    def wanted(self) -> WantedWorker:
        """What it needs of a worker now."""
        name, tokenizer = (self.model.name, self.model.tokenizer) if self.model else ("", 0)
        return WantedWorker(name, tokenizer, self.revision, self.session.position, self.session.end, self.blocks)

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

    def committed(self, now: float, emit: Emit, target: PeerId, draft: PeerId | None) -> None:
        """Tokens were committed at ``now``, at these workers."""
        tokens, accepted, offered = emit.tokens, emit.accepted, emit.offered
        self.tally.committed(now, len(tokens), accepted, offered, emit.cached)
        self.trace.committed(len(tokens), accepted, offered)
        details = None
        if self.details is not None:
            details = self.details.committed(now, target, draft, self.session.reopened)
        committed = Committed(tokens, accepted, offered, emit.cached, emit.metadata, details)
        self.items.put(committed, weight(committed))

    def failed(self, error: GenerationError) -> None:
        """It has no whole text."""
        self.ended = error
        self.log.warning("failed (%s): %s", error.code.name, error.message)
        self.items.put(error)

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


def weight(committed: Committed) -> int:
    """As how many commits of tokens alone it counts, by its memory. What is said of the prompt, once, is free."""
    numbers = sum(1 + len(token.tokens) for token in committed.metadata.logprobs)
    if committed.details is not None:
        numbers += sum(len(passed.proposal.tokens) for passed in committed.details.passed)
    return 1 + numbers // NUMBERS_PER_COMMIT


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
    return Session(request, limits, generation.digest)


def outside_vocabulary(proposal: Proposal, vocabulary: int) -> MalformedMessage | None:
    """What is wrong with one of tokens that the model of its session does not have."""
    worst = max(itertools.chain(proposal.tokens, *(support.tokens for support in proposal.q)), default=-1)
    if worst < vocabulary:
        return None
    why = f"token {worst} is outside the vocabulary of {vocabulary}"
    return MalformedMessage(why, proposal.session, proposal.epoch)
