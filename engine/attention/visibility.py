"""Which cached tokens the queries of one chunk may look at.

Decides how the keys of a chunk are read and the mask over them: a query sees the committed prefix, its ancestors and
itself, cut to a sliding window where a layer has one. Works from positions and parents alone; knows nothing about
attention.

The order of keys does not matter to attention, only which of them a query sees. So here they come in the order of
their slots: a range, if the slots needed nearly fill one, else copied together. Down to the last bit it does matter,
through the order of additions: where results must not depend on the batch, :mod:`engine.attention.invariance` orders
them.

Tensor legend: T queries, P pending nodes of their sequence, K keys read, L committed positions in reach, H key/value
heads, S slots of the cache, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.cache.sequence_state import ROOT, SequenceState

GATHER_ABOVE = 1.25
"""Slots in the range per slot needed, above which a gathered copy is cheaper than reading over the holes."""

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
