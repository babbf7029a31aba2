"""One forward of the model over the cache, from nothing but plain data.

Decides how a step is computed, once it is decided what: padded and replayed (:mod:`engine.cuda`), or as it is. Every
rank of a tensor-parallel group computes the same step from the same :class:`StepInput`. Knows no books; those are kept
once, by :mod:`engine.step` on rank 0.

Tensor legend: T tokens of the step, R rows asked for, V vocabulary, L layers whose states are kept, D hidden size.
"""

from __future__ import annotations

import inspect
import io
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from engine.attention.attention import PagedLayers, Step, forward_context, steps_of
from engine.attention.rows import ROW_CLASSES, as_wanted
from engine.cache.kv_cache import CachedSequence
from engine.cache.kv_store import KVStore, Move
from engine.cache.sequence_state import SequenceState
from engine.cpu.levels import cpu_levels
from engine.cuda.graphs import Record, RowSteps
from engine.cuda.recorded_levels import recorded_levels
from engine.hidden import LayerTap
from engine.host.upload import upload
from engine.layers.fused import fused_logits
from engine.layers.linear import products
from engine.levels.levels import Levels
from engine.model import Model
from engine.sampling.sampling import Draw


class Chunk(NamedTuple):
    """Tokens to append to one sequence, and which of their logits are wanted.

    ``parents`` None continues the chain from the last pending node (or the prefix's end). Otherwise it holds an index
    per token in the sequence's pending numbering, where this chunk's tokens get the next free numbers, or -1.
    """

    sequence: CachedSequence
    tokens: Sequence[int]
    parents: Sequence[int] | None = None
    rows: Sequence[int] = ()
    """Indices into ``tokens``."""
    draws: Sequence[Draw] = ()
    """How a token is drawn on each of these, if all are plain draws; see :attr:`Engine.drawn`."""

    def resolved_parents(self) -> Sequence[int]:
        """The parents, spelled out."""
        if self.parents is None:
            pending = self.sequence.pending
            return range(pending - 1, pending - 1 + len(self.tokens))
        if len(self.parents) != len(self.tokens):
            raise ValueError(f"{len(self.parents)} parents for {len(self.tokens)} tokens")
        return self.parents


def checked(chunks: Sequence[Chunk], vocabulary: int) -> tuple[list[int], list[int], list[Draw]]:
    """All tokens, the wanted rows as indices into them, and how these are drawn. Raises ValueError."""
    tokens: list[int] = []
    rows: list[int] = []
    draws: list[Draw] = []
    for chunk in chunks:
        first, count = len(tokens), len(chunk.tokens)
        if not count:
            raise ValueError("a chunk without tokens")
        for row in chunk.rows:
            if not 0 <= row < count:
                raise ValueError(f"row {row} of a chunk of {count} tokens")
            rows.append(first + row)
        tokens += chunk.tokens
        draws += chunk.draws
    if tokens and (min(tokens) < 0 or max(tokens) >= vocabulary):
        raise ValueError(f"token ids must be in [0, {vocabulary}), got {min(tokens)} to {max(tokens)}")
    return tokens, rows, draws


@dataclass(frozen=True, slots=True)
class StepInput:
    """All that a step is computed from."""

    tokens: Sequence[int]
    """Of all chunks, one after the other."""
    rows: Sequence[int]
    """Whose logits are wanted, as indices into ``tokens``."""
    chunks: Sequence[tuple[SequenceState, int]]
    """Sequences, which do not change meanwhile, and how many of their last pending nodes are in this step."""
    moves: Sequence[Move]
    """Slots to copy before anything is computed."""
    invariant: bool
    """Whether products have to be; see :func:`engine.layers.linear.products`."""
    row_classes: Sequence[int] = ()
    """Numbers of rows that rank 0 pads steps to, if it does; the others then use no more than these."""

    def encoded(self) -> bytes:
        """For the other ranks; see :meth:`decoded`."""
        chunks = [(sequence.state(), count) for sequence, count in self.chunks]
        plain = (self.tokens, self.rows, chunks, self.moves, self.invariant, self.row_classes)
        return pickle.dumps(plain, pickle.HIGHEST_PROTOCOL)

    @classmethod
    def decoded(cls, data: bytes) -> StepInput:
        """What :meth:`encoded` made, in a process of the same worker. Raises UnpicklingError for anything else."""
        return cls(*_Unpickler(io.BytesIO(data)).load())


