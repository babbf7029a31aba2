"""Staged drafting in a draft worker: what its own forwards are made to verify besides drafting.

Decides for which sessions guesses are made and how many of them join the next forward, and goes on, after it, along
those that the draft model drew itself. What becomes a draft is what would have become one without guesses, a forward
or more later. Sessions under the rejection rule are left out: each of their drafts is drawn once, from its own q.

Guesses come from the session's own text (:class:`Lookup`) and from a still smaller model (:class:`Assistant`); a new
kind is a class with the members of :class:`Guesser`.

Tensor legend: N sessions, V vocabulary.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from draft_service.sequence import DraftBatchEntry, DraftSequence
from engine.cache.kv_cache import CachedSequence, CacheFull
from engine.interface import FATAL, Chunk
from engine.sampling.sampling import Draw, candidates
from engine.shaping.shaping import shaped
from engine.step import Engine
from speculation.drafting.draft_session import Candidate
from speculation.drafting.guesses import MAX_GUESSES, MAX_SESSIONS, Forward, Guesses, draft_along
from speculation.messages import Rule, Source, Token
from speculation.sources.lookup import PromptLookup
from speculation.trie import Node
from speculation.verifying.budget import StepCost
from speculation.verifying.calibration import Calibration

log = logging.getLogger(__name__)

INDEXED = 512
"""Committed tokens that lookup takes in at once; a long prompt is read over several steps."""
NOTHING = -1
"""What a draft model draws at a place where nothing may follow."""
PREFILL = 512
"""Most tokens that an assistant computes for one session in one step."""
FIRST_ODDS, WEIGHT = 0.8, 0.1
"""What a guess of it is believed to be worth before any was made, and weight of the latest one in that belief."""
TRIAL = 32
"""Forwards without a guess of it, after which a session gets one all the same."""


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
            if len(known) == len(tokens):
                ask.guesses.copy(known.propose_after(ask.path, ask.depth))

    def drop(self, sequence: DraftSequence) -> None:
        """Forget a session's text."""
        self._known.pop(sequence, None)


@dataclass(slots=True)
class _Read:
    """A session as far as the assistant has read it."""

    cached: CachedSequence
    """Holds committed tokens but for the last, and the chain behind them."""
    chain: list[Token] = field(default_factory=list)
    """What is pending in the cache, one behind the other."""
    odds: float = FIRST_ODDS
    """Chance that the draft model follows a guess."""
    rested: int = 0
    """Forwards since its last guess."""

    def unread(self, tokens: Sequence[Token], path: Sequence[Token]) -> Sequence[Token]:
        """What must be computed before the token behind committed ``tokens`` and ``path`` can be guessed.

        Ends with the last of them. What was read beside them is forgotten.
        """
        wanted = [*tokens[self.cached.length :], *path]
        alike = 0
        while alike < min(len(self.chain), len(wanted) - 1) and self.chain[alike] == wanted[alike]:
            alike += 1
        self.cached.retract(len(self.chain) - alike)
        committed = min(alike, len(tokens) - 1 - self.cached.length)
        self.cached.advance(range(committed))
        self.chain = self.chain[committed:alike]
        reused = 0 if self.chain else self.cached.reuse()
        return wanted[alike + reused :]


