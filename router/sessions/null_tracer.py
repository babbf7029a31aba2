"""What dispatch tells of a session to whoever traces it: nobody, unless tracing is on (:mod:`router.http.tracing`)."""

from __future__ import annotations

from router.generation import GenerationError
from speculation.events import PeerId, Role
from speculation.messages import FinishReason, Open, SessionId


class NullTracer:
    """A session without spans."""

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
