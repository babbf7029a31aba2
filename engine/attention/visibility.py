"""Which cached tokens the queries of one chunk may look at.

Decides how the keys of a chunk are read and the mask over them: a query sees the committed prefix, its ancestors and
itself, cut to a sliding window where a layer has one. Works from positions and parents alone; knows nothing about
attention.

The order of keys does not matter to attention, only which of them a query sees. So here they come in the order of
their slots: a range, if the slots needed nearly fill one, else copied together. Down to the last bit it does matter,
through the order of additions: where results must not depend on the batch, :mod:`engine.attention.invariance` orders
them.

Most sessions of a step hang nothing but a chain from their text: a token to decode, or drafts in a row. All of them see
every token before them, so their keys need no order of their own: a column for each position. Slots and masks of all
such sessions together take a handful of operations, where views of their own would take some twenty a session, in every
step.

Tensor legend: T queries (of a chain: padded), P pending nodes of their sequence, K keys read, L committed positions in
reach, N chains, B blocks (padded).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from engine.cache.sequence_state import ROOT, SequenceState

GATHER_ABOVE = 1.25
"""Slots in the range per slot needed, above which a gathered copy is cheaper than reading over the holes."""

NOWHERE = 1 << 40
"""As the position of a column: beyond every sequence."""

HIDDEN = float("-inf")
BITS_TO_MASK = torch.tensor([[0.0 if byte >> bit & 1 else HIDDEN for bit in range(8)] for byte in range(256)])
"""Eight mask entries for every byte, least significant bit first."""


@dataclass
class KeyView:
    """The keys that ``queries`` tokens of the packed row read: ``keys`` slots from ``base`` on, or ``slots_K``.

    Its tensors are on the host.
    """

    queries: int
    keys: int
    base: int
    slots_K: Tensor | None
    mask_TK: Tensor | None
    """Added to the scores: 0 or -inf; None when every query sees every key."""
    segments: Sequence[tuple[int, int]]
    """Ranges of keys whose weighted values are summed apart, then added up."""


def oldest_needed(sequence: SequenceState, tokens: int, window: int | None) -> int:
    """The first committed position that the last ``tokens`` pending nodes see."""
    if window is None:
        return 0
    first = sequence.length + min(sequence.depths[sequence.pending - tokens :]) - window + 1
    return min(max(0, first), sequence.length)


def mask_of_bits(lines: Sequence[int], columns: int) -> Tensor:
    """``[len(lines), columns]`` in float32: 0 for every bit set, else -inf; bit 0 is the first column."""
    width = -(-columns // 8)
    packed = bytearray().join(line.to_bytes(width, "little") for line in lines)
    bytes_TB = torch.frombuffer(packed, dtype=torch.uint8).view(len(lines), width)
    return BITS_TO_MASK[bytes_TB.int()].view(len(lines), width * 8)[:, :columns]


def slot_ordered(sequence: SequenceState, tokens: int, window: int | None, dtype: torch.dtype) -> KeyView:
    """View for the last ``tokens`` pending nodes of ``sequence`` in a layer that sees ``window`` positions back."""
    first = sequence.pending - tokens
    reach = oldest_needed(sequence, tokens, window)
    slots_K = sequence.slots(reach)
    low, high = (int(bound) for bound in torch.aminmax(slots_K))
    span, needed = high - low + 1, len(slots_K)
    in_place = span <= GATHER_ABOVE * needed
    keys = span if in_place else needed
    columns_K = slots_K - low if in_place else torch.arange(needed)
    sees_all = tokens == 1 and keys == needed and sequence.is_chain and (window is None or needed <= window)
    mask_TK = None if sees_all else _mask(sequence, first, columns_K, keys, reach, window).to(dtype)
    return KeyView(tokens, keys, low, None if in_place else slots_K, mask_TK, [(0, keys)])


def _mask(sequence: SequenceState, first: int, columns_K: Tensor, keys: int, reach: int, window: int | None) -> Tensor:
    """``[T, keys]``: 0 where a query sees the key in a column, else -inf, also in columns that hold no key of it."""
    tokens = sequence.pending - first
    committed_L, pending_P = columns_K.tensor_split((len(columns_K) - sequence.pending,))
    hidden_TP = _hidden(sequence, first)
    mask_TK = torch.full((tokens, keys), HIDDEN)
    if window is None:
        mask_TK[:, committed_L] = 0.0
    else:
        depths_P = torch.tensor(sequence.depths)
        oldest_T1 = sequence.length + depths_P[first:, None] - window + 1
        passed_TL = torch.arange(reach, sequence.length) < oldest_T1
        mask_TK[:, committed_L] = torch.zeros(passed_TL.shape).masked_fill_(passed_TL, HIDDEN)
        hidden_TP.masked_fill_(sequence.length + depths_P < oldest_T1, HIDDEN)
    mask_TK[:, pending_P] = hidden_TP
    return mask_TK


def _hidden(sequence: SequenceState, first: int) -> Tensor:
    """``[T, P]``: 0 where pending node P is T's ancestor or T itself, else -inf; for T from ``first`` on."""
    nodes = sequence.pending
    if sequence.is_chain:
        return torch.full((nodes - first, nodes), HIDDEN).triu_(first + 1)
    # One integer per node, bit j for ancestor j: cheaper than a tensor operation per node.
    lines: list[int] = []
    for node, parent in enumerate(sequence.parents):
        lines.append(1 << node | (0 if parent == ROOT else lines[parent]))
    return mask_of_bits(lines[first:], nodes)


@dataclass(frozen=True, slots=True)
class ChainView:
    """All that is pending of a sequence, a chain, before it is known with whom its keys are gathered."""

    sequence: SequenceState
    queries: int
    keys: int
    """Columns, one for each position from 0 on; the last ones may be padding."""
    segments: Sequence[tuple[int, int]]
    """As of a :class:`KeyView`; they begin at the same positions in all views of a
    step."""
    alone: Callable[[], Sequence[KeyView]]
    """What reads the same keys by itself: one view."""


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
