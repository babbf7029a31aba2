"""The kernels of :mod:`engine.attention.row_attention`, in Triton, which torch's builds for CPUs come without.

Keys are read as FlashAttention does (Dao et al., 2022; split as in Flash-Decoding): blocks of keys, a running maximum
and sum. Whatever a row's result depends on is fixed by positions: which split a key belongs to, the order of blocks in
a split, the order in which splits are added up. So a row has the same bits however many others are in the step, and
whichever program computes it: programs take splits from a list (as FlashInfer plans its work; Ye et al., 2025), which
is made on the device, so that what is launched depends on the number of rows only.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def list_splits(
    seen_ptr, home_ptr, pages_ptr, branch_ptr, group_ptr, common_ptr, reach_ptr,  # [T], of engine.attention.rows.Rows
    starts_ptr,  # [N + 1] int32: where each split begins, and where the last one ends
    count_ptr,  # [1] int32: splits listed
    work_ptr,  # [T * N, WORK] int32
    T, N, ROWS: tl.constexpr, SPLITS: tl.constexpr, WORK: tl.constexpr,
):  # fmt: skip
    """A program lists what a row reads: all it sees, but for what the first row of its group reads for it.

    Of each split its row, its number, its first position and the one behind its last, up to where keys are found by
    the page table, where that and the branch begin, and how many rows it is read for. A row reads a split for all of
    its group where all find it by their page table.
    """
    me = tl.program_id(0)
    t, n = tl.arange(0, ROWS), tl.arange(0, SPLITS)
    start_N = tl.load(starts_ptr + n, mask=n < N, other=1 << 30)
    stop_N = tl.load(starts_ptr + n + 1, mask=n < N, other=1 << 30)
    there = t < T
    seen_T, reach_T = tl.load(seen_ptr + t, mask=there, other=0), tl.load(reach_ptr + t, mask=there, other=0)
    group_T, common_T = tl.load(group_ptr + t, mask=there, other=0), tl.load(common_ptr + t, mask=there, other=0)
    end_T = tl.sum((start_N[None, :] < tl.maximum(seen_T, reach_T)[:, None]).to(tl.int32), 1)
    first_T = tl.sum((stop_N[None, :] <= common_T[:, None]).to(tl.int32), 1)
    first_T = tl.where(group_T > 0, 0, tl.where(reach_T > 0, end_T, first_T))
    count_T = tl.maximum(end_T - first_T, 0)
    before, count = tl.sum(tl.where(t < me, count_T, 0), 0), tl.sum(tl.where(t == me, count_T, 0), 0)
    seen, reach = tl.load(seen_ptr + me), tl.load(reach_ptr + me)
    first = tl.sum(tl.where(t == me, first_T, 0), 0)
    shared_N = (reach > 0) | (stop_N <= tl.load(common_ptr + me))
    stop_N = tl.minimum(stop_N, tl.maximum(seen, reach))
    at_N = work_ptr + (before + n - first) * WORK
    listed_N = (n >= first) & (n < first + count)
    tl.store(at_N, me, mask=listed_N)
    tl.store(at_N + 1, n, mask=listed_N)
    tl.store(at_N + 2, start_N, mask=listed_N)
    tl.store(at_N + 3, stop_N, mask=listed_N)
    tl.store(at_N + 4, tl.where(shared_N, stop_N, tl.load(home_ptr + me)), mask=listed_N)
    tl.store(at_N + 5, tl.load(pages_ptr + me), mask=listed_N)
    tl.store(at_N + 6, tl.load(branch_ptr + me), mask=listed_N)
    tl.store(at_N + 7, tl.where(shared_N, tl.load(group_ptr + me), 1), mask=listed_N)
    if me == T - 1:
        tl.store(count_ptr, before + count)


@triton.jit
def _slots(position_K, inside_K, numbers_ptr, pages, home, branch, PAGE: tl.constexpr):
    """Where the tokens at these positions are: up to ``home`` by the page table, from there on by the branch."""
    by_page_K = position_K < home
    page_K = tl.load(numbers_ptr + pages + position_K // PAGE, mask=inside_K & by_page_K, other=0)
    slot_K = tl.load(numbers_ptr + branch + position_K - home, mask=inside_K & (position_K >= home), other=0)
    return tl.where(by_page_K, page_K * PAGE + position_K % PAGE, slot_K).to(tl.int64)


@triton.jit
def _read(at_ptr, slot_K, inside_K, column, SIZE: tl.constexpr):
    """What the cache holds in these slots; 0 where there is none."""
    mask = inside_K[:, None] & (column[None, :] < SIZE)
    return tl.load(at_ptr + slot_K[:, None] * SIZE + column[None, :], mask=mask, other=0.0)


@triton.jit
def _scores(
    query_MD, key_KD, position_K, seen_M, scale, cap,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores to the base of 2. Keys that a row does not see are masked, which changes no bit of it."""
    score_MK = tl.dot(query_MD, tl.trans(key_KD), input_precision=PRECISION).to(tl.float32)
    if CAPPED:
        doubled_MK = tl.exp2(score_MK * (scale / cap * 2 * LOG2_E))
        score_MK = (1 - 2 / (doubled_MK + 1)) * (cap * LOG2_E)
    else:
        score_MK = score_MK * (scale * LOG2_E)
    visible_MK = position_K[None, :] < seen_M[:, None]
    if WINDOW > 0:
        visible_MK = visible_MK & (position_K[None, :] >= seen_M[:, None] - WINDOW)
    return tl.where(visible_MK, score_MK, -float("inf"))


