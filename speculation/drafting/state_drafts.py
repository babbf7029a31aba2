"""What is guessed from a target's hidden states, as a draft source: good for one place, and left alone while useless.

Guesses come just before a step, for the place where the text ends then. How they were made, one after the other or all
at once, is nobody's business here: they are a small tree. What they are worth is learned like any source's
(:mod:`speculation.verifying.calibration`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from speculation.messages import ANCHOR, SourceName, Token

NODES = 20
"""Most tokens drafted at one place; the budget verifies fewer."""
PATIENCE = 32
"""Steps without a guess worth verifying after which guessing for a session rests."""
REST = 8
"""Steps between two tries while it rests, which show whether it has become good."""


@dataclass(frozen=True, slots=True)
class GuessTree:
    """A :class:`speculation.sources.registry.Suggestion`."""

    tokens: tuple[Token, ...] = ()
    parents: tuple[int, ...] = ()
    confidence: tuple[float, ...] = ()

    def cut(self, depth: int) -> GuessTree:
        """Without what is deeper."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ANCHOR else depths[parent] + 1)
        if max(depths, default=0) <= depth:
            return self
        kept = {node: i for i, node in enumerate(node for node, at in enumerate(depths) if at <= depth)}
        return GuessTree(
            tuple(self.tokens[node] for node in kept),
            tuple(kept.get(self.parents[node], ANCHOR) for node in kept),
            tuple(self.confidence[node] for node in kept),
        )


class StateDrafts:
    """The guesses for one session. A :class:`speculation.sources.registry.LocalSource`."""

    def __init__(self, source: SourceName, depth: int) -> None:
        """Nothing is guessed yet. ``depth``: of the deepest trees."""
        self.source, self.depth = source, depth
        self._end = 0
        self._position = -1
        self._tree = GuessTree()
        self._unused = 0
        """Steps since a guess was verified last."""

    @property
    def rests(self) -> bool:
        """Whether nothing need be guessed at this place."""
        return self._unused >= PATIENCE and (self._unused - PATIENCE) % REST != 0

    def guess(self, position: int, tree: GuessTree) -> None:
        """Take in what may stand at ``position`` and behind it."""
        self._position, self._tree = position, tree

    def stepped(self, *, verified: bool) -> None:
        """A step is over; ``verified``: whether guesses were worth verifying in it."""
        self._unused = 0 if verified else self._unused + 1

    def extend(self, tokens: Sequence[Token]) -> None:
        """Committed tokens matter by their number alone: guesses are good for one place."""
        self._end += len(tokens)

    def propose(self, depth: int) -> GuessTree:
        """What was guessed for this very place."""
        return self._tree.cut(depth) if self._position == self._end else GuessTree()
