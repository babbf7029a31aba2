"""Measures the round trip on a stream: a ping now and then, answered at once, smoothed over some seconds.

It is the way of a message between the two event loops, so a peer that is slow to react looks far away; which is what
whoever sends it work wants to know.
"""

from __future__ import annotations

PING_SECONDS = 0.5
"""Pause between pings."""
LOST_SECONDS = 5.0
"""A ping not answered for this long is given up."""
SMOOTHING = 0.2
"""Weight of the newest measurement."""


class RoundTrip:
    """Of one stream. The clock is the caller's, in seconds."""

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
