"""What a session's time is worth: the tokens it makes a second while it has drafts at hand."""

from __future__ import annotations

WEIGHT = 0.1
"""Weight of the latest step."""


class ThroughputEstimator:
    """Tokens and seconds of a step that found drafts in the trie. Unknown before the first."""

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