@triton.jit
def attend_splits(
    query_ptr, keys_ptr, values_ptr,  # [T, Q, D], [S, H, D], [S, H, E]
    sums_ptr,  # [T, Q, N, E] float32: weighted values of each of N splits
    maxima_ptr, totals_ptr,  # [T, Q, N] float32: largest score, sum of weights
    seen_ptr, numbers_ptr,  # [T], [F], of engine.attention.rows.Rows
    count_ptr, work_ptr,  # of list_splits
    scale, cap, N, QUERY_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, SIZE: tl.constexpr, SIZE_PADDED: tl.constexpr,
    VALUE_SIZE: tl.constexpr, VALUE_PADDED: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr, ROWS: tl.constexpr, WORK: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One key head of the splits on the list, as many programs as there are taking turns."""
    GROUP: tl.constexpr = QUERY_HEADS // KEY_HEADS
    h = tl.program_id(1)
    row, d, e = tl.arange(0, ROWS), tl.arange(0, SIZE_PADDED), tl.arange(0, VALUE_PADDED)
    for item in range(tl.program_id(0), tl.load(count_ptr), tl.num_programs(0)):
        work = work_ptr + item * WORK
        t, n = tl.load(work), tl.load(work + 1)
        start, stop, home = tl.load(work + 2), tl.load(work + 3), tl.load(work + 4)
        pages, branch = tl.load(work + 5), tl.load(work + 6)
        live = row < GROUP * tl.load(work + 7)
        seen_M = tl.load(seen_ptr + t + row // GROUP, mask=live, other=0)
        if WINDOW > 0:
            stop = tl.where(stop > tl.min(tl.where(live, seen_M, 1 << 30), 0) - WINDOW, stop, start)
        at_M = (t + row // GROUP) * QUERY_HEADS + h * GROUP + row % GROUP
        live_MD = live[:, None] & (d[None, :] < SIZE)
        query_MD = tl.load(query_ptr + at_M[:, None] * SIZE + d[None, :], mask=live_MD, other=0.0)
        largest_M = tl.full([ROWS], -float("inf"), tl.float32)
        total_M = tl.zeros([ROWS], tl.float32)
        sum_ME = tl.zeros([ROWS, VALUE_PADDED], tl.float32)
        for first in tl.range(start, stop, BLOCK, num_stages=STAGES):
            position_K = first + tl.arange(0, BLOCK)
            inside_K = position_K < stop
            slot_K = _slots(position_K, inside_K, numbers_ptr, pages, home, branch, PAGE) * KEY_HEADS + h
            key_KD = _read(keys_ptr, slot_K, inside_K, d, SIZE)
            value_KE = _read(values_ptr, slot_K, inside_K, e, VALUE_SIZE)
            score_MK = _scores(query_MD, key_KD, position_K, seen_M, scale, cap, WINDOW, CAPPED, PRECISION)
            larger_M = tl.maximum(largest_M, tl.max(score_MK, 1))
            base_M = tl.where(larger_M == -float("inf"), 0.0, larger_M)  # nothing seen yet
            weight_MK = tl.exp2(score_MK - base_M[:, None])
            decay_M = tl.exp2(largest_M - base_M)
            total_M = total_M * decay_M + tl.sum(weight_MK, 1)
            found_ME = tl.dot(weight_MK.to(value_KE.dtype), value_KE, input_precision=PRECISION).to(tl.float32)
            sum_ME = sum_ME * decay_M[:, None] + found_ME
            largest_M = larger_M
        to_M = at_M * N + n
        live_ME = live[:, None] & (e[None, :] < VALUE_SIZE)
        tl.store(sums_ptr + to_M[:, None] * VALUE_SIZE + e[None, :], sum_ME, mask=live_ME)
        tl.store(maxima_ptr + to_M, largest_M, mask=live)
        tl.store(totals_ptr + to_M, total_M, mask=live)


@triton.jit
def add_splits(
    sums_ptr, maxima_ptr, totals_ptr, seen_ptr, starts_ptr,
    sinks_ptr, out_ptr,  # [Q], [T, Q, E]
    N, SPLITS: tl.constexpr, QUERY_HEADS: tl.constexpr, VALUE_SIZE: tl.constexpr, VALUE_PADDED: tl.constexpr,
    CHUNK: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """The splits that a row sees, added up in order, ``CHUNK`` at a time; of one head."""
    t, q = tl.program_id(0), tl.program_id(1)
    seen = tl.load(seen_ptr + t)
    e, n = tl.arange(0, VALUE_PADDED), tl.arange(0, SPLITS)
    at = (t * QUERY_HEADS + q) * N
    there = (n < N) & (tl.load(starts_ptr + n, mask=n < N, other=1 << 30) < seen)
    used = tl.sum(there.to(tl.int32), 0)
    if WINDOW > 0:
        there = there & (tl.load(starts_ptr + n + 1, mask=n < N, other=0) > seen - WINDOW)
    largest = tl.max(tl.load(maxima_ptr + at + n, mask=there, other=-float("inf")), 0)
    if SINKS:
        sink = tl.load(sinks_ptr + q).to(tl.float32) * LOG2_E
        largest = tl.maximum(largest, sink)
    base = tl.where(largest == -float("inf"), 0.0, largest)
    total = tl.exp2(sink - base) if SINKS else 0.0
    sum_E = tl.zeros([VALUE_PADDED], tl.float32)
    for first in range(0, used, CHUNK):
        part = first + tl.arange(0, CHUNK)
        within = part < used
        if WINDOW > 0:
            within = within & (tl.load(starts_ptr + part + 1, mask=within, other=0) > seen - WINDOW)
        weight_N = tl.exp2(tl.load(maxima_ptr + at + part, mask=within, other=-float("inf")) - base)
        total = total + tl.sum(weight_N * tl.load(totals_ptr + at + part, mask=within, other=0.0), 0)
        part_NE = tl.load(
            sums_ptr + (at + part)[:, None] * VALUE_SIZE + e[None, :],
            mask=within[:, None] & (e[None, :] < VALUE_SIZE),
            other=0.0,
        )
        sum_E += tl.sum(part_NE * weight_N[:, None], 0)
    found_E = tl.where(seen > 0, sum_E / tl.where(seen > 0, total, 1.0), 0.0)
    tl.store(
        out_ptr + (t * QUERY_HEADS + q) * VALUE_SIZE + e, found_E.to(out_ptr.dtype.element_ty), mask=e < VALUE_SIZE
    )
