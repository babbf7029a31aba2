"""How many prompt tokens fit beside running text, by measured time.

A step with prompt tokens is taken to cost what its sessions that decode cost alone, plus as much again for every token
more. Both are measured while serving: the first by :class:`speculation.budget.StepCost`, from steps without prompts;
the second here, from steps with some. Before the first is known, all tokens of a step are taken to cost the same.
"""

from __future__ import annotations

SMOOTHING = 0.1
"""Weight of a new step."""
OUTLIER = 3.0
"""A step that took this many times longer than steps of its size counts as that long only."""


class PromptTime:
    """What steps that compute prompt tokens take, learned online."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        """Learn from a step of ``tokens``, some of them of prompts."""
        if not self._tokens:
            self._tokens, self._seconds = tokens, seconds
            return
        seconds = min(seconds, OUTLIER * max(self._seconds, self._seconds / self._tokens * tokens))
        self._tokens += SMOOTHING * (tokens - self._tokens)
        self._seconds += SMOOTHING * (seconds - self._seconds)

    def beside(self, decoding: int, alone: float | None, most: int, *, slowdown: float, seconds: float) -> int:
        """How many prompt tokens, at ``most``, a step can take beside ``decoding`` (at least 1) tokens of others.

        ``alone``: seconds of those by themselves, if that is known. With the prompt tokens it shall take at most
        ``slowdown`` (at least 1) times that, or ``seconds`` if that is more.
        """
        if not self._tokens:
            return min(decoding, most)
        if alone is not None and self._tokens > decoding:
            each = (self._seconds - alone) / (self._tokens - decoding)
        else:
            each = self._seconds / self._tokens
            alone = each * decoding
        spare = max(slowdown * alone, seconds) - alone
        return most if spare >= each * most else int(spare / each)
