"""How long drafts take to arrive after a session has run out of them.

When a commit leaves a trie empty (a *miss*), the drafter hears of it and pushes what follows the new end: at once if it
has drafted that already, else after it has. Learned here is the share of misses after which a path of 1, 2, ... tokens
was there by a given time, so that a target can tell whether waiting would pay. A dead drafter is waited for in vain
once or twice.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

DEEPEST = 8
"""Tokens of a path that are timed."""
TIMES = tuple(0.0005 * 1.4**i for i in range(18))
"""Seconds after a miss at which the path is looked at: half a millisecond to 150."""
TICK = 1e-6
"""Seconds; a moment nearer than this is now, or a wait that ends on the dot would be followed by one of no length."""
WEIGHT = 0.1
"""Weight of the latest miss."""


@dataclass(slots=True)
class Miss:
    """A commit that left no drafts: when, where, and when a path of 1, 2, ... tokens was there."""

    at: float
    position: int
    reached: list[float] = field(default_factory=list)
    """Seconds after the miss."""

    def arrived(self, depth: int, at: float) -> None:
        """A path of ``depth`` tokens is there."""
        self.reached += [at - self.at] * (min(depth, DEEPEST) - len(self.reached))


@dataclass(frozen=True, slots=True)
class Moment:
    """What may be expected of a wait until then."""

    seconds: float
    """From now."""
    shares: Sequence[float]
    """Chance of a path of 1, 2, ... tokens."""


class DraftLatencyEstimator:
    """By when how long a path is there. One for a worker, and one for each of its sessions that starts from it."""

    def __init__(self, wider: DraftLatencyEstimator | None = None) -> None:
        """``wider``: what other sessions have seen; learns from this one as well. Unknown, nothing is expected."""
        self._wider = wider
        unknown = [[0.0] * DEEPEST for _ in TIMES]
        self._shares: list[list[float]] = [list(row) for row in wider._shares] if wider else unknown
        """Share of misses with a path of 1, 2, ... tokens (inner) by each of the times (outer)."""

    def moments(self, age: float, behind: int = 0) -> list[Moment]:
        """Later moments, given that ``age`` seconds after the miss there is no path longer than ``behind`` tokens.

        By so many the text itself has gone on since, so that a path of that length is always there.
        """
        if behind >= DEEPEST:
            return []
        first = bisect_right(TIMES, age + TICK)
        passed = self._shares[first - 1] if first else [0.0] * DEEPEST
        open_share = max(1.0 - passed[behind], WEIGHT)  # of the misses, those with nothing longer there by then
        moments: list[Moment] = []
        for time, row in zip(TIMES[first:], self._shares[first:], strict=True):
            more = (max(share - gone, 0.0) for share, gone in zip(row[behind:], passed[behind:], strict=True))
            # Some misses with a short path by then have a long one later: a long one is no likelier than a short one.
            shares = [share / open_share for share in accumulate(more, min)]
            moments.append(Moment(time - age, [1.0] * behind + shares))
        return moments

    def observe(self, miss: Miss) -> None:
        """Learn from a miss that is over."""
        for time, row in zip(TIMES, self._shares, strict=True):
            there = bisect_right(miss.reached, time)
            for depth in range(DEEPEST):
                row[depth] += WEIGHT * ((depth < there) - row[depth])
        if self._wider:
            self._wider.observe(miss)
