"""Attention of the rows of a step over the paged cache, whatever the rows are for.

One way for prompts, decoding, chains and trees of drafts. Here it is computed by operations of torch, for any device,
number format and size of heads, and this defines what is computed: on CUDA by kernels of our own
(:mod:`engine.attention.triton_rows`), on x86-64 by C++ (:mod:`engine.cpu.rows`), both faster and exact everywhere.

In bfloat16 on a CPU a row's result has the same bits alone, in a tree, in a batch, and computed again in a prompt. Two
facts about torch's and oneDNN's kernels carry this; they are tested, not promised by anyone:

- The softmax of a row adds up in 16 lanes, and a product over up to 512 keys adds up key after key (with AMX, 32 keys
  before it adds them to the whole), so keys of weight 0 behind the others change no sum. Over more keys a product is
  cut where its size says, so here it is cut by position instead: into segments that are summed apart.
- A score is a sum over the head's size, whatever stands beside it.

So rows read their keys in the order of their positions, a column for each. Those whose keys are found by one page table
read them together, a row of another branch by itself; of what is short, several are padded to one size and gathered.

Tensor legend: T rows, N views of a batch, M rows of a view (padded), K keys (padded), S slots, Q query heads,
H key/value heads, G = Q / H, B = N * H, L = G * M, D key head size, E value head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from engine.attention.rows import Rows
from engine.cache.kv_store import BLOCK
from engine.host.upload import to_device

VIEW_ROWS = 64
"""Rows that read keys together at most."""

KEY_BLOCK = 64
"""Keys are read in multiples of this: torch computes very small products by another kernel."""

SEGMENT = 384
"""Positions whose weighted values are summed in one product."""

FEW_ROWS, FEW_KEYS, PADDED_TO = 16, 512, 1.5
"""Rows and keys up to which a view is computed together with others, and how many times its own keys it then reads."""

HIDDEN = float("-inf")


class UnsupportedAttention(Exception):
    """The model asks its attention for something this engine does not compute."""


class Scoring(NamedTuple):
    """How a layer makes weights of products."""

    scaling: float | None = None
    """See :meth:`scale`."""
    window: int | None = None
    """How many tokens a row sees at most, itself included."""
    cap: float | None = None
    """Scores s become ``cap * tanh(s / cap)``."""
    sinks_Q: Tensor | None = None
    """A score per head that takes part in the softmax and has no value."""

    def scale(self, size: int) -> float:
        """What products of heads of this size are multiplied by; unless told, one over the root of it."""
        return size**-0.5 if self.scaling is None else self.scaling


@dataclass(frozen=True, slots=True)
class ViewBatch:
    """Views that are computed in one go."""

    rows: slice | Tensor
    """Of all views, one after the other."""
    keys_F: Tensor
    """Where each head's keys are, of all views: counted in heads over all slots of the cache, ``[B * K]``."""
    mask_N1MK: Tensor
    """Added to the scores: 0 or -inf."""

    def gathered(self, cached_SHD: Tensor) -> Tensor:
        """A layer's keys or values for all views, ``[B, K, D]``."""
        size = cached_SHD.shape[-1]
        # Selecting rows of a matrix is a plain copy row by row, and brings them in the order of the heads at once.
        return cached_SHD.view(-1, size).index_select(0, self.keys_F).view(-1, self.mask_N1MK.shape[-1], size)


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Who reads what in a step, for all of its layers."""

    rows: Rows
    batches: dict[tuple[int | None, int], list[ViewBatch]] = field(default_factory=dict)
    """What torch computes together, by window and number of key heads."""


class RowAttention:
    """What computes it, on any device; a subclass does so on one."""

    replayed = False
    """Whether steps are padded and recorded, to be replayed; else they are on the host, as large as they are."""
    spare = 0
    """Slots of the cache that are nobody's, for padding."""

    def __init__(self, group: int = 1, page: int = BLOCK) -> None:
        self.group = group
        """Rows that are said to read common keys together."""
        self.page = page
        """Slots of a block of the cache."""

    def arithmetic(self, dtype: torch.dtype) -> str:  # noqa: ARG002
        """What decides how sums are rounded, where workers that differ in it may differ in a token; empty: nothing."""
        return ""

    def plan(self, rows: Rows) -> RowPlan:
        """Divide the reading of a step."""
        return RowPlan(rows)

    def __call__(
        self, query_TQD: Tensor, keys_SHD: Tensor, values_SHE: Tensor, plan: RowPlan, how: Scoring = Scoring()
    ) -> Tensor:
        """``[T, Q, E]``. Every row sees itself and what is before it on its branch.

        What rows get that see nothing, which are padding, says nothing. Raises :class:`UnsupportedAttention` for dtypes
        and sizes that are not computed.
        """
        (tokens, query_heads, size), (_, heads, value_size) = query_TQD.shape, values_SHE.shape
        window = how.window
        batches = plan.batches.get((window, heads))
        if batches is None:
            batches = [_batch(views, plan.rows, self.page, window, heads, query_TQD) for views in _together(plan.rows)]
            plan.batches[window, heads] = batches
        out_TQE = query_TQD.new_empty(tokens, query_heads, value_size)
        for batch in batches:
            views, _, members, keys = batch.mask_N1MK.shape
            query_NMHGD = query_TQD[batch.rows].view(views, members, heads, -1, size)
            query_BLD = query_NMHGD.permute(0, 2, 3, 1, 4).reshape(views * heads, -1, size)
            products_BLK = _product(query_BLD, batch.gathered(keys_SHD).transpose(1, 2))
            products_NQMK = products_BLK.view(views, query_heads, members, keys)
            weights_NQMK = _softmax(products_NQMK, how.scale(size), how, batch.mask_N1MK).to(query_TQD.dtype)
            found_BLE = _weighted_sum(weights_NQMK.view_as(products_BLK), batch.gathered(values_SHE))
            found_NMQE = found_BLE.view(views, query_heads, members, -1).transpose(1, 2)
            out_TQE[batch.rows] = found_NMQE.reshape(-1, query_heads, value_size)
        return out_TQE


