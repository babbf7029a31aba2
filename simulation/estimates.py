"""What the textbook says drafting brings: closed forms for drafting and verification in turn.

Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding" (arXiv:2211.17192), sections 3.1 to
3.3. They take every draft token as kept with the same chance, whatever stands before it, a verification of any number
of tokens as one plain step, and messages as free. Real text is harder in some stretches than in others, so that it
keeps more long drafts than its mean chance says; :func:`committed_along` counts that on the text itself. Kept here to
be set beside what is measured and simulated.
"""

from __future__ import annotations

from collections.abc import Sequence


def committed(acceptance: float, length: int) -> float:
    """Tokens that a verification of ``length`` draft tokens commits on average: ``(1 - a^(K+1)) / (1 - a)``."""
    assert 0.0 <= acceptance <= 1.0
    if acceptance == 1.0:
        return length + 1.0
    return (1.0 - acceptance ** (length + 1)) / (1.0 - acceptance)


def speedup(acceptance: float, length: int, cost: float) -> float:
    """Over plain decoding; ``cost``: seconds of a draft token over those of a target's step (their c)."""
    return committed(acceptance, length) / (cost * length + 1.0)


def best_length(acceptance: float, cost: float, longest: int) -> int:
    """The draft length, from 1 to ``longest``, with the largest :func:`speedup`; the shortest of equals."""
    return max(range(1, longest + 1), key=lambda length: speedup(acceptance, length, cost))


def committed_along(runs: Sequence[int], length: int) -> float:
    """What :func:`committed` stands for, counted.

    ``runs``: for every place of the text as the start of a draft, how many draft tokens in a row are right.
    """
    return 1.0 + sum(min(run, length) for run in runs) / len(runs)
