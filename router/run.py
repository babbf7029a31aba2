"""A session under way: its state machine, where it is open, and what there is to hand to its client."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from router.choice import Wanted
from router.generation import Committed, Ended, GenerationError, ServedModel
from router.journal import SessionNotes
from router.tally import SessionTally
from router.untraced import Untraced
from router.witness import Witness
from speculation.events import PeerId, Role
from speculation.session import Session
from transport.session_log import SessionLog


@dataclass(eq=False, slots=True)
class Run:
    """A session under way and what it has for its client."""

    session: Session
    tally: SessionTally
    log: SessionLog
    notes: SessionNotes
    trace: Untraced
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
    witness: Witness | None = None
    """For a request that wants details."""

    @property
    def wanted(self) -> Wanted:
        """What it needs of a worker now."""
        name, tokenizer = (self.model.name, self.model.tokenizer) if self.model else ("", 0)
        tokens = self.session.prompt_length + len(self.session.output)
        return Wanted(name, tokenizer, self.revision, tokens, self.blocks)
