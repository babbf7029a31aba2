"""A tree of guesses as an EAGLE head grows it, level by level: which places it goes on from, and what is drafted.

As EAGLE-2 does (Li et al. 2024, arXiv:2406.16858): the likeliest paths are gone on with, and at the end the likeliest
of all guesses are drafted. A path's chance is the product of what the head thinks of its tokens. Knows no model; the
head is :mod:`engine.eagle`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from speculation.drafting.draft_session import Candidate, DraftLimits
from speculation.drafting.state_drafts import GuessTree
from speculation.messages import ANCHOR, Token

WIDTH = 4
"""Guesses for the token behind a place, and places of a session that a level goes on from; one for chains."""
MAX_LEVELS = 8
"""Deepest guesses at a target; requests may allow fewer (``max_depth``)."""
MIN_CHANCE = 0.05
"""Of a path; below, it is not gone on with."""
PUSHED = 16.0
"""Times the bytes a committed token that a head elsewhere may push, of what a draft model may. Features make most
drafts new."""
WIDER, MORE = 2, 2
"""Times the drafts that a session of it may have, and the places expanded in one step, of what a draft model has, and
how many alternatives more at a place. After each verification a head drafts anew beside what it sent before, a place
read without the last outcome is wrong more often, and eight rows of one layer take no longer than four."""


def limits_elsewhere(limits: DraftLimits) -> DraftLimits:
    """What a head on a draft worker may do, where a draft model may do ``limits``."""
    return replace(
        limits,
        nodes=WIDER * limits.nodes,
        width=WIDER * limits.width,
        children=limits.children + MORE,
        bytes_a_token=PUSHED * limits.bytes_a_token,
    )


@dataclass(frozen=True, slots=True)
class GuessPlace:
    """A guess, or the end of the text, that guesses can hang from."""

    node: int = ANCHOR
    """Its number in the tree."""
    parent: int = ANCHOR
    """That of the place it hangs from."""
    path: tuple[Token, ...] = ()
    """All guesses up to it."""
    chance: float = 1.0
    """That the text gets there."""


class GrowingTree:
    """The guesses for one session so far."""

    def __init__(self, width: int = WIDTH) -> None:
        """``width``: see :data:`WIDTH`."""
        self.width = width
        self._places: list[GuessPlace] = []
        self._confidence: list[float] = []
        self._fresh = [GuessPlace()]

    def frontier(self) -> Sequence[GuessPlace]:
        """The places to go on from: of those hung up last the likeliest, if they are likely at all."""
        likely = sorted(self._fresh, key=lambda place: -place.chance)[: self.width]
        return [place for place in likely if place.chance >= MIN_CHANCE]

    def grow(self, level: Sequence[tuple[GuessPlace, Sequence[Candidate]]]) -> None:
        """Hang guesses from places of the frontier."""
        self._fresh = []
        for place, guesses in level:
            for guess in guesses[: self.width]:
                if not 0.0 < guess.confidence <= 1.0:  # a head that is broken may say NaN
                    continue
                path, chance = (*place.path, guess.token), place.chance * guess.confidence
                self._fresh.append(GuessPlace(len(self._places), place.node, path, chance))
                self._places.append(self._fresh[-1])
                self._confidence.append(guess.confidence)

    def likeliest(self, max_tokens: int) -> GuessTree:
        """The ``max_tokens`` guesses whose paths are the likeliest; none is without what it follows."""
        # Of equals the first, which is never behind what follows it.
        chosen = sorted(range(len(self._places)), key=lambda node: -self._places[node].chance)[:max_tokens]
        kept = {node: i for i, node in enumerate(sorted(chosen))}
        return GuessTree(
            tuple(self._places[node].path[-1] for node in kept),
            tuple(kept.get(self._places[node].parent, ANCHOR) for node in kept),
            tuple(self._confidence[node] for node in kept),
        )
