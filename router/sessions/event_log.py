"""What lately happened to the workers and sessions of a router, one line each, for views of the cluster.

A ring of bounded length. A lost target can take a thousand sessions with it: the same thing happening again at the same
worker within a second counts as once, several times over, so that it does not push the reason for it out.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

from speculation.events import PeerId

MAX_EVENTS = 100
TOGETHER_SECONDS = 1.0
LONGEST = 300
"""Characters of a line."""
LOOK_BACK = 16
"""Lines among which the same is looked for."""


class EventKind(StrEnum):
    """What happened. Stable names."""

    WORKER_UP = "worker_up"
    WORKER_DRAINING = "worker_draining"
    WORKER_GONE = "worker_gone"
    """As it was expected to."""
    WORKER_LOST = "worker_lost"
    SESSION_REOPENED = "session_reopened"
    SESSION_MOVED = "session_moved"
    SESSION_CONDEMNED = "session_condemned"
    DRAFTER_QUARANTINED = "drafter_quarantined"


@dataclass(frozen=True, slots=True)
class LoggedEvent:
    """One line, with the fields that ``GET /cluster`` shows of it."""

    number: int
    """Counted from 1, also those that have left the ring."""
    time: float
    """Seconds since 1970."""
    kind: EventKind
    text: str
    worker: PeerId
    session: int | None = None
    request: str = ""
    times: int = 1
    """How often it happened within a second; ``text``, ``session`` and ``request`` are those of the first."""


class EventLog:
    """Of one router."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lines: deque[LoggedEvent] = deque(maxlen=MAX_EVENTS)
        self._number = 0

    @property
    def lines(self) -> tuple[LoggedEvent, ...]:
        """Oldest first."""
        return tuple(self._lines)

    def note(self, kind: EventKind, text: str, worker: PeerId, session: int | None = None, request: str = "") -> None:
        """It happens now."""
        now = self._clock()
        for back in range(1, min(len(self._lines), LOOK_BACK) + 1):
            line = self._lines[-back]
            if line.kind is kind and line.worker == worker and abs(now - line.time) < TOGETHER_SECONDS:
                self._lines[-back] = replace(line, times=line.times + 1)
                return
        self._number += 1
        shortened = " ".join(text.split())[:LONGEST]
        self._lines.append(LoggedEvent(self._number, now, kind, shortened, worker, session, request))
