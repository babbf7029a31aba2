"""A still smaller model that guesses what the draft model draws: with the same tokenizer, in the same process.

Decides how long the guesses get. What its own steps take is paid out of the time of the forward that the guesses join,
so where it does not pay it rests, and is tried again now and then. Its draws are made with the noise of the position,
as the draft model's are, and the target's.

Tensor legend: N sessions, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from draft_service.sequence import DraftSequence
from draft_service.staged_drafting import Ask
from engine.cache.kv_cache import CachedSequence, CacheFull
from engine.interface import Chunk
from engine.sampling.sampling import Draw, candidates
from engine.shaping.shaping import RowShaping, shaped
from engine.step import Engine
from speculation.drafting.draft_session import Candidate
from speculation.drafting.guesses import Forward
from speculation.messages import Source, Token
from speculation.verifying.budget import StepCost

PREFILL = 512
"""Most tokens computed for one session in one step."""
FIRST_ODDS = 0.8
"""What a guess is believed to be worth before any was made."""
WEIGHT = 0.1
"""Weight of the latest guess in that belief."""
TRIAL = 32
"""Forwards without a guess, after which a session gets one all the same."""


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
        """What must be computed before the token after ``tokens`` and ``path`` can be guessed.

        Ends with the last of them.

        Committed tokens are ``tokens``; what was read beside them and the path is forgotten.
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
    """Guesses of a model. A :class:`draft_service.staged_drafting.Guesser`; owns ``engine`` and its cache."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._read: dict[DraftSequence, _Read | None] = {}  # None: there was no room for it
        self._cost = StepCost()

    def guess(self, asked: Sequence[Ask], forward: Forward) -> None:
        """Draft a level at a time for all sessions together, as long as it pays."""
        going = self._worth_asking(asked)
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
            context = self._engine.model.context
            going = [
                (ask, read)
                for (ask, read), length in zip(going, lengths, strict=True)
                if 0 < length < ask.depth and ask.place.end + length < context
            ]

    def _worth_asking(self, asked: Sequence[Ask]) -> list[tuple[Ask, _Read]]:
        """Where the assistant's own guesses may be better than those that hang there."""
        going: list[tuple[Ask, _Read]] = []
        for ask in asked:
            if ask.sequence not in self._read:
                session = ask.sequence.session
                scope = session.opened.request_options.cache_scope
                self._read[ask.sequence] = _Read(self._engine.cache.sequence(session.tokens, scope))
            read = self._read[ask.sequence]
            if read is not None and ask.guesses.first_odds < read.odds and ask.place.end < self._engine.model.context:
                read.rested += 1
                going.append((ask, read))
        return going

    def drop(self, sequence: DraftSequence) -> None:
        """Forget a session."""
        read = self._read.pop(sequence, None)
        if read is not None:
            read.cached.free()

    def _lengthen(self, going: Sequence[tuple[Ask, _Read]], *, begin: bool) -> bool:
        """One more guess for each session, instead of others' to ``begin`` with; False if there was no room for it."""
        if begin:
            for ask, _ in going:
                ask.guesses.clear()
        started = time.perf_counter()
        chunks, drawing = _chunks(going)
        try:
            logits_NV = self._engine.run(chunks)
        except CacheFull:
            ask, read = going[-1]
            read.cached.free()
            self._read[ask.sequence] = None
            return False
        for (_, read), chunk in zip(going, chunks, strict=True):
            read.chain += chunk.tokens
        for (ask, read), drawn in zip(drawing, _drawn(drawing, logits_NV), strict=True):
            before, read.rested = ask.guesses.odds, 0
            for candidate in drawn:
                ask.guesses.add(candidate.token, candidate.confidence, Source.DRAFT)
                read.odds += WEIGHT * (ask.guesses.odds / before - read.odds)
        self._cost.observe(sum(len(chunk.tokens) for chunk in chunks), time.perf_counter() - started)
        return True


def _chunks(going: Sequence[tuple[Ask, _Read]]) -> tuple[list[Chunk], list[tuple[Ask, _Read]]]:
    """What to feed, and for which sessions that is all there is to read, so that a guess can be drawn."""
    chunks: list[Chunk] = []
    drawing: list[tuple[Ask, _Read]] = []
    for ask, read in going:
        unread = read.unread(ask.sequence.session.tokens, ask.text)
        complete = len(unread) <= PREFILL
        chunks.append(Chunk(read.cached, unread[:PREFILL], rows=[len(unread) - 1] if complete else []))
        if complete:
            drawing.append((ask, read))
    return chunks, drawing


def _drawn(drawing: Sequence[tuple[Ask, _Read]], logits_NV: Tensor) -> Sequence[Sequence[Candidate]]:
    """What the assistant says next in each session, drawn and shaped as the draft model's own word is; none or one."""
    draws: list[Draw] = []
    shapes: list[RowShaping | None] = []
    for ask, _ in drawing:
        session, shaping = ask.sequence.session, ask.sequence.shaping
        draws.append(Draw(session.opened.sampling, len(session.tokens) + len(ask.text)))
        shapes.append(None if shaping is None else shaping.after(ask.text))
    return candidates(shaped(logits_NV, shapes), draws, k=1)
