"""Guesses of Medusa heads for the next few places, all made at once, as a small tree.

A head (Cai et al. 2024, "Medusa", arXiv:2401.10774) reads the hidden state that the target's own token was drawn from
and guesses one of the tokens behind that one. It does not know what the heads before it have guessed, so any guess for
a place may follow any guess for the place before. Decided here: which part of that product is drafted, the likeliest
paths. The heads themselves are :mod:`engine.medusa`'s.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from speculation.drafting.draft_session import Candidate
from speculation.drafting.state_drafts import GuessTree
from speculation.messages import ANCHOR, Token

HeadGuesses = Sequence[Sequence[Candidate]]
"""For each place, what it may hold, the likeliest first."""


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
