"""Short chains, laid out many at once.

Most sessions of a step hang nothing but a chain from their text: a token to decode, or drafts in a row. All of them see
every token before them, so their keys need no order of their own: a column for each position. Slots and masks of all
such sessions together take a handful of operations, where views of their own (:mod:`engine.attention.visibility`,
:mod:`engine.attention.invariance`) would take some twenty a session, in every step.

Tensor legend: N chains, T queries of a chain (padded), K keys (padded), B blocks (padded).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from engine.attention.visibility import HIDDEN, KeyView
from engine.cache.sequence_state import SequenceState

NOWHERE = 1 << 40
"""As the position of a column: beyond every sequence."""


@dataclass(frozen=True, slots=True)
class ChainView:
    """All that is pending of a sequence, a chain, before it is known with whom its keys are gathered."""

    sequence: SequenceState
    queries: int
    keys: int
    """Columns, one for each position from 0 on; the last ones may be padding."""
    segments: Sequence[tuple[int, int]]
    """As of a :class:`~engine.attention.visibility.KeyView`; they begin at the same positions in all views of a
    step."""
    alone: Callable[[], KeyView]
    """What reads the same keys by itself."""


def is_plain(sequence: SequenceState, tokens: int, window: int | None) -> bool:
    """Whether the last ``tokens`` pending nodes are a chain at home, all that is pending, and see every token."""
    end = sequence.length + tokens
    return (
        sequence.pending == tokens
        and sequence.is_chain
        and (window is None or end <= window)
        and sequence.pending_slots == [sequence.home(position) for position in range(sequence.length, end)]
    )


def laid_out(chains: Sequence[ChainView], queries: int, segments: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """Slots and mask of all chains, ``[N, K]`` int64 and ``[N, T, K]`` float32, with ``queries`` (T) for each.

    ``segments``: at least as wide as those of every chain. A chain's last query is repeated up to T. Columns without a
    key repeat the chain's last one: their weight is 0, but a value that is not a number would count.
    """
    states = [view.sequence for view in chains]
    block = states[0].block
    lengths_N1 = torch.tensor([state.length for state in states])[:, None]
    own_N1 = torch.tensor([view.queries for view in chains])[:, None]
    positions_K = _positions(max(chains, key=lambda view: view.keys).segments, segments)
    inside_NK = torch.minimum(positions_K, lengths_N1 + own_N1 - 1)
    table_NB = _table([state.blocks for state in states])
    slots_NK = table_NB.gather(1, inside_NK // block) * block + inside_NK % block
    last_NT = lengths_N1 + torch.minimum(torch.arange(queries), own_N1 - 1)
    mask_NTK = torch.zeros(len(chains), queries, len(positions_K))
    return slots_NK, mask_NTK.masked_fill_(positions_K > last_NT[:, :, None], HIDDEN)


def _positions(own: Sequence[tuple[int, int]], segments: Sequence[tuple[int, int]]) -> Tensor:
    """Whose keys stand in the columns of ``segments``, for chains with segments ``own`` or the first of these."""
    positions_K = torch.full((segments[-1][1],), NOWHERE)
    for (first, _), (start, stop) in zip(segments, own, strict=False):
        positions_K[first : first + stop - start] = torch.arange(start, stop)
    return positions_K


def _table(blocks: Sequence[Sequence[int]]) -> Tensor:
    """All block tables, ``[N, B]``, filled up with any blocks."""
    width = max(len(each) for each in blocks)
    flat = chain.from_iterable([*each, *[0] * (width - len(each))] for each in blocks)
    return torch.tensor(list(flat)).view(len(blocks), width)
