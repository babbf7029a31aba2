"""A session under way: its state machine, where it is open, and what there is to hand to its client."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

from router.generation import Committed, Ended, Generation, GenerationError, ServedModel
from router.sessions.choice import WantedWorker
from router.sessions.observer import SessionObserver
from speculation.events import PeerId
from speculation.messages import FinishReason, Limits, SessionId
from speculation.request.session import Session, SessionLimits


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
