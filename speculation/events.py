"""What a session hears and what it does: the two vocabularies of :mod:`speculation.request.session`.

Events go in, effects come out. Both are plain values, so a session can be driven by a router, a simulator or a test.
With them, where committed tokens came from.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

from speculation.frozen import frozen
from speculation.messages import (
    FinishReason,
    Proposal,
    SessionMessage,
    Source,
    SourceName,
    Token,
    TokenLogprobs,
    ToWorker,
    Verification,
)

PeerId = NewType("PeerId", str)


class Role(StrEnum):
    """What a worker does."""

    TARGET = "target"
    DRAFT = "draft"


class FailureCode(StrEnum):
    """Why a session failed, as the client is told. Stable names."""

    INVALID = "invalid"
    UNAVAILABLE = "unavailable"
    """No target worker could take it in time."""
    OVERLOADED = "overloaded"
    """Every target worker was full for as long as a request may wait; nothing was started."""
    FAULTY = "faulty"
    """Target after target was lost, or failed, when it computed this: the request itself is at fault."""


# -- events ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """Begin."""


@dataclass(frozen=True, slots=True)
class Placed:
    """Answer to :class:`Place`: the chosen worker, or None when there is none now."""

    role: Role
    peer: PeerId | None
    queued: bool = False
    """There are workers, and the session's turn will come."""


@dataclass(frozen=True, slots=True)
class PoisonRequest:
    """Other answer to :class:`Place`: so many targets in a row died of this session, and it gets no other now."""

    deaths: int


@frozen
class Received:
    """A message of a worker about this session."""

    peer: PeerId
    message: SessionMessage


@dataclass(frozen=True, slots=True)
class Faulted:
    """A worker sent a message about this session that breaks the protocol. The message was dropped."""

    peer: PeerId
    epoch: int
    why: str


@dataclass(frozen=True, slots=True)
class Lost:
    """The stream to a worker is gone."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class Draining:
    """A worker says that it will go soon. What it runs it runs on, until it goes."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class Stays:
    """A worker that was to go will not go after all."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class Available:
    """A worker of this role became usable, or may be usable by this session again."""

    role: Role


@dataclass(frozen=True, slots=True)
class Stop:
    """The client wants no more: it went away, or found its stop string."""


@frozen
class Tick:
    """A wake-up asked for with :class:`Wake`, never before its time, or any other time."""


Event = Start | Placed | PoisonRequest | Received | Faulted | Lost | Draining | Stays | Available | Stop | Tick

# -- effects -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Place:
    """Choose a worker that is not in ``avoid`` and answer with :class:`Placed`."""

    role: Role
    avoid: frozenset[PeerId]


@frozen
class Send:
    """Pass a message to a worker."""

    peer: PeerId
    message: ToWorker


@frozen
class Relay:
    """Pass a message on to the worker at the other side, as it came but under the epoch of the session there."""

    peer: PeerId
    message: Proposal | Verification
    epoch: int


class Own(StrEnum):
    """Why a token is the target's own."""

    RECOVERED = "recovered"
    """A draft was offered at that place and refused."""
    BONUS = "bonus"
    """Drafts were offered, and all along the path were kept."""
    TARGET = "target"
    """Nothing was offered: plain decoding."""


Origin = SourceName | Own
"""No draft source is called like one of :class:`Own`."""


@frozen
class StepMetadata:
    """What a target says of tokens it commits, for those who want to know; see :class:`Verification`."""

    sources: tuple[SourceName, ...] = ()
    refused: tuple[SourceName, ...] = ()
    recovered: bool = False
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: Collection[TokenLogprobs] = ()
    """Read, and so checked, when they are iterated over, which may take long and raise ValueError."""
    took_us: int = 0
    waited_us: int = 0


@frozen
class Emit:
    """Tokens were committed. The first ``accepted`` of them were drafted."""

    tokens: tuple[Token, ...]
    accepted: int
    offered: int
    cached: int = 0
    """With the first ones: how many tokens of the prompt were in the target's cache."""
    metadata: StepMetadata = StepMetadata()

    @property
    def origins(self) -> tuple[Origin, ...]:
        """Where each of the tokens came from."""
        drafted: tuple[Origin, ...] = self.metadata.sources or (Source.DRAFT,) * self.accepted
        own = Own.RECOVERED if self.metadata.recovered else Own.BONUS if self.offered else Own.TARGET
        return drafted + (own,) * (len(self.tokens) - self.accepted)

    @property
    def refused(self) -> tuple[SourceName, ...]:
        """Where the drafts came from that were offered and not kept."""
        return self.metadata.refused or (Source.DRAFT,) * (self.offered - self.accepted)

    @property
    def from_draft_models(self) -> tuple[int, int]:
        """Of the drafts accepted and of those offered, how many a draft model had made."""
        kept, refused = self.accepted, self.offered - self.accepted
        if self.metadata.sources:
            kept = self.metadata.sources.count(Source.DRAFT)
        if self.metadata.refused:
            refused = self.metadata.refused.count(Source.DRAFT)
        return kept, kept + refused


@dataclass(frozen=True, slots=True)
class Finish:
    """The session ended as it should. ``None``: stopped by the client."""

    reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class Fail:
    """The session cannot go on."""

    code: FailureCode
    message: str


@frozen
class Wake:
    """Send a :class:`Tick` at this time, and not when the one before it says."""

    at: float


Command = Place | Send | Relay | Finish | Fail | Wake
Effect = Command | Emit
