"""One forward over everything a batch has to compute.

Decides how chunks of different sequences are packed into one row, and keeps a step all-or-nothing. Which chunks are
worth computing is the caller's decision; how they are computed is :mod:`engine.forward`'s; what the logits mean is
:mod:`engine.sampling.sampling`'s.

Tensor legend: R rows asked for, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from engine.cache.kv_cache import CachedSequence, CacheFull, KVCache
from engine.cache.kv_store import Move
from engine.cuda.graphs import Record
from engine.eagle.head import EagleHead
from engine.forward import Chunk, ForwardPass, StepInput, checked
from engine.leader import Leader
from engine.levels.levels import Levels
from engine.model import Model


class Engine(ForwardPass):
    """A model over a cache, with its books."""

    speculates = True

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        *,
        invariant: bool = True,
        leader: Leader | None = None,
        record: Record | None = None,
        eagle: EagleHead | None = None,
        aux_layers: Sequence[int] = (),
    ) -> None:
        """``invariant``: give a token the same bits however it is batched, where that can be had.

        That is in bfloat16 on a CPU. It costs decoding a chain next to nothing, a prompt up to 1.6 times its time with
        AMX. Recorded steps of such an engine can draw.
        ``leader``: has the other ranks of a tensor-parallel group compute every step as well. ``record``: how
        steps are recorded to be replayed (:mod:`engine.cuda.graphs`), if they are. ``aux_layers``: behind how many
        decoder layers states are kept (:attr:`aux`); 0: before the first. With ``eagle``, which drafts from such
        states, they are those that it reads. Raises ModelError if the model does not show these.
        """
        agreed = bool if leader is None else leader.all_agree
        super().__init__(
            model,
            cache.store,
            record,
            agreed=agreed,
            aux_layers=aux_layers if eagle is None else eagle.config.aux_layers_of(model.layers),
            fuse=None if eagle is None else eagle.fuse,
            draws=invariant and leader is None,  # other ranks draw nothing, and have to record the same steps
        )
        self.cache = cache
        self.exactness = ""
        """Whether a token has the same bits however it is computed, for people; empty: it was not measured."""
        self.wants_exact = invariant
        self.invariant = invariant and model.dtype == torch.bfloat16 and model.device.type == "cpu"
        self.eagle = eagle
        self._leader = leader

    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        """Compute ``chunks``; return the wanted rows in chunk order, ``[R, V]`` in float32 (float64 if the model is).

        The tokens become pending nodes of their sequences. Where the step has drawn (:attr:`drawn`), the result is in
        the model's own format and good until the next step only. Raises :class:`CacheFull`, or ValueError for a chunk
        that cannot be computed; then, as after any other exception, no sequence has changed.
        """
        tokens, rows, draws = checked(chunks, self.model.vocabulary)
        if not tokens:
            return torch.empty(0, self.model.vocabulary, dtype=self.dtype, device=self.model.device)
        self._check_room(chunks)
        states: list[tuple[CachedSequence, int]] = []  # of what was appended
        moves: list[Move] = []
        try:
            for chunk in chunks:
                chunk.sequence.append(chunk.resolved_parents())
                states.append((chunk.sequence, len(chunk.tokens)))
            self._check_context(states)
            moves = self.cache.take_moves()
            inputs = StepInput(tokens, rows, states, moves, self.invariant, self.row_classes)
            with nullcontext() if self._leader is None else self._leader.step(inputs):
                return self.compute(inputs, draws if len(draws) == len(rows) else ())
        except BaseException:
            if not self._moved:
                self.cache.moves.note(moves)
            for sequence, count in states:
                sequence.retract(count)
            raise

    def levels(self, width: int, children: int) -> Levels | None:
        """See :meth:`.ForwardPass.levels`; None with other ranks, which compute whole steps."""
        return super().levels(width, children) if self._leader is None else None

    def check(self) -> None:
        """Raise :class:`engine.parallel.group.RankError` if a rank does not answer. Not while a step is computed."""
        if self._leader is not None:
            self._leader.check()

    def close(self) -> None:
        """End the other ranks, if there are any. The last call; not while a step is computed."""
        if self._leader is not None:
            self._leader.stop()

    def _check_room(self, chunks: Sequence[Chunk]) -> None:
        if len({chunk.sequence for chunk in chunks}) < len(chunks):
            raise ValueError("a sequence may have only one chunk in a step")
        free = self.cache.ledger.free
        if sum(len(chunk.tokens) + 1 for chunk in chunks) <= free:
            return  # no sequence needs more
        needed = sum(chunk.sequence.blocks_needed(len(chunk.tokens)) for chunk in chunks)
        if needed > free:
            raise CacheFull(f"the step needs {needed} free blocks, there are {free}")

    def _check_context(self, states: Sequence[tuple[CachedSequence, int]]) -> None:
        context = self.model.context
        for sequence, _ in states:
            # No node is deeper than there are nodes.
            if sequence.length + len(sequence.parents) > context:
                end = sequence.length + max(sequence.depths) + 1
                if end > context:
                    raise ValueError(f"position {end - 1} is beyond the model's context of {context} tokens")
