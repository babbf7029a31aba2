"""How long drafts take to arrive after a session has run out of them.

When a commit leaves a trie empty (a *miss*), the drafter hears of it, drafts from the new end and pushes. The seconds
until the first, second, ... token of its path are there are learned here, so that a target can tell whether waiting
would pay. Some come at once, because they were under way already; the others take a round trip. The estimate leans
towards the latter: it follows late arrivals quickly and early ones slowly. A wait that was in vain makes the next one
less attractive; a dead drafter is waited for once or twice.
"""

from __future__ import annotations

import itertools
import math

DEEPEST = 8
"""Tokens of a path that are timed."""
LATER, SOONER = 0.3, 0.04
"""Weight of the latest observation if it was later than expected, or sooner."""
DISAPPOINTMENT = 2.0
"""How much longer than it was waited for in vain drafts are then expected to take."""


class Arrivals:
    """Expected seconds from a miss until a path of 1, 2, ... draft tokens is there."""

    def __init__(self, wider: Arrivals | None = None) -> None:
        """``wider``: what other sessions have seen; learns from this one as well."""
        self._wider = wider
        self._seconds: list[float] = list(wider._seconds) if wider else [math.inf] * DEEPEST

    def due(self, elapsed: float) -> list[float]:
        """Expected seconds from now on, ``elapsed`` after a miss; what is overdue may come at any moment."""
        seen = itertools.takewhile(math.isfinite, self._seconds)
        return [max(seconds - elapsed, 0.0) for seconds in seen]

    def seconds(self, depth: int) -> float:
        """Expected seconds from a miss to a path of ``depth``; inf if never seen."""
        return self._seconds[depth - 1]

    def observe(self, depth: int, seconds: float) -> None:
        """A path of ``depth`` tokens was there ``seconds`` after a miss."""
        if depth > DEEPEST:
            return
        known = self._seconds[depth - 1]
        weight = LATER if seconds > known else SOONER
        self._seconds[depth - 1] = seconds if known == math.inf else known + weight * (seconds - known)
        for deeper in range(depth, DEEPEST):
            self._seconds[deeper] = max(self._seconds[deeper], self._seconds[depth - 1])
        if self._wider:
            self._wider.observe(depth, seconds)

    def in_vain(self, elapsed: float) -> None:
        """Nothing came within ``elapsed`` seconds of a miss."""
        self._seconds = [max(seconds, DISAPPOINTMENT * elapsed) for seconds in self._seconds]
        if self._wider:
            self._wider.in_vain(elapsed)
