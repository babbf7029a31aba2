"""Chained 64-bit digests of token prefixes.

A digest names a place in a token sequence without sending the sequence: ``digest(prefix + [t])`` is computed from
``digest(prefix)`` and ``t``. It guards against mix-ups, not against an adversary.
"""

from __future__ import annotations

from collections.abc import Iterable

from speculation.noise import GOLDEN_64, MASK64, splitmix64

EMPTY = 0x5061_6365_6C69_6E65
"""Digest of the empty prefix."""


def extend(digest: int, token: int) -> int:
    """Digest of the prefix that ``digest`` names, followed by ``token``."""
    return splitmix64(digest ^ (((token + 1) * GOLDEN_64) & MASK64))


def of(tokens: Iterable[int]) -> int:
    """Digest of a whole prefix."""
    digest = EMPTY
    for token in tokens:
        digest = extend(digest, token)
    return digest
