"""The likeliest draws of every place of a draft level, found by two Triton kernels; by three where noise is drawn.

Logits are read as the model wrote them, in parts of a row that programs share out; a program per row merges what they
found. Noise has the bits of :mod:`engine.sampling.noise` in the integers; its logarithms, like exponentials, may differ
in the last place. A score and its token are compared as one number, 32 bits of each: the lower token wins among equal
scores.

Tensor legend: as in :mod:`engine.levels.level_memory`; A parts of a row, D scores that are kept of
each, J those of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.layers.layer_kernels import EXACT
from engine.levels.level_memory import TOLD, LevelMemory
from engine.sampling.sampling import RIVALS
from speculation import noise

PART = 1024
"""Logits that a program reads."""

LOWEST = tl.constexpr(-0x7F80_0001_0000_0000)
"""Minus infinity, of a token that does not exist."""

GOLDEN_32, LOWBIAS_1, LOWBIAS_2 = (tl.constexpr(each) for each in (noise.GOLDEN_32, noise.LOWBIAS_1, noise.LOWBIAS_2))
GOLDEN_64, SPLITMIX_1, SPLITMIX_2 = (
    tl.constexpr(each) for each in (noise.GOLDEN_64, noise.SPLITMIX_1, noise.SPLITMIX_2)
)
STREAM = tl.constexpr(int(noise.Stream.SAMPLE))
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
    seed_ptr, temperature_ptr,  # fields of a session
    end_ptr, level_ptr,  # [N, L], [N]
    stride, V: tl.constexpr, PARTS: tl.constexpr, PARTS_PADDED: tl.constexpr, PART: tl.constexpr, KEPT: tl.constexpr,
    WIDTH: tl.constexpr, LEAVES: tl.constexpr, PLACES: tl.constexpr, RECORD: tl.constexpr, NOISY: tl.constexpr,
):  # fmt: skip
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
    largest_ptr, total_ptr, best_ptr, temperature_ptr, level_ptr,
    found_ptr,  # [K, N, W, X] float64
    M, PARTS: tl.constexpr, PARTS_PADDED: tl.constexpr, KEPT: tl.constexpr, KEPT_PADDED: tl.constexpr,
    BEST_PADDED: tl.constexpr, WIDTH: tl.constexpr, CHILDREN: tl.constexpr, RECORD: tl.constexpr, TOLD: tl.constexpr,
    NOISY: tl.constexpr,
):  # fmt: skip
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


def find_draws(memory: LevelMemory, logits_MX: Tensor, *, noisy: bool) -> None:
    """Note what may follow the places of a level. ``logits_MX``, ``noisy``: as of :class:`~.level_ops.LevelOps`."""
    fields, vocabulary = memory.fields, memory.logits_MV.shape[1]
    count, kept, parts = memory.count, memory.children + RIVALS, triton.cdiv(vocabulary, PART)
    largest_MA, total_MA = torch.empty(2, count, parts, device=logits_MX.device)
    best_MAD = torch.empty(count, parts, kept, dtype=torch.int64, device=logits_MX.device)
    best = triton.next_power_of_2(parts * kept)
    sizes = {"WIDTH": memory.width, "RECORD": memory.record_NS.shape[1], "NOISY": noisy, "KEPT": kept, "PARTS": parts}
    sizes |= {"PARTS_PADDED": triton.next_power_of_2(parts), **EXACT}
    if noisy:
        _find_largest[count, parts](
            logits_MX, largest_MA, logits_MX.stride(0), V=vocabulary, PARTS=parts, PART=PART, num_warps=4, **EXACT
        )
    _find_best[count, parts](
        logits_MX, largest_MA, total_MA, best_MAD, fields["seed"], fields["temperature"], memory.end_NL, memory.level_N,
        logits_MX.stride(0), V=vocabulary, PART=PART, LEAVES=memory.leaves, PLACES=memory.end_NL.shape[1],
        num_warps=4, **sizes,
    )  # fmt: skip
    _merge[(count,)](
        largest_MA, total_MA, best_MAD, fields["temperature"], memory.level_N, memory.found_KNWX, M=count,
        KEPT_PADDED=triton.next_power_of_2(kept), BEST_PADDED=best, CHILDREN=memory.children, TOLD=TOLD,
        num_warps=max(1, best // 256), **sizes,
    )  # fmt: skip
