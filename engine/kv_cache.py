"""Which slot of the cache holds which token.

Decides which slot a token gets and when it is free again. A session's state is a committed prefix plus a tree of
pending nodes; committing a path through the tree re-points slots and copies nothing. Knows nothing about what the
tokens are, about masks, tensors or models.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from engine.block_ledger import BlockLedger
from engine.kv_store import KVStore

ROOT = -1
"""Parent index of a pending node that hangs from the end of the committed prefix."""


class CacheFull(Exception):
    """There are not enough free slots. Nothing was changed."""


class KVCache:
    """Slots for ``capacity`` tokens (rounded up to whole blocks), in every layer.

    The books only; the tensors are in ``store``.
    """

    def __init__(
        self, layers: int, capacity: int, *, block: int = 16, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        if capacity < 1 or block < 1:
            raise ValueError(f"capacity and block must be positive, got {capacity} and {block}")
        blocks = -(-capacity // block)
        self.capacity = blocks * block
        self.block = block
        self.ledger = BlockLedger(blocks)
        self.sequences: set[CachedSequence] = set()
        self.store = KVStore(layers, self.capacity, dtype=dtype, device=device)

    @property
    def free_tokens(self) -> int:
        """Tokens that fit into unowned blocks; a sequence also has the spare slots of its own blocks."""
        return self.ledger.free * self.block

    def sequence(self) -> CachedSequence:
        """A new, empty sequence. Whoever asked for it must :meth:`~CachedSequence.free` it."""
        sequence = CachedSequence(self)
        self.sequences.add(sequence)
        return sequence

    def check(self) -> None:
        """Assert that every slot is free or owned exactly once."""
        owner = bytearray(self.capacity)
        for sequence in self.sequences:
            for slot in sequence.owned_slots():
                assert not owner[slot], f"slot {slot} is owned twice"
                owner[slot] = 1
        for block in range(self.capacity // self.block):
            owned = sum(owner[block * self.block : (block + 1) * self.block])
            expected = 0 if block in self.ledger else self.block
            assert owned == expected, f"block {block}: {owned} slots owned, expected {expected}"
        free = sum(block in self.ledger for block in range(self.capacity // self.block))
        assert free == self.ledger.free, f"ledger counts {self.ledger.free} free blocks, there are {free}"


class CachedSequence:
    """The cached state of one session: a committed prefix and a tree of pending nodes hanging from its end.

    Pending nodes are numbered 0, 1, ... in the order they were appended, so a parent comes before its children.
    """

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self.parents: list[int] = []
        """Parent of every pending node, or ROOT."""
        self.depths: list[int] = []
        """Distance of every pending node from the prefix's end: its position is ``length + depth``."""
        self.pending_slots: list[int] = []
        self.ascending = 0
        """How many committed tokens, from the first on, have slots that go up one by one."""
        self._slots = array("q")  # of the committed tokens
        self._blocks: list[int] = []  # in the order they were taken
        self._spare: list[int] = []  # sorted slots of own blocks that hold nothing

    @property
    def length(self) -> int:
        """Number of committed tokens."""
        return len(self._slots)

    @property
    def pending(self) -> int:
        """Number of pending nodes."""
        return len(self.parents)

    @property
    def is_chain(self) -> bool:
        """Whether every pending node is the only child of the one before it."""
        return not self.parents or self.depths[-1] == len(self.depths) - 1

    def slots(self, start: int = 0) -> Tensor:
        """Slots of the committed tokens from position ``start`` on, then of all pending nodes."""
        pending_P = torch.tensor(self.pending_slots, dtype=torch.int64)
        if start >= len(self._slots):
            return pending_P
        # Read in place, then copied by cat: an array cannot grow while a tensor shares its memory.
        return torch.cat((torch.frombuffer(self._slots, dtype=torch.int64, offset=8 * start), pending_P))

    def committed_slots(self, start: int, stop: int | None = None) -> list[int]:
        """Slots of the committed tokens from position ``start`` on, up to ``stop``."""
        return self._slots[start:stop].tolist()

    def blocks_needed(self, count: int) -> int:
        """Blocks to be taken from the ledger before ``count`` more tokens fit."""
        return max(0, -(-(count - len(self._spare)) // self._cache.block))

    def can_append(self, count: int) -> bool:
        """Whether ``count`` more pending nodes fit now."""
        return self.blocks_needed(count) <= self._cache.ledger.free

    def append(self, parents: Sequence[int]) -> list[int]:
        """Add one pending node per entry and return their slots. Raises :class:`CacheFull`."""
        depths = list(self.depths)
        for index, parent in enumerate(parents, start=self.pending):
            if not ROOT <= parent < index:
                raise ValueError(f"pending node {index} cannot have parent {parent}; a parent must precede its child")
            depths.append(0 if parent == ROOT else depths[parent] + 1)
        assert self in self._cache.sequences, "append() to a sequence that was freed"
        slots = self._reserve(len(parents))
        self.parents += parents
        self.depths = depths
        self.pending_slots += slots
        return slots

    def retract(self, count: int) -> None:
        """Drop the ``count`` nodes appended last."""
        keep = self.pending - count
        assert keep >= 0, f"cannot retract {count} of {self.pending} pending nodes"
        dropped = self.pending_slots[keep:]
        del self.parents[keep:], self.depths[keep:], self.pending_slots[keep:]
        self._release(dropped)

    def advance(self, path: Sequence[int]) -> dict[int, int]:
        """Commit ``path``: pending nodes, root first, each the child of the one before.

        Descendants of its last node (with an empty path: everything) stay pending; the rest is freed. Returns the new
        index of each survivor by its old one. Costs time in the number of pending nodes, not in the prefix.
        """
        last = ROOT
        for node in path:
            if not 0 <= node < self.pending or self.parents[node] != last:
                raise ValueError(f"pending node {node} is not a child of {last}; cannot commit {list(path)}")
            last = node
        renumbered: dict[int, int] = {}
        for node, parent in enumerate(self.parents):
            if node > last and (parent == last or parent in renumbered):
                renumbered[node] = len(renumbered)
        kept = renumbered.keys() | path
        freed = [slot for node, slot in enumerate(self.pending_slots) if node not in kept]
        for node in path:
            self._commit_slot(self.pending_slots[node])
        self.parents = [renumbered.get(self.parents[node], ROOT) for node in renumbered]
        self.depths = [self.depths[node] - len(path) for node in renumbered]
        self.pending_slots = [self.pending_slots[node] for node in renumbered]
        self._release(freed)
        return renumbered

    def rollback(self) -> None:
        """Drop all pending nodes."""
        self.retract(self.pending)

    def truncate(self, length: int) -> None:
        """Shorten the committed prefix to ``length`` tokens. Nothing may be pending."""
        if self.pending:
            raise ValueError(f"truncate() with {self.pending} pending nodes; roll back or advance first")
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate {self.length} tokens to {length}")
        freed = self._slots[length:].tolist()
        del self._slots[length:]
        self.ascending = min(self.ascending, length)
        self._release(freed)

    def free(self) -> None:
        """Give everything back. Harmless when done twice."""
        # All at once: slot by slot would take quadratic time in a long sequence.
        for block in self._blocks:
            self._cache.ledger.give(block)
        for holdings in (self.parents, self.depths, self.pending_slots, self._slots, self._blocks, self._spare):
            del holdings[:]
        self.ascending = 0
        self._cache.sequences.discard(self)

    def owned_slots(self) -> Iterable[int]:
        """Every slot of this sequence's blocks, whether it holds a token or is spare (for the cache's check)."""
        yield from self._slots
        yield from self.pending_slots
        yield from self._spare

    def _commit_slot(self, slot: int) -> None:
        if self.ascending == self.length and (not self._slots or slot == self._slots[-1] + 1):
            self.ascending += 1
        self._slots.append(slot)

    def _reserve(self, count: int) -> list[int]:
        needed = self.blocks_needed(count)
        if needed > self._cache.ledger.free:
            raise CacheFull(f"{count} tokens need {needed} free blocks, there are {self._cache.ledger.free}")
        block = self._cache.block
        for _ in range(needed):
            taken = self._cache.ledger.take(after=self._blocks[-1] if self._blocks else None)
            self._blocks.append(taken)
            self._spare += range(taken * block, (taken + 1) * block)
        if needed:
            self._spare.sort()
        # Lowest first: holes left by refused branches are filled before new ground is broken.
        slots = self._spare[:count]
        del self._spare[:count]
        return slots

    def _release(self, slots: list[int]) -> None:
        if not slots:
            return
        self._spare += slots
        self._spare.sort()
        block = self._cache.block
        for owned in {slot // block for slot in slots}:
            start = bisect_left(self._spare, owned * block)
            if len(self._spare) >= start + block and self._spare[start + block - 1] == (owned + 1) * block - 1:
                del self._spare[start : start + block]
                self._blocks.remove(owned)
                self._cache.ledger.give(owned)
