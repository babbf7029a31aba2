"""How far a worker is, and whether it is there.

It is judged by what it says, and by whether it hears what it is asked.

A worker that says nothing is gone, and so is one that goes on talking and does not answer: then messages reach the
router and none reach the worker. Judged by ticks of the router's own clock, not by time: a router that was stopped, or
had no CPU, has not read what came meanwhile, so a tick that comes late counts for little. A ping that has yet to be
written counts for as little: it waits behind what the worker has to read first.

A drafter that is given up and turns out to be the same one when it is back was slow, and not gone. It gets twice the
time from then on (:class:`Patience`): to open its sessions again costs a busy machine more than to wait.
"""

from __future__ import annotations

TICKS = 20
"""Ticks in the time after which a worker is given up."""
DOUBTFUL_TICK = 0.25
"""What a tick counts for that came late, or that says little for another reason."""
MAX_PATIENCE = 5.0
"""How many times as long as others a slow drafter may be silent."""
PING_SECONDS = 0.5
"""Pause between pings."""
LOST_SECONDS = 5.0
"""A ping not answered for this long is given up."""
SMOOTHING = 0.2
"""Weight of the newest measurement."""


class Patience:
    """How many times as long as others a worker may be silent: it grows where one was given up that was not gone."""

    def __init__(self, longest: float = MAX_PATIENCE) -> None:
        """Once. ``longest``: the most it grows to."""
        self.factor = 1.0
        self._longest, self._given_up = longest, ""

    def given_up(self, instance: str) -> None:
        """It was silent for too long."""
        self._given_up = instance

    def came(self, instance: str) -> None:
        """It introduced itself."""
        slow = instance != "" and instance == self._given_up
        self.factor = min(2 * self.factor, self._longest) if slow else 1.0
        self._given_up = ""


class Liveness:
    """Of one stream."""

    def __init__(self, seconds: float, patience: Patience, slack: float = 0.0) -> None:
        """From now on. ``seconds``: of :data:`TICKS` ticks; ``slack``: ticks that the first word may come later."""
        self._seconds, self._patience = seconds, patience
        self._silent = -slack
        """Ticks in which nothing was heard."""
        self._unanswered = 0.0
        """Ticks since the last ping, if it has not been answered."""
        self._pinged = self._written = self._answers = False

    def heard(self) -> None:
        """Something came."""
        self._silent = 0.0

    def pinged(self) -> None:
        """An answer is waited for, once that is written."""
        self._unanswered = self._unanswered if self._pinged else 0.0
        self._pinged, self._written = True, False

    def written(self) -> None:
        """The ping is on its way."""
        self._written = True

    def answered(self) -> None:
        """A ping came back: this worker answers."""
        self._pinged, self._answers = False, True

    def held_back(self) -> None:
        """What comes is not read for a while, for want of time here."""
        self._silent = self._unanswered = 0.0

    def tick(self, *, late: bool, slack: float = 0.0) -> str | None:
        """Another tick has passed: why the worker is to be given up, if so.

        ``late``: it came late by another one or more. ``slack``: ticks that an answer is known to take.
        """
        weight, limit = DOUBTFUL_TICK if late else 1.0, TICKS * self._patience.factor
        seconds = f"{self._seconds * self._patience.factor:.0f} s"
        self._silent += weight
        if self._pinged and self._answers:
            self._unanswered += weight if self._written else DOUBTFUL_TICK
        if self._silent >= limit:
            return f"nothing heard for {seconds}"
        if self._unanswered >= limit + slack and self._pinged:
            return f"it talks, but has not answered for {seconds}"
        return None


class RoundTrip:
    """How long pings on one stream take, smoothed over some seconds. The clock is the caller's, in seconds.

    It is the way of a message between the two event loops, so a peer that is slow to react looks far away; which is
    what whoever sends it work wants to know.
    """

    def __init__(self) -> None:
        """Nothing is known yet."""
        self.seconds: float | None = None
        """Smoothed; None before the first answer."""
        self._number = 0
        self._waiting = False
        self._sent_at = float("-inf")

    def due(self, now: float) -> int | None:
        """The number to ping with now, if it is time to."""
        if now - self._sent_at < (LOST_SECONDS if self._waiting else PING_SECONDS):
            return None
        self._number += 1
        self._waiting, self._sent_at = True, now
        return self._number

    def answered(self, number: int, now: float) -> None:
        """The peer sent a number back; any but the one waited for says nothing."""
        if not self._waiting or number != self._number:
            return
        self._waiting = False
        taken = now - self._sent_at
        self.seconds = taken if self.seconds is None else self.seconds + SMOOTHING * (taken - self.seconds)
