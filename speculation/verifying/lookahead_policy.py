"""How far drafters shall run ahead of one session, when they rest, and what its time is worth.

The target finds out and tells them. Two things are learned from each verification. How often the target says what was
drafted gives the longest lead whose last token still has a fair chance; drafting further would only keep a processor
from better work. And how many drafts are accepted a step tells whether drafting is of any use: drafts may be right and
yet come too late, every time. Where fewer are than make up for what drafting costs the target's steps, the drafter
rests, tries again after a while, and rests longer if nothing has changed. Whether drafting pays for all sessions
together is another question (:mod:`speculation.verifying.payoff`).
"""

from __future__ import annotations

import math

FAIR_CHANCE = 0.002
"""Drafting stops where the odds of a token to be reached fall below this. Low: the step in flight comes in between."""
WEIGHT = 0.1
"""Weight of the latest observation."""
BREAK_EVEN = 0.05
"""Accepted drafts a verification that make up for drafting where it takes nothing from the target but messages."""
CREDIT = 3.0
"""Times the break-even that a drafter is credited with when it tries again: about ten verifications."""
FIRST_REST = 32
LONGEST_REST = 512
"""Verifications to rest for; doubles each time in a row."""


class LookaheadPolicy:
    """The lookahead that one session deserves."""

    def __init__(self, longest: int, wider: LookaheadPolicy | None = None) -> None:
        """``longest``.

        The lookahead never exceeds it. ``wider``: what all sessions have seen; learns from this one too.
        """
        self._longest = longest
        self._wider = wider
        self._agreement: float = wider._agreement if wider else 0.8
        self._accepted: float = max(wider._accepted, CREDIT * BREAK_EVEN) if wider else 1.0
        self._resting = 0
        self._next_rest = FIRST_REST

    @property
    def agreement(self) -> float:
        """Chance that the target goes on as drafted, by one token."""
        return min(max(self._agreement, 0.01), 0.99)

    @property
    def lead(self) -> int:
        """How many tokens to run ahead; 0 while resting."""
        if self._resting:
            return 0
        return max(1, min(self._longest, math.ceil(math.log(FAIR_CHANCE) / math.log(self.agreement))))

    def observe(self, matched: int, diverged: bool, accepted: int, break_even: float = BREAK_EVEN) -> None:
        """Learn from a verification: ``matched`` drafts were followed, then one was not if ``diverged``.

        ``accepted`` is what the target could make use of: drafts that were in time. ``break_even``: how many accepted a
        verification make up for what drafting takes.
        """
        if self._wider:
            self._wider.observe(matched, diverged, accepted, break_even)
        if self._resting:
            self._resting -= 1
            return
        for right in [True] * matched + [False] * diverged:
            self._agreement += WEIGHT / 2 * (right - self._agreement)
        self._accepted += WEIGHT * (accepted - self._accepted)
        if self._accepted < break_even:
            self._resting = self._next_rest
            self._next_rest = min(2 * self._next_rest, LONGEST_REST)
            self._accepted = CREDIT * break_even
        elif self._accepted > CREDIT * break_even:
            self._next_rest = FIRST_REST


class ThroughputEstimator:
    """The tokens that a session makes a second while it has drafts at hand: of steps that found drafts in the trie.

    Unknown before the first.
    """

    def __init__(self, wider: ThroughputEstimator | None = None) -> None:
        """``wider``: where other sessions have got to; learns from this one too."""
        self._wider = wider
        self.tokens: float = wider.tokens if wider else 1.0
        self._seconds: float = wider._seconds if wider else 0.0

    @property
    def rate(self) -> float:
        """Tokens a second; 0 if unknown."""
        return self.tokens / self._seconds if self._seconds else 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        """A step committed ``tokens``, ``seconds`` after the one before it."""
        weight = WEIGHT if self._seconds else 1.0
        self.tokens += weight * (tokens - self.tokens)
        self._seconds += weight * (seconds - self._seconds)
        if self._wider:
            self._wider.observe(tokens, seconds)
