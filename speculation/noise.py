"""Counter-based Gumbel noise: the coin that target and drafter share.

Coupled sampling draws ``x = argmax_v (log p(v) + g(seed, position, v))`` (the Gumbel-max trick). Because ``g`` is a
pure function of its counters, two workers that never talk draw with the same noise, whatever the batch, the number
of draft tokens or the machine, and a token can be drawn again after a failure.

This module is the reference. ``engine.sampling.noise`` holds the torch version, which must equal it bit for bit in the
integers; the floats may differ in the last place of a logarithm.

The hash is two rounds of a 32-bit finaliser with full avalanche (constants found by hash-prospector, "lowbias32"),
keyed in both rounds by 64 bits derived from (stream, seed, position) with SplitMix64. 32-bit words keep the torch
version fast on vocabularies of 150,000 tokens.
"""

from __future__ import annotations

import math
from enum import IntEnum
from typing import NewType

from speculation.digest import GOLDEN_64 as GOLDEN_64
from speculation.digest import MASK64 as MASK64
from speculation.digest import SPLITMIX_1 as SPLITMIX_1
from speculation.digest import SPLITMIX_2 as SPLITMIX_2
from speculation.digest import splitmix64 as splitmix64

Key = NewType("Key", int)
"""64 bits: everything about a draw but the token."""

MASK32 = 0xFFFF_FFFF
GOLDEN_32 = 0x9E37_79B9
LOWBIAS_1 = 0x21F0_AAAD
LOWBIAS_2 = 0xD35A_2D97


class Stream(IntEnum):
    """Independent uses of a seed. Two uses that shared one would be correlated, which biases the output."""

    SAMPLE = 0
    """The target's own draw, shared with drafters under the coupled rule."""
    DRAFT = 1
    """A drafter's private draw from q (rejection rule)."""
    ACCEPT = 2
    """The acceptance coin (rejection rule)."""
    RESIDUAL = 3
    """The draw from the residual distribution (rejection rule)."""


def key(seed: int, position: int, stream: Stream = Stream.SAMPLE) -> Key:
    """Key of every draw at ``position`` (index in the full token sequence) for ``seed`` (any integer)."""
    return Key(splitmix64(splitmix64(splitmix64(seed & MASK64) ^ (position & MASK64)) ^ stream))


def _mix32(x: int) -> int:
    x ^= x >> 16
    x = (x * LOWBIAS_1) & MASK32
    x ^= x >> 15
    x = (x * LOWBIAS_2) & MASK32
    return x ^ (x >> 15)


def bits(k: Key, token: int) -> int:
    """32 uniform bits for one token id."""
    low, high = k & MASK32, k >> 32
    return _mix32(_mix32(((token * GOLDEN_32) + low) & MASK32) ^ high)


def uniform(word: int) -> float:
    """Map 32 bits to the open interval (0, 1); both ends are unreachable."""
    return (word + 0.5) * 2.0**-32


def gumbel(k: Key, token: int) -> float:
    """Standard Gumbel noise for one token: ``-log(E)`` with ``E = -log(1 - u)``.

    ``1 - u`` rather than ``u``: the largest noise, which decides the argmax, then comes from the smallest ``u``,
    where floating point (also float32) keeps all 32 bits.
    """
    return -math.log(-math.log1p(-uniform(bits(k, token))))