def _softmax(products_NQMK: Tensor, scale: float, how: Scoring, mask_N1MK: Tensor) -> Tensor:
    """Of the scores, in float32 at least; a sink takes its part as one more column."""
    cap, sinks_Q = how.cap, how.sinks_Q
    if cap is not None:
        products_NQMK, scale = torch.tanh(products_NQMK.to(mask_N1MK.dtype) * (scale / cap)), cap
    scores_NQMK = torch.add(mask_N1MK, products_NQMK, alpha=scale)
    if sinks_Q is None:
        return scores_NQMK.softmax(-1)
    sinks_NQM1 = sinks_Q.to(scores_NQMK.dtype)[:, None, None].expand(*scores_NQMK.shape[:-1], 1)
    return torch.cat((scores_NQMK, sinks_NQM1), -1).softmax(-1)[..., :-1]


def _weighted_sum(weights_BLK: Tensor, values_BKE: Tensor) -> Tensor:
    """``[B, L, E]``: each segment's sum by itself, then one after the other."""
    parts = zip(torch.split(weights_BLK, SEGMENT, -1), torch.split(values_BKE, SEGMENT, 1), strict=True)
    sums = [_product(some_BLK, some_BKE) for some_BLK, some_BKE in parts]
    if len(sums) == 1:
        return sums[0]
    total_BLE = sums[0].to(torch.promote_types(values_BKE.dtype, torch.float32))
    for part_BLE in sums[1:]:
        total_BLE += part_BLE
    return total_BLE.to(values_BKE.dtype)


def _product(rows_BLI: Tensor, matrix_BIO: Tensor) -> Tensor:
    """Matrix product. A lone row gets company: another kernel might multiply it, and add up in another order."""
    if rows_BLI.shape[1] > 1:
        return rows_BLI @ matrix_BIO
    return (rows_BLI.expand(-1, 2, -1) @ matrix_BIO)[:, :1]


