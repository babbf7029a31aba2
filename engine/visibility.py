"""Which cached tokens the tokens of one chunk may look at.

Decides the slots attention reads for a chunk and the mask over them: the committed prefix, the ancestors and itself,
cut to a sliding window where a layer has one. Works from positions and parents alone; knows nothing about attention.

The order of keys does not matter to attention, only which of them a query sees. So when the slots needed fill a range
(whatever their order), that range is read in place, and only otherwise copied together. Down to the last bit it does
matter, through the order of additions: where results must not depend on the batch, keys are read in the order of their
positions, in whole blocks (see :func:`engine.attention.invariant_attention`).

Tensor legend: T tokens of the chunk, P pending nodes of its sequence, K keys read, L committed positions in reach.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.kv_cache import ROOT, CachedSequence

GATHER_ABOVE = 1.25
"""Slots in the range per slot needed, above which a gathered copy is cheaper than reading over the holes."""

KEY_BLOCK = 64
"""Keys are read in multiples of this where results must not depend on the batch."""

HIDDEN = float("-inf")
BITS_TO_MASK = torch.tensor([[0.0 if byte >> bit & 1 else HIDDEN for bit in range(8)] for byte in range(256)])
"""Eight mask entries for every byte, least significant bit first."""


@dataclass
class KeyView:
    """The keys of one chunk: ``count`` slots from ``base`` on, or those of ``index_K``."""

    base: int
    count: int
    index_K: Tensor | None
    mask_TK: Tensor | None
    """Added to the scores: 0 or -inf; None when every query sees every key."""
    _repeated: dict[tuple[int, int, int | None], Tensor] = field(default_factory=dict)

    def of(self, cached_1HSD: Tensor) -> Tensor:
        """The viewed part of a layer's keys or values, ``[1, H, K, D]``; not a copy when it is a range."""
        if self.index_K is None:
            return cached_1HSD.narrow(2, self.base, self.count)
        return cached_1HSD.index_select(2, self.index_K)

    def repeated_mask(self, times: int, start: int = 0, rows: int | None = None) -> Tensor | None:
        """The mask of ``rows`` queries (default: all) for ``times`` stacked copies of them, ``[times * rows, K]``.

        Computed once for all layers.
        """
        if self.mask_TK is None:
            return None
        part = (times, start, rows)
        if part not in self._repeated:
            mask_TK = self.mask_TK if rows is None else self.mask_TK[start : start + rows]
            self._repeated[part] = mask_TK if times == 1 else mask_TK.repeat(times, 1)
        return self._repeated[part]


def view_keys(
    sequence: CachedSequence,
    tokens: int,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
    room: int | None = None,
) -> KeyView:
    """View for the last ``tokens`` pending nodes of ``sequence`` in a layer that sees ``window`` positions back.

    ``room``, the number of slots in the cache, asks for keys in the order of their positions and in whole blocks.
    """
    first = sequence.pending - tokens
    depths_T = sequence.depths[first:]
    reach = 0 if window is None else max(0, sequence.length + min(depths_T) - window + 1)
    reach = min(reach, sequence.length)
    if room is not None:
        reach -= reach % KEY_BLOCK
    slots_K = sequence.slots(reach)
    low, high = _bounds(slots_K)
    span = high - low + 1
    needed = len(slots_K)
    if room is None:
        in_place = span <= GATHER_ABOVE * needed
        columns_K = slots_K - low if in_place else torch.arange(needed)
        keys = span if in_place else needed
    else:
        columns_K = torch.arange(needed)
        keys = -(-needed // KEY_BLOCK) * KEY_BLOCK
        in_place = low + keys <= room and torch.equal(slots_K, columns_K + low)
    sees_all = tokens == 1 and keys == needed and sequence.is_chain and (window is None or needed <= window)
    mask_TK = None if sees_all else _mask(sequence, first, columns_K, keys, reach, window, dtype).to(device)
    if in_place:
        return KeyView(low, keys, None, mask_TK)
    padding = slots_K[-1:].expand(keys - needed) if room is not None else slots_K[:0]
    return KeyView(low, keys, torch.cat((slots_K, padding)).to(device), mask_TK)


def _bounds(slots_K: Tensor) -> tuple[int, int]:
    low, high = torch.aminmax(slots_K)
    return int(low), int(high)


def _mask(
    sequence: CachedSequence,
    first: int,
    columns_K: Tensor,
    keys: int,
    reach: int,
    window: int | None,
    dtype: torch.dtype,
) -> Tensor:
    """``[T, keys]``: 0 where a query sees the key in a column, else -inf, also in columns that hold no key of it."""
    tokens = sequence.pending - first
    committed_L, pending_P = columns_K.tensor_split((len(columns_K) - sequence.pending,))
    hidden_TP = _hidden(sequence, first, dtype)
    if keys == len(columns_K):
        mask_TK = torch.zeros(tokens, keys, dtype=dtype)
    else:
        mask_TK = torch.full((tokens, keys), HIDDEN, dtype=dtype)
        mask_TK[:, committed_L] = 0.0
    if window is not None:
        depths_P = torch.tensor(sequence.depths)
        oldest_T1 = sequence.length + depths_P[first:, None] - window + 1
        passed_TL = torch.arange(reach, sequence.length) < oldest_T1
        mask_TK[:, committed_L] = torch.zeros(passed_TL.shape, dtype=dtype).masked_fill_(passed_TL, HIDDEN)
        hidden_TP.masked_fill_(sequence.length + depths_P < oldest_T1, HIDDEN)
    mask_TK[:, pending_P] = hidden_TP
    return mask_TK


def _hidden(sequence: CachedSequence, first: int, dtype: torch.dtype) -> Tensor:
    """``[T, P]``: 0 where pending node P is T's ancestor or T itself, else -inf; for T from ``first`` on."""
    nodes = sequence.pending
    if sequence.is_chain:
        return torch.full((nodes - first, nodes), HIDDEN, dtype=dtype).triu_(first + 1)
    # One integer per node, bit j for ancestor j: cheaper than a tensor operation per node.
    lines: list[int] = []
    for node, parent in enumerate(sequence.parents):
        lines.append(1 << node | (0 if parent == ROOT else lines[parent]))
    width = -(-nodes // 8)
    packed = bytearray().join(line.to_bytes(width, "little") for line in lines[first:])
    bytes_TB = torch.frombuffer(packed, dtype=torch.uint8).view(nodes - first, width)
    return BITS_TO_MASK[bytes_TB.int()].to(dtype).view(nodes - first, width * 8)[:, :nodes]
