"""Which chunks' attention is computed together.

One by one, a batch of sessions that each decode a token pays for some ten small operations per session and layer. So
views with few queries and few keys are padded to one size, and their keys gathered; the rest are read in place, each
by itself. What is padded is hidden in whole groups of keys behind each segment, which changes no bit of a sum (see
:mod:`engine.attention.invariance`).

Tensor legend: N views of a batch, T queries of a view (padded), P packed tokens of the step, K keys (padded), S slots,
H key/value heads, Q query heads, D key head size, E value head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from engine.attention.visibility import HIDDEN, ChainView, KeyView, laid_out
from engine.host.upload import to_device, upload

FEW_QUERIES = 16
"""Queries up to which a view is computed together with others."""
FEW_KEYS = 512
"""Keys up to which it is: more are read faster in place, each sequence by itself."""
PADDED_TO = 1.5
"""How many times its own keys a view is padded to at most."""

CPU = torch.device("cpu")

Segments = Sequence[tuple[int, int]]
View = KeyView | ChainView


@dataclass
class KeyBatch:
    """One view, or several of one size: what :mod:`engine.attention.attention` computes in one go."""

    views: int
    queries: int
    """T, of each view."""
    base: int | None
    """First slot when all keys are one run of slots (then there is one view)."""
    slots_F: Tensor | None
    """Else the slots of all keys, ``[N * K]``."""
    keys: int
    segments: Segments
    mask_N1TK: Tensor | None
    """Added to the scores: 0 or -inf; None when every query sees every key."""
    start: int
    """Packed index of the first query, when the queries are one run."""
    packed_F: Tensor | None = None
    """Else the packed index of every query, ``[N * T]``; padded ones repeat another."""
    real_P: Tensor | None = None
    """Which of the ``N * T`` are not padded, if any is."""

    _rows: dict[int, Tensor] = field(default_factory=dict)
    _masks: dict[tuple[torch.dtype, int], Tensor] = field(default_factory=dict)

    def mask(self, dtype: torch.dtype, times: int = 1) -> Tensor | None:
        """The mask for ``times`` stacked copies of the queries, ``[N, 1, times * T, K]``; once for all layers."""
        if self.mask_N1TK is None:
            return None
        kind = (dtype, times)
        if kind not in self._masks:
            stacked = self.mask_N1TK if times == 1 else self.mask_N1TK.repeat(1, 1, times, 1)
            self._masks[kind] = stacked.to(dtype)
        return self._masks[kind]

    def keys_of(self, cached_SHD: Tensor) -> Tensor:
        """A layer's keys or values for all views, ``[N * H, K, D]``, contiguous."""
        if self.slots_F is None:
            assert self.base is not None
            return cached_SHD[self.base : self.base + self.keys].transpose(0, 1).contiguous()
        _, heads, size = cached_SHD.shape
        if heads not in self._rows:
            slots_N1K = self.slots_F.view(self.views, 1, self.keys)
            heads_H1 = torch.arange(heads, device=slots_N1K.device)[:, None]
            self._rows[heads] = (slots_N1K * heads + heads_H1).view(-1)
        # Selecting rows of a matrix is a plain copy row by row, and brings them in the order of the heads at once.
        return cached_SHD.view(-1, size).index_select(0, self._rows[heads]).view(-1, self.keys, size)

    def queries_of(self, query_QPD: Tensor) -> Tensor:
        """The queries of all views, ``[N, Q, T, D]``."""
        if self.packed_F is None:
            chosen_QFD = query_QPD[:, self.start : self.start + self.views * self.queries]
        else:
            chosen_QFD = query_QPD.index_select(1, self.packed_F)
        return chosen_QFD.view(len(query_QPD), self.views, self.queries, -1).transpose(0, 1)

    def put(self, out_PQE: Tensor, found_NTQE: Tensor) -> None:
        """Write what was computed to where it belongs in the packed row."""
        found_FQE = found_NTQE.flatten(0, 1)
        if self.packed_F is None:
            out_PQE[self.start : self.start + len(found_FQE)] = found_FQE
        elif self.real_P is None:
            out_PQE.index_copy_(0, self.packed_F, found_FQE)
        else:
            out_PQE.index_copy_(0, self.packed_F[self.real_P], found_FQE[self.real_P])


