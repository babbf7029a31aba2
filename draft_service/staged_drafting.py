"""Staged drafting in a draft worker: what its own forwards are made to verify besides drafting.

Decides for which sessions guesses are made and how many of them join the next forward, and goes on, after it, along
those that the draft model drew itself. What becomes a draft is what would have become one without guesses, a forward
or more later. Sessions under the rejection rule are left out: each of their drafts is drawn once, from its own q.

A new kind of guess is a class with the members of :class:`Guesser`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from draft_service.sequence import DraftBatchEntry, DraftSequence
from speculation.drafting.draft_session import Candidate
from speculation.drafting.guesses import MAX_GUESSES, MAX_SESSIONS, Forward, Guesses, draft_along
from speculation.messages import Rule, Source, Token
from speculation.sources.lookup import PromptLookup
from speculation.trie import Node
from speculation.verifying.budget import StepCost
from speculation.verifying.calibration import Calibration

INDEXED = 512
"""Committed tokens that lookup takes in at once; a long prompt is read over several steps."""
NOTHING = -1
"""What a draft model draws at a place where nothing may follow."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A place behind which guesses may hang in the next forward, and those that hang there so far."""

    sequence: DraftSequence
    place: Node
    path: tuple[Token, ...]
    """Drafts from the end of the text to the place, its own token included."""
    depth: int
    """Guesses that may follow each other there, at least 1."""
    guesses: Guesses

    @property
    def text(self) -> tuple[Token, ...]:
        """The path and the guesses behind it."""
        return (*self.path, *self.guesses.tree.tokens)


class Guesser(Protocol):
    """What guesses how a draft model goes on."""

    def guess(self, asked: Sequence[Ask], forward: Forward) -> None:
        """Hang guesses from those places for which it has better ones than hang there, as many as it can afford."""

    def drop(self, sequence: DraftSequence) -> None:
        """Forget a session."""


class Lookup:
    """Guesses copied from the session's own text and drafts; see :mod:`speculation.sources.lookup`."""

    def __init__(self) -> None:
        self._known: dict[DraftSequence, PromptLookup] = {}

    def guess(self, asked: Sequence[Ask], _forward: Forward) -> None:
        """Ask every session's own text, once all of it is read."""
        for ask in asked:
            known = self._known.setdefault(ask.sequence, PromptLookup())
            tokens = ask.sequence.session.tokens
            known.extend(tokens[len(known) : len(known) + INDEXED])
            if len(known) < len(tokens):
                continue
            found = known.propose_after(ask.path, ask.depth)
            for token, sure in zip(found.tokens, found.confidence, strict=True):
                ask.guesses.add(token, sure, Source.LOOKUP)

    def drop(self, sequence: DraftSequence) -> None:
        """Forget a session's text."""
        self._known.pop(sequence, None)


class StagedDrafting:
    """The guesses of all sessions of a draft worker; none without ``guessers``."""

    def __init__(self, vocabulary: int, guessers: Sequence[Guesser] = ()) -> None:
        """Each of the ``guessers`` sees what those before it have guessed. ``vocabulary``: the draft model's."""
        self._vocabulary, self._guessers = vocabulary, guessers
        self._calibration = Calibration()
        self._guesses: dict[DraftSequence, Guesses] = {}
        self._asked: dict[DraftSequence, Ask] = {}  # in the step at hand
        self.seconds = 0.0
        """How long it took to find the guesses for the step at hand."""

    def hang(self, entries: Sequence[DraftBatchEntry], cost: StepCost, context: int) -> None:
        """Add to the entries of the next forward the guesses that pay, by what such forwards take: ``cost``.

        ``context``: the draft model's; no guess lies beyond it.
        """
        if not self._guessers:
            return
        started = time.perf_counter()
        depths = {entry.sequence: _depth(entry, context) for entry in entries}
        open_entries = [entry for entry in entries if depths[entry.sequence] > 0]
        guessed = sorted(open_entries, key=lambda entry: -entry.expands[0].weight)[:MAX_SESSIONS]
        asked = [self._ask(entry, depths[entry.sequence]) for entry in guessed]
        self._asked = {ask.sequence: ask for ask in asked}
        gain = sum(node.weight for entry in entries for node in entry.expands)
        forward = Forward(sum(len(entry.tokens) for entry in entries), gain, cost)
        for guesser in self._guessers:
            guesser.guess(asked, forward)
        trees = [ask.guesses.tree for ask in asked]
        chances = [[ask.place.weight * odds for odds in tree.odds] for ask, tree in zip(asked, trees, strict=True)]
        for entry, tree, count in zip(guessed, trees, forward.worth(chances), strict=True):
            entry.guesses = tree.first(count)
        self.seconds = time.perf_counter() - started

    def _ask(self, entry: DraftBatchEntry, depth: int) -> Ask:
        """The place of an entry behind which guesses hang: the one that is worth most."""
        sequence, place = entry.sequence, entry.expands[0]
        if sequence not in self._guesses:
            self._guesses[sequence] = Guesses(self._vocabulary, self._calibration)
        guesses = self._guesses[sequence]
        guesses.clear()
        path = tuple(node.token for node in place.path_from(sequence.session.trie.root))
        return Ask(sequence, place, path, depth, guesses)

    def follow(self, entry: DraftBatchEntry, found: Sequence[Sequence[Candidate]]) -> list[Node]:
        """The guesses that the draft model drew itself, as the drafts that they are; the others are forgotten.

        ``found``: what may follow at each row of the entry, whose places have been expanded. The drafts returned have
        been expanded too.
        """
        ask = self._asked.get(entry.sequence)
        if ask is None:
            return []
        sequence, tokens = ask.sequence, entry.guesses.tokens
        rows = [found[0], *found[len(entry.expands) :]]
        kept = ask.guesses.settle(len(tokens), [row[0].token if row else NOTHING for row in rows])
        first = sequence.cached.pending - len(tokens)
        followed = draft_along(sequence.session, ask.place, tokens[:kept], rows[1:])
        sequence.pending.update((node, first + i) for i, node in enumerate(followed))
        sequence.cached.retract(len(tokens) - len(followed))
        return followed

    def drop(self, sequence: DraftSequence) -> None:
        """Forget a session."""
        self._guesses.pop(sequence, None)
        self._asked.pop(sequence, None)
        for guesser in self._guessers:
            guesser.drop(sequence)


def _depth(entry: DraftBatchEntry, context: int) -> int:
    """How many guesses may follow each other behind the first place of an entry; at most 0: none may be made.

    They are made where drafts are what the draft model draws, however often it does. The last level is drafted, never
    expanded: computing it is of no use.
    """
    session = entry.sequence.session
    if not entry.expands or session.opened.speculation.rule is not Rule.COUPLED:
        return 0
    place = entry.expands[0]
    room = context - len(entry.sequence.text.tokens) - (place.end - session.trie.position)
    return min(session.levels_below(place) - 1, room, MAX_GUESSES)
