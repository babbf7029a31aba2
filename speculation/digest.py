"""Chained 64-bit digests of token prefixes.

A digest names a place in a token sequence without sending the sequence: ``digest(prefix + [t])`` is computed from
``digest(prefix)`` and ``t``. It guards against mix-ups, not against an adversary.

Caches name prefixes of whole blocks by a digest of their own kind, chained block by block, which is much faster to
compute over a long prompt.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from hashlib import blake2b

MASK64 = 0xFFFF_FFFF_FFFF_FFFF
GOLDEN_64 = 0x9E37_79B9_7F4A_7C15
SPLITMIX_1 = 0xBF58_476D_1CE4_E5B9
SPLITMIX_2 = 0x94D0_49BB_1331_11EB

EMPTY = 0x5061_6365_6C69_6E65


def splitmix64(x: int) -> int:
    """One output of SplitMix64 (Steele, Lea, Flood 2014) for the state ``x``."""
    x = (x + GOLDEN_64) & MASK64
    x = ((x ^ (x >> 30)) * SPLITMIX_1) & MASK64
    x = ((x ^ (x >> 27)) * SPLITMIX_2) & MASK64
    return x ^ (x >> 31)


def extend(digest: int, token: int) -> int:
    """Digest of the prefix that ``digest`` names, followed by ``token``."""
    return splitmix64(digest ^ (((token + 1) * GOLDEN_64) & MASK64))


def of(tokens: Iterable[int]) -> int:
    """Digest of a whole prefix."""
    digest = EMPTY
    for token in tokens:
        digest = extend(digest, token)
    return digest


def empty_of(scope: str) -> int:
    """Digest, by blocks, of the empty prefix of a scope's own; :data:`EMPTY` for that of nobody in particular."""
    return int.from_bytes(blake2b(scope.encode(), digest_size=8).digest(), "little") if scope else EMPTY


def extend_block(digest: int, tokens: Sequence[int]) -> int:
    """Digest, by blocks, of the prefix that ``digest`` names, followed by a block of ``tokens`` (each below 2^32).

    The prefix must consist of whole blocks; that of none is :func:`empty_of` a scope. The same on every machine.
    """
    packed = struct.pack(f"<Q{len(tokens)}I", digest, *tokens)
    return int.from_bytes(blake2b(packed, digest_size=8).digest(), "little")
