"""What the engine computes for one session in a step of a draft worker, and how its rows are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from draft_service.sequence import DraftSequence
from engine.cuda.level_memory import Expanded
from engine.interface import Chunk
from engine.sampling.sampling import Draw
from engine.shaping.shaping import RowShaping
from speculation.messages import ANCHOR
from speculation.trie import Node, VerificationTree


@dataclass(slots=True)
class DraftBatchEntry:
    """One session's part of a step: feed committed tokens, or draft nodes; ``expands`` are the places to go on from."""

    sequence: DraftSequence
    tokens: Sequence[int]
    parents: Sequence[int]
    expands: Sequence[Node]
    """The nodes whose tokens come last."""
    guesses: VerificationTree = VerificationTree()
    """What the draft model may draw behind the first of ``expands``, computed after all else."""
    levels: int = 1
    """How many levels are expanded in one launch, the places first; see :mod:`draft_service.levels`."""
    reserved: Sequence[int] = ()
    """Slots of the levels below the places; those that were used, once it is known."""
    leaves: Sequence[Node] = ()
    """Other drafts that these levels may expand."""
    found: Sequence[Sequence[Expanded | None]] = ()
    """What the launch expanded, by level; empty without one."""

    @property
    def size(self) -> int:
        """How many tokens are computed."""
        return len(self.tokens) + len(self.guesses.nodes) + len(self.reserved)

    @property
    def drawn(self) -> int:
        """How many places are drawn at: those to expand, then the guesses."""
        return len(self.expands) + len(self.guesses.nodes)

    @property
    def rows(self) -> int:
        """How many rows are judged: those of the places drawn at.

        Of a text that is computed without being drawn from it is the last one, which sees all others.
        """
        return self.drawn or 1

    @property
    def computes_committed(self) -> bool:
        """Whether the tokens are committed ones."""
        return not self.expands or self.expands[0] is self.sequence.session.trie.root

    def discarded(self) -> None:
        """Nothing of it is pending any more."""
        self.reserved, self.leaves, self.found = (), (), ()

    def chunk(self) -> Chunk:
        """What the engine computes."""
        own = len(self.tokens)
        first = self.sequence.cached.pending + own
        place = first - len(self.expands)
        parents = [place if parent == ANCHOR else first + parent for parent in self.guesses.parents]
        rows = range(self.size - self.rows, self.size)
        return Chunk(self.sequence.cached, [*self.tokens, *self.guesses.tokens], [*self.parents, *parents], rows)

    def draws(self) -> list[Draw]:
        """How the token of each place is drawn."""
        sampling = self.sequence.session.opened.sampling
        draws = [Draw(sampling, node.end, node.digest) for node in self.expands]
        return draws + [Draw(sampling, draws[0].position + guess.end) for guess in self.guesses.nodes]

    def shapes(self) -> list[RowShaping | None]:
        """How the logits of each place are shaped; None: not at all."""
        shaping, root = self.sequence.shaping, self.sequence.session.trie.root
        if shaping is None:
            return [None] * self.drawn
        paths = [[above.token for above in node.path_from(root)] for node in self.expands]
        paths += [[*paths[0], *self.guesses.tokens[: guess.end]] for guess in self.guesses.nodes]
        return [shaping.after(path) for path in paths]
