"""What a router remembers of the prompts it sent to a target: digests of their beginnings, by whole blocks.

A target keeps what it computed for as long as it has room, so a prompt that begins alike is best sent there again.
This is a guess of what it still has, never more: what was really found comes with the first verification.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from speculation.digest import empty_of, extend_block
from speculation.messages import Token

BLOCK = 64
"""Tokens; a multiple of the blocks that engines share."""
MAX_BLOCKS = 512
"""Blocks of one prompt that are looked at: beyond, sharing the beginning decides."""
REMEMBERED_BLOCKS = 16_384
"""Blocks remembered of one target; the least recently used go first."""


def blocks_of(tokens: Sequence[Token], scope: str = "") -> tuple[int, ...]:
    """Digests of the first block, the first two, and so on, as sessions of one cache scope share them."""
    digest, found = empty_of(scope), list[int]()
    for end in range(BLOCK, min(len(tokens), BLOCK * MAX_BLOCKS) + 1, BLOCK):
        digest = extend_block(digest, tokens[end - BLOCK : end])
        found.append(digest)
    return tuple(found)


class Prefixes:
    """Of one target."""

    def __init__(self) -> None:
        """Nothing was sent yet."""
        self._known: OrderedDict[int, None] = OrderedDict()

    def note(self, blocks: Sequence[int]) -> None:
        """A prompt of these blocks is sent."""
        for block in reversed(blocks):  # so that a beginning outlives what follows it
            self._known[block] = None
            self._known.move_to_end(block)
        while len(self._known) > REMEMBERED_BLOCKS:
            self._known.popitem(last=False)

    def known_tokens(self, blocks: Sequence[int]) -> int:
        """How many tokens of a prompt were sent before."""
        count = 0
        for block in blocks:
            if block not in self._known:
                break
            count += 1
        return count * BLOCK

    def clear(self) -> None:
        """The target has lost its cache."""
        self._known.clear()