class Assistant:
    """Guesses of a still smaller model with the draft model's tokenizer, in the same process.

    What its own steps take is paid out of the time of the forward that the guesses join, so where it does not pay it
    rests, and is tried again now and then. Its draws are made and shaped as the draft model's are, and the target's.
    """

    def __init__(self, engine: Engine) -> None:
        """It owns ``engine`` and its cache."""
        self._engine = engine
        self._read: dict[DraftSequence, _Read | None] = {}  # None: there was no room for it
        self._cost = StepCost()

    def guess(self, asked: Sequence[Ask], forward: Forward) -> None:
        """Draft a level at a time for all sessions together, as long as it pays."""
        context = self._engine.model.context
        going = list(self._worth_asking(asked))
        gained = spent = 0.0
        made = 0
        while going:
            gain = sum(ask.place.weight * (ask.guesses.odds if made else 1.0) * read.odds for ask, read in going)
            seconds = self._cost(len(going))
            if not forward.pays(gained, spent, made, gain, len(going), seconds):
                going = [(ask, read) for ask, read in going if not made and read.rested > TRIAL]
            if not going or not self._lengthen(going, begin=not made):
                return
            gained, spent, made = gained + gain, spent + seconds, made + len(going)
            lengths = [len(ask.guesses.tree.nodes) for ask, _ in going]
            going = [
                (ask, read)
                for (ask, read), length in zip(going, lengths, strict=True)
                if 0 < length < ask.depth and ask.place.end + length < context
            ]

    def _worth_asking(self, asked: Sequence[Ask]) -> Iterator[tuple[Ask, _Read]]:
        """Where its own guesses may be better than those that hang there."""
        for ask in asked:
            if ask.place.end >= self._engine.model.context:
                self._give_up(ask.sequence)
            elif ask.sequence not in self._read:
                session = ask.sequence.session
                scope = session.opened.request_options.cache_scope
                self._read[ask.sequence] = _Read(self._engine.cache.sequence(session.tokens, scope))
            read = self._read[ask.sequence]
            if read is not None and ask.guesses.first_odds < read.odds:
                read.rested += 1
                yield ask, read

    def drop(self, sequence: DraftSequence) -> None:
        """Forget a session."""
        if (read := self._read.pop(sequence, None)) is not None:
            read.cached.free()

    def _give_up(self, sequence: DraftSequence) -> None:
        """Guess nothing more for a session."""
        self.drop(sequence)
        self._read[sequence] = None

    def _lengthen(self, going: Sequence[tuple[Ask, _Read]], *, begin: bool) -> bool:
        """One more guess for each session, instead of others' to ``begin`` with; False if there was no room for it."""
        for ask, _ in going if begin else ():
            ask.guesses.clear()
        started = time.perf_counter()
        unread = [read.unread(ask.sequence.session.tokens, ask.text) for ask, read in going]
        drawing = [one for one, tokens in zip(going, unread, strict=True) if len(tokens) <= PREFILL]
        chunks = [
            Chunk(read.cached, tokens[:PREFILL], rows=[len(tokens) - 1] if len(tokens) <= PREFILL else [])
            for (_, read), tokens in zip(going, unread, strict=True)
        ]
        try:
            logits_NV = self._engine.run(chunks)
        except CacheFull:
            self._give_up(going[-1][0].sequence)
            return False
        for (_, read), chunk in zip(going, chunks, strict=True):
            read.chain += chunk.tokens
        for (ask, read), drawn in zip(drawing, _drawn([ask for ask, _ in drawing], logits_NV), strict=True):
            before, read.rested = ask.guesses.odds, 0
            for candidate in drawn:
                ask.guesses.add(candidate.token, candidate.confidence, Source.DRAFT)
                read.odds += WEIGHT * (ask.guesses.odds / before - read.odds)
        self._cost.observe(sum(len(chunk.tokens) for chunk in chunks), time.perf_counter() - started)
        return True


def _drawn(drawing: Sequence[Ask], logits_NV: Tensor) -> Sequence[Sequence[Candidate]]:
    """What the assistant says next in each session, drawn and shaped as the draft model's own word is; none or one."""
    texts = [(ask.sequence, ask.text) for ask in drawing]
    draws = [Draw(one.session.opened.sampling, len(one.session.tokens) + len(text)) for one, text in texts]
    shapes = [None if one.shaping is None else one.shaping.after(text) for one, text in texts]
    return candidates(shaped(logits_NV, shapes), draws, k=1)


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
        depths = [(entry, depth) for entry in entries if (depth := _depth(entry, context)) > 0]
        guessed = sorted(depths, key=lambda pair: -pair[0].expands[0].weight)[:MAX_SESSIONS]
        asked = [self._ask(entry, depth) for entry, depth in guessed]
        self._asked = {ask.sequence: ask for ask in asked}
        gain = sum(node.weight for entry in entries for node in entry.expands)
        forward = Forward(sum(len(entry.tokens) for entry in entries), gain, cost)
        self._guess(asked, forward)
        trees = [ask.guesses.tree for ask in asked]
        chances = [[ask.place.weight * odds for odds in tree.odds] for ask, tree in zip(asked, trees, strict=True)]
        for (entry, _), tree, count in zip(guessed, trees, forward.worth(chances), strict=True):
            entry.guesses = tree.first(count)
        self.seconds = time.perf_counter() - started

    def _guess(self, asked: Sequence[Ask], forward: Forward) -> None:
        try:
            for guesser in self._guessers:
                guesser.guess(asked, forward)
        except FATAL:
            raise
        except Exception as error:  # whatever a model may raise; what goes on without guesses loses no draft
            log.warning("a step goes on without guesses: %s: %s", type(error).__name__, error)
            for ask in asked:
                ask.guesses.clear()

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

    They are made where drafts are what the draft model draws, however often it does, and not where a launch draws
    several levels. The last level is drafted, never expanded: computing it is of no use.
    """
    session = entry.sequence.session
    if not entry.expands or entry.levels > 1 or session.opened.speculation.rule is not Rule.COUPLED:
        return 0
    place = entry.expands[0]
    room = context - len(entry.sequence.text.tokens) - (place.end - session.trie.position)
    return min(session.levels_below(place) - 1, room, MAX_GUESSES)