class _Unpickler(pickle.Unpickler):
    """Knows one class and no function, so that nothing it reads can run code."""

    def find_class(self, module: str, name: str) -> type[SequenceState]:
        if (module, name) == (SequenceState.__module__, SequenceState.__qualname__):
            return SequenceState
        raise pickle.UnpicklingError(f"{module}.{name} does not belong in a step")


class ForwardPass:
    """A model over a store. The shapes of keys and values are those of the heads that this rank computes."""

    fuses = False
    """Whether steps fuse the states that are kept of them."""

    def __init__(
        self,
        model: Model,
        store: KVStore,
        record: Record | None = None,
        *,
        agreed: Callable[[bool], bool] = bool,
        aux_layers: Sequence[int] = (),
        fuse: Callable[[Tensor], Tensor] | None = None,
        draws: bool = False,
    ) -> None:
        """``record``: how steps by rows are recorded to be replayed, if they are; ``agreed``: see :class:`RowSteps`.

        ``aux_layers``, ``fuse``: see :class:`engine.hidden.LayerTap`; these are fused only where steps are recorded.
        Raises ModelError if the model does not show these. ``draws``: plain draws are a part of what is recorded.
        """
        self.model = model
        self.last_calls: list[int] = []
        """How often each layer's attention was called in the last step that was not replayed."""
        self.forward_seconds = 0.0
        """How long the model itself took in the last step; on CUDA, how long the host took to ask for it."""
        self.dtype = torch.promote_types(model.dtype, torch.float32)
        """Of the logits."""
        self.aux: Tensor | None = None
        """Auxiliary hidden states of every token of the last step, in the order of its chunks; kept if asked for.

        ``[T, L * D]`` in the model's own format, a tensor of its own: for each of the ``aux_layers``, in their order,
        the residual stream behind so many decoder layers. Where :attr:`fuses`, what was made of these, ``[T, E]``.
        """
        self._moved = False  # whether the moves of the last step were made; it may have failed since
        self._keeps_rows = "logits_to_keep" in inspect.signature(model.module.forward).parameters
        assert model.attention is not None, "a model that cannot speculate"
        fuse = fuse if model.attention.replayed else None
        self.fuses = fuse is not None
        self._layer_tap = LayerTap(model, aux_layers, ROW_CLASSES[-1], fuse) if aux_layers else None
        self._layers = PagedLayers(store, model.attention, model.layers, model.context)
        self._rows: RowSteps | None = None
        if model.attention.replayed:
            drawn = model.vocabulary if draws and self.dtype == torch.float32 else 0
            self._rows = RowSteps(self._logits, self._layers, record, agreed, drawn, self._note)

    @torch.inference_mode()
    def compute(self, inputs: StepInput, draws: Sequence[Draw] = ()) -> Tensor:
        """The wanted rows of a step of at least one token, ``[R, V]`` in float32 (float64 if the model is).

        ``draws``: plain ones, of these rows, if they may be drawn in the step. If they are (:attr:`drawn`), the result
        is in the model's own format and good until the next step only.
        """
        self._moved = False
        self._layers.store.move(inputs.moves)
        self._moved = True
        started = time.perf_counter()
        if self._layer_tap is not None:
            self._layer_tap.start()
        if self._rows is not None:
            if inputs.row_classes is not self._rows.classes:  # another rank's
                for rows in set(self._rows.classes).difference(inputs.row_classes or self._rows.classes):
                    self._rows.avoid(rows)
            logits_RV = self._rows.run(inputs.tokens, inputs.rows, inputs.chunks, draws)
        else:
            logits_RV = self._by_rows(inputs)
        if self._layer_tap is not None:
            self.aux = self._layer_tap.take()
        self.forward_seconds = time.perf_counter() - started
        logits_RV = logits_RV[: len(inputs.rows), : self.model.vocabulary]
        return logits_RV if self.drawn is not None else logits_RV.to(self.dtype)

    @property
    def drawn(self) -> Tensor | None:
        """What the last step drew itself: the token of each wanted row, and 1 if all its logits are numbers, else 0.

        int32 ``[R, 2]``, good until the next step. None: it drew nothing, because not every chunk brought its draws
        or it was none of those that can.
        """
        return None if self._rows is None else self._rows.drawn_R2

    @property
    def row_classes(self) -> Sequence[int]:
        """Numbers of rows that steps are padded to, ascending; none: they are as large as what they compute."""
        return () if self._rows is None else self._rows.classes

    def avoid_rows(self, rows: int) -> None:
        """Compute no more steps of this class of rows, if there are smaller or larger ones left."""
        if self._rows is not None:
            self._rows.avoid(rows)

    def levels(self, width: int, children: int) -> Levels | None:
        """What expands several levels of draft trees in one launch; None where that cannot be had.

        ``width``: places that a level expands of a sequence at most; ``children``: drafts that hang from each.
        """
        if self._layer_tap is not None:
            return None
        if self._rows is None:
            return cpu_levels(self.model.module, self._layers, self.model.vocabulary, width=width, children=children)
        return recorded_levels(self._rows, self.model.vocabulary, self.dtype, width=width, children=children)

    def _note(self, rows: int) -> None:
        """So many more tokens of the step have been computed."""
        if self._layer_tap is not None:
            self._layer_tap.computed(rows)

    def record_steps(self) -> bool:
        """Prepare for steps of every size, where that can be done without one; False: it cannot."""
        return self._rows is not None and self._rows.warm_up()

    def _by_rows(self, inputs: StepInput) -> Tensor:
        """The wanted rows, of a step as large as what it computes: neither padded nor recorded."""
        order, model, found = sorted(set(inputs.rows)), self.model, list[Tensor]()
        for piece, step, tokens_T, positions_T in steps_of(inputs.tokens, order, inputs.chunks, self._layers):
            step.invariant = inputs.invariant
            found.append(self._logits(step, tokens_T, positions_T, upload(piece.wanted, model.device)))
            self._note(len(piece))
        return as_wanted(found, order, inputs.rows)

    @torch.inference_mode()
    def _logits(self, step: Step, tokens_T: Tensor, positions_T: Tensor, rows_R: Tensor) -> Tensor:
        """Logits of the wanted rows, ``[R, V]``; V is padded as in the model."""
        step.tap = self._layer_tap
        with forward_context(step), products(invariant=step.invariant):
            logits_RV = fused_logits(self.model.module, tokens_T, positions_T, rows_R)
            all_rows = logits_RV is None and not self._keeps_rows
            if logits_RV is None:
                logits_RV = self._stock_logits(tokens_T, positions_T, rows_R)
            if self._layer_tap is not None:
                self._layer_tap.fuse(len(tokens_T))
        self.last_calls = step.calls
        return logits_RV.index_select(0, rows_R) if all_rows else logits_RV

    def _stock_logits(self, tokens_T: Tensor, positions_T: Tensor, rows_R: Tensor) -> Tensor:
        """By transformers' own forward: of the wanted rows if it can leave out others, else of all."""
        wanted = {"logits_to_keep": rows_R} if self._keeps_rows else {}
        output = self.model.module(input_ids=tokens_T[None], position_ids=positions_T[None], use_cache=False, **wanted)
        logits_RV: Tensor = output.logits[0]
        return logits_RV
