"""An EAGLE-3 head that drafts in turn with its target, in the target's process, from states it is given as they are.

All is :class:`draft_service.in_turn.InTurn`'s and :class:`draft_service.eagle.HeadLookahead`'s but this: it has the
states of all that is committed before it drafts again. So what was computed of drafts is of no use then, and rows
depend on the tokens up to them alone: sessions share what their texts begin with, as those of the target do.

Tensor legend: N tokens, D hidden size of the head.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

from torch import Tensor

from draft_service.eagle import HeadLookahead, text_of
from draft_service.head_engine import HeadEngine
from draft_service.in_turn import InTurn, limits_in_turn
from draft_service.sequence import DraftSequence
from engine.cache.kv_cache import CachedSequence
from speculation.drafting.draft_session import DraftLimits
from speculation.messages import Rule, Verification, Welcome
from transport.worker import Key, Outgoing

PREFILL = 1024
"""Rows that the head computes at once of texts that it has not read: it has few layers."""


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

    def _rows(self, sequence: DraftSequence) -> CachedSequence:
        opened, text = sequence.session.opened, text_of(sequence)
        if opened.speculation.rule is Rule.COUPLED:
            # Also of the first token, whose own row there is not.
            scope = f"{opened.tokens[0]}\0{opened.request_options.cache_scope}"
            rows = self._head.cache.sequence(text.tokens, scope)
        else:
            rows = super()._rows(sequence)  # drafts that were drawn stand, with what was made of them
        self._head.begin(rows, 1)
        return rows

    def _verified(self, link: Hashable, verification: Verification, sequence: DraftSequence | None) -> Outgoing:
        if sequence is not None and sequence.session.opened.speculation.rule is Rule.COUPLED:
            sequence.rewind(sequence.cached.length)
        return super()._verified(link, verification, sequence)