def together(views: Sequence[View], starts: Sequence[int] | None = None, device: torch.device = CPU) -> list[KeyBatch]:
    """Batches that hold each of ``views``, given in packed order, once; their tensors are on ``device``.

    ``starts``: packed index of each view's first query; by default they follow one another from 0 on.
    """
    if starts is None:
        starts = list(accumulate((view.queries for view in views[:-1]), initial=0))
    small = [i for i, view in enumerate(views) if view.queries <= FEW_QUERIES and view.keys <= FEW_KEYS]
    batches = []
    for group in _alike(views, small):
        chosen, firsts = [views[i] for i in group], [starts[i] for i in group]
        batches.append(_several(chosen, firsts, device) if len(group) > 1 else _alone(chosen[0], firsts[0], device))
    apart = set(range(len(views))).difference(small)
    return batches + [_alone(views[i], starts[i], device) for i in sorted(apart)]


def _alike(views: Sequence[View], small: Sequence[int]) -> Iterator[list[int]]:
    """Groups of about equal length, each in packed order."""
    group: list[int] = []
    for i in sorted(small, key=lambda i: -views[i].keys):
        if group and views[group[0]].keys > PADDED_TO * views[i].keys:
            yield sorted(group)
            group = []
        group.append(i)
    if group:
        yield sorted(group)


def _alone(either: View, start: int, device: torch.device) -> KeyBatch:
    (view,) = either.alone() if isinstance(either, ChainView) else (either,)
    mask_N1TK = None if view.mask_TK is None else to_device(view.mask_TK[None, None], device)
    base = view.base if view.slots_K is None else None
    slots_K = None if view.slots_K is None else to_device(view.slots_K, device)
    return KeyBatch(1, view.queries, base, slots_K, view.keys, view.segments, mask_N1TK, start)


def _several(views: Sequence[View], starts: Sequence[int], device: torch.device) -> KeyBatch:
    queries = max(view.queries for view in views)
    segments = _common_segments(views)
    keys = segments[-1][1]
    slots_NK, mask_NTK = _laid_out(views, queries, segments)
    slots_F, mask_N1TK = to_device(slots_NK.view(-1), device), to_device(mask_NTK[:, None], device)
    batch = KeyBatch(len(views), queries, None, slots_F, keys, segments, mask_N1TK, starts[0])
    counts = [view.queries for view in views]
    in_a_row = list(range(starts[0], starts[0] + len(views) * queries, queries))
    if min(counts) < queries or list(starts) != in_a_row:
        packed = [
            start + min(t, count - 1) for start, count in zip(starts, counts, strict=True) for t in range(queries)
        ]
        batch.packed_F = upload(packed, device)
    if min(counts) < queries:
        real = [row * queries + t for row, count in enumerate(counts) for t in range(count)]
        batch.real_P = upload(real, device)
    return batch


def _laid_out(views: Sequence[View], queries: int, segments: Segments) -> tuple[Tensor, Tensor]:
    """Slots (N, K) and mask (N, T, K) of all views; chains at once."""
    chains = [row for row, view in enumerate(views) if isinstance(view, ChainView)]
    of_chains = [view for view in views if isinstance(view, ChainView)]
    if len(chains) == len(views):
        return laid_out(of_chains, queries, segments)
    keys = segments[-1][1]
    slots_NK = torch.empty(len(views), keys, dtype=torch.int64)
    mask_NTK = torch.full((len(views), queries, keys), HIDDEN)
    if chains:
        slots_NK[chains], mask_NTK[chains] = laid_out(of_chains, queries, segments)
    for row, view in enumerate(views):
        if isinstance(view, KeyView):
            _lay_out(view, segments, slots_NK[row], mask_NTK[row])
    return slots_NK, mask_NTK


def _lay_out(view: KeyView, segments: Segments, slots_K: Tensor, mask_TK: Tensor) -> None:
    """Write one view's row of each: slots, and mask, which is hidden all over. T and K are those of the batch."""
    own_K = torch.arange(view.base, view.base + view.keys) if view.slots_K is None else view.slots_K
    slots_K.fill_(own_K[-1])  # what is hidden reads a slot all the same
    for (first, _), (start, stop) in zip(segments, view.segments, strict=False):
        end = first + stop - start
        slots_K[first:end] = own_K[start:stop]
        seen: Tensor | float = 0.0 if view.mask_TK is None else view.mask_TK[:, start:stop]
        mask_TK[: view.queries, first:end] = seen
    mask_TK[view.queries :] = mask_TK[view.queries - 1]


def _common_segments(views: Sequence[View]) -> list[tuple[int, int]]:
    """Ranges wide enough for the segments of each."""
    max_segments = max(len(view.segments) for view in views)
    widths = [
        max(view.segments[i][1] - view.segments[i][0] for view in views if i < len(view.segments))
        for i in range(max_segments)
    ]
    ends = list(accumulate(widths))
    return list(zip([0, *ends], ends, strict=False))
