"""The operations of :mod:`engine.cuda.level_ops` as Triton kernels: three for a level, one more where noise is drawn.

Logits are read as the model wrote them, in parts of a row that programs share out; a program per row merges what they
found, and a program per session makes leaves of it and the rows of the next level. No program waits for another of its
launch, and sums are added up in a fixed order, so the result does not depend on timing. Noise has the bits of
:mod:`engine.sampling.noise` in the integers; its logarithms, like exponentials, may differ in the last place.

A score and its token are compared as one number, 32 bits of each: the lower token wins among equal scores.

Only for use on CUDA: it imports Triton, which builds of torch for CPUs come without. With ``TRITON_INTERPRET=1`` set
before the import it also runs on a CPU, slowly.

Tensor legend: as in :mod:`engine.cuda.level_ops`; A parts of a row, D scores that are kept of each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.cuda import level_ops
from engine.cuda.level_ops import MAX_BRANCH, MAX_LEVELS, MAX_STOPS, TOLD, LevelMemory
from engine.host.upload import upload
from engine.layers.layer_kernels import EXACT
from engine.sampling.sampling import RIVALS
from speculation import noise, trie
from speculation.verifying import calibration

PART = 1024
"""Logits that a program reads."""

LOWEST = tl.constexpr(-0x7F80_0001_0000_0000)
"""Minus infinity, of a token that does not exist."""

NO_LEAF, GIVEN, NO_LIMIT = (tl.constexpr(each) for each in (level_ops.NO_LEAF, level_ops.GIVEN, level_ops.NO_LIMIT))
GOLDEN_32, LOWBIAS_1, LOWBIAS_2 = (tl.constexpr(each) for each in (noise.GOLDEN_32, noise.LOWBIAS_1, noise.LOWBIAS_2))
GOLDEN_64, SPLITMIX_1, SPLITMIX_2 = (
    tl.constexpr(each) for each in (noise.GOLDEN_64, noise.SPLITMIX_1, noise.SPLITMIX_2)
)
STREAM = tl.constexpr(int(noise.Stream.SAMPLE))
MIN_CONFIDENCE = tl.constexpr(trie.MIN_CONFIDENCE)
MIN_ODDS, MAX_ODDS = tl.constexpr(calibration.MIN_ODDS), tl.constexpr(calibration.MAX_ODDS)
RANKS, BINS, CELLS = (tl.constexpr(each) for each in (calibration.RANKS, calibration.BINS, calibration.CELLS))
DISTANCES = tl.constexpr(len(calibration.DEPTHS) + 1)
SMALLEST = tl.constexpr(torch.finfo(torch.float32).tiny)
INFINITY = tl.constexpr(float("inf"))


@triton.jit
def _splitmix64(x):
    x = x + GOLDEN_64
    x = (x ^ (x >> 30)) * SPLITMIX_1
    x = (x ^ (x >> 27)) * SPLITMIX_2
    return x ^ (x >> 31)


@triton.jit
def _mix32(x):
    x = (x ^ (x >> 16)) * LOWBIAS_1
    x = (x ^ (x >> 15)) * LOWBIAS_2
    return x ^ (x >> 15)


@triton.jit
def _gumbel(key, token_V):
    """Of :mod:`engine.sampling.noise`, in float32."""
    word_V = _mix32(token_V.to(tl.uint32) * GOLDEN_32 + key.to(tl.uint32))
    word_V = _mix32(word_V ^ (key >> 32).to(tl.uint32)).to(tl.int32, bitcast=True)
    uniform_V = word_V.to(tl.float32) + 0.5
    uniform_V = (uniform_V + tl.where(word_V < 0, 4294967296.0, 0.0)) * 2.3283064365386963e-10
    uniform_V = tl.minimum(uniform_V, 0.999999940395355224609375)
    # log1p: what rounding takes from the difference is put right again.
    left_V = 1.0 - uniform_V
    lost_V = tl.where(left_V == 1.0, 1.0, tl.div_rn(uniform_V, tl.where(left_V == 1.0, 1.0, 1.0 - left_V)))
    exponential_V = tl.where(left_V == 1.0, uniform_V, -tl.log(left_V) * lost_V)
    return -tl.log(exponential_V)


@triton.jit
def _largest(logit_V):
    """Infinite if any logit is no number."""
    no_number = tl.max((logit_V != logit_V).to(tl.int32), 0) > 0
    return tl.where(no_number, INFINITY, tl.max(tl.where(logit_V != logit_V, -INFINITY, logit_V), 0))


@triton.jit
def _find_largest(logits_ptr, largest_ptr, stride, V: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr):
    """Of a part of a row."""
    m, part = tl.program_id(0), tl.program_id(1)
    v = part * PART + tl.arange(0, PART)
    logit_V = tl.load(logits_ptr + m.to(tl.int64) * stride + v, mask=v < V, other=-INFINITY).to(tl.float32)
    tl.store(largest_ptr + m * PARTS + part, _largest(logit_V))


@triton.jit
def _find_best(
    logits_ptr,  # [M, X], whose rows are so far apart
    largest_ptr,  # [M, A] float32, there already if NOISY
    total_ptr,  # [M, A] float32: of exponentials of the differences to it
    best_ptr,  # [M, A, D] int64
    seed_ptr,  # fields of a session, as the next one
    temperature_ptr,
    end_ptr,  # [N, L]
    level_ptr,  # [N]
    stride,
    V: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_PADDED: tl.constexpr,
    PART: tl.constexpr,
    KEPT: tl.constexpr,
    WIDTH: tl.constexpr,
    LEAVES: tl.constexpr,
    PLACES: tl.constexpr,
    RECORD: tl.constexpr,
    NOISY: tl.constexpr,
):
    """The best scores of a part of a row."""
    m, part = tl.program_id(0), tl.program_id(1)
    n = m // WIDTH
    v = part * PART + tl.arange(0, PART)
    logit_V = tl.load(logits_ptr + m.to(tl.int64) * stride + v, mask=v < V, other=-INFINITY).to(tl.float32)
    largest = _largest(logit_V)
    base = tl.where((largest > -INFINITY) & (largest < INFINITY), largest, 0.0)
    tl.store(total_ptr + m * PARTS + part, tl.sum(tl.exp(logit_V - base), 0))
    if NOISY:
        a = tl.arange(0, PARTS_PADDED)
        largest = tl.max(tl.load(largest_ptr + m * PARTS + a, mask=a < PARTS, other=-INFINITY), 0)
        largest = tl.where((largest > -INFINITY) & (largest < INFINITY), largest, 0.0)
        place = LEAVES + tl.load(level_ptr + n) * WIDTH + m % WIDTH
        end = tl.load(end_ptr + n * PLACES + place)
        mixed = _splitmix64((tl.load(seed_ptr + n * RECORD) ^ end).to(tl.uint64))
        temperature = tl.load(temperature_ptr + n * RECORD).to(tl.float32)
        divisor_V = tl.zeros([PART], tl.float32) + tl.where(temperature == 0.0, 1.0, temperature)
        score_V = tl.div_rn(logit_V - largest, divisor_V)
        score_V += tl.where(temperature == 0.0, 0.0, _gumbel(_splitmix64(mixed ^ STREAM), v))
    else:
        tl.store(largest_ptr + m * PARTS + part, largest)
        score_V = logit_V
    bits_V = tl.where(score_V == 0.0, 0.0, score_V).to(tl.int32, bitcast=True)  # one zero
    bits_V = bits_V ^ ((bits_V >> 31) & 0x7FFFFFFF)  # integers in the order of the numbers
    both_V = ((bits_V.to(tl.int64) + 1) << 32) - (v.to(tl.int64) + 1)  # below the score: ~v
    both_V = tl.where((score_V == score_V) & (v < V), both_V, LOWEST)
    for d in tl.static_range(KEPT):
        best = tl.max(both_V, 0)
        tl.store(best_ptr + (m * PARTS + part) * KEPT + d, best)
        both_V = tl.where(both_V == best, LOWEST, both_V)


@triton.jit
def _merge(
    largest_ptr,
    total_ptr,
    best_ptr,
    temperature_ptr,
    level_ptr,
    found_ptr,  # [K, N, W, X] float64
    M,
    PARTS: tl.constexpr,
    PARTS_PADDED: tl.constexpr,
    KEPT: tl.constexpr,
    KEPT_PADDED: tl.constexpr,
    BEST_PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    CHILDREN: tl.constexpr,
    RECORD: tl.constexpr,
    TOLD: tl.constexpr,
    NOISY: tl.constexpr,
):
    """The best draws of a row, with their confidences."""
    m = tl.program_id(0)
    n = m // WIDTH
    j, d, a = tl.arange(0, BEST_PADDED), tl.arange(0, KEPT_PADDED), tl.arange(0, PARTS_PADDED)
    both_J = tl.load(best_ptr + m * PARTS * KEPT + j, mask=j < PARTS * KEPT, other=LOWEST)
    best_D = tl.full([KEPT_PADDED], LOWEST, tl.int64)
    for i in tl.static_range(KEPT):
        best = tl.max(both_J, 0)
        best_D = tl.where(d == i, best, best_D)
        both_J = tl.where(both_J == best, LOWEST, both_J)
    bits_D = (best_D >> 32).to(tl.int32)
    score_D = (bits_D ^ ((bits_D >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    token_D = (-1 - best_D).to(tl.uint32).to(tl.int64)
    largest_A = tl.load(largest_ptr + m * PARTS + a, mask=a < PARTS, other=-INFINITY)
    largest = tl.max(largest_A, 0)
    sound = (largest > -INFINITY) & (largest < INFINITY)
    score_D = tl.where(sound, score_D, 0.0)
    largest, largest_A = tl.where(sound, largest, 0.0), tl.where(sound, largest_A, 0.0)
    total_A = tl.load(total_ptr + m * PARTS + a, mask=a < PARTS, other=0.0)
    total = tl.sum(total_A * tl.exp(largest_A - largest), 0)
    log_total = tl.log(tl.where(sound, total, 1.0))
    if NOISY:
        weight_D = tl.where(d < KEPT, tl.exp(score_D - tl.max(score_D, 0)), 0.0)
        greedy = tl.load(temperature_ptr + n * RECORD) == 0.0
        confidence_D = tl.where(greedy, tl.exp(score_D - log_total), weight_D / tl.sum(weight_D, 0))
    else:
        confidence_D = tl.exp(score_D - (largest + log_total))
    confidence_D = tl.minimum(tl.maximum(tl.where(sound, confidence_D, 0.0), SMALLEST), 1.0)
    there_D = (d < CHILDREN) & (tl.where(sound, score_D, -INFINITY) > -INFINITY)
    to = found_ptr + (tl.load(level_ptr + n) * M + m) * (TOLD + 2 * CHILDREN)
    tl.store(to + 1, sound.to(tl.float64))
    tl.store(to + 2, tl.sum(there_D.to(tl.int32), 0).to(tl.float64))
    tl.store(to + TOLD + d, token_D.to(tl.float64), mask=d < CHILDREN)
    tl.store(to + TOLD + CHILDREN + d, confidence_D.to(tl.float64), mask=d < CHILDREN)


@triton.jit
def _begin(
    weight_field_ptr,
    leaf_weight_ptr,
    leaf_token_ptr,
    table_ptr,
    end_field_ptr,
    home_field_ptr,
    branch_field_ptr,
    numbers_ptr,  # [*] int32
    level_ptr,
    branch_ptr,  # [N, L, B]
    home_ptr,  # [N, L]
    end_ptr,
    weight_ptr,  # [N, P] float64
    token_ptr,
    place_weight_ptr,  # [N, W] float64
    found_ptr,
    pages_ptr,  # [M] int32
    WIDTH: tl.constexpr,
    CHILDREN: tl.constexpr,
    LEAVES: tl.constexpr,
    PLACES: tl.constexpr,
    DRAFTS: tl.constexpr,
    DRAFTS_PADDED: tl.constexpr,
    GIVEN_PADDED: tl.constexpr,
    BRANCH: tl.constexpr,
    RECORD: tl.constexpr,
    TOLD: tl.constexpr,
):
    n = tl.program_id(0)
    start = n * RECORD
    p, w = tl.arange(0, DRAFTS_PADDED), tl.arange(0, WIDTH)
    g, b = tl.arange(0, GIVEN_PADDED), tl.arange(0, BRANCH)
    weight_P = tl.load(leaf_weight_ptr + start + p, mask=p < LEAVES, other=0.0)
    tl.store(weight_ptr + n * DRAFTS + p, weight_P, mask=p < DRAFTS)
    tl.store(token_ptr + n * DRAFTS + p, tl.load(leaf_token_ptr + start + p, mask=p < LEAVES, other=0), mask=p < LEAVES)
    given = g < LEAVES + WIDTH
    end_G = tl.load(end_field_ptr + start + g, mask=given, other=0)
    home_G = tl.load(home_field_ptr + start + g, mask=given, other=0)
    at_G = tl.load(branch_field_ptr + start + g, mask=given, other=0)
    tl.store(end_ptr + n * PLACES + g, end_G, mask=given)
    tl.store(home_ptr + n * PLACES + g, home_G, mask=given)
    live_GB = given[:, None] & (b[None, :] < (end_G - home_G)[:, None])
    slot_GB = tl.load(numbers_ptr + at_G[:, None] + b[None, :], mask=live_GB, other=0)
    to_GB = branch_ptr + (n * PLACES + g)[:, None] * BRANCH + b[None, :]
    tl.store(to_GB, slot_GB.to(tl.int64), mask=given[:, None] & (b[None, :] < BRANCH))
    weight_W = tl.load(weight_field_ptr + start + w)
    tl.store(place_weight_ptr + n * WIDTH + w, weight_W)
    tl.store(
        found_ptr + (n * WIDTH + w) * (TOLD + 2 * CHILDREN), tl.where(weight_W == 0.0, NO_LEAF, GIVEN).to(tl.float64)
    )
    tl.store(pages_ptr + n * WIDTH + w, tl.load(table_ptr + start + 0 * w).to(tl.int32))
    tl.store(level_ptr + n, 0)


@triton.jit
def _within(x, low: tl.constexpr, high: tl.constexpr):
    """Bounds in double precision, which a bare constant would not have."""
    return tl.minimum(tl.maximum(x, tl.full(x.shape, low, x.dtype)), tl.full(x.shape, high, x.dtype))


@triton.jit
def _next_level(
    odds_ptr,  # factors, slopes, offsets, float64
    depths_ptr,  # [DISTANCES - 1]
    factor_ptr,  # fields of a session
    min_weight_ptr,
    field_width_ptr,
    field_children_ptr,
    position_ptr,
    max_end_ptr,
    stop_ptr,
    slot_ptr,
    level_ptr,
    branch_ptr,
    home_ptr,
    end_ptr,
    weight_ptr,
    token_ptr,
    place_weight_ptr,
    found_ptr,
    tokens_ptr,  # columns of engine.attention.rows.Rows, int32
    positions_ptr,
    slots_ptr,
    keys_ptr,
    homes_ptr,
    group_ptr,
    common_ptr,
    numbers_ptr,
    spare,
    M,
    WIDTH: tl.constexpr,
    CHILDREN: tl.constexpr,
    LEAVES: tl.constexpr,
    LEVELS: tl.constexpr,
    PLACES: tl.constexpr,
    DRAFTS: tl.constexpr,
    DRAFTS_PADDED: tl.constexpr,
    STOPS: tl.constexpr,
    BRANCH: tl.constexpr,
    GROUP: tl.constexpr,
    RECORD: tl.constexpr,
    TOLD: tl.constexpr,
):
    """Leaves of a session from what a level said, and rows of the best leaves."""
    NUMBERS: tl.constexpr = TOLD + 2 * CHILDREN
    n = tl.program_id(0)
    start = n * RECORD
    level = tl.load(level_ptr + n)

    # Every leaf that is new goes through its siblings, up to itself; all leaves of a place do the same.
    p = tl.arange(0, DRAFTS_PADDED)
    weight_P = tl.load(weight_ptr + n * DRAFTS + p, mask=p < DRAFTS, other=-1.0)
    token_P = tl.load(token_ptr + n * DRAFTS + p, mask=p < DRAFTS, other=0)
    after_P = tl.maximum(p - LEAVES, 0)
    rank_P, place_P = after_P % CHILDREN, after_P // CHILDREN
    new_P = (p >= LEAVES) & (p < DRAFTS) & (place_P // WIDTH == level)
    w_P = place_P % WIDTH
    said_at_P = found_ptr + (level * M + n * WIDTH + w_P) * NUMBERS
    end_P = tl.load(end_ptr + n * PLACES + LEAVES + level * WIDTH + w_P)
    ahead_P = end_P - tl.load(position_ptr + start)
    depth_P = tl.zeros([DRAFTS_PADDED], tl.int64)
    for i in tl.static_range(DISTANCES - 1):
        depth_P += (ahead_P >= tl.load(depths_ptr + i)).to(tl.int64)
    min_weight = tl.load(min_weight_ptr + start)
    children = tl.minimum(tl.load(field_children_ptr + start), tl.load(said_at_P + 2).to(tl.int64))
    may_P = end_P < tl.load(max_end_ptr + start)
    above_P = tl.load(place_weight_ptr + n * WIDTH + w_P)
    before_P = tl.zeros([DRAFTS_PADDED], tl.float64)
    left_P = before_P + 1.0
    taken_P = p >= 0
    for number in tl.static_range(CHILDREN):
        rank = number if number < RANKS - 1 else RANKS - 1
        draft_P = tl.load(said_at_P + TOLD + number).to(tl.int64)
        said_P = _within(tl.load(said_at_P + TOLD + CHILDREN + number), MIN_CONFIDENCE, 1.0)
        claim_P = said_P / tl.maximum(1.0 - before_P, said_P)
        tenth_P = tl.minimum(tl.maximum((claim_P * BINS).to(tl.int64), 0), BINS - 1)
        cell_P = (rank * BINS + tenth_P) * DISTANCES + depth_P
        odds_P = tl.minimum(claim_P * tl.load(odds_ptr + rank), 1.0)
        odds_P = odds_P * tl.load(odds_ptr + RANKS + cell_P) + tl.load(odds_ptr + RANKS + CELLS + cell_P)
        odds_P = _within(odds_P, MIN_ODDS, MAX_ODDS)
        odds_P = _within(odds_P * tl.load(factor_ptr + start + rank), MIN_ODDS, MAX_ODDS)
        odds_P = _within(left_P * odds_P, MIN_CONFIDENCE, 1.0)
        chance_P = above_P * odds_P
        taken_P = taken_P & (number < children)
        if number > 0:
            taken_P = taken_P & (chance_P >= min_weight)
        opened_P = taken_P & may_P & (chance_P >= min_weight)
        for i in tl.static_range(STOPS):
            opened_P = opened_P & (draft_P != tl.load(stop_ptr + start + i))
        mine_P = new_P & (rank_P == number)
        weight_P = tl.where(mine_P, tl.where(opened_P, chance_P, 0.0), weight_P)
        token_P = tl.where(mine_P, draft_P, token_P)
        before_P += said_P
        left_P = left_P - odds_P

    # The best of all leaves, the first among equals, are the places of the next level.
    w, b = tl.arange(0, WIDTH), tl.arange(0, BRANCH)
    more = level + 1 < LEVELS
    chosen_W = tl.zeros([WIDTH], tl.int32)
    token_W = tl.zeros([WIDTH], tl.int64)
    best_W = tl.zeros([WIDTH], tl.float64)
    width = tl.where(more, tl.load(field_width_ptr + start), 0)
    for i in tl.static_range(WIDTH):
        best = tl.where(i < width, tl.maximum(tl.max(weight_P, 0), 0.0), 0.0)
        at = tl.min(tl.where(weight_P == best, p, DRAFTS_PADDED), 0)
        at = tl.where(best > 0.0, at, DRAFTS_PADDED)  # no leaf
        best_W = tl.where(w == i, best, best_W)
        chosen_W = tl.where(w == i, at, chosen_W)
        token_W = tl.where(w == i, tl.sum(tl.where(p == at, token_P, 0), 0), token_W)
        weight_P = tl.where(p == at, 0.0, weight_P)
    tl.store(weight_ptr + n * DRAFTS + p, weight_P, mask=p < DRAFTS)
    tl.store(token_ptr + n * DRAFTS + p, token_P, mask=p < DRAFTS)
    active_W = best_W > 0.0
    above_W = tl.where(chosen_W < LEAVES, chosen_W, LEAVES + (chosen_W - LEAVES) // CHILDREN)
    home_W = tl.load(home_ptr + n * PLACES + above_W, mask=active_W, other=0)
    end_W = tl.load(end_ptr + n * PLACES + above_W, mask=active_W, other=-1) + 1
    slot_W = tl.load(slot_ptr + start + level * WIDTH + w, mask=active_W, other=0)
    inside_WB = active_W[:, None] & (b[None, :] < BRANCH)
    branch_WB = tl.load(branch_ptr + (n * PLACES + above_W)[:, None] * BRANCH + b[None, :], mask=inside_WB, other=0)
    last_W = tl.minimum(tl.maximum(end_W - 1 - home_W, 0), BRANCH - 1)
    branch_WB = tl.where(inside_WB & (b[None, :] == last_W[:, None]), slot_W[:, None], branch_WB)
    there_W = w < tl.where(more, WIDTH, 0)
    here_W = n * PLACES + LEAVES + (level + 1) * WIDTH + w
    there_WB = there_W[:, None] & (b[None, :] < BRANCH)
    tl.store(place_weight_ptr + n * WIDTH + w, best_W, mask=there_W)
    tl.store(home_ptr + here_W, home_W, mask=there_W)
    tl.store(end_ptr + here_W, end_W, mask=there_W)
    tl.store(branch_ptr + here_W[:, None] * BRANCH + b[None, :], branch_WB, mask=there_WB)
    tl.store(
        found_ptr + ((level + 1) * M + n * WIDTH + w) * NUMBERS,
        tl.where(active_W, chosen_W, NO_LEAF).to(tl.float64),
        mask=there_W,
    )

    # The likeliest come first, so those of a group that are there stand side by side.
    together_WW = (w[:, None] // GROUP == w[None, :] // GROUP) & active_W[None, :]
    common_W = tl.min(tl.where(together_WW, home_W[None, :], NO_LIMIT), 1)
    size_W = tl.sum(together_WW.to(tl.int32), 1)
    row_W = n * WIDTH + w
    tl.store(tokens_ptr + row_W, token_W.to(tl.int32), mask=there_W)
    tl.store(positions_ptr + row_W, tl.maximum(end_W - 1, 0).to(tl.int32), mask=there_W)
    tl.store(slots_ptr + row_W, tl.where(active_W, slot_W, spare + row_W).to(tl.int32), mask=there_W)
    tl.store(keys_ptr + row_W, end_W.to(tl.int32), mask=there_W)
    tl.store(homes_ptr + row_W, home_W.to(tl.int32), mask=there_W)
    tl.store(group_ptr + row_W, tl.where(w % GROUP == 0, size_W, 0), mask=there_W)
    tl.store(common_ptr + row_W, tl.where(active_W, common_W, 0).to(tl.int32), mask=there_W)
    tl.store(numbers_ptr + row_W[:, None] * BRANCH + b[None, :], branch_WB.to(tl.int32), mask=there_WB)
    tl.store(level_ptr + n, tl.where(more, level + 1, level))


class TritonLevelOps:
    """Implements :class:`engine.cuda.level_ops.LevelOps` for logits in float32 or less."""

    def __init__(self, device: torch.device) -> None:
        self._depths = upload(calibration.DEPTHS, device)

    def begin(self, memory: LevelMemory) -> None:
        """See :meth:`engine.cuda.level_ops.LevelOps.begin`."""
        fields, (drafts, places) = memory.fields, _sizes(memory)
        _begin[(memory.sessions,)](
            *(fields[name] for name in ("weight", "leaf_weight", "leaf_token", "table", "end", "home", "branch")),
            memory.rows.numbers_F,
            memory.level_N,
            memory.branch_NLB,
            memory.home_NL,
            memory.end_NL,
            memory.weight_NP,
            memory.token_NP,
            memory.place_weight_NW,
            memory.found_KNWX,
            memory.rows.pages_T,
            WIDTH=memory.width,
            CHILDREN=memory.children,
            LEAVES=memory.leaves,
            PLACES=places,
            DRAFTS=drafts,
            DRAFTS_PADDED=triton.next_power_of_2(drafts),
            GIVEN_PADDED=triton.next_power_of_2(memory.leaves + memory.width),
            BRANCH=MAX_BRANCH,
            RECORD=memory.record_NS.shape[1],
            TOLD=TOLD,
            num_warps=4,
            **EXACT,
        )

    def expand(self, memory: LevelMemory, logits_MX: Tensor, *, noisy: bool) -> None:
        """See :meth:`engine.cuda.level_ops.LevelOps.expand`."""
        self._say(memory, logits_MX, noisy=noisy)
        fields, rows, (drafts, places) = memory.fields, memory.rows, _sizes(memory)
        padded = triton.next_power_of_2(drafts)
        _next_level[(memory.sessions,)](
            memory.odds_F,
            self._depths,
            *(fields[name] for name in ("factor", "min_weight", "width", "children", "position", "max_end", "stop")),
            fields["slot"],
            memory.level_N,
            memory.branch_NLB,
            memory.home_NL,
            memory.end_NL,
            memory.weight_NP,
            memory.token_NP,
            memory.place_weight_NW,
            memory.found_KNWX,
            rows.tokens_T,
            rows.positions_T,
            rows.slots_T,
            rows.keys_T,
            rows.home_T,
            rows.group_T,
            rows.common_T,
            rows.numbers_F,
            memory.spare,
            M=memory.count,
            WIDTH=memory.width,
            CHILDREN=memory.children,
            LEAVES=memory.leaves,
            LEVELS=MAX_LEVELS,
            PLACES=places,
            DRAFTS=drafts,
            DRAFTS_PADDED=padded,
            STOPS=MAX_STOPS,
            BRANCH=MAX_BRANCH,
            GROUP=memory.group,
            RECORD=memory.record_NS.shape[1],
            TOLD=TOLD,
            num_warps=min(8, max(1, padded // 32)),
            **EXACT,
        )

    def _say(self, memory: LevelMemory, logits_MX: Tensor, *, noisy: bool) -> None:
        """What may follow the places of a level."""
        fields, vocabulary = memory.fields, memory.logits_MV.shape[1]
        count, kept, parts = memory.count, memory.children + RIVALS, triton.cdiv(vocabulary, PART)
        largest_MA, total_MA = torch.empty(2, count, parts, device=logits_MX.device)
        best_MAD = torch.empty(count, parts, kept, dtype=torch.int64, device=logits_MX.device)
        best = triton.next_power_of_2(parts * kept)
        sizes = {"WIDTH": memory.width, "RECORD": memory.record_NS.shape[1], "NOISY": noisy}
        of_parts = {"PARTS": parts, "PARTS_PADDED": triton.next_power_of_2(parts), "KEPT": kept}
        if noisy:
            _find_largest[count, parts](
                logits_MX, largest_MA, logits_MX.stride(0), V=vocabulary, PARTS=parts, PART=PART, num_warps=4, **EXACT
            )
        _find_best[count, parts](
            logits_MX,
            largest_MA,
            total_MA,
            best_MAD,
            *(fields[name] for name in ("seed", "temperature")),
            memory.end_NL,
            memory.level_N,
            logits_MX.stride(0),
            V=vocabulary,
            PART=PART,
            LEAVES=memory.leaves,
            PLACES=memory.end_NL.shape[1],
            num_warps=4,
            **sizes,
            **of_parts,
            **EXACT,
        )
        _merge[(count,)](
            largest_MA,
            total_MA,
            best_MAD,
            fields["temperature"],
            memory.level_N,
            memory.found_KNWX,
            M=count,
            KEPT_PADDED=triton.next_power_of_2(kept),
            BEST_PADDED=best,
            CHILDREN=memory.children,
            TOLD=TOLD,
            num_warps=max(1, best // 256),
            **sizes,
            **of_parts,
            **EXACT,
        )


def _sizes(memory: LevelMemory) -> tuple[int, int]:
    """Leaves and places of a session."""
    return memory.weight_NP.shape[1], memory.end_NL.shape[1]
