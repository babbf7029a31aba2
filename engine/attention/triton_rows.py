"""Attention by rows on CUDA, fit for CUDA graphs: what is launched depends on the number of rows only.

A row's result has the same bits alone, in any tree, in any batch, and computed again elsewhere
(:mod:`engine.attention.row_attention_kernels`). At load the kernels are tried against what
:mod:`engine.attention.row_attention` computes, and not used where they differ.

Keys are read in splits that lie at fixed positions, short ones at first, longer ones far back: a text of 8,000 tokens
keeps a GPU busy with one row, and one of 128,000 needs no more than three times as many programs.

Tensor legend: T rows, Q query heads, H key/value heads, S slots, D key head size, E value head size, N splits.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, count

import torch
from torch import Tensor

from engine.attention.row_attention import RowAttention, RowPlan, Scoring, UnsupportedAttention
from engine.attention.rows import ROW_CLASSES, SLICE, Rows, empty_buffer, packed
from engine.cache.kv_store import PAGE
from engine.cache.sequence_state import SequenceState
from engine.host.upload import upload

log = logging.getLogger(__name__)

BLOCK, STAGES = 64, 2
"""Keys that are read at a time (of 32 bits: half as many), and how many blocks are under way."""

SPLITS, LONGER_SPLITS = ((128, 8), (256, 28)), 16
"""Keys of the first splits and how many these are; then so many of twice the keys, and so on."""

PROGRAMS = 512
"""That take splits in turn: more than a GPU computes at a time, and few enough to be started for nothing."""

WORK = 8
"""Numbers that tell of a split to be read."""

ADD_WARPS = 1

CHUNK = 16
"""Splits that are added up at a time."""

MIN_ROWS = 64
"""Of a matrix product: heads of a group, of as many tokens as fit."""

LARGEST_HEAD = 256

TRIAL_ROWS = 16

DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})

TOLERANCE = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.05}
"""Largest accepted error in the trial, whose results are of size 1."""


def split_starts(context: int) -> list[int]:
    """Where the splits of a sequence of up to ``context`` tokens begin, and where the last one ends.

    Those of a shorter one are the same as far as they go.
    """
    octaves = chain(SPLITS, ((SPLITS[-1][0] << i, LONGER_SPLITS) for i in count(1)))
    starts = [0]
    while starts[-1] < context:
        split, splits = next(octaves)
        starts += [starts[-1] + split * (i + 1) for i in range(splits)]
    return starts[: bisect_left(starts, context) + 1]


@dataclass(frozen=True, slots=True)
class TritonPlan(RowPlan):
    """With what the kernels read."""

    works: Sequence[tuple[Tensor, Tensor]] = ()
    """Of each slice how many splits are read, and which; :func:`engine.attention.row_attention_kernels.list_splits`."""


class TritonRows(RowAttention):
    """The kernels, and memory for their intermediate results, which all layers and steps share."""

    replayed, spare = True, ROW_CLASSES[-1]

    def __init__(self, context: int, heads_per_key: int, device: torch.device, page: int = PAGE) -> None:
        """``context``: tokens of the longest sequence; ``heads_per_key``: query heads that share a key head."""
        super().__init__(max(1, MIN_ROWS // heads_per_key), page)
        starts = split_starts(context)
        self.splits = len(starts) - 1
        """Of the longest sequence."""
        self._starts = upload(starts, device, torch.int32)
        self._scratch: dict[tuple[int, int], tuple[Tensor, ...]] = {}

    def plan(self, rows: Rows) -> RowPlan:
        """Divide the reading of a step, on its device."""
        from triton import next_power_of_2

        from engine.attention.row_attention_kernels import list_splits

        works = []
        for start in range(0, len(rows), SLICE):
            part = rows.cut(start, min(start + SLICE, len(rows)))
            counted, work = part.keys_T.new_empty(1), part.keys_T.new_empty(len(part) * self.splits, WORK)
            list_splits[len(part),](
                part.keys_T, part.home_T, part.pages_T, part.branch_T, part.group_T, part.common_T, part.reach_T,
                self._starts, counted, work, len(part), self.splits,
                ROWS=next_power_of_2(len(part)), SPLITS=next_power_of_2(self.splits), WORK=WORK, num_warps=4,
            )  # fmt: skip
            works.append((counted, work))
        return TritonPlan(rows, works=works)

    def __call__(
        self, query_TQD: Tensor, keys_SHD: Tensor, values_SHE: Tensor, plan: RowPlan, how: Scoring = Scoring()
    ) -> Tensor:
        """Rows that see nothing get zeros."""
        assert isinstance(plan, TritonPlan)
        dtypes = {query_TQD.dtype, keys_SHD.dtype, values_SHE.dtype}
        largest = max(keys_SHD.shape[-1], values_SHE.shape[-1])
        if len(dtypes) > 1 or not dtypes <= DTYPES or largest > LARGEST_HEAD:
            raise UnsupportedAttention(f"heads of {query_TQD.shape[-1]} in {query_TQD.dtype} are not computed by rows")
        # Imported here: torch's builds for CPUs come without it.
        from triton import next_power_of_2

        from engine.attention.row_attention_kernels import add_splits, attend_splits

        query_TQD = query_TQD.contiguous()
        query_heads, size = query_TQD.shape[1:]
        key_heads, value_size = values_SHE.shape[1:]
        out_TQE = query_TQD.new_empty(*query_TQD.shape[:2], value_size)
        sums, maxima, totals = self._memory(query_heads, value_size, query_TQD.device)
        size_padded, value_padded = (max(16, next_power_of_2(each)) for each in (size, value_size))
        for start, work in zip(range(0, len(query_TQD), SLICE), plan.works, strict=True):
            stop = min(start + SLICE, len(query_TQD))
            rows = plan.rows.cut(start, stop)
            attend_splits[max(16, PROGRAMS // key_heads), key_heads](
                query_TQD[start:stop], keys_SHD, values_SHE, sums, maxima, totals, rows.keys_T, rows.numbers_F, *work,
                how.scale(size), how.cap or 1.0, self.splits,
                QUERY_HEADS=query_heads, KEY_HEADS=key_heads,
                SIZE=size, SIZE_PADDED=size_padded, VALUE_SIZE=value_size, VALUE_PADDED=value_padded,
                PAGE=self.page, BLOCK=BLOCK if query_TQD.itemsize == 2 else BLOCK // 2, STAGES=STAGES,
                ROWS=max(MIN_ROWS, next_power_of_2(self.group * (query_heads // key_heads))),
                WORK=WORK, WINDOW=how.window or 0, CAPPED=how.cap is not None,
                PRECISION="ieee" if query_TQD.dtype == torch.float32 else "tf32",
                num_warps=4,
            )  # fmt: skip
            add_splits[stop - start, query_heads](
                sums, maxima, totals, rows.keys_T, self._starts, totals if how.sinks_Q is None else how.sinks_Q,
                out_TQE[start:stop], self.splits, SPLITS=next_power_of_2(self.splits),
                QUERY_HEADS=query_heads, VALUE_SIZE=value_size, VALUE_PADDED=value_padded,
                CHUNK=CHUNK, WINDOW=how.window or 0, SINKS=how.sinks_Q is not None, num_warps=ADD_WARPS,
            )  # fmt: skip
        return out_TQE

    def _memory(self, heads: int, size: int, device: torch.device) -> tuple[Tensor, ...]:
        if (heads, size) not in self._scratch:
            shape = (SLICE, heads, self.splits)
            sizes = ((*shape, size), shape, shape)
            self._scratch[heads, size] = tuple(torch.empty(each, device=device) for each in sizes)
        return self._scratch[heads, size]


def find_attention(context: int, heads_per_key: int, dtype: torch.dtype, device: torch.device) -> TritonRows | None:
    """The kernels for a model on this device; None where there are none that compute right, which is logged."""
    if device.type != "cuda" or dtype not in DTYPES:
        return None
    attention = TritonRows(context, heads_per_key, device)
    try:
        error = trial_error(attention, heads_per_key, dtype, device)
    except Exception as refusal:  # no Triton, an old driver, a GPU it does not know
        line = next(iter(str(refusal).strip().splitlines()), "no reason given")
        why = f"{type(refusal).__name__}: {line}"
    else:
        if error <= TOLERANCE[dtype]:  # not if it is NaN
            return attention
        why = f"its results are off by {error:.2g}"
    log.warning("attention is computed without kernels of its own, which is slower and not exact: %s", why)
    return None


@torch.inference_mode()
def trial_error(attention: TritonRows, heads_per_key: int, dtype: torch.dtype, device: torch.device) -> float:
    """The largest difference between the kernels and the plain computation, over a step of every kind of row."""
    heads, size, slots = 2, 64, 12 * PAGE
    generator = torch.Generator().manual_seed(11)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    keys_SHD, values_SHE = random(slots, heads, size), random(slots, heads, size)
    chain = SequenceState(PAGE, [7, 2, 11, 0, 5], 4 * PAGE + 9, [-1, 0, 1], [0, 1, 2])
    chain.pending_slots = [chain.home(chain.length + i) for i in range(3)]
    tree = SequenceState(PAGE, [9, 1], PAGE - 1, [-1, -1, 1, 2, 0], [0, 0, 1, 2, 1])
    tree.pending_slots = [PAGE + 3, tree.home(PAGE - 1), PAGE, PAGE + 9, PAGE + 4]
    prompt = SequenceState(PAGE, [4], 0, list(range(-1, 7)), list(range(8)), [4 * PAGE + i for i in range(8)])
    chunks = [(chain, 3), (tree, 5), (prompt, 8)]
    (piece,) = packed([0] * TRIAL_ROWS, [], chunks, group=attention.group, max_rows=TRIAL_ROWS, pages=5)
    buffer = empty_buffer(TRIAL_ROWS, 5, device)
    numbers = piece.host_buffer(TRIAL_ROWS, slots)
    buffer[: len(numbers)] = numbers.to(device)
    rows, plain = Rows.within(buffer, TRIAL_ROWS), RowAttention(page=PAGE)
    # Large queries make every row look at few keys, so that no result is small.
    query_TQD = 4 * random(TRIAL_ROWS, heads * heads_per_key, size)
    precise = query_TQD.float(), keys_SHD.float(), values_SHE.float()
    plan, plain_plan, worst = attention.plan(rows), plain.plan(Rows.within(numbers, TRIAL_ROWS)), 0.0
    for how in (Scoring(), Scoring(window=70), Scoring(cap=20.0), Scoring(sinks_Q=random(heads * heads_per_key))):
        found_TQE = attention(query_TQD, keys_SHD, values_SHE, plan, how)
        expected_TQE = plain(*precise, plain_plan, how)
        error = (found_TQE.float() - expected_TQE).abs().max()
        worst = float(torch.maximum(error, error.new_tensor(worst)))  # NaN stays NaN
    return worst
