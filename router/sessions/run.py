"""A session under way: its state machine, where it is open, and what there is to hand to its client."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from router.generation import Committed, Ended, Generation, GenerationError, ServedModel
from router.sessions.choice import WantedWorker
from router.sessions.observer import SessionObserver
from speculation.events import PeerId
from speculation.messages import FinishReason, Limits, SessionId
from speculation.request.session import Session, SessionLimits
from transport.wire import AskedLogprobs


class _There(NamedTuple):
    """A session at a worker."""

    epoch: int
    unanswered: int
    asked: AskedLogprobs


class OpenSessions:
    """The sessions that this router has open at one worker: under which epoch, and what of them is still unanswered."""

    def __init__(self) -> None:
        """None."""
        self.unanswered = 0
        """Tokens that the worker was sent and has not answered yet, of all sessions together."""
        self._open: dict[SessionId, _There] = {}

    def __len__(self) -> int:
        """How many."""
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


@dataclass(eq=False, slots=True)
class RunningSession:
    """A session under way and what it has for its client."""

    session: Session
    observer: SessionObserver
    model: ServedModel | None
    blocks: tuple[int, ...]
    """Of the prompt; see :mod:`router.sessions.prefixes`."""
    began: float
    """On the event loop's clock, in seconds."""
    items: asyncio.Queue[Committed | Ended | GenerationError] = field(default_factory=asyncio.Queue)
    timer: asyncio.TimerHandle | None = None
    """The one wake-up that its session has asked for."""
    opened_at: PeerId | None = None
    """The target it was last opened at."""
    revision: int | None = None
    """That the text began with. Another would go on with another text."""
    ended: FinishReason | GenerationError | None = None
    """Why, once it is over; None if it was stopped."""

    @property
    def wanted(self) -> WantedWorker:
        """What it needs of a worker now."""
        name, tokenizer = (self.model.name, self.model.tokenizer) if self.model else ("", 0)
        return WantedWorker(name, tokenizer, self.revision, self.session.position, self.session.end, self.blocks)


def session_of(number: SessionId, generation: Generation, limits: SessionLimits, traceparent: str) -> Session:
    """The session that a generation gets. ``traceparent``: of its trace; empty if it is not traced."""
    prompt = len(generation.prompt)
    if generation.timeout is not None:
        limits = replace(limits, unavailable_timeout=generation.timeout)
    return Session(
        number,
        generation.prompt,
        generation.sampling,
        Limits(prompt + generation.max_tokens, generation.stop_tokens, prompt + generation.min_tokens),
        generation.speculation,
        limits,
        generation.priority,
        replace(generation.request_options, request=generation.request_id, trace=traceparent),
    )
