"""Draft sources at a simulated target that need more than the text of their session.

A part of :mod:`simulate`. What Medusa heads say was recorded along the text; earlier outputs are those of
the requests that this target has ended, in the very store that serves. What indexing takes is left out: an output can
be found as soon as its request has ended.
"""

from __future__ import annotations

from collections.abc import Sequence

from simulation.agreement import ReplayedRequest
from speculation.drafting.medusa import GuessTree, HeadGuesses, MedusaDrafts
from speculation.messages import Source, Sources, Token
from speculation.sources.suffix import SuffixLookup, SuffixStore


class RecordedHeads:
    """Heads that say at each place what was recorded there. A :class:`.local_sources.LocalSource`."""

    source = Source.MEDUSA

    def __init__(self, first: int, guesses: Sequence[HeadGuesses]) -> None:
        """``guesses[i]`` are those for position ``first + i``; none for a place where the heads had nothing to read."""
        self.depth = max(map(len, guesses), default=0)
        self._drafts = MedusaDrafts(self.depth)
        self._first, self._guesses = first, guesses
        self._end = 0

    @property
    def guessing(self) -> bool:
        """Whether they guess at this place: they do not rest, and there is something to read."""
        at = self._end - self._first
        return 0 <= at < len(self._guesses) and bool(self._guesses[at]) and not self._drafts.rests

    def stepped(self, *, verified: bool) -> None:
        """A step is over; ``verified``: whether guesses were worth verifying in it."""
        self._drafts.stepped(verified=verified)

    def extend(self, tokens: Sequence[Token]) -> None:
        """The next committed tokens."""
        self._drafts.extend(tokens)
        self._end += len(tokens)

    def propose(self, depth: int) -> GuessTree:
        """The likeliest of what was guessed for this very place."""
        if self.guessing:
            self._drafts.guess(self._end, self._guesses[self._end - self._first])
        return self._drafts.propose(depth)


class OwnSources:
    """What the sessions of one target draft with there, beside what their text and their request give them."""

    def __init__(self, allowed: Sources, capacity: int) -> None:
        """``allowed``: what their requests ask for; ``capacity``: tokens of earlier outputs that are kept."""
        self._heads = Source.MEDUSA in allowed
        self._store = SuffixStore(capacity) if Source.SUFFIX in allowed else None

    def heads(self, request: ReplayedRequest) -> RecordedHeads | None:
        """What the heads say for a request that is opened, if there are any."""
        return RecordedHeads(len(request.prompt), request.guesses) if self._heads and request.guesses else None

    def outputs(self, request: ReplayedRequest) -> SuffixLookup | None:
        """What it can find in earlier outputs, if any are kept."""
        return None if self._store is None else SuffixLookup(self._store, request.scope)

    def keep(self, request: ReplayedRequest, tokens: Sequence[Token]) -> None:
        """A request has ended, with all these tokens."""
        if self._store is not None:
            self._store.record(request.scope, tokens, len(request.prompt))
            while not self._store.idle:
                self._store.work(len(tokens))
