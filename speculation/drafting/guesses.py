"""Staged drafting: guesses at what a draft model draws, so that one forward of it can grow several levels of drafts.

A draft model is to guesses what a target is to drafts (Spector and Re 2023, "Staged Speculative Decoding",
arXiv:2308.04623; Chen et al. 2023, "Cascade Speculative Drafting", arXiv:2312.11462), so everything here is the first
level's own: the guesses stand in a :class:`~speculation.trie.SpeculationTrie`, their odds are calibrated, the budget
says how many are worth a row, and the coupled rule keeps those that the draft model drew itself. A guess can make
drafting faster, never different.

Knows nothing of models, nor of where guesses come from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from speculation.acceptance import walk
from speculation.drafting.draft_session import Candidate, DraftSession
from speculation.messages import Source, Token
from speculation.sources.lookup import Continuation
from speculation.trie import Node, SpeculationTrie, TrieLimits, VerificationTree
from speculation.verifying.budget import best_prefix, choose
from speculation.verifying.calibration import Calibration

MAX_GUESSES = 8
"""Longest chain of guesses in a forward."""
MAX_TOGETHER = 64
"""Most guesses of all sessions together in a forward."""
MAX_SESSIONS = MAX_TOGETHER // MAX_GUESSES
"""Most sessions that guesses are sought for at once: seeking takes its time too."""


class Guesses:
    """The guesses of one session for its next forward: a chain that hangs from one of its places."""

    def __init__(self, vocabulary: int, calibration: Calibration | None = None) -> None:
        """``calibration``: what guesses have been worth in other sessions; learns from this one too."""
        self._calibration = Calibration(calibration or Calibration())
        limits = TrieLimits(nodes=MAX_GUESSES, depth=MAX_GUESSES, children=1)
        self._trie = SpeculationTrie((), vocabulary=vocabulary, limits=limits, odds=self._calibration)
        self._last = self._trie.root

    @property
    def tree(self) -> VerificationTree:
        """The whole chain. An end of 1 is that of a guess which hangs from the place itself."""
        return self._trie.select(MAX_GUESSES)

    @property
    def odds(self) -> float:
        """Chance that the draft model draws the whole chain; 1 of none."""
        return self._last.weight

    @property
    def first_odds(self) -> float:
        """Chance of the first guess alone; 0 if there is none."""
        return max((child.weight for child in self._trie.root.children.values()), default=0.0)

    def clear(self) -> None:
        """Begin anew, at another place."""
        self._trie.clear()
        self._last = self._trie.root

    def add(self, token: Token, confidence: float, source: Source) -> bool:
        """Lengthen the chain by a token that is right with ``confidence`` if those before it are; whether it was."""
        child = self._trie.add(self._last, token, confidence, source)
        self._last = child or self._last
        return child is not None

    def copy(self, found: Continuation) -> None:
        """Lengthen the chain by what stood there before, as far as there is room."""
        for token, sure in zip(found.tokens, found.confidence, strict=True):
            self.add(token, sure, Source.LOOKUP)

    def settle(self, computed: int, drawn: Sequence[Token]) -> int:
        """How many of the ``computed`` first guesses the draft model follows; learns what guesses are worth.

        ``drawn[0]`` is its token at the place, ``drawn[i + 1]`` the one behind guess ``i``. A guess that was not
        computed is put to the test as well, if the last one before it is followed.
        """
        node = self._trie.root
        for token in drawn:
            self._calibration.observe(node, token)
            if token not in node.children:
                break
            node = node.children[token]
        tree = self.tree.first(computed)
        return len(walk(tree.tokens, tree.parents, drawn).kept)


def draft_along(
    session: DraftSession, place: Node, tokens: Sequence[Token], rows: Sequence[Sequence[Candidate]]
) -> list[Node]:
    """The guesses that were kept, as the drafts that they are: each expanded in turn, as far as drafts are worth it.

    ``place``: an expanded one. ``tokens``: the guesses kept behind it; ``rows[i]``: what may follow ``tokens[i]``.
    """
    followed: list[Node] = []
    for token, row in zip(tokens, rows, strict=False):
        child = session.draft_below(place, token)
        if child is None:
            break
        session.expand(child, row)
        followed.append(child)
        place = child
    return followed


@dataclass(frozen=True, slots=True)
class Forward:
    """A forward of the draft model that guesses may join."""

    tokens: int
    """What it computes without them."""
    gain: float
    """Expected committed tokens that it is good for without them: the chances of its places, added up."""
    cost: Callable[[int], float]
    """Seconds of a forward, by its tokens."""

    def worth(self, chances: Sequence[Sequence[float]]) -> list[int]:
        """How many guesses of each chain are worth their rows, :data:`MAX_TOGETHER` at most.

        ``chances``: of each guess, that the draft model follows it and the text gets to its place; falling.
        """
        return choose(chances, self.tokens, self.cost, MAX_TOGETHER, self.gain)

    def pays(self, gained: float, spent: float, guesses: int, gain: float, more: int, seconds: float) -> bool:
        """Whether to look for ``more`` guesses, good for ``gain``, where looking alone takes ``seconds``.

        There are ``guesses`` already, good for ``gained``, that took ``spent`` seconds to find.
        """
        costs = (self.cost(self.tokens + guesses) + spent, self.cost(self.tokens + guesses + more) + spent + seconds)
        return best_prefix([gain], self.gain + gained, 0, costs.__getitem__) > 0
