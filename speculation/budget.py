"""How many draft tokens a step verifies: expected tokens against measured cost.

A step that computes ``n`` tokens takes ``T(n)`` seconds and commits one token for each session that decodes, plus every
draft token that is kept. Drafts are worth adding, likeliest first, as long as tokens per second go up:

    choose the m that maximises  (sessions + p_1 + ... + p_m) / T(base + m),   p_1 >= p_2 >= ...

with ``p_i`` the probability that the i-th draft token is kept together with everything above it. Both sides are
measured while serving: :class:`StepCost` learns ``T``, :class:`Calibration` learns what a drafter's confidence is
worth. Zero is a candidate like any other, so verification switches itself off where it does not pay. What is known
fades, so it is tried again later.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

BINS = 10


class StepCost:
    """``T(n)``: seconds of a step that computes ``n`` tokens, learned online; never falls with ``n``."""

    SMOOTHING = 0.1
    """Weight of a new measurement."""
    OUTLIER = 3.0
    """A step that took this many times longer than expected counts as that long only."""
    SLOPE = 0.02
    """Assumed cost of one more token, as a share of a step, beyond what was measured: low, so that it gets measured."""
    LARGEST = 512
    """Larger steps are prefill and teach nothing about drafts."""

    def __init__(self) -> None:
        self._measured: dict[int, float] = {}
        self._sizes: list[int] = []
        self._costs: list[float] = []

    def observe(self, tokens: int, seconds: float) -> None:
        """Learn from one step."""
        if not 0 < tokens <= self.LARGEST:
            return
        known = self._measured.get(tokens)
        if known is not None:
            seconds = known + self.SMOOTHING * (min(seconds, self.OUTLIER * known) - known)
        self._measured[tokens] = seconds
        self._sizes = sorted(self._measured)
        self._costs = _rising([self._measured[size] for size in self._sizes])

    def __call__(self, tokens: int) -> float:
        """Expected seconds; between measured sizes on a straight line. 1 before anything was measured."""
        if not self._sizes:
            return 1.0 + self.SLOPE * tokens
        sizes, costs = self._sizes, self._costs
        at = bisect_left(sizes, tokens)
        if at == len(sizes):
            return costs[-1] * (1 + self.SLOPE * (tokens - sizes[-1]))
        if at == 0 or sizes[at] == tokens:
            return costs[at]
        share = (tokens - sizes[at - 1]) / (sizes[at] - sizes[at - 1])
        return costs[at - 1] + share * (costs[at] - costs[at - 1])


def _rising(costs: list[float]) -> list[float]:
    """The closest sequence that never falls (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []
    for cost in costs:
        total, count = cost, 1
        while pools and pools[-1][0] / pools[-1][1] > total / count:
            above, size = pools.pop()
            total, count = total + above, count + size
        pools.append((total, count))
    return [total / count for total, count in pools for _ in range(count)]


class Calibration:
    """What a drafter's confidence in one token is worth: how often tokens of that confidence are kept.

    Counts only tokens whose parent was kept: the others were never put to the test.
    """

    DECAY = 0.995
    """What a count is worth one step later."""
    PRIOR = 4.0
    """Trials the drafter's own word counts for."""

    def __init__(self) -> None:
        self._tried = [0.0] * BINS
        self._kept = [0.0] * BINS

    def __call__(self, confidence: float) -> float:
        """Probability that a token of this confidence is kept if its parent is."""
        at = _bin(confidence)
        return (self._kept[at] + self.PRIOR * confidence) / (self._tried[at] + self.PRIOR)

    def observe(self, confidence: float, kept: bool) -> None:
        """Learn from one token that was put to the test."""
        at = _bin(confidence)
        self._tried[at] += 1
        self._kept[at] += kept

    def fade(self) -> None:
        """Let a step pass."""
        self._tried = [count * self.DECAY for count in self._tried]
        self._kept = [count * self.DECAY for count in self._kept]


def _bin(confidence: float) -> int:
    return min(int(confidence * BINS), BINS - 1)


def choose(odds: Sequence[Sequence[float]], base: int, cost: StepCost) -> list[int]:
    """How many of each session's draft tokens to verify.

    ``odds[s]`` are session ``s``'s path probabilities, falling; ``base`` is what the step computes anyway. Sessions
    without drafts have an empty entry; all of them commit one token of their own.
    """
    ranked = sorted(((p, s) for s, row in enumerate(odds) for p in row), key=lambda pair: -pair[0])
    expected = float(len(odds))
    best_rate, best_count = expected / cost(base), 0
    for count, (p, _) in enumerate(ranked, start=1):
        expected += p
        rate = expected / cost(base + count)
        if rate > best_rate:
            best_rate, best_count = rate, count
    chosen = [0] * len(odds)
    for _, session in ranked[:best_count]:
        chosen[session] += 1
    return chosen
