"""A session under way: its state machine, where it is open, and what there is to hand to its client."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from router.generation import Committed, Ended, GenerationError, ServedModel
from router.sessions.choice import WantedWorker
from router.sessions.event_log import SessionNotes
from router.sessions.null_tracer import NullTracer
from router.sessions.speculation_trace import SpeculationTrace
from router.sessions.tally import SessionTally
from speculation.events import PeerId
from speculation.messages import FinishReason
from speculation.request.session import Session
from transport.session_log import SessionLog


@dataclass(eq=False, slots=True)
class RunningSession:
    """A session under way and what it has for its client."""

    session: Session
    tally: SessionTally
    log: SessionLog
    notes: SessionNotes
    trace: NullTracer
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
    speculation_trace: SpeculationTrace | None = None
    """For a request that wants details."""

    @property
    def wanted(self) -> WantedWorker:
        """What it needs of a worker now."""
        name, tokenizer = (self.model.name, self.model.tokenizer) if self.model else ("", 0)
        return WantedWorker(name, tokenizer, self.revision, self.session.position, self.session.end, self.blocks)
