"""One forward of the model over the cache, from nothing but plain data.

Decides how a step is computed, once it is decided what: replayed, over pages, or plainly. Every rank of a
tensor-parallel group computes the same step from the same :class:`StepInput`. Knows no books; those are kept once, by
:mod:`engine.step` on rank 0.

Tensor legend: T tokens of the step, R rows asked for, V vocabulary, D hidden size, X logits and hidden state together.
"""

from __future__ import annotations

import inspect
import io
import pickle
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from engine.attention import PagedPart, Step, forward_context
from engine.cuda.graphs import Graphs, Record
from engine.cuda.pages import Chain, Pages, chain_of
from engine.hidden import HiddenTap
from engine.kv_store import KVStore, Move
from engine.linear import products
from engine.model import Model
from engine.sequence_state import SequenceState
from engine.upload import upload


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
    """Whether attention has to be batch-invariant; see :mod:`engine.invariance`."""

    @property
    def positions(self) -> list[int]:
        """Of every token."""
        return [state.length + depth for state, count in self.chunks for depth in state.depths[-count:]]

    @property
    def slots(self) -> list[int]:
        """Where every token's keys and values go."""
        return [slot for state, count in self.chunks for slot in state.pending_slots[-count:]]

    def encoded(self) -> bytes:
        """For the other ranks; see :meth:`decoded`."""
        chunks = [(sequence.state(), count) for sequence, count in self.chunks]
        return pickle.dumps((self.tokens, self.rows, chunks, self.moves, self.invariant), pickle.HIGHEST_PROTOCOL)

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


class Forward:
    """A model over a store. The shapes of keys and values are those of the heads that this rank computes."""

    def __init__(
        self, model: Model, store: KVStore, record: Record | None = None, *, keep_hidden: bool = False
    ) -> None:
        """``record``: how small steps are recorded to be replayed, if they are.

        ``keep_hidden``: keep what the output layer reads. Raises ModelError if the model does not show it.
        """
        self.calls: list[int] = []
        """How often each layer's attention was called in the last step that was not replayed."""
        self.seconds = 0.0
        """How long the model itself took in the last step; on CUDA, how long the host took to ask for it."""
        self.moved = False
        """Whether the moves of the last step were made; it may have failed since."""
        self.dtype = torch.promote_types(model.dtype, torch.float32)
        """Of the logits."""
        self.hidden_RD: Tensor | None = None
        """What the output layer read for each row of the last step, if that is kept."""
        self._model = model
        self._store = store
        self._keeps_rows = "logits_to_keep" in inspect.signature(model.module.forward).parameters
        self._tap = HiddenTap(model) if keep_hidden else None
        self._hidden_size: int = model.config.get_text_config(decoder=True).hidden_size if keep_hidden else 0
        self._graphs: Graphs | None = None
        if record is not None and model.paged is not None:
            self._graphs = Graphs(self._logits, store, model.paged, model.layers, model.context, record)

    @property
    def recorded_sizes(self) -> Sequence[int]:
        """Tokens of the steps that are recorded when they come up first."""
        return () if self._graphs is None else self._graphs.sizes

    @torch.inference_mode()
    def compute(self, inputs: StepInput) -> Tensor:
        """The wanted rows of a step of at least one token, ``[R, V]`` in float32 (float64 if the model is)."""
        self.moved = False
        self._store.move(inputs.moves)
        self.moved = True
        started = time.perf_counter()
        rows_R = upload(inputs.rows or [len(inputs.tokens) - 1], self._model.device)
        chains = self._chains(inputs)
        logits_TV = self._replayed(inputs, chains)
        if logits_TV is not None:
            logits_RV = logits_TV.index_select(0, rows_R)
        else:
            logits_RV = self._computed(inputs, chains, rows_R)
        if self._tap is not None:
            hidden_RD = logits_RV[:, -self._hidden_size :]
            self.hidden_RD = hidden_RD[: len(inputs.rows)].to(self._model.dtype)
        self.seconds = time.perf_counter() - started
        return logits_RV[: len(inputs.rows), : self._model.vocabulary].to(self.dtype)

    def _chains(self, inputs: StepInput) -> list[Chain | None]:
        """Every chunk as a paged kernel sees it; None for those it cannot compute."""
        kernel = self._model.paged
        if kernel is None or inputs.invariant:
            return [None] * len(inputs.chunks)
        return [None if state.block % kernel.page else chain_of(state, tokens) for state, tokens in inputs.chunks]

    def _replayed(self, inputs: StepInput, chains: Sequence[Chain | None]) -> Tensor | None:
        """The logits of all tokens, if the step is one that is replayed."""
        paged = [chain for chain in chains if chain is not None]
        if self._graphs is None or len(paged) < len(chains):
            return None
        return self._graphs.run(inputs.tokens, inputs.positions, inputs.slots, paged, inputs.chunks[0][0].block)

    def _computed(self, inputs: StepInput, chains: Sequence[Chain | None], rows_R: Tensor) -> Tensor:
        """The wanted rows, computed kernel by kernel."""
        store, device, slots = self._store, self._model.device, inputs.slots
        count = len(slots)
        numbers_3T = upload([*inputs.tokens, *inputs.positions, *slots], device).view(3, count)
        tokens_T, positions_T, slots_T = numbers_3T
        first = slots[0] if slots == list(range(slots[0], slots[0] + count)) else None
        part = self._paged_part(inputs, chains)
        step = Step(
            store, inputs.chunks, slots_T, self._model.layers, first=first, invariant=inputs.invariant, paged=part
        )
        logits_RV = self._logits(step, tokens_T, positions_T, rows_R)
        self.calls = step.calls
        return logits_RV

    def _paged_part(self, inputs: StepInput, chains: Sequence[Chain | None]) -> PagedPart | None:
        """What a paged kernel computes of the step, if anything."""
        kernel, device = self._model.paged, self._model.device
        paged = {i: chain for i, chain in enumerate(chains) if chain is not None}
        if kernel is None or not paged:
            return None
        pages = Pages.of(list(paged.values()), inputs.chunks[0][0].block, device)
        if len(paged) == len(chains):
            return PagedPart(kernel, pages, frozenset(paged))
        ends = list(accumulate(tokens for _, tokens in inputs.chunks))
        packed = [index for i, chain in paged.items() for index in range(ends[i] - chain.queries, ends[i])]
        return PagedPart(kernel, pages, frozenset(paged), upload(packed, device))

    def _logits(self, step: Step, tokens_T: Tensor, positions_T: Tensor, rows_R: Tensor | None = None) -> Tensor:
        """Logits of the wanted rows, ``[R, V]``; by default of all. V is padded as in the model.

        Hidden states that are kept stand behind them in their rows: one tensor is what is recorded and replayed.
        """
        wanted = {"logits_to_keep": rows_R} if self._keeps_rows and rows_R is not None else {}
        with forward_context(step), products(invariant=step.invariant):
            output = self._model.module(
                input_ids=tokens_T[None], position_ids=positions_T[None], use_cache=False, **wanted
            )
        logits_RV: Tensor = output.logits[0]
        if self._tap is not None:
            logits_RV = torch.cat((logits_RV, self._tap.take()[0]), -1)
        return logits_RV if self._keeps_rows or rows_R is None else logits_RV.index_select(0, rows_R)
