"""What the HTTP side asks of the router, and what it gets back.

The API speaks text and OpenAI's JSON; the router speaks tokens and sessions. This module is the seam between them.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from router.errors import ApiError
from speculation.events import Emit
from speculation.frozen import frozen
from speculation.messages import FinishReason, Proposal, RequestOptions, Sampling, SourceName, Speculation, Token


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
    min_tokens: int = 0
    """No stop token is drawn before so many were generated."""
    request_options: RequestOptions = RequestOptions()
    timeout: float | None = None
    """Seconds that it may wait for a target while there is none; None: as long as the router sees fit."""
    details: bool = False
    """Whether every commit comes with :class:`Details`."""
    digest: int | None = field(default=None, compare=False)
    """Of the prompt (:func:`speculation.digest.of`), made where that holds nobody up; None: not yet."""


@frozen
class Passed:
    """A proposal on its way from a drafter to the target."""

    at: float
    """Seconds since the generation began."""
    proposal: Proposal
    """Without q, which may be large."""
    numbers: tuple[int, ...] = ()
    """Of its tokens: the same for the same token after the same text, different for all others of the generation."""
    after: int | None = None
    """Number of the draft token it hangs from; None if that was not seen, as the committed text was not."""


@frozen
class Details:
    """What the router saw of one commit. Times are seconds since the generation began."""

    at: float
    """When the target's word arrived."""
    passed: tuple[Passed, ...]
    """What drafters had proposed since the commit before."""
    target: str
    draft: str | None
    reopened: int
    """How often the session was opened again after a fault so far."""


@frozen
class Committed(Emit):
    """Tokens that are decided, as the session emits them, and what the router says of them besides."""

    details: Details | None = None
    more: bool = field(default=False, compare=False)
    """Whether what comes next is there already: both may be told a client together."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The last item of a generation."""

    reason: FinishReason
    reopened: int = 0


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model behind the router, as its target workers describe it."""

    name: str
    vocabulary: int
    context: int
    tokenizer: int
    """Digest of the tokenizer; 0: unknown."""
    source: str = ""
    sources: tuple[SourceName, ...] = ()
    """Draft sources that were registered at targets of it."""


class GenerationError(ApiError):
    """A generation could not be finished."""


class Generator(Protocol):
    """What the API needs of a router. ``router.dispatch`` implements it; tests fake it."""

    @property
    def models(self) -> Mapping[str, ServedModel]:
        """The served models by name; none while no target worker was ever connected."""

    @property
    def expected(self) -> Collection[str]:
        """Names of all models it is to serve, where it was told of several; of others it learns by their targets."""

    @property
    def loading(self) -> Collection[str]:
        """Names of the models that target workers load."""

    def generate(self, generation: Generation) -> AsyncGenerator[Committed | Ended]:
        """Decode. Yields committed tokens as they are decided, then one :class:`Ended`.

        Closing the generator (``aclose``, or cancelling the task that iterates) stops the session on all workers.
        Raises :class:`GenerationError`.
        """
