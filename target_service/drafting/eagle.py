"""An EAGLE-3 head at work in a target's process: it drafts as a draft model there does, from the target's own states.

Kept here is what the head has not read yet of the states of the tokens that were computed for good; it is given them
before it drafts (:mod:`draft_service.eagle`). Where a target takes over a prefix from its cache, the head mostly
knows the same prefix. Of what it does not know, up to :data:`RECOMPUTED` tokens are computed again by the target; else
the session's rows begin behind the prefix.

Tensor legend: N rows, D hidden size of the head.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from draft_service.eagle import HeadInTurn
from draft_service.head_engine import HeadEngine
from draft_service.in_turn import InTurn
from engine.eagle.cached import CachedHead
from engine.eagle.head import EagleHead
from engine.interface import Chunk, StepEngine
from speculation.messages import Source, Welcome
from speculation.verifying.planner import Planner
from target_service.drafting.draft_model import DraftModel, key_of
from target_service.drafting.features import FeatureSender
from target_service.drafting.state_reader import StateReader, fused_states, kept_rows
from target_service.sequence import BatchEntry, TargetSequence
from target_service.step_account import TargetCounters
from target_service.verdicts import Verdict
from transport.worker import Key

log = logging.getLogger(__name__)

RECOMPUTED = 64
"""Tokens of a prefix that the target computes again at most, so that the head knows all of it."""
KEPT = 512
"""Tokens of a text whose states are kept at least while the head rests; it begins with these then."""


@dataclass(slots=True, eq=False)
class _UnreadStates:
    """The states of a session that the head has not read."""

    end: int = 0
    """The position whose state is awaited."""
    states: deque[Tensor] = field(default_factory=deque)
    """Of the positions before it, ``[N, D]`` each."""
    count: int = 0
    """How many positions."""
    gap: bool = False
    """Whether the head has not read what is before these."""

    def add(self, states_ND: Tensor) -> None:
        """Take those of the next positions; of too many, let go of the first."""
        self.states.append(states_ND)
        self.end += len(states_ND)
        self.count += len(states_ND)
        while self.count - len(self.states[0]) >= KEPT:
            self.count -= len(self.states.popleft())
            self.gap = True

    def leave_out(self, position: int) -> None:
        """Go on with the state there, whatever is before it."""
        self.states.clear()
        self.end, self.count, self.gap = position, 0, True

    def take(self) -> Tensor:
        """All of them, ``[N, D]``: they are read."""
        states_ND = torch.cat(list(self.states))
        self.states.clear()
        self.count, self.gap = 0, False
        return states_ND


class EagleDrafter(DraftModel):
    """The sessions of a target that an EAGLE-3 head drafts for, beside it."""

    source = Source.EAGLE
    name = "EAGLE head"
    _drafter: HeadInTurn

    def __init__(
        self, head: EagleHead, drafter: HeadInTurn, planner: Planner, counters: TargetCounters, *, adaptive: bool
    ) -> None:
        """``head``: what fuses states for ``drafter``. All else: see :class:`DraftModel`."""
        super().__init__(drafter, planner, counters, adaptive=adaptive)
        self._head = head
        self._unread: dict[Key, _UnreadStates] = {}

    def open(self, sequence: TargetSequence) -> None:
        """A session is open, and may take over from the cache what the head knows as well."""
        if sequence.session.opened.speculation.allows(self.source):
            sequence.reusable = partial(self._reusable, sequence)

    def _reusable(self, sequence: TargetSequence, length: int) -> int:
        """How much of a prefix of ``length`` tokens a target may take over, as far as the head is concerned."""
        with self._spared(sequence.log):
            self._begin(sequence)
            if (key := key_of(sequence)) in self._open:
                unread = self._unread.setdefault(key, _UnreadStates())
                if unread.end < length and not unread.count:
                    unread.end = max(unread.end, self._drafter.reuse(key))
                if unread.end < length <= unread.end + RECOMPUTED:
                    return unread.end
        return length

    @torch.inference_mode()
    def note(
        self, engine: StepEngine, chunks: Sequence[Chunk], entries: Sequence[BatchEntry], decided: Sequence[Verdict]
    ) -> None:
        """Keep the states of what stays of the step just computed."""
        with self._spared(log):
            states = fused_states(self._head, engine, kept_rows(chunks, entries, decided), self._known)
            for sequence, _, part_ND in states:
                self._unread[key_of(sequence)].add(part_ND)

    def _known(self, sequence: TargetSequence, _count: int) -> int | None:
        if (key := key_of(sequence)) not in self._open:
            return None
        unread, start = self._unread.setdefault(key, _UnreadStates()), sequence.cached.length
        if unread.end < start:
            unread.leave_out(start)
        return unread.end - start

    def _catch_up(self) -> None:
        super()._catch_up()
        for key, unread in self._unread.items():
            if unread.count:
                first, gap = unread.end - unread.count, unread.gap
                self._drafter.feed(key, first, unread.take(), gap=gap)

    def _forget(self, key: Key) -> bool:
        self._unread.pop(key, None)
        return super()._forget(key)


def own_drafters(
    engine: StepEngine,
    welcome: Welcome,
    drafter: InTurn | None,
    planner: Planner,
    counters: TargetCounters,
    adaptive: bool,
) -> list[StateReader]:
    """What the engine brings, and a draft model, whose word comes last. ``adaptive``: draft only where that pays."""
    readers: list[StateReader] = []
    head = engine.eagle
    if head is not None and head.fingerprint:
        readers.append(FeatureSender(head, counters))
    elif head is not None:
        drafting = HeadEngine(CachedHead(head, engine.cache.capacity, engine.model.context), engine.model)
        readers.append(EagleDrafter(head, HeadInTurn(drafting, welcome), planner, counters, adaptive=adaptive))
    if drafter is not None:
        drafter.draft_for(engine.model.vocabulary)
        readers.append(DraftModel(drafter, planner, counters, adaptive=adaptive))
    return readers
