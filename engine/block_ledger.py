"""Which blocks of the cache are free.

Decides which block a sequence gets next, so that a sequence's blocks usually lie side by side: attention can then read
its keys in place instead of gathering a copy. Knows nothing about tokens, layers or tensors.

Sharing prefixes between sequences belongs here: give a full block a hash chained over its tokens and a reference
count, look a prompt's hashes up before taking fresh blocks, and evict unreferenced hashed blocks last.
"""

from __future__ import annotations

FREE, OWNED = b"\x01", b"\x00"


class BlockLedger:
    """Free blocks out of ``blocks``, each owned by at most one sequence."""

    def __init__(self, blocks: int) -> None:
        self._free = bytearray(FREE) * blocks
        self.free = blocks

    def __contains__(self, block: int) -> bool:
        """Whether the block is free."""
        return bool(self._free[block])

    def take(self, after: int | None) -> int:
        """Take one block, best the one that follows block ``after``. There must be a free one."""
        assert self.free, "take() without a free block"
        if after is not None and after + 1 < len(self._free) and self._free[after + 1]:
            block = after + 1
        else:
            block = self._open_ground()
        self._free[block] = 0
        self.free -= 1
        return block

    def give(self, block: int) -> None:
        """Return a block."""
        assert not self._free[block], f"block {block} is free already"
        self._free[block] = 1
        self.free += 1

    def _open_ground(self) -> int:
        """Where a sequence can grow longest without meeting another one.

        The middle of the widest free run, so that the sequence on its left keeps room to grow as well; its start
        when nobody is on the left.
        """
        best_start, best_length = 0, 0
        start = self._free.find(FREE)
        while start >= 0:
            end = self._free.find(OWNED, start)
            if end < 0:
                end = len(self._free)
            if end - start > best_length:
                best_start, best_length = start, end - start
            start = self._free.find(FREE, end)
        return best_start if best_start == 0 else best_start + best_length // 2
