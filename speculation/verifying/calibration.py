"""What a draft source's word is worth, learned from what the target says.

A source states a confidence for every token it proposes. Siblings exclude each other, so each is asked about only where
those before it are wrong: a second choice's *claim* is its share of what the first has left. The claim is corrected in
steps, from the wide to the narrow; each starts from what the one before it believes, and departs from that only as far
as it has seen trials:

    1. by source and rank (first choice, second, others): a factor. A source that is always wrong is found out at once.
    2. by claim, in tenths: the margin of the draft, as far as it is known.
    3. by how far ahead of the committed text it was drafted.
    4. in this session: a factor again, by source and rank.

Tokens are put to the test when their parent is committed, verified or not: the target's next token is one child of that
parent or none. So the odds of drafts that are not being verified are learned too, and speculation that was switched off
can come back. Old trials fade.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, field

from speculation.messages import SourceName, Token
from speculation.trie import Node

BINS = 10
RANKS = 3
"""First choice, second, and all others together."""
DEPTHS = (2, 6, 14)
"""Where the classes of distance end."""

MIN_ODDS = 1e-4
"""No token is hopeless: what is never tried is never learned."""
MAX_ODDS = 0.999

DISTANCES = len(DEPTHS) + 1
CELLS = RANKS * BINS * DISTANCES

Kind = tuple[SourceName, int]
Margin = tuple[SourceName, int, int]
Cell = Kind | Margin | tuple[SourceName, int, int, int]
Cells = tuple[Kind, Margin, Cell]
"""What is learned from a token, and by: its source and rank; its claim besides; and how far ahead it was drafted."""


@dataclass(frozen=True, slots=True)
class OddsTable:
    """What :class:`Calibration` makes of the claims of one source, as numbers, for whoever computes it elsewhere.

    A claim is multiplied by the factor of its rank, and is at most 1. By rank, tenth of the claim and class of distance
    (the last changes fastest, ``CELLS`` in all) follows ``slope * that + offset``, within :data:`MIN_ODDS` and
    :data:`MAX_ODDS`; and within these again once multiplied by the factor that its session has for its rank. By default
    nothing was learned.
    """

    factors: list[float] = field(default_factory=lambda: [1.0] * RANKS)
    slopes: list[float] = field(default_factory=lambda: [1.0] * CELLS)
    offsets: list[float] = field(default_factory=lambda: [0.0] * CELLS)


class Tally:
    """Successes among trials, against what was expected of them; old ones fade."""

    __slots__ = ("expected", "kept", "tried")

    def __init__(self) -> None:
        self.tried = self.kept = self.expected = 0.0

    def add(self, kept: float, expected: float, memory: float) -> None:
        """One more trial; after ``memory`` trials this one counts for a third."""
        fade = 1.0 - 1.0 / memory
        self.tried = self.tried * fade + 1.0
        self.kept = self.kept * fade + kept
        self.expected = self.expected * fade + expected

    def share(self, belief: float, prior: float) -> float:
        """The success rate, starting from ``belief`` as if from ``prior`` trials."""
        return (self.kept + prior * belief) / (self.tried + prior)

    def factor(self, prior: float) -> float:
        """Successes over expected ones, starting from 1 as if from ``prior`` expected successes."""
        return (self.kept + prior) / (self.expected + prior)


class Calibration:
    """Turns claims into odds. One for a worker, and one for each of its sessions that starts from it."""

    MEMORY = 400.0
    """Trials after which an old one counts for a third."""
    PRIOR = 4.0
    """Trials that the wider belief counts for."""
    SESSION_MEMORY = 60.0
    SESSION_PRIOR = 6.0

    def __init__(self, wider: Calibration | None = None) -> None:
        """``wider``: what is believed before this session has shown otherwise."""
        self._wider = wider
        self._tallies: defaultdict[Cell, Tally] = defaultdict(Tally)
        self._tables: defaultdict[SourceName, OddsTable] = defaultdict(OddsTable)
        self._stale: set[Margin] = set()
        """Where tables do not say yet what was learned."""

    def __call__(self, node: Node) -> float:
        """Probability that the node is kept if its parent is and the siblings before it are not."""
        return self._odds(node.claim, _cells(node))

    def table(self, source: SourceName) -> OddsTable:
        """All that it believes of a source, which is kept up to date; of a session's, see :meth:`factors`."""
        assert self._wider is None, "a session has factors"
        for margin in self._stale:
            kind, tenth = margin[:2], margin[2]
            table, first = self._tables[margin[0]], (kind[1] * BINS + tenth) * DISTANCES
            table.factors[kind[1]] = self._factor(kind, self.PRIOR)
            for depth in range(DISTANCES):
                table.slopes[first + depth], table.offsets[first + depth] = self._corrections(margin, depth)
        self._stale.clear()
        return self._tables[source]

    def factors(self, source: SourceName) -> list[float]:
        """By rank, what a session makes of the wider belief."""
        return [self._factor((source, rank), self.SESSION_PRIOR) for rank in range(RANKS)]

    def _corrections(self, margin: Margin, depth: int) -> tuple[float, float]:
        """Slope and offset of what the second and third step make of a belief."""
        slope, offset = 1.0, 0.0
        for cell in (margin, (*margin, depth)):
            if cell in self._tallies:
                tally = self._tallies[cell]
                at_0, at_1 = tally.share(0.0, self.PRIOR), tally.share(1.0, self.PRIOR)
                slope, offset = slope * (at_1 - at_0), at_0 + offset * (at_1 - at_0)
        return slope, offset

    def observe(self, place: Node, token: Token) -> None:
        """Learn from a committed place and the ``token`` after it: its children were tried until one was right."""
        for child in place.children.values():
            self._tried(child.claim, _cells(child), child.token == token)
            if child.token == token:
                return

    def _tried(self, claim: float, cells: Cells, kept: bool) -> None:
        kind, margin, depth = cells
        if self._wider is not None:
            self._tallies[kind].add(kept, self._wider._odds(claim, cells), self.SESSION_MEMORY)
            self._wider._tried(claim, cells, kept)
            return
        self._tallies[kind].add(kept, claim, self.MEMORY)
        self._tallies[margin].add(kept, 0.0, self.MEMORY)
        self._tallies[depth].add(kept, 0.0, self.MEMORY)
        self._stale.add(margin)

    def _odds(self, claim: float, cells: Cells) -> float:
        kind, margin, depth = cells
        tally = self._tallies.get(kind)
        if self._wider is not None:
            odds = self._wider._odds(claim, cells)
            if tally is not None:
                odds *= tally.factor(self.SESSION_PRIOR)
        else:
            odds = claim if tally is None else min(claim * tally.factor(self.PRIOR), 1.0)
            for cell in (margin, depth):
                tally = self._tallies.get(cell)
                if tally is not None:
                    odds = tally.share(odds, self.PRIOR)
        return MIN_ODDS if odds < MIN_ODDS else MAX_ODDS if odds > MAX_ODDS else odds

    def _factor(self, kind: Kind, prior: float) -> float:
        tally = self._tallies.get(kind)
        return 1.0 if tally is None else tally.factor(prior)


def _cells(node: Node) -> Cells:
    source, rank, tenth = node.source, node.rank, int(node.claim * BINS)
    if rank >= RANKS:
        rank = RANKS - 1
    if tenth >= BINS:
        tenth = BINS - 1
    return (source, rank), (source, rank, tenth), (source, rank, tenth, bisect_right(DEPTHS, node.ahead))
