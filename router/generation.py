"""What the HTTP side asks of the router, and what it gets back.

The API speaks text and OpenAI's JSON; the router speaks tokens and sessions. This module is the seam between them.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Protocol

from speculation.messages import FinishReason, Sampling, Speculation, Token


@dataclass(frozen=True, slots=True)
class Generation:
    """One choice of one request: a valid prompt and how to continue it."""

    prompt: tuple[Token, ...]
    sampling: Sampling
    max_tokens: int
    stop_tokens: frozenset[Token] = frozenset()
    speculation: Speculation = Speculation()
    request_id: str = ""
    priority: int = 0
    """The lower, the sooner it is served where not all can be."""
    model: ServedModel | None = None
    """Which of the served models; None: the only one, or any."""


@dataclass(frozen=True, slots=True)
class Committed:
    """Tokens that are decided. The first ``accepted`` of them were drafted; ``offered`` drafts were verified."""

    tokens: tuple[Token, ...]
    accepted: int
    offered: int
    cached: int = 0
    """With the first ones: how many tokens of the prompt were in the target's cache."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The last item of a generation."""

    reason: FinishReason
    reopened: int = 0
    """How often the session was moved to another target worker."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model behind the router, as its target workers describe it."""

    name: str
    vocabulary: int
    context: int
    tokenizer: int
    """Digest of the tokenizer; 0: unknown."""
    source: str = ""
    """Folder or hub id it was read from."""


class GenerationError(Exception):
    """A generation could not be finished. ``code`` is a stable name of ``router.errors``."""

    def __init__(self, code: str, message: str) -> None:
        """``message`` is for the client."""
        super().__init__(message)
        self.code = code
        self.message = message


class Generator(Protocol):
    """What the API needs of a router. ``router.dispatch`` implements it; tests fake it."""

    @property
    def models(self) -> Mapping[str, ServedModel]:
        """The served models by name; none while no target worker was ever connected."""
        ...

    def generate(self, generation: Generation) -> AsyncGenerator[Committed | Ended]:
        """Decode. Yields committed tokens as they are decided, then one :class:`Ended`.

        Closing the generator (``aclose``, or cancelling the task that iterates) stops the session on all workers.
        Raises :class:`GenerationError`.
        """
        ...
