"""An EAGLE-3 head as what a draft worker drafts with, away from its target: a model of one layer or few.

A row is a token with the state it was drawn from: the target's own where that has come, else what the head made of the
token before. So the head runs ahead on its own word, and a row is computed again when the true state comes. What each
row leads to is kept beside its keys and values, slot by slot, and moves with them.

Tensor legend: R rows asked for, V vocabulary, D hidden size of the head.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor

from engine.cache.kv_cache import CachedSequence, KVCache
from engine.eagle.cached import ROWS_AT_ONCE, SEQUENCES_AT_ONCE, CachedHead, HeadChunk
from engine.host.upload import upload
from engine.interface import Chunk
from engine.levels.levels import Levels
from engine.model import Model

KEPT = 64
"""True states of computed rows that are kept, since a row may have to be computed once more."""


class HeadEngine:
    """A head over its cache, used as an :class:`engine.step.Engine` is."""

    def __init__(self, head: CachedHead, model: Model) -> None:
        """``model``: describes the target, whose tokens the head says; nothing of it is computed."""
        self.model, self._head = model, head
        self.forward_seconds = 0.0
        self.width: int = head.head.config.hidden_size
        self.dtype: torch.dtype = head.head.norm.weight.dtype
        self._known: dict[CachedSequence, dict[int, Tensor]] = {}
        """True states that have come, by row, of each sequence."""

    @property
    def cache(self) -> KVCache:
        """Where its sequences come from. Rows of the head's own states depend on more than tokens: not to be shared."""
        return self._head.cache

    def begin(self, sequence: CachedSequence, position: int) -> None:
        """Its first row will be the token at ``position``."""
        sequence.first, self._known[sequence] = position, {}

    def feed(self, sequence: CachedSequence, row: int, state_D: Tensor) -> None:
        """The true state of a committed row; rows from it on that are computed are the caller's to drop."""
        self._known[sequence][row] = state_D.to(self._head.next_SD)

    def forget(self, sequence: CachedSequence) -> None:
        """A sequence is used no more."""
        self._known.pop(sequence, None)

    def levels(self, width: int, children: int) -> Levels | None:
        """See :meth:`engine.step.Engine.levels`."""
        return self._head.levels(self.model.vocabulary, width=width, children=children)

    def close(self) -> None:
        """Nothing to let go of."""

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        """See :meth:`engine.step.Engine.run`: logits ``[R, V]`` in float32, -inf of tokens the head cannot say.

        Rows without a true state wait for those they hang from, so a chunk may take several forwards.
        """
        started = time.perf_counter()
        chunks = [chunk._replace(parents=chunk.resolved_parents()) for chunk in chunks]
        done = [0] * len(chunks)
        found: list[Tensor] = []
        order: list[tuple[int, int]] = []  # of these logits: chunk and row
        try:
            while waves := self._waves(chunks, done):
                found.append(self._head.run([wave for _, wave in waves], self.model.vocabulary))
                for number, wave in waves:
                    order += [(number, done[number] + row) for row in wave.rows]
                    done[number] += len(wave.tokens)
            wanted = [(number, row) for number, chunk in enumerate(chunks) for row in chunk.rows]
            if order != wanted or len(found) != 1:
                place = {each: at for at, each in enumerate(order)}
                found = [torch.cat(found)[upload([place[each] for each in wanted], self._head.device)]]
        except BaseException:
            for chunk, count in zip(chunks, done, strict=True):
                chunk.sequence.retract(count)
            raise
        for chunk in chunks:
            self._trim(chunk.sequence)
        self.forward_seconds = time.perf_counter() - started
        return found[0]

    def _waves(self, chunks: Sequence[Chunk], done: Sequence[int]) -> list[tuple[int, HeadChunk]]:
        """What can be computed at once of the chunks, with their numbers, behind the rows that are done."""
        waves: list[tuple[int, HeadChunk]] = []
        room = ROWS_AT_ONCE
        for number, (chunk, start) in enumerate(zip(chunks, done, strict=True)):
            if start < len(chunk.tokens) and room and len(waves) < SEQUENCES_AT_ONCE:
                wave = self._wave(chunk, start, room)
                waves.append((number, wave))
                room -= len(wave.tokens)
        return waves

    def _wave(self, chunk: Chunk, start: int, room: int) -> HeadChunk:
        """The rows of a chunk that can be computed at once, from row ``start`` on, at most ``room``."""
        sequence, known = chunk.sequence, self._known[chunk.sequence]
        first = sequence.pending  # the number of the row ``start``
        depths = list(sequence.depths)
        states: dict[int, Tensor] = {}
        parents = chunk.resolved_parents()
        end = start
        for parent in islice(parents, start, start + room):
            depth = depths[parent] + 1 if parent >= 0 else 0
            state_D = known.get(sequence.length + depth)
            if state_D is not None:
                states[end - start] = state_D
            elif parent >= first:
                break
            depths.append(depth)
            end += 1
        rows = [row - start for row in chunk.rows if start <= row < end]
        return HeadChunk(sequence, chunk.tokens[start:end], states, parents[start:end], rows)

    def _trim(self, sequence: CachedSequence) -> None:
        states = self._known[sequence]
        for row in [row for row in states if row < sequence.length - KEPT]:
            del states[row]
