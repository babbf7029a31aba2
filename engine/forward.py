"""One forward of the model over the cache, from nothing but plain data.

Decides how a step is computed, once it is decided what: every rank of a tensor-parallel group computes the same step
from the same :class:`StepInput`. Knows no books; those are kept once, by :mod:`engine.step` on rank 0.

Tensor legend: T tokens of the step, R rows asked for, V vocabulary.
"""

from __future__ import annotations

import inspect
import pickle
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention import Step, forward_context
from engine.kv_store import KVStore, Move
from engine.model import Model
from engine.sequence_state import SequenceState


@dataclass(frozen=True, slots=True)
class StepInput:
    """All that a step is computed from."""

    tokens: Sequence[int]
    """Of all chunks, one after the other."""
    rows: Sequence[int]
    """Whose logits are wanted, as indices into ``tokens``."""
    chunks: Sequence[tuple[SequenceState, int]]
    """Sequences and how many of their last pending nodes are in this step."""
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
        return pickle.dumps((self.tokens, self.rows, self.chunks, self.moves, self.invariant), pickle.HIGHEST_PROTOCOL)

    @classmethod
    def decoded(cls, data: bytes) -> StepInput:
        """What :meth:`encoded` made, in a process of the same worker."""
        return cls(*pickle.loads(data))


class Forward:
    """A model over a store. The shapes of keys and values are those of the heads that this rank computes."""

    def __init__(self, model: Model, store: KVStore) -> None:
        self.calls: list[int] = []
        """How often each layer's attention was called in the last step."""
        self.seconds = 0.0
        """How long the model itself took in the last step."""
        self.dtype = torch.promote_types(model.dtype, torch.float32)
        """Of the logits."""
        self._model = model
        self._store = store
        self._keeps_rows = "logits_to_keep" in inspect.signature(model.module.forward).parameters

    @torch.inference_mode()
    def compute(self, inputs: StepInput) -> Tensor:
        """The wanted rows of a step of at least one token, ``[R, V]`` in float32 (float64 if the model is)."""
        model, device = self._model, self._model.device
        self._store.move(inputs.moves)
        step = Step(self._store, inputs.chunks, inputs.slots, model.layers, inputs.invariant)
        wanted_R = torch.tensor(inputs.rows or [len(inputs.tokens) - 1], device=device)
        started = time.perf_counter()
        with forward_context(step):
            output = model.module(
                input_ids=torch.tensor([inputs.tokens], device=device),
                position_ids=torch.tensor([inputs.positions], device=device),
                use_cache=False,
                **({"logits_to_keep": wanted_R} if self._keeps_rows else {}),
            )
        self.seconds = time.perf_counter() - started
        self.calls = step.calls
        logits_RV: Tensor = output.logits[0] if self._keeps_rows else output.logits[0, wanted_R]
        return logits_RV[: len(inputs.rows), : model.vocabulary].to(self.dtype)
