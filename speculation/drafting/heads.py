"""Drafts of heads that read a target's hidden states: small trees of guesses, good for one place.

Guesses come just before a step, for the place where the text ends then. What they are worth is learned like any
source's (:mod:`speculation.verifying.calibration`), and they are left alone while useless.

An EAGLE head (:mod:`engine.eagle`) goes on from its own states, level by level. As EAGLE-2 does (Li et al. 2024,
arXiv:2406.16858), :class:`GrowingTree` goes on with the likeliest paths, and at the end drafts the likeliest of all
guesses. A path's chance is the product of what the head thinks of its tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from speculation.drafting.draft_session import Candidate, DraftLimits
from speculation.frozen import frozen
from speculation.messages import ANCHOR, SourceName, Token, depths_of

NODES = 20
"""Most tokens drafted at one place; the budget verifies fewer."""
PATIENCE = 32
"""Steps without a guess worth verifying after which guessing for a session rests."""
REST = 8
"""Steps between two tries while it rests, which show whether it has become good."""
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


@dataclass(frozen=True, slots=True)
class GuessTree:
    """A :class:`speculation.sources.registry.Suggestion`."""

    tokens: tuple[Token, ...] = ()
    parents: tuple[int, ...] = ()
    confidence: tuple[float, ...] = ()

    def cut(self, depth: int) -> GuessTree:
        """Without what is deeper."""
        depths = depths_of(self.parents)
        if max(depths, default=0) <= depth:
            return self
        return self.part(node for node, at in enumerate(depths) if at <= depth)

    def part(self, nodes: Iterable[int]) -> GuessTree:
        """Of those ``nodes`` alone, which ascend and hang from each other."""
        kept = {node: i for i, node in enumerate(nodes)}
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
        self._unused = 0  # steps since a guess was verified last

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


def limits_elsewhere(limits: DraftLimits) -> DraftLimits:
    """What a head on a draft worker may do, where a draft model may do ``limits``."""
    return replace(
        limits,
        nodes=WIDER * limits.nodes,
        width=WIDER * limits.width,
        children=limits.children + MORE,
        bytes_a_token=PUSHED * limits.bytes_a_token,
    )


@frozen
class GuessPlace:
    """A guess, or the end of the text, that guesses can hang from."""

    node: int = ANCHOR
    parent: int = ANCHOR
    path: tuple[Token, ...] = ()
    """All guesses up to it."""
    chance: float = 1.0
    """That the text gets there."""


class GrowingTree:
    """The guesses for one session so far."""

    def __init__(self, width: int = WIDTH) -> None:
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
        tokens = tuple(place.path[-1] for place in self._places)
        parents = tuple(place.parent for place in self._places)
        return GuessTree(tokens, parents, tuple(self._confidence)).part(sorted(chosen))
