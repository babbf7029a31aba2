"""The kernels of :mod:`engine.attention.row_attention`, in Triton, which torch's builds for CPUs come without.

Keys are read as FlashAttention does (Dao et al., 2022; split as in Flash-Decoding): blocks of keys, a running maximum
and sum. Whatever a row's result depends on is fixed by positions: which split a key belongs to, the order of blocks in
a split, the order in which splits are added up. So a row has the same bits however many others are in the step.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def attend_splits(
    query_ptr,  # [T, Q, D]
    keys_ptr,  # [S, H, D]
    values_ptr,  # [S, H, E]
    sums_ptr,  # [T, Q, N, E] float32: weighted values of each of N splits
    maxima_ptr,  # [T, Q, N] float32: largest score
    totals_ptr,  # [T, Q, N] float32: sum of weights
    seen_ptr,  # [T]; these six are columns of engine.attention.rows.Rows
    home_ptr,
    pages_ptr,
    branch_ptr,
    group_ptr,
    common_ptr,
    numbers_ptr,  # [F]
    scale,
    cap,
    N,
    first_split,
    first_position,
    QUERY_HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_PADDED: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLLED: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One row, one key head, one split: the keys at positions ``[start, start + SPLIT)``.

    Where all rows of a group find the whole split by their page table, the first of them reads it for all.
    """
    GROUP: tl.constexpr = QUERY_HEADS // KEY_HEADS
    t, h, n = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    seen = tl.load(seen_ptr + t)
    start = first_position + n * SPLIT
    rows = tl.where(start + SPLIT <= tl.load(common_ptr + t), tl.load(group_ptr + t), 1)
    row = tl.arange(0, ROWS)
    live = row < GROUP * rows
    needed = (start < seen) & (rows > 0)
    seen_M = tl.load(seen_ptr + t + row // GROUP, mask=live, other=0)
    if WINDOW > 0:
        needed = needed & (start + SPLIT > tl.min(tl.where(live, seen_M, 1 << 30), 0) - WINDOW)
    if needed:
        d, e = tl.arange(0, SIZE_PADDED), tl.arange(0, VALUE_PADDED)
        at_M = (t + row // GROUP) * QUERY_HEADS + h * GROUP + row % GROUP
        live_MD = live[:, None] & (d[None, :] < SIZE)
        query_MD = tl.load(query_ptr + at_M[:, None] * SIZE + d[None, :], mask=live_MD, other=0.0)
        home, pages, branch = tl.load(home_ptr + t), tl.load(pages_ptr + t), tl.load(branch_ptr + t)
        largest_M = tl.full([ROWS], -float("inf"), tl.float32)
        total_M = tl.zeros([ROWS], tl.float32)
        sum_ME = tl.zeros([ROWS, VALUE_PADDED], tl.float32)
        for part in range(SPLIT // (UNROLLED * BLOCK)):
            for i in tl.static_range(UNROLLED):
                # Keys behind the last one are masked, which changes no bit.
                position_K = start + (part * UNROLLED + i) * BLOCK + tl.arange(0, BLOCK)
                inside_K = position_K < seen
                by_page_K = position_K < home
                page_K = tl.load(numbers_ptr + pages + position_K // PAGE, mask=inside_K & by_page_K, other=0)
                slot_K = tl.load(
                    numbers_ptr + branch + position_K - home, mask=inside_K & (position_K >= home), other=0
                )
                slot_K = tl.where(by_page_K, page_K * PAGE + position_K % PAGE, slot_K).to(tl.int64) * KEY_HEADS + h
                key_KD = tl.load(
                    keys_ptr + slot_K[:, None] * SIZE + d[None, :],
                    mask=inside_K[:, None] & (d[None, :] < SIZE),
                    other=0.0,
                )
                value_KE = tl.load(
                    values_ptr + slot_K[:, None] * VALUE_SIZE + e[None, :],
                    mask=inside_K[:, None] & (e[None, :] < VALUE_SIZE),
                    other=0.0,
                )
                score_MK = tl.dot(query_MD, tl.trans(key_KD), input_precision=PRECISION).to(tl.float32)
                if CAPPED:
                    doubled_MK = tl.exp2(score_MK * (scale / cap * 2 * LOG2_E))
                    score_MK = (1 - 2 / (doubled_MK + 1)) * (cap * LOG2_E)
                else:
                    score_MK = score_MK * (scale * LOG2_E)
                if WINDOW > 0:
                    visible_MK = inside_K[None, :] & (position_K[None, :] >= seen_M[:, None] - WINDOW)
                else:
                    visible_MK = inside_K[None, :] & (row[:, None] >= 0)
                score_MK = tl.where(visible_MK, score_MK, -float("inf"))
                larger_M = tl.maximum(largest_M, tl.max(score_MK, 1))
                base_M = tl.where(larger_M == -float("inf"), 0.0, larger_M)  # nothing seen yet: a window begins later
                weight_MK = tl.exp2(score_MK - base_M[:, None])
                decay_M = tl.exp2(largest_M - base_M)
                total_M = total_M * decay_M + tl.sum(weight_MK, 1)
                found_ME = tl.dot(weight_MK.to(value_KE.dtype), value_KE, input_precision=PRECISION).to(tl.float32)
                sum_ME = sum_ME * decay_M[:, None] + found_ME
                largest_M = larger_M
        to_M = at_M * N + first_split + n
        live_ME = live[:, None] & (e[None, :] < VALUE_SIZE)
        tl.store(sums_ptr + to_M[:, None] * VALUE_SIZE + e[None, :], sum_ME, mask=live_ME)
        tl.store(maxima_ptr + to_M, largest_M, mask=live)
        tl.store(totals_ptr + to_M, total_M, mask=live)


@triton.jit
def add_splits(
    sums_ptr,
    maxima_ptr,
    totals_ptr,
    seen_ptr,
    starts_ptr,  # [N + 1] int32: where each split begins, and where the last one ends
    sinks_ptr,  # [Q]
    out_ptr,  # [T, Q, E]
    N,
    USED: tl.constexpr,
    QUERY_HEADS: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
):
    """The first ``USED`` splits of a row and head, added up in order, ``CHUNK`` at a time."""
    t, q = tl.program_id(0), tl.program_id(1)
    seen = tl.load(seen_ptr + t)
    e = tl.arange(0, VALUE_PADDED)
    at = (t * QUERY_HEADS + q) * N
    largest = -float("inf")
    for first in tl.static_range(0, USED, CHUNK):
        n = first + tl.arange(0, CHUNK)
        there = (n < USED) & (tl.load(starts_ptr + n, mask=n < USED, other=1 << 30) < seen)
        if WINDOW > 0:
            there = there & (tl.load(starts_ptr + n + 1, mask=n < USED, other=0) > seen - WINDOW)
        largest = tl.maximum(largest, tl.max(tl.load(maxima_ptr + at + n, mask=there, other=-float("inf")), 0))
    if SINKS:
        sink = tl.load(sinks_ptr + q).to(tl.float32) * LOG2_E
        largest = tl.maximum(largest, sink)
    base = tl.where(largest == -float("inf"), 0.0, largest)
    total = tl.exp2(sink - base) if SINKS else 0.0
    sum_E = tl.zeros([VALUE_PADDED], tl.float32)
    for first in tl.static_range(0, USED, CHUNK):
        n = first + tl.arange(0, CHUNK)
        there = (n < USED) & (tl.load(starts_ptr + n, mask=n < USED, other=1 << 30) < seen)
        if WINDOW > 0:
            there = there & (tl.load(starts_ptr + n + 1, mask=n < USED, other=0) > seen - WINDOW)
        weight_N = tl.exp2(tl.load(maxima_ptr + at + n, mask=there, other=-float("inf")) - base)
        total = total + tl.sum(weight_N * tl.load(totals_ptr + at + n, mask=there, other=0.0), 0)
        part_NE = tl.load(
            sums_ptr + (at + n)[:, None] * VALUE_SIZE + e[None, :],
            mask=there[:, None] & (e[None, :] < VALUE_SIZE),
            other=0.0,
        )
        sum_E += tl.sum(part_NE * weight_N[:, None], 0)
    found_E = tl.where(seen > 0, sum_E / tl.where(seen > 0, total, 1.0), 0.0)
    tl.store(
        out_ptr + (t * QUERY_HEADS + q) * VALUE_SIZE + e, found_E.to(out_ptr.dtype.element_ty), mask=e < VALUE_SIZE
    )
