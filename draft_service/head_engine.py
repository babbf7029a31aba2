"""An EAGLE-3 head as what a draft worker drafts with, away from its target: a model of one layer or few.

A row is a token with the state it was drawn from: the target's own where that has come, else what the head made of the
token before. So the head runs ahead on its own word, and a row is computed again when the true state comes. What each
row leads to is kept beside its keys and values, slot by slot, and moves with them.

Tensor legend: R rows asked for, V vocabulary, N rows, D hidden size of the head, S slots.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor

from engine.cache.kv_cache import CachedSequence, KVCache
from engine.eagle.cached import CachedHead, HeadChunk
from engine.host.upload import upload
from engine.interface import Chunk
from engine.levels.levels import Levels
from engine.model import Model

KEPT = 64
"""True states of computed rows that are kept, since a row may have to be computed once more."""


class _Known:
    """What came of the target's states for one sequence."""

    def __init__(self, first: int) -> None:
        self.first = first
        """Position of the state that the first row reads."""
        self.states: dict[int, Tensor] = {}


class HeadEngine:
    """A head over its cache, used as an :class:`engine.step.Engine` is."""

    def __init__(self, head: CachedHead, model: Model) -> None:
        """``model``: describes the target, whose tokens the head says; nothing of it is computed."""
        self.model, self._head = model, head
        self.forward_seconds = 0.0
        self.width: int = head.head.config.hidden_size
        self.dtype: torch.dtype = head.head.norm.weight.dtype
        self._next_SD = head.cache.store.beside(self.width)
        self._known: dict[CachedSequence, _Known] = {}

    @property
    def cache(self) -> KVCache:
        """Where its sequences come from. Rows of the head's own states depend on more than tokens: not to be shared."""
        return self._head.cache

    def begin(self, sequence: CachedSequence, position: int) -> None:
        """Its first row will be the token at ``position``."""
        self._known[sequence] = _Known(position - 1)

    def feed(self, sequence: CachedSequence, row: int, state_D: Tensor) -> None:
        """The true state of a committed row; rows from it on that are computed are the caller's to drop."""
        self._known[sequence].states[row] = state_D.to(self._next_SD)

    def forget(self, sequence: CachedSequence) -> None:
        """A sequence is used no more."""
        self._known.pop(sequence, None)

    def levels(self, width: int, children: int) -> Levels | None:
        """See :meth:`engine.step.Engine.levels`."""
        return self._head.levels(self._next_SD, self.model.vocabulary, width=width, children=children)

    def close(self) -> None:
        """Nothing to let go of."""

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        """See :meth:`engine.step.Engine.run`: logits ``[R, V]`` in float32, -inf of tokens the head cannot say.

        Rows without a true state wait for those they hang from, so a chunk may take several forwards.
        """
        started = time.perf_counter()
        self.cache.store.move(self.cache.take_moves())
        done = [0] * len(chunks)
        normed: list[list[Tensor]] = [[] for _ in chunks]
        try:
            while waves := [
                (number, wave)
                for number, chunk in enumerate(chunks)
                if (wave := self._wave(chunk, done[number])) is not None
            ]:
                next_ND, normed_ND = self._head.run([wave for _, wave in waves])
                counts = [len(wave.tokens) for _, wave in waves]
                slots = [
                    slot
                    for (_, wave), count in zip(waves, counts, strict=True)
                    for slot in wave.sequence.pending_slots[-count:]
                ]
                self._next_SD[upload(slots, self._next_SD.device)] = next_ND.to(self._next_SD)
                for (number, _), count, part_ND in zip(waves, counts, torch.split(normed_ND, counts), strict=True):
                    done[number] += count
                    normed[number].append(part_ND)
        except BaseException:
            for chunk, count in zip(chunks, done, strict=True):
                chunk.sequence.retract(count)
            raise
        wanted = [torch.cat(parts)[list(chunk.rows)] for chunk, parts in zip(chunks, normed, strict=True)]
        logits_RV = self._head.logits(torch.cat(wanted), self.model.vocabulary)
        for chunk in chunks:
            self._trim(chunk.sequence)
        self.forward_seconds = time.perf_counter() - started
        return logits_RV

    def _wave(self, chunk: Chunk, start: int) -> HeadChunk | None:
        """The next rows of a chunk that can be computed at once, from row ``start`` on; None: there are no more."""
        sequence, known = chunk.sequence, self._known[chunk.sequence]
        if start == len(chunk.tokens):
            return None
        first = sequence.pending  # the number of the row ``start``
        depths = list(sequence.depths)
        states: list[Tensor] = []
        parents = chunk.resolved_parents()
        for parent in islice(parents, start, None):
            depth = depths[parent] + 1 if parent >= 0 else 0
            state_D = known.states.get(sequence.length + depth)
            if state_D is None and parent >= first:
                break
            depths.append(depth)
            states.append(self._of_parent(sequence, parent) if state_D is None else state_D)
        end = start + len(states)
        return HeadChunk(sequence, known.first, chunk.tokens[start:end], torch.stack(states), parents[start:end])

    def _of_parent(self, sequence: CachedSequence, parent: int) -> Tensor:
        """What the head made of the row that a row hangs from; zeros for the first one."""
        if parent >= 0:
            return self._next_SD[sequence.pending_slots[parent]]
        if not sequence.length:
            return self._next_SD.new_zeros(self.width)
        return self._next_SD[sequence.home(sequence.length - 1)]

    def _trim(self, sequence: CachedSequence) -> None:
        states = self._known[sequence].states
        for row in [row for row in states if row < sequence.length - KEPT]:
            del states[row]
