"""What steps and messages cost, for the simulator: curves through measured times; and what the textbook makes of that.

What a worker believes about its own steps, learned while serving, is :class:`speculation.verifying.budget.StepCost`.

The textbook has closed forms for drafting and verification in turn: Leviathan et al. 2023, "Fast Inference from
Transformers via Speculative Decoding" (arXiv:2211.17192), sections 3.1 to 3.3. They take every draft token as kept with
the same chance, whatever stands before it, a verification of any number of tokens as one plain step, and messages as
free. Real text is harder in some stretches than in others, so that it keeps more long drafts than its mean chance says;
:func:`committed_along` counts that on the text itself. Kept here to be set beside what is measured and simulated.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from speculation.verifying.budget import rising, rows_for

FAR = 1 << 12
"""A step so large that a straight line to it is a straight line to everything."""


class Curve:
    """Seconds of a step by the tokens it computes: never falling, on straight lines between what was measured."""

    def __init__(self, measured: Iterable[tuple[int, float, float]]) -> None:
        """``measured``: tokens, seconds, and how much this measurement counts. At least one."""
        points = sorted(measured)
        assert points, "a curve needs a point"
        self._sizes = [tokens for tokens, _, _ in points]
        self._seconds = rising([seconds for _, seconds, _ in points], [weight for _, _, weight in points])

    @classmethod
    def straight(cls, seconds: float, slope: float) -> Curve:
        """``seconds`` for one token, and the share ``slope`` of that for each further one."""
        return cls([(1, seconds, 1.0), (FAR, seconds * (1 + slope * (FAR - 1)), 1.0)])

    def __call__(self, tokens: int) -> float:
        """Seconds; outside of what was measured, on the line through its two ends, and never less than the least."""
        sizes, seconds = self._sizes, self._seconds
        at = bisect_left(sizes, tokens)
        if at < len(sizes) and (at == 0 or sizes[at] == tokens):
            return seconds[at]
        left, right = (0, -1) if at == len(sizes) else (at - 1, at)
        run = sizes[right] - sizes[left]
        slope = (seconds[right] - seconds[left]) / run if run else 0.0
        return seconds[right] + slope * (tokens - sizes[right])


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds that things take in one set-up."""

    verify: Mapping[int, Curve]
    """A step of the target, by sessions and tokens, while nobody drafts. At least one entry."""
    draft: Curve
    """A step of the drafter, by tokens computed: places expanded, and committed tokens that it had not read."""
    to_target: float
    """A message's way from drafter to target through the router, without any distance: queues, wake-ups, encoding."""
    to_draft: float
    contention: float = 1.0
    """How many times as long as those of ``verify`` its steps take while drafters draft for it: they may share memory,
    caches and cores with it, or the device itself."""
    draft_contention: float = 1.0
    """How many times as long as by ``draft`` their steps take while a target computes."""
    verify_each: float = 0.0
    """What every session adds to a step of the target, beyond ``verify``."""
    branching: float = 1.0
    """How many times as long as others of its size a step of the target takes in which drafts branch."""
    row_classes: Sequence[int] = ()
    """Numbers of rows that the target's steps are padded to (:class:`speculation.verifying.budget.StepCost`)."""
    verify_pause: float = 0.0
    """Between two steps of a target that does not wait."""
    draft_pause: float = 0.0
    jitter: float = 0.0
    """Relative standard deviation of a step's time."""
    heads: Mapping[int, Curve] = field(default_factory=dict)
    """As ``verify``, of steps of which a head reads the hidden states: at the target it guesses besides, unless
    that is ``level``'s; for one elsewhere they are fused. Empty: that takes nothing."""
    level: Curve | None = None
    """A forward of a head at the target before a step, by places expanded, all sessions together: it drafts as many
    levels as pay. None: what it takes is part of ``heads``, and it drafts all of them."""
    feature_seconds: float = 0.0
    """On the way to a head elsewhere, of what it reads of one token: its bytes over those that pass in a second."""

    def verify_seconds(self, sessions: int, tokens: int, *, heads: bool = False) -> float:
        """A step of the target; where so many sessions were not measured, as with the next fewer.

        ``heads``: whether a head reads its hidden states.
        """
        curves = (heads and self.heads) or self.verify
        known = [count for count in curves if count <= sessions]
        curve = curves[max(known) if known else min(curves)]
        return curve(rows_for(tokens, self.row_classes)) + self.verify_each * sessions


def expected_tokens(acceptance: float, length: float) -> float:
    """Tokens that a verification of ``length`` draft tokens commits on average: ``(1 - a^(K+1)) / (1 - a)``."""
    assert 0.0 <= acceptance <= 1.0
    if acceptance == 1.0:
        return length + 1.0
    return float((1.0 - acceptance ** (length + 1)) / (1.0 - acceptance))


def expected_speedup(acceptance: float, length: int, cost: float) -> float:
    """Over plain decoding; ``cost``: seconds of a draft token over those of a target's step (their c)."""
    return expected_tokens(acceptance, length) / (cost * length + 1.0)


def best_length(acceptance: float, cost: float, longest: int) -> int:
    """The draft length, from 1 to ``longest``, with the largest :func:`expected_speedup`; the shortest of equals."""
    return max(range(1, longest + 1), key=lambda length: expected_speedup(acceptance, length, cost))


def committed_along(runs: Sequence[int], length: int) -> float:
    """What :func:`expected_tokens` stands for, counted.

    ``runs``: for every place of the text as the start of a draft, how many draft tokens in a row are right.
    """
    return 1.0 + sum(min(run, length) for run in runs) / len(runs)
