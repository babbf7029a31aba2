"""How long a step takes, and so how many prompt tokens fit beside running text, and when one must be stuck.

A step of ``n`` tokens is taken to last ``fixed + each * n`` seconds. Every step moves the two by the least that makes
up for a part of the error (normalised least mean squares): a step of few tokens tells about the one, a step of many
about the other, and what steps of one size cannot tell apart stays as it was.
:class:`speculation.verifying.budget.StepCost` knows better what a few draft tokens cost; this line also holds for sizes
that were never tried.
"""

from __future__ import annotations

SMOOTHING = 0.3
"""Part of the error that a step makes up for."""
OUTLIER = 3.0
"""A step that took this many times longer than expected counts as that long only."""
ROWS_SMOOTHING = 0.2
"""Weight of a new number of tokens that a session's part of a step had."""
EVEN = 32
"""Tokens of a step that tells as much of the fixed part as about that of each token."""
STUCK_TIMES, STUCK_SECONDS = 20.0, 10.0
"""A step that takes so many times the longest that its like lately took, and at least so many seconds, is stuck."""
FORGETTING = 0.99
"""What is left of the longest time at the next step."""


class StepTime:
    """Seconds of a step by its tokens, learned online."""

    def __init__(self) -> None:
        self._fixed = self._each = 0.0
        self._known = False
        self._rows_each = 1.0

    def __call__(self, tokens: int) -> float:
        """Expected seconds; 0 before anything was measured."""
        return self._fixed + self._each * tokens

    def observe(self, tokens: int, seconds: float) -> None:
        """Learn from one step."""
        expected, part = self(tokens), 1.0
        if self._known:
            seconds, part = min(seconds, OUTLIER * expected), SMOOTHING
        self._known = True
        size = tokens / EVEN
        change = part * (seconds - expected) / (1.0 + size * size)
        self._fixed = max(self._fixed + change, 0.0)
        self._each = max(self._each + change * size / EVEN, 0.0)

    def verified(self, sessions: int, tokens: int) -> None:
        """A step computed so many tokens, drafts included, for so many sessions that decode."""
        self._rows_each += ROWS_SMOOTHING * (tokens / sessions - self._rows_each)

    def prefill_budget(self, decoding: int, max_tokens: int, *, slowdown: float, seconds: float) -> int:
        """How many prompt tokens, up to ``max_tokens``, a step can take beside ``decoding`` sessions and their drafts.

        With them it shall take at most ``slowdown`` (at least 1) times as long as without, or ``seconds`` if that is
        more. The sessions are expected to verify as many drafts as lately.
        """
        alone = self(round(decoding * self._rows_each))
        spare = max(slowdown * alone, seconds) - alone
        return max_tokens if spare >= self._each * max_tokens else int(spare / self._each)


class LongestStep:
    """The longest that steps lately took, by their tokens in powers of two: what takes far longer is stuck."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def observe(self, tokens: int, seconds: float) -> None:
        """Learn from one step."""
        size = tokens.bit_length()
        self._seconds[size] = max(seconds, FORGETTING * self._seconds.get(size, 0.0))

    def max_seconds(self, tokens: int) -> float | None:
        """What a step of so many tokens may take; None where no step was measured.

        It is taken to last as long as a larger one, or as a smaller one in proportion. May be asked from any thread.
        """
        size = tokens.bit_length()
        known = self._seconds.copy().items()
        longest = min((seconds * 2 ** max(0, size - smaller) for smaller, seconds in known), default=None)
        return None if longest is None else max(STUCK_TIMES * longest, STUCK_SECONDS)
