"""What a session hears and what it does: the two vocabularies of :mod:`speculation.session`.

Events go in, effects come out. Both are plain values, so a session can be driven by a router, a simulator or a test.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

from speculation.messages import FinishReason, FromWorker, Token, ToWorker

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
    FAULTY = "faulty"
    """Target after target was lost, or failed, without committing a token: the request itself is suspect."""


# -- events ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """Begin."""


@dataclass(frozen=True, slots=True)
class Placed:
    """Answer to :class:`Place`: the chosen worker, or None when there is none now."""

    role: Role
    peer: PeerId | None


@dataclass(frozen=True, slots=True)
class Received:
    """A message of a worker about this session."""

    peer: PeerId
    message: FromWorker


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
class Available:
    """A worker of this role became usable."""

    role: Role


@dataclass(frozen=True, slots=True)
class Stop:
    """The client wants no more: it went away, or found its stop string."""


@dataclass(frozen=True, slots=True)
class Tick:
    """A wake-up asked for with :class:`Wake`, or any other time."""


Event = Start | Placed | Received | Faulted | Lost | Available | Stop | Tick

# -- effects -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Place:
    """Choose a worker that is not in ``avoid`` and answer with :class:`Placed`."""

    role: Role
    avoid: frozenset[PeerId]


@dataclass(frozen=True, slots=True)
class Send:
    """Pass a message to a worker."""

    peer: PeerId
    message: ToWorker


@dataclass(frozen=True, slots=True)
class Emit:
    """Tokens were committed. The first ``accepted`` of them were drafted."""

    tokens: tuple[Token, ...]
    accepted: int
    offered: int
    cached: int = 0
    """With the first ones: how many tokens of the prompt were in the target's cache."""


@dataclass(frozen=True, slots=True)
class Finish:
    """The session ended as it should. ``None``: stopped by the client."""

    reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class Fail:
    """The session cannot go on."""

    code: FailureCode
    message: str


@dataclass(frozen=True, slots=True)
class Wake:
    """Send a :class:`Tick` at this time."""

    at: float


Effect = Place | Send | Emit | Finish | Fail | Wake
