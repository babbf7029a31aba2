"""How fast totals grow at present: what they are now against what they were a few seconds ago.

Costs next to nothing as they grow: a sample is kept at most four times a second, and those older than the window go.
"""

from __future__ import annotations

from collections import deque

WINDOW_SECONDS = 5.0
"""What "now" means."""
SAMPLE_SECONDS = 0.25
FIRST_SECONDS = 0.5
"""Sooner after the start no rate is told."""


class Recent:
    """Some totals that never fall. Times are seconds of any one clock."""

    __slots__ = ("_due", "_samples", "_since", "totals")

    def __init__(self, now: float, *totals: int) -> None:
        """What they are at the start."""
        self.totals, self._since = totals, now
        self._samples = deque([(now, totals)])
        self._due = now + SAMPLE_SECONDS

    def add(self, now: float, *more: int) -> None:
        """Each grows by so much."""
        self.set(now, *(total + grown for total, grown in zip(self.totals, more, strict=True)))

    def set(self, now: float, *totals: int) -> None:
        """They are so much now."""
        if now >= self._due:
            self._due = now + SAMPLE_SECONDS
            self._samples.append((self._since, self.totals))
            while len(self._samples) > 1 and self._samples[1][0] <= now - WINDOW_SECONDS:
                self._samples.popleft()
        self.totals, self._since = totals, now

    def growth(self, now: float) -> tuple[int, ...]:
        """By how much each grew within the window."""
        return tuple(total - before for total, before in zip(self.totals, self._base(now)[1], strict=True))

    def rates(self, now: float) -> tuple[float, ...] | None:
        """By how much each grows in a second; None where that cannot be said yet."""
        # After a pause the last sample is older than the window, but nothing grew since.
        seconds = min(now - self._base(now)[0], WINDOW_SECONDS + SAMPLE_SECONDS)
        if seconds < FIRST_SECONDS:
            return None
        return tuple(grown / seconds for grown in self.growth(now))

    def _base(self, now: float) -> tuple[float, tuple[int, ...]]:
        """What they were, and since when, as the window began; the first sample if that is later."""
        if self._since <= now - WINDOW_SECONDS:
            return self._since, self.totals
        before = [sample for sample in self._samples if sample[0] <= now - WINDOW_SECONDS]
        return before[-1] if before else self._samples[0]
