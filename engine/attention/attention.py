"""Attention over the slot cache, as transformers models call it.

Registered under :data:`NAME` with transformers' AttentionInterface, so any model that dispatches its attention there
runs packed: the tokens of all sequences in one row, each looking at its own keys (:mod:`engine.attention.rows`). What
computes that is one of :mod:`engine.attention.row_attention` and its subclasses.

What a step needs travels in a forward context next to the call, not in keyword arguments: some models drop those.

Tensor legend: T tokens of the step, Q query heads, H key/value heads, S slots, D key head size, E value head size.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface

from engine.attention.row_attention import RowAttention, RowPlan, Scoring, UnsupportedAttention
from engine.attention.rows import Packed, Rows, packed
from engine.cache.kv_store import KVStore
from engine.cache.sequence_state import SequenceState
from engine.host.upload import to_device

NAME = "paceline"

MAX_ROWS = 4096
"""Of a piece of a step that is not replayed."""


@dataclass(frozen=True, slots=True)
class PagedLayers:
    """Layers whose keys and values are in a store."""

    store: KVStore
    attention: RowAttention
    count: int
    context: int
    """Tokens of the longest sequence."""

    @property
    def pages(self) -> int:
        """Of the longest sequence."""
        return -(-self.context // self.attention.page)


class KeepsStates(Protocol):
    """Takes in states between layers: :class:`engine.hidden.LayerTap`."""

    layers: tuple[int, ...]

    def keep(self, layer: int, states_TD: Tensor) -> None:
        """What stands behind so many layers."""

    def room(self, rows: int) -> Tensor:
        """Where they all go, ``[T, L, D]``."""


class Step:
    """What the layers need to know about the forward in progress."""

    def __init__(self, layers: PagedLayers, slots_T: Tensor, rows: Rows) -> None:
        """``slots_T``: int64, where the keys and values of each row go; ``rows``: where they are read."""
        self.store, self.attention, self.slots_T, self.rows = layers.store, layers.attention, slots_T, rows
        self.invariant = False
        """See :func:`engine.layers.linear.products`."""
        self.tap: KeepsStates | None = None
        """What wants the states between layers, if anything."""
        self.calls = [0] * layers.count
        """How often each layer called; a model that computes attention elsewhere leaves zeros here."""
        self._plan: RowPlan | None = None

    def keep(self, layer: int, states_TD: Tensor) -> None:
        """What stands behind so many layers, before any norm; it is copied if it is wanted."""
        if self.tap is not None:
            self.tap.keep(layer, states_TD)

    def attend(self, layer: int, query_TQD: Tensor, keys_SHD: Tensor, values_SHE: Tensor, how: Scoring) -> Tensor:
        """Attention of all rows, whose own keys and values are stored already, ``[T, Q, E]``, contiguous."""
        self.calls[layer] += 1
        if self._plan is None:
            self._plan = self.attention.plan(self.rows)
        return self.attention(query_TQD, keys_SHD, values_SHE, self._plan, how)


Compute = Callable[[Step, Tensor, Tensor, Tensor], Tensor]
"""The wanted rows of a step, ``[R, X]``, from its tokens, their positions and which rows are wanted, all int64."""


def steps_of(
    tokens: Sequence[int],
    wanted: Sequence[int],
    chunks: Sequence[tuple[SequenceState, int]],
    layers: PagedLayers,
) -> Iterator[tuple[Packed, Step, Tensor, Tensor]]:
    """A step that is not replayed, in one piece or several, with the tokens and positions of each, ``[T]`` int64.

    Arguments are those of :func:`engine.attention.rows.packed`.
    """
    attention = layers.attention
    assert all(state.block == attention.page for state, _ in chunks), "pages are the cache's blocks"
    for piece in packed(tokens, wanted, chunks, group=attention.group, max_rows=MAX_ROWS, pages=layers.pages):
        count = len(piece)
        buffer = piece.host_buffer(count, 0)
        tokens_T, positions_T, slots_T = to_device(buffer[: 3 * count], layers.store.device).long().view(3, count)
        yield piece, Step(layers, slots_T, Rows.within(buffer, count)), tokens_T, positions_T


class _Current(threading.local):
    """The step of this thread: a target and a draft worker may compute in threads of one process."""

    step: Step | None = None


_current = _Current()


@contextmanager
def forward_context(step: Step) -> Iterator[None]:
    """Make ``step`` the one that attention layers called inside belong to."""
    assert _current.step is None, "a forward is already in progress on this thread"
    _current.step = step
    try:
        yield
    finally:
        _current.step = None


def current_step() -> Step:
    """The one that the forward in progress on this thread belongs to."""
    assert _current.step is not None, "a layer was called outside Engine.run"
    return _current.step


def paged_attention(
    module: nn.Module,
    query_1QTD: Tensor,
    key_1HTD: Tensor,
    value_1HTE: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,  # noqa: ARG001
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Cache the new keys and values, attend, return ``[1, T, Q, E]``, contiguous. The signature is transformers'."""
    step = current_step()
    if attention_mask is not None or position_bias is not None:
        raise UnsupportedAttention("the model adds its own bias to the attention scores (ALiBi or similar)")
    if indices is not None or block_indices is not None:
        raise UnsupportedAttention("the model attends to a choice of its keys only (sparse attention)")
    layer: int = module.layer_idx  # type: ignore[assignment]
    keys_SHD, values_SHE = step.store.write(layer, step.slots_T, key_1HTD, value_1HTE)
    query_TQD = query_1QTD[0].transpose(0, 1)
    how = Scoring(scaling, sliding_window, softcap or None, s_aux)
    return step.attend(layer, query_TQD, keys_SHD, values_SHE, how)[None], None


AttentionInterface.register(NAME, paged_attention)
