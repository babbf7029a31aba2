"""Which chunks' attention is computed together.

One by one, a batch of sessions that each decode a token pays for some ten small operations per session and layer. So
views with few queries and few keys are padded to one size, and their keys gathered; the rest are read in place, each
by itself. What is padded is hidden in whole groups of keys behind each segment, which changes no bit of a sum (see
:mod:`engine.invariance`).

Tensor legend: N views of a batch, T queries of a view (padded), P packed tokens of the step, K keys (padded), S slots,
H key/value heads, Q query heads, D key head size, E value head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from engine.visibility import HIDDEN, KeyView

FEW_QUERIES = 16
"""Queries up to which a view is computed together with others."""
FEW_KEYS = 512
"""Keys up to which it is: more are read faster in place, each sequence by itself."""
PADDED_TO = 1.5
"""How many times its own keys a view is padded to at most."""

Segments = Sequence[tuple[int, int]]


@dataclass
class KeyBatch:
    """One view, or several of one size: what :mod:`engine.attention` computes in one go."""

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
            self._masks[kind] = self.mask_N1TK.repeat(1, 1, times, 1).to(dtype)
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


def together(views: Sequence[KeyView]) -> list[KeyBatch]:
    """Batches that hold each of ``views``, given in packed order, once."""
    starts = list(accumulate((view.queries for view in views), initial=0))
    small = [i for i, view in enumerate(views) if view.queries <= FEW_QUERIES and view.keys <= FEW_KEYS]
    batches = []
    for group in _alike(views, small):
        batches.append(_several(views, starts, group) if len(group) > 1 else _alone(views[group[0]], starts[group[0]]))
    apart = set(range(len(views))).difference(small)
    return batches + [_alone(views[i], starts[i]) for i in sorted(apart)]


def _alike(views: Sequence[KeyView], small: Sequence[int]) -> Iterator[list[int]]:
    """Groups of about equal length, each in packed order."""
    group: list[int] = []
    for i in sorted(small, key=lambda i: -views[i].keys):
        if group and views[group[0]].keys > PADDED_TO * views[i].keys:
            yield sorted(group)
            group = []
        group.append(i)
    if group:
        yield sorted(group)


def _alone(view: KeyView, start: int) -> KeyBatch:
    mask_N1TK = None if view.mask_TK is None else view.mask_TK[None, None]
    base = view.base if view.slots_K is None else None
    return KeyBatch(1, view.queries, base, view.slots_K, view.keys, view.segments, mask_N1TK, start)


def _several(views: Sequence[KeyView], starts: Sequence[int], group: Sequence[int]) -> KeyBatch:
    chosen = [views[i] for i in group]
    queries = max(view.queries for view in chosen)
    segments = _common_segments(chosen)
    keys = segments[-1][1]
    device = next((view.mask_TK.device for view in chosen if view.mask_TK is not None), torch.device("cpu"))
    slots_NK = torch.zeros(len(chosen), keys, dtype=torch.int64, device=device)
    mask_NTK = torch.full((len(chosen), queries, keys), HIDDEN, device=device)
    for row, view in enumerate(chosen):
        slots_K = torch.arange(view.base, view.base + view.keys) if view.slots_K is None else view.slots_K
        for (first, _), (start, stop) in zip(segments, view.segments, strict=False):
            end = first + stop - start
            slots_NK[row, first:end] = slots_K[start:stop]
            seen: Tensor | float = 0.0 if view.mask_TK is None else view.mask_TK[:, start:stop]
            mask_NTK[row, : view.queries, first:end] = seen
        mask_NTK[row, view.queries :] = mask_NTK[row, view.queries - 1]
    batch = KeyBatch(len(chosen), queries, None, slots_NK.view(-1), keys, segments, mask_NTK[:, None], starts[group[0]])
    counts = [view.queries for view in chosen]
    if min(counts) < queries or list(group) != list(range(group[0], group[0] + len(group))):
        packed = [starts[i] + min(t, views[i].queries - 1) for i in group for t in range(queries)]
        batch.packed_F = torch.tensor(packed, device=device)
    if min(counts) < queries:
        real = [row * queries + t for row, count in enumerate(counts) for t in range(count)]
        batch.real_P = torch.tensor(real, device=device)
    return batch


def _common_segments(views: Sequence[KeyView]) -> list[tuple[int, int]]:
    """Ranges wide enough for the segments of each."""
    most = max(len(view.segments) for view in views)
    widths = [
        max(view.segments[i][1] - view.segments[i][0] for view in views if i < len(view.segments)) for i in range(most)
    ]
    ends = list(accumulate(widths))
    return list(zip([0, *ends], ends, strict=False))