@dataclass(slots=True)
class View:
    """Rows that read the same keys, up to ``stop``: how many keys, and how many of these the page table finds."""

    start: int
    stop: int
    keys: int
    home: int

    @property
    def rows(self) -> int:
        """How many."""
        return self.stop - self.start

    @property
    def small(self) -> bool:
        """Whether it is computed together with others."""
        return self.rows <= FEW_ROWS and self.keys <= FEW_KEYS


def _views(rows: Rows) -> list[View]:
    views: list[View] = []
    table = -1  # of the last view; one with a branch is not continued
    columns = (rows.keys_T, rows.home_T, rows.pages_T)
    for t, (keys, home, pages) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        if keys == home and pages == table and views[-1].rows < VIEW_ROWS:
            last = views[-1]
            last.stop, last.keys = t + 1, max(last.keys, keys)
            last.home = last.keys
        else:
            views.append(View(t, t + 1, max(keys, 1), home))  # what sees nothing is padding
            table = pages if keys == home else -1
    return views


def _together(rows: Rows) -> Iterator[list[View]]:
    """Views of about equal length, in the order of their rows."""
    group: list[View] = []
    for view in sorted(_views(rows), key=lambda view: (view.small, -view.keys)):
        if group and not (view.small and group[0].small and group[0].keys <= PADDED_TO * view.keys):
            yield sorted(group, key=lambda view: view.start)
            group = []
        group.append(view)
    if group:
        yield sorted(group, key=lambda view: view.start)


def _batch(
    views: Sequence[View], rows: Rows, page: int, window: int | None, heads: int, query_TQD: Tensor
) -> ViewBatch:
    """Views as they are computed, on the device of the queries."""
    members, keys = max(view.rows for view in views), max(view.keys for view in views)
    start_N1, stop_N1, keys_N1, home_N1 = torch.tensor(
        [(view.start, view.stop, view.keys, view.home) for view in views]
    ).T[..., None]
    row_NM = torch.minimum(start_N1 + torch.arange(members), stop_N1 - 1)  # a view's last row is repeated
    seen_NM1 = rows.keys_T[row_NM].clamp_(1)[..., None]  # padding sees what it does not use, or it would be NaN
    first = 0 if window is None else max(0, int(seen_NM1.min()) - window) // SEGMENT * SEGMENT
    positions_K = torch.arange(first, keys + (first - keys) % KEY_BLOCK)
    hidden_NMK = positions_K >= seen_NM1
    if window is not None:
        hidden_NMK |= positions_K < seen_NM1 - window
    # Columns without a key repeat the last one: their weight is 0, but a value that is not a number would count.
    inside_NK = torch.minimum(positions_K, keys_N1 - 1)
    pages_NK = rows.pages_T[start_N1] + torch.minimum(inside_NK, home_N1 - 1).clamp_(0) // page
    slots_NK = rows.numbers_F[pages_NK] * page + inside_NK % page
    if any(view.home < view.keys for view in views):
        behind_NK = inside_NK - home_N1
        branch_NK = (rows.branch_T[start_N1] + behind_NK).clamp_(0)
        slots_NK = torch.where(behind_NK < 0, slots_NK, rows.numbers_F[branch_NK])
    keys_NHK = slots_NK[:, None] * heads + torch.arange(heads)[:, None]
    dtype, device = torch.promote_types(query_TQD.dtype, torch.float32), query_TQD.device
    mask_NMK = torch.zeros(hidden_NMK.shape, dtype=dtype).masked_fill_(hidden_NMK, HIDDEN)
    in_a_row = views[-1].stop - views[0].start == sum(view.rows for view in views) == len(views) * members
    chosen = slice(views[0].start, views[-1].stop) if in_a_row else to_device(row_NM.view(-1), device)
    return ViewBatch(chosen, to_device(keys_NHK.view(-1), device), to_device(mask_NMK[:, None], device))
