"""An EAGLE-3 head as what drafts: on a draft worker that holds no model, or in turn with its target.

All is :class:`draft_service.lookahead.Lookahead`'s but this: a session's rows begin with the first token whose features
have come, the head runs ahead from there on its own word, and when features come of tokens that it has read so, it
reads them again and drafts again from the end of the text.

On a draft worker (:class:`HeadLookahead`) they are sent by the target. Without any nothing is drafted; late ones, and
those that never come, cost acceptance. What is none (of another session, epoch, head or size, not a number) is dropped
and counted.

In the target's process (:class:`HeadInTurn`) it is given the states of all that is committed before it drafts again. So
what was computed of drafts is of no use then, and rows depend on the tokens up to them alone: sessions share what their
texts begin with, as those of the target do.

Tensor legend: N tokens, D hidden size of the head.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

from torch import Tensor

from draft_service.head_engine import HeadEngine
from draft_service.in_turn import InTurn, limits_in_turn
from draft_service.levels import DraftLevels
from draft_service.lookahead import Lookahead, LookaheadLimits
from draft_service.sequence import DraftSequence, Reader, Text
from engine.cache.kv_cache import CachedSequence
from engine.eagle.cached import unpacked
from engine.recorder import Recorder
from speculation.drafting.draft_session import DraftLimits
from speculation.messages import Features, Open, Rule, Token, ToWorker, Verification, Welcome
from transport.tracing import Tracing
from transport.worker import Key, Outgoing

MAX_EARLY = 512
"""Features that are kept of tokens which are not known to be committed yet: a verification may be overtaken."""

PREFILL = 1024
"""Rows that the head computes at once of texts that it has not read: it has few layers."""


class HeadText(Text):
    """What a head reads of a text: nothing, as long as no features have come."""

    def __init__(self, committed: Sequence[Token]) -> None:
        super().__init__([])
        self.tokens: list[Token] = []
        self.begun = False
        """Whether it reads any token."""
        self.come: dict[int, Tensor] = {}
        """Features that have come and are not given to the head yet, by the position of their token."""
        self._committed = committed

    @property
    def complete(self) -> bool:
        """Whether drafts can hang from its end."""
        return self.begun and self.end == len(self._committed)

    @property
    def end(self) -> int:
        """Position behind the last token that it reads."""
        return self.first + len(self.tokens)

    def begin(self, position: int) -> None:
        """Read the text from there on, but no token yet."""
        self.begun, self.first = True, position
        self.tokens.clear()

    def read_to(self, end: int | None = None) -> None:
        """Read the tokens before that position; None: all."""
        self.tokens += self._committed[self.end : end]

    def follow(self, count: int) -> None:  # noqa: ARG002
        """Read on, whoever drafted it."""
        if self.begun:
            self.read_to()


class HeadLookahead(Lookahead):
    """The sessions of a draft worker with a head."""

    def __init__(
        self,
        engine: HeadEngine,
        welcome: Welcome,
        limits: LookaheadLimits = LookaheadLimits(),
        recorder: Recorder | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        """As of :class:`Lookahead`; ``welcome`` names the head."""
        draft = limits.draft.of_head()
        reader = Reader(engine.model, HeadText)
        levels = DraftLevels(engine.levels(draft.width, draft.children))
        super().__init__(engine, welcome, replace(limits, draft=draft), recorder, tracing, reader, levels=levels)
        self._head = engine

    def receive(self, link: Hashable, message: ToWorker, at: float = 0.0) -> Outgoing:
        """Take one message of a router."""
        if not isinstance(message, Features):
            return super().receive(link, message, at)
        sequence = self._sequences.get((link, message.session))
        if sequence is None or sequence.session.opened.epoch != message.epoch:
            self.counters.features_late += 1
        elif why := self._take(sequence, message):
            self.counters.features_refused += 1
            if self.counters.features_refused.bit_count() == 1:  # the 1st, 2nd, 4th ...
                sequence.log.warning("refused features at %d: %s", message.position, why)
        else:
            self.counters.features += len(message)
            self._absorb(sequence)
        return []

    def _take(self, sequence: DraftSequence, features: Features) -> str:
        """Keep features of a session until they are read; returns why not, if so."""
        text, position = text_of(sequence), sequence.session.trie.position
        if features.head != self._welcome.head:
            return "they are for another head, or from beside another target"
        if features.position < 1 or features.end > position + MAX_EARLY:
            return f"they are of tokens {features.position} to {features.end}, the text has {position}"
        try:
            states_ND = unpacked(features, self._head.width, self._head.dtype)
        except ValueError as error:
            return str(error)
        text.come.update(enumerate(states_ND, features.position))
        return ""

    def _absorb(self, sequence: DraftSequence) -> None:
        """Give the head what has come of committed tokens; what it has read without, it will read again."""
        text, session = text_of(sequence), sequence.session
        known = sorted(position for position in text.come if position < session.trie.position)
        if not known or (session.opened.speculation.rule is Rule.REJECTION and len(session.trie)):
            return  # what was drawn from a q stands: it goes on when that is decided
        if not text.begun:
            text.begin(known[0])
            text.read_to()
            self._head.begin(sequence.cached, known[0])
        rows = {position - text.first: text.come.pop(position) for position in known}
        rows = {row: state_D for row, state_D in rows.items() if row >= 0}
        for row, state_D in rows.items():
            self._head.feed(sequence.cached, row, state_D)
        if rows and (first := min(rows)) < sequence.cached.length:
            sequence.rewind(first)

    def _rows(self, opened: Open, tokens: Sequence[Token]) -> CachedSequence:  # noqa: ARG002
        """They depend on more than tokens: nothing is shared."""
        return self._head.cache.sequence()

    def _verified(self, link: Hashable, verification: Verification, sequence: DraftSequence | None) -> Outgoing:
        outgoing = super()._verified(link, verification, sequence)
        if sequence is not None and self._sequences.get((link, verification.session)) is sequence:
            self._absorb(sequence)
        return outgoing

    def _drop(self, sequence: DraftSequence, why: str) -> None:
        super()._drop(sequence, why)
        self._head.forget(sequence.cached)


class HeadInTurn(InTurn, HeadLookahead):
    """The sessions of a target that a head in its process drafts for."""

    def __init__(self, engine: HeadEngine, welcome: Welcome) -> None:
        super().__init__(engine, welcome, replace(limits_in_turn(DraftLimits()), prefill=PREFILL))

    def reuse(self, key: Key) -> int:
        """Take over what is known of how a text goes on; returns the position whose state is wanted next, if any was.

        Worth a try whenever all states that have come are read: other sessions may have come further meanwhile.
        """
        sequence = self._sequences.get(key)
        if sequence is None:
            return 0
        text = text_of(sequence)
        if not text.begun:
            text.begin(1)
        elif text.first != 1 or text.come or sequence.cached.pending or sequence.num_uncomputed_tokens:
            return 0
        text.read_to()
        self.counters.reused += sequence.cached.reuse()
        del text.tokens[sequence.cached.length :]
        return text.end - 1

    def feed(self, key: Key, position: int, states_ND: Tensor, *, gap: bool) -> None:
        """Take the target's fused states from ``position`` on. ``gap``: it lacks some before, and reads on from here.

        The states of a text that goes on are those of all its tokens but the last.
        """
        sequence = self._sequences.get(key)
        if sequence is None:
            return
        text, first = text_of(sequence), position + 1  # the token that was drawn from the first of them
        if gap:
            self._head.forget(sequence.cached)
            sequence.rewind(0)
            sequence.cached.free()
            sequence.cached = self._head.cache.sequence()
            self._head.begin(sequence.cached, first)
            text.begin(first)
        elif not text.begun:
            text.begin(1)
        text.read_to(max(text.end, first + len(states_ND)))
        text.come.update(enumerate(states_ND, first))
        self._absorb(sequence)

    def _rows(self, opened: Open, tokens: Sequence[Token]) -> CachedSequence:
        if opened.speculation.rule is Rule.COUPLED:
            # Also of the first token, whose own row there is not.
            scope = f"{opened.tokens[0]}\0{opened.request_options.cache_scope}"
            rows = self._head.cache.sequence(tokens, scope)
        else:
            rows = super()._rows(opened, tokens)  # drafts that were drawn stand, with what was made of them
        self._head.begin(rows, 1)
        return rows

    def _verified(self, link: Hashable, verification: Verification, sequence: DraftSequence | None) -> Outgoing:
        if sequence is not None and sequence.session.opened.speculation.rule is Rule.COUPLED:
            sequence.rewind(sequence.cached.length)
        return super()._verified(link, verification, sequence)


def text_of(sequence: DraftSequence) -> HeadText:
    """What a head reads of it."""
    assert isinstance(sequence.text, HeadText)
    return sequence.text
