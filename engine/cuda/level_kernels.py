"""The operations of :mod:`engine.levels.level_ops` as Triton kernels: three for a level, one more where noise is drawn.

What may follow each place is found by :mod:`engine.cuda.draw_kernels`; here a program per session makes leaves of it
and the rows of the next level. No program waits for another of its launch, and sums are added up in a fixed order, so
the result does not depend on timing.

Only for use on CUDA: it imports Triton, which builds of torch for CPUs come without. With ``TRITON_INTERPRET=1`` set
before the import it also runs on a CPU, slowly.

Tensor legend: as in :mod:`engine.levels.level_memory`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.cuda.draw_kernels import find_draws
from engine.host.upload import upload
from engine.layers.layer_kernels import EXACT
from engine.levels import level_memory
from engine.levels.level_memory import MAX_BRANCH, MAX_LEVELS, MAX_STOPS, TOLD, LevelMemory
from engine.levels.level_ops import LevelOps
from speculation import trie
from speculation.verifying import calibration

NO_LEAF, GIVEN, NO_LIMIT = (
    tl.constexpr(each) for each in (level_memory.NO_LEAF, level_memory.GIVEN, level_memory.NO_LIMIT)
)
MIN_CONFIDENCE = tl.constexpr(trie.MIN_CONFIDENCE)
MIN_ODDS, MAX_ODDS = tl.constexpr(calibration.MIN_ODDS), tl.constexpr(calibration.MAX_ODDS)
RANKS, BINS, CELLS = (tl.constexpr(each) for each in (calibration.RANKS, calibration.BINS, calibration.CELLS))
DISTANCES = tl.constexpr(calibration.DISTANCES)


@triton.jit
def _begin(
    weight_field_ptr, leaf_weight_ptr, leaf_token_ptr, table_ptr, end_field_ptr, home_field_ptr, branch_field_ptr,
    numbers_ptr,  # [*] int32
    level_ptr, branch_ptr, home_ptr, end_ptr,  # [N], [N, L, B], [N, L], [N, L]
    weight_ptr, token_ptr, place_weight_ptr,  # [N, P] float64, [N, P], [N, W] float64
    found_ptr, pages_ptr,  # [M] int32
    WIDTH: tl.constexpr, CHILDREN: tl.constexpr, LEAVES: tl.constexpr, PLACES: tl.constexpr, DRAFTS: tl.constexpr,
    DRAFTS_PADDED: tl.constexpr, GIVEN_PADDED: tl.constexpr, BRANCH: tl.constexpr, RECORD: tl.constexpr,
    TOLD: tl.constexpr,
):  # fmt: skip
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
def _with_drafts(
    weight_P, token_P, new_P, rank_P, depth_P, may_P, above_P, children_P, said_at_P, min_weight,
    odds_ptr, factor_ptr, stop_ptr, CHILDREN: tl.constexpr, STOPS: tl.constexpr, TOLD: tl.constexpr,
):  # fmt: skip
    """All leaves, with those that are new: each goes through its siblings, up to itself."""
    before_P = tl.zeros(weight_P.shape, tl.float64)
    left_P = before_P + 1.0
    taken_P = rank_P >= 0
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
        odds_P = _within(odds_P * tl.load(factor_ptr + rank), MIN_ODDS, MAX_ODDS)
        odds_P = _within(left_P * odds_P, MIN_CONFIDENCE, 1.0)
        chance_P = above_P * odds_P
        taken_P = taken_P & (number < children_P)
        if number > 0:
            taken_P = taken_P & (chance_P >= min_weight)
        opened_P = taken_P & may_P & (chance_P >= min_weight)
        for i in tl.static_range(STOPS):
            opened_P = opened_P & (draft_P != tl.load(stop_ptr + i))
        mine_P = new_P & (rank_P == number)
        weight_P = tl.where(mine_P, tl.where(opened_P, chance_P, 0.0), weight_P)
        token_P = tl.where(mine_P, draft_P, token_P)
        before_P += said_P
        left_P = left_P - odds_P
    return weight_P, token_P


@triton.jit
def _best(weight_P, token_P, p, width, WIDTH: tl.constexpr, DRAFTS_PADDED: tl.constexpr):
    """Which leaves are the likeliest, the first among equals, their weights and tokens, and what is left of all."""
    w = tl.arange(0, WIDTH)
    chosen_W = tl.zeros([WIDTH], tl.int32)
    token_W = tl.zeros([WIDTH], tl.int64)
    best_W = tl.zeros([WIDTH], tl.float64)
    for i in tl.static_range(WIDTH):
        best = tl.where(i < width, tl.maximum(tl.max(weight_P, 0), 0.0), 0.0)
        at = tl.min(tl.where(weight_P == best, p, DRAFTS_PADDED), 0)
        at = tl.where(best > 0.0, at, DRAFTS_PADDED)  # no leaf
        best_W = tl.where(w == i, best, best_W)
        chosen_W = tl.where(w == i, at, chosen_W)
        token_W = tl.where(w == i, tl.sum(tl.where(p == at, token_P, 0), 0), token_W)
        weight_P = tl.where(p == at, 0.0, weight_P)
    return chosen_W, best_W, token_W, weight_P


@triton.jit
def _store_rows(
    tokens_ptr, positions_ptr, slots_ptr, keys_ptr, homes_ptr, group_ptr, common_ptr, spare, n, w, there_W, active_W,
    token_W, end_W, home_W, slot_W, before, WIDTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Columns of :class:`engine.attention.rows.Rows`; ``before``: tokens of the text that the cache does not hold."""
    keys_W, home_W = tl.where(active_W, end_W - before, 0), tl.where(active_W, home_W - before, 0)
    # The likeliest come first, so those of a group that are there stand side by side.
    together_WW = (w[:, None] // GROUP == w[None, :] // GROUP) & active_W[None, :]
    common_W = tl.min(tl.where(together_WW, home_W[None, :], NO_LIMIT), 1)
    size_W = tl.sum(together_WW.to(tl.int32), 1)
    row_W = n * WIDTH + w
    tl.store(tokens_ptr + row_W, token_W.to(tl.int32), mask=there_W)
    tl.store(positions_ptr + row_W, tl.maximum(end_W - 1, 0).to(tl.int32), mask=there_W)
    tl.store(slots_ptr + row_W, tl.where(active_W, slot_W, spare + row_W).to(tl.int32), mask=there_W)
    tl.store(keys_ptr + row_W, keys_W.to(tl.int32), mask=there_W)
    tl.store(homes_ptr + row_W, home_W.to(tl.int32), mask=there_W)
    tl.store(group_ptr + row_W, tl.where(w % GROUP == 0, size_W, 0), mask=there_W)
    tl.store(common_ptr + row_W, tl.where(active_W, common_W, 0).to(tl.int32), mask=there_W)


@triton.jit
def _next_level(
    odds_ptr, depths_ptr,  # factors, slopes, offsets, float64; [DISTANCES - 1]
    factor_ptr, min_weight_ptr, field_width_ptr, field_children_ptr, position_ptr, max_end_ptr, before_ptr, stop_ptr,
    slot_ptr,
    level_ptr, branch_ptr, home_ptr, end_ptr, weight_ptr, token_ptr, place_weight_ptr, found_ptr,
    tokens_ptr, positions_ptr, slots_ptr, keys_ptr, homes_ptr, group_ptr, common_ptr, numbers_ptr,  # int32
    spare, M, WIDTH: tl.constexpr, CHILDREN: tl.constexpr, LEAVES: tl.constexpr, LEVELS: tl.constexpr,
    PLACES: tl.constexpr, DRAFTS: tl.constexpr, DRAFTS_PADDED: tl.constexpr, STOPS: tl.constexpr, BRANCH: tl.constexpr,
    GROUP: tl.constexpr, RECORD: tl.constexpr, TOLD: tl.constexpr,
):  # fmt: skip
    """Leaves of a session from what a level said, and rows of the best leaves. Fields first, then memory, then rows."""
    NUMBERS: tl.constexpr = TOLD + 2 * CHILDREN
    n = tl.program_id(0)
    start = n * RECORD
    level = tl.load(level_ptr + n)
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
    children_P = tl.minimum(tl.load(field_children_ptr + start), tl.load(said_at_P + 2).to(tl.int64))
    may_P = end_P < tl.load(max_end_ptr + start)
    above_P = tl.load(place_weight_ptr + n * WIDTH + w_P)
    weight_P, token_P = _with_drafts(
        weight_P, token_P, new_P, rank_P, depth_P, may_P, above_P, children_P, said_at_P, min_weight,
        odds_ptr, factor_ptr + start, stop_ptr + start, CHILDREN, STOPS, TOLD,
    )  # fmt: skip
    w, b = tl.arange(0, WIDTH), tl.arange(0, BRANCH)
    more = level + 1 < LEVELS
    width = tl.where(more, tl.load(field_width_ptr + start), 0)
    chosen_W, best_W, token_W, weight_P = _best(weight_P, token_P, p, width, WIDTH, DRAFTS_PADDED)
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
    tl.store(numbers_ptr + (n * WIDTH + w)[:, None] * BRANCH + b[None, :], branch_WB.to(tl.int32), mask=there_WB)
    _store_rows(
        tokens_ptr, positions_ptr, slots_ptr, keys_ptr, homes_ptr, group_ptr, common_ptr, spare, n, w, there_W,
        active_W, token_W, end_W, home_W, slot_W, tl.load(before_ptr + start), WIDTH, GROUP,
    )  # fmt: skip
    tl.store(level_ptr + n, tl.where(more, level + 1, level))


class TritonLevelOps(LevelOps):
    """The kernels, for logits in float32 or less."""

    def __init__(self, device: torch.device) -> None:
        self._depths = upload(calibration.DEPTHS, device)

    def begin(self, memory: LevelMemory) -> None:
        """See :meth:`engine.levels.level_ops.LevelOps.begin`."""
        fields = memory.fields
        _begin[(memory.sessions,)](
            *(fields[name] for name in ("weight", "leaf_weight", "leaf_token", "table", "end", "home", "branch")),
            memory.rows.numbers_F, *_state(memory), memory.rows.pages_T,
            **memory.constants, DRAFTS_PADDED=triton.next_power_of_2(memory.constants["DRAFTS"]),
            GIVEN_PADDED=triton.next_power_of_2(memory.leaves + memory.width), BRANCH=MAX_BRANCH,
            RECORD=memory.record_NS.shape[1], TOLD=TOLD, num_warps=4, **EXACT,
        )  # fmt: skip

    def expand(self, memory: LevelMemory, logits_MX: Tensor, *, noisy: bool) -> None:
        """See :meth:`engine.levels.level_ops.LevelOps.expand`."""
        find_draws(memory, logits_MX, noisy=noisy)
        fields, rows, padded = memory.fields, memory.rows, triton.next_power_of_2(memory.constants["DRAFTS"])
        told = ("factor", "min_weight", "width", "children", "position", "max_end", "before", "stop", "slot")
        columns = (rows.tokens_T, rows.positions_T, rows.slots_T, rows.keys_T, rows.home_T, rows.group_T, rows.common_T)
        _next_level[(memory.sessions,)](
            memory.odds_F, self._depths, *(fields[name] for name in told), *_state(memory), *columns,
            rows.numbers_F, memory.spare, M=memory.count,
            **memory.constants, LEVELS=MAX_LEVELS, DRAFTS_PADDED=padded, STOPS=MAX_STOPS, BRANCH=MAX_BRANCH,
            GROUP=memory.group, RECORD=memory.record_NS.shape[1], TOLD=TOLD,
            num_warps=min(8, max(1, padded // 32)), **EXACT,
        )  # fmt: skip


def _state(memory: LevelMemory) -> tuple[Tensor, ...]:
    """What goes on from level to level, in the order in which the kernels take it."""
    places = (memory.level_N, memory.branch_NLB, memory.home_NL, memory.end_NL)
    return (*places, memory.weight_NP, memory.token_NP, memory.place_weight_NW, memory.found_KNWX)
