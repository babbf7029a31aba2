"""The torch version of :mod:`speculation.noise`, which it equals bit for bit in the integers.

Decides how the words are computed quickly; what they are is decided there. One row per key, one column per token.

Tensor legend: N keys (rows), V vocabulary, B one block of the vocabulary.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.host.upload import upload
from speculation.noise import GOLDEN_32, GOLDEN_64, LOWBIAS_1, LOWBIAS_2, SPLITMIX_1, SPLITMIX_2, Stream, key

BLOCK = 1 << 15
"""Tokens hashed at once on a CPU: some twenty passes over a block that stays in the processor's own cache.

Elsewhere all are, since there every pass costs its launch.
"""

POSITIONS = 8
"""Positions of one seed hashed together, if their words fit into a block."""

KEPT_BLOCKS = 128
"""Such groups of positions kept by a thread: at 4 bytes a word some 80 MB for a vocabulary of 150,000."""


Words = TypeVar("Words", Tensor, NDArray[np.int64])


def gumbel(keys: Sequence[int] | Tensor, vocabulary: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """``speculation.noise.gumbel(key, token)`` for every key and token, ``[N, V]``; always finite.

    Keys are 64-bit; in a tensor (int64) the top bit is the sign.
    """
    low_N1, high_N1 = _halves(keys, torch.device(device))
    noise_NV = torch.empty(len(low_N1), vocabulary, dtype=dtype, device=device)
    tokens_V = torch.arange(vocabulary, device=device, dtype=torch.int32)
    block = BLOCK if noise_NV.device.type == "cpu" else vocabulary
    for start in range(0, vocabulary, block):
        words_NB = _words(low_N1, high_N1, tokens_V[start : start + block])
        _to_gumbel(words_NB, noise_NV[:, start : start + block])
    return noise_NV


def keys_at(seeds_N: Words, positions_N: Words) -> Words:
    """``speculation.noise.key(seed, position)``, as int64 whose top bit is the sign.

    ``seeds_N``: :func:`splitmix64` of each seed, likewise.
    """
    return splitmix64(splitmix64(seeds_N ^ positions_N) ^ int(Stream.SAMPLE))


def splitmix64(words_N: Words) -> Words:
    """:func:`speculation.noise.splitmix64` in wrapping int64 arithmetic."""
    words_N = words_N + signed(GOLDEN_64, 64)
    words_N = (words_N ^ _shifted(words_N, 30)) * signed(SPLITMIX_1, 64)
    words_N = (words_N ^ _shifted(words_N, 27)) * signed(SPLITMIX_2, 64)
    return words_N ^ _shifted(words_N, 31)


class RecentNoise(threading.local):
    """The noise of draws at positions drawn before, or about to be; each thread has its own.

    Hashing is some thirty small operations, however few tokens. So with a small vocabulary it is done for several
    positions at once, and kept: the branches of a tree share positions, and the next step looks at the same ones.
    """

    def __init__(self) -> None:
        self._blocks: dict[tuple[int, int, int, torch.dtype, torch.device], Tensor] = {}

    def rows(
        self, draws: Sequence[tuple[int, int]], vocabulary: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """:func:`gumbel` for the draw of every (seed, position), ``[N, V]``."""
        together = max(1, min(POSITIONS, BLOCK // vocabulary))
        wanted = [(seed, position // together, vocabulary, dtype, device) for seed, position in draws]
        missing = [block for block in dict.fromkeys(wanted) if block not in self._blocks]
        if missing:
            keys = [key(seed, first * together + i) for seed, first, *_ in missing for i in range(together)]
            hashed_NV = gumbel(keys, vocabulary, dtype, device)
            # Not copied: the oldest go first, so what was hashed at once is soon let go of at once.
            self._blocks |= zip(missing, torch.split(hashed_NV, together), strict=True)
        noise_NV = torch.stack(
            [self._blocks[block][position % together] for block, (_, position) in zip(wanted, draws, strict=True)]
        )
        while len(self._blocks) > KEPT_BLOCKS:
            del self._blocks[next(iter(self._blocks))]
        return noise_NV


def _halves(keys: Sequence[int] | Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Low and high 32 bits of every key as int32 ``[N, 1]``."""
    keys_N = keys.to(device) if isinstance(keys, Tensor) else upload([signed(each, 64) for each in keys], device)
    # The high half's arithmetic shift and both narrowing casts keep exactly the 32 bits wanted.
    return keys_N.to(torch.int32)[:, None], (keys_N >> 32).to(torch.int32)[:, None]


def _shifted(words_N: Words, bits: int) -> Words:
    return (words_N >> bits) & ((1 << (64 - bits)) - 1)


def signed(value: int, width: int) -> int:
    """The signed integer with the same low ``width`` bits."""
    value &= (1 << width) - 1
    return value - (1 << width) if value >> (width - 1) else value


def _words(low_N1: Tensor, high_N1: Tensor, tokens_B: Tensor) -> Tensor:
    """The hash in wrapping int32 arithmetic: half the memory traffic of int64, and no masking after products."""
    words_NB = tokens_B * signed(GOLDEN_32, 32) + low_N1
    _mix(words_NB)
    words_NB ^= high_N1
    _mix(words_NB)
    return words_NB


def _mix(words: Tensor) -> None:
    _xor_shifted(words, 16)
    words *= signed(LOWBIAS_1, 32)
    _xor_shifted(words, 15)
    words *= signed(LOWBIAS_2, 32)
    _xor_shifted(words, 15)


def _xor_shifted(words: Tensor, bits: int) -> None:
    # int32 shifts in copies of the sign; the mask makes it the reference's unsigned shift.
    words ^= (words >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def _to_gumbel(words_NB: Tensor, out_NB: Tensor) -> None:
    """``-log(-log1p(-u))`` with ``u = (word + 0.5) / 2**32``, written to ``out_NB``."""
    # Signed to unsigned: negative words are 2**32 too low. Small words, whose noise decides draws, stay exact.
    out_NB.copy_(words_NB)
    out_NB += 0.5
    out_NB += (words_NB < 0).to(out_NB.dtype).mul_(2.0**32)
    out_NB *= 2.0**-32
    # Just below 1 the product rounds to 1 in float32, whose noise would be -inf: a lone survivor could lose its draw.
    out_NB.clamp_(max=1.0 - torch.finfo(out_NB.dtype).eps / 2)
    out_NB.neg_().log1p_().neg_().log_().neg_()
