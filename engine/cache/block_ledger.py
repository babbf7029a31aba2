"""Who holds which block of the cache, and which one is given out next.

A block is empty, held by one or more sequences, or idle: known by its tokens and held by nobody. Idle blocks count as
free; they are given out when there are no empty ones, the least recently used first. Among the empty ones, decides
such that a sequence's blocks usually lie side by side: attention can then read its keys in place instead of gathering
a copy. Knows nothing about layers or tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from engine.cache.known_blocks import KnownBlocks

EMPTY, USED = b"\x01", b"\x00"


class BlockLedger:
    """Reference counts of ``blocks`` blocks, all empty at first."""

    def __init__(self, blocks: int) -> None:
        self.known = KnownBlocks()
        self._holders = [0] * blocks
        self._empty = bytearray(EMPTY) * blocks
        self._empties = blocks
        self._idle: OrderedDict[int, None] = OrderedDict()  # in the order in which they were given back

    @property
    def free(self) -> int:
        """How many blocks can be taken."""
        return self._empties + len(self._idle)

    def holders(self, block: int) -> int:
        """How many sequences hold a block."""
        return self._holders[block]

    def is_empty(self, block: int) -> bool:
        """Whether nobody holds a block, nor can find it."""
        return bool(self._empty[block])

    def is_own(self, block: int) -> bool:
        """Whether only one sequence holds a block, and no other one can find it."""
        return self._holders[block] == 1 and block not in self.known

    def take(self, after: int | None) -> int:
        """Take one free block, best the one that follows block ``after``. There must be one."""
        if not self._empties:
            assert self._idle, "take() without a free block"
            self.forget(next(iter(self._idle)))
        if after is not None and after + 1 < len(self._empty) and self._empty[after + 1]:
            block = after + 1
        else:
            block = self._open_ground()
        self._empty[block] = 0
        self._empties -= 1
        self._holders[block] = 1
        return block

    def hold(self, block: int) -> None:
        """Share a known block: hold it as well."""
        assert block in self.known, f"block {block} is not known, so it cannot be shared"
        self._idle.pop(block, None)
        self._holders[block] += 1

    def give(self, block: int) -> None:
        """Hold a block no longer. Of a chain that nobody holds then, give the last first: it is to give way first."""
        assert self._holders[block], f"block {block} is free already"
        self._holders[block] -= 1
        if self._holders[block]:
            return
        if block in self.known:
            self._idle[block] = None
        else:
            self._clear(block)

    def forget(self, block: int) -> None:
        """Make a known block, and what is known below it, unknown; those who hold them keep them."""
        for forgotten in self.known.forget(block):
            if forgotten in self._idle:
                del self._idle[forgotten]
                self._clear(forgotten)

    def validate(self, held: Mapping[int, int]) -> None:
        """Assert that every block is held as often as ``held`` says, and else empty or idle."""
        for block, holders in enumerate(self._holders):
            expected = held.get(block, 0)
            assert holders == expected, f"block {block} counts {holders} holders, it has {expected}"
            states = (bool(holders), block in self._idle, bool(self._empty[block]))
            assert sum(states) == 1, f"block {block} is (held, idle, empty): {states}"
            assert block in self.known or block not in self._idle, f"block {block} is idle but not known"
            assert block not in self.known or not self._empty[block], f"block {block} is known but empty"
        empties = sum(self._empty)
        assert self._empties == empties, f"{self._empties} empty blocks are counted, there are {empties}"
        for known in self.known:
            above = known.above
            assert above and (self.known.holds(above) or above is self.known.root(above.scope)), "a block hangs nowhere"

    def _clear(self, block: int) -> None:
        self._empty[block] = 1
        self._empties += 1

    def _open_ground(self) -> int:
        """Where a sequence can grow longest without meeting another one.

        The middle of the widest empty run, so that the sequence on its left keeps room to grow as well; its start
        when nobody is on the left.
        """
        best_start, best_length = 0, 0
        start = self._empty.find(EMPTY)
        while start >= 0:
            end = self._empty.find(USED, start)
            if end < 0:
                end = len(self._empty)
            if end - start > best_length:
                best_start, best_length = start, end - start
            start = self._empty.find(EMPTY, end)
        return best_start if best_start == 0 else best_start + best_length // 2
