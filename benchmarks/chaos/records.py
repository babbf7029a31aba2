"""What the clients of a run saw, what of it counts against the server, and whether a row of the table holds.

Pure bookkeeping: knows neither HTTP nor processes. Times are seconds of one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

REFUSED = 429
OK = 200


@dataclass(frozen=True, slots=True, order=True)
class Silence:
    """A time in which a stream said nothing."""

    seconds: float
    began: float


NO_SILENCE = Silence(0.0, 0.0)


@dataclass(slots=True)
class Reply:
    """One streamed request, from the moment it was sent."""

    request: int
    sent: float
    status: int | None = None
    """Of HTTP; None while there was no answer. A status of 200 accepts the request."""
    retry_after: str = ""
    chunks: list[float] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)
    done: bool = False
    """Whether the stream said that it is complete."""
    error: str = ""
    ended: float | None = None

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self.parts)

    @property
    def refused(self) -> bool:
        """Whether it was turned away as it should be: before acceptance, and told when to come again."""
        return self.status == REFUSED and bool(self.retry_after)

    @property
    def failed(self) -> bool:
        """Whether it ended in any other way than complete or refused."""
        return self.ended is not None and not self.refused and not (self.status == OK and self.done)

    @property
    def reason(self) -> str:
        """Why it failed."""
        if self.error:
            return self.error
        if self.status == REFUSED:
            return "status 429 without Retry-After"
        return "the stream ended without [DONE]" if self.status == OK else f"status {self.status}"

    @property
    def first_token(self) -> float:
        """Seconds until the first piece; 0 if there was none."""
        return self.chunks[0] - self.sent if self.chunks else 0.0

    @property
    def silence(self) -> Silence:
        """Longest time without a piece of text after the first, up to the end."""
        ends = [] if self.ended is None or not self.chunks else [self.ended]
        gaps = (Silence(later - earlier, earlier) for earlier, later in pairwise([*self.chunks, *ends]))
        return max(gaps, default=NO_SILENCE)

    def differs(self, right: str) -> bool:
        """Whether its text is not the right one, or not its beginning if the stream did not complete."""
        return self.text != right if self.done else not right.startswith(self.text)


@dataclass(frozen=True, slots=True)
class ReplyTally:
    """What a number of replies amount to."""

    requests: int
    refused: int
    """Before acceptance, with status 429 and Retry-After."""
    failed: int
    different: int
    silence: Silence
    first_token: float
    """The longest wait for one, in seconds."""
    complaints: tuple[str, ...] = ()


COMPLAINTS = 5


def tally(replies: Iterable[Reply], right: Mapping[int, str]) -> ReplyTally:
    """Count; ``right`` has the text of each request that was asked for."""
    asked = list(replies)
    failed = [reply for reply in asked if reply.failed]
    different = [reply for reply in asked if reply.differs(right[reply.request])]
    first = min((reply.sent for reply in asked), default=0.0)
    complaints = [
        f"request {reply.request}, sent after {reply.sent - first:.0f} s, {len(reply.chunks)} pieces: {reply.reason}"
        for reply in failed
    ]
    complaints += [f"request {reply.request}: {difference(reply.text, right[reply.request])}" for reply in different]
    return ReplyTally(
        requests=len(asked),
        refused=sum(reply.refused for reply in asked),
        failed=len(failed),
        different=len(different),
        silence=max((reply.silence for reply in asked), default=NO_SILENCE),
        first_token=max((reply.first_token for reply in asked), default=0.0),
        complaints=tuple(complaints[:COMPLAINTS]),
    )


def difference(got: str, right: str) -> str:
    """Where a text leaves the right one."""
    at = next((i for i, (a, b) in enumerate(zip(got, right, strict=False)) if a != b), min(len(got), len(right)))
    return f"text differs from character {at} on: {got[at : at + 20]!r} instead of {right[at : at + 20]!r}"


@dataclass(frozen=True, slots=True)
class Requirement:
    """What a row must show, besides no failed request and no different text."""

    text: str
    silence: float | None = None
    """Seconds that the longest silence stays below; None: no bound."""


@dataclass(slots=True)
class FaultResult:
    """What was measured under one fault."""

    streams: int
    tally: ReplyTally
    seconds: float = 0.0
    """From the fault until all workers were back; 0 where nothing was lost."""
    complaints: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    name: str = ""
    fault: str = ""
    wanted: Requirement = Requirement("")

    @property
    def problems(self) -> list[str]:
        """Everything that keeps the row from holding, the requests' own complaints last."""
        found = list(self.complaints)
        bound = self.wanted.silence
        silence = self.tally.silence.seconds
        if bound is not None and silence >= bound:
            found.append(f"a silence of {silence:.2f} s, wanted under {bound:g} s")
        if not self.tally.requests:
            found.append("nothing was asked for")
        return [*found, *self.tally.complaints]

    @property
    def holds(self) -> bool:
        """Whether the row shows what it must."""
        return not self.problems
