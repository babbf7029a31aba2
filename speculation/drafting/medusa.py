"""Medusa heads as a draft source: guesses for the next few places, all made at once, as a small tree.

A head (Cai et al. 2024, "Medusa", arXiv:2401.10774) reads the hidden state that the target's own token was drawn from
and guesses one of the tokens behind that one. It does not know what the heads before it have guessed, so any guess for
a place may follow any guess for the place before. Decided here: which part of that product is drafted (the likeliest
paths), and when a session's heads rest. What a guess is worth is learned like any source's
(:mod:`speculation.verifying.calibration`). The heads themselves are :mod:`engine.medusa`'s.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from speculation.drafting.draft_session import Candidate
from speculation.messages import ANCHOR, Source, Token

NODES = 20
"""Most tokens drafted at one place; the budget verifies fewer."""
PATIENCE = 32
"""Steps without a guess worth verifying after which the heads of a session rest."""
REST = 8
"""Steps between two tries of heads that rest, which show whether they have become good."""

HeadGuesses = Sequence[Sequence[Candidate]]
"""For each place, what it may hold, the likeliest first."""


@dataclass(frozen=True, slots=True)
class GuessTree:
    """A :class:`speculation.sources.local_sources.Suggestion`."""

    tokens: tuple[Token, ...] = ()
    parents: tuple[int, ...] = ()
    confidence: tuple[float, ...] = ()


def likeliest(places: HeadGuesses, max_tokens: int) -> GuessTree:
    """The ``max_tokens`` likeliest paths through the guesses: those of the highest product of confidences."""
    tokens: list[Token] = []
    parents: list[int] = []
    confidence: list[float] = []
    # Path probability, then breadth first and best first among equals: rank follows depth follows parent.
    open_paths: list[tuple[float, int, int, int]] = []

    def extend(chance: float, depth: int, parent: int) -> None:
        for rank, guess in enumerate(places[depth]) if depth < len(places) else ():
            heapq.heappush(open_paths, (-chance * guess.confidence, parent, rank, depth))

    extend(1.0, 0, ANCHOR)
    while open_paths and len(tokens) < max_tokens:
        chance, parent, rank, depth = heapq.heappop(open_paths)
        guess = places[depth][rank]
        tokens.append(guess.token)
        parents.append(parent)
        confidence.append(guess.confidence)
        extend(-chance, depth + 1, len(tokens) - 1)
    return GuessTree(tuple(tokens), tuple(parents), tuple(confidence))


class MedusaDrafts:
    """What the heads have guessed for one session. A :class:`speculation.sources.local_sources.LocalSource`."""

    source = Source.MEDUSA

    def __init__(self, heads: int) -> None:
        """Nothing is guessed yet."""
        self.depth = heads
        self._end = 0
        self._position = -1
        self._places: HeadGuesses = ()
        self._unused = 0
        """Steps since a guess was verified last."""

    @property
    def rests(self) -> bool:
        """Whether the heads need not be asked at this place."""
        return self._unused >= PATIENCE and (self._unused - PATIENCE) % REST != 0

    def guess(self, position: int, places: HeadGuesses) -> None:
        """Take in what the heads say of ``position`` and the places after it."""
        self._position, self._places = position, places

    def stepped(self, *, verified: bool) -> None:
        """A step is over; ``verified``: whether guesses were worth verifying in it."""
        self._unused = 0 if verified else self._unused + 1

    def extend(self, tokens: Sequence[Token]) -> None:
        """Committed tokens matter by their number alone: guesses are good for one place."""
        self._end += len(tokens)

    def propose(self, depth: int) -> GuessTree:
        """The likeliest of what was guessed for this very place."""
        return likeliest(self._places[:depth], NODES) if self._position == self._end else GuessTree()
