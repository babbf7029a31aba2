"""Where the tokens of one sequence are in the cache: all that attention needs to know of it.

A plain value without books, so that it can be sent to the other ranks of a tensor-parallel group. Decides nothing; who
changes it is :mod:`engine.cache.kv_cache`.
"""

from __future__ import annotations

from array import array
from collections.abc import MutableSequence
from dataclasses import dataclass, field
from typing import Any

ROOT = -1
"""Parent index of a pending node that hangs from the end of the committed prefix."""


@dataclass(eq=False)
class SequenceState:
    """A committed prefix and a tree of pending nodes hanging from its end.

    The committed token at position p is at home: in slot ``blocks[p // block] * block + p % block``. Pending nodes are
    numbered 0, 1, ... with a parent before its children, and lie in any slots.
    """

    block: int
    """Slots of a block."""
    blocks: MutableSequence[int] = field(default_factory=lambda: array("i"))
    """The block table. An array is copied into a step's layout at once."""
    length: int = 0
    """Number of committed tokens."""
    parents: list[int] = field(default_factory=list)
    """Parent of every pending node, or ROOT."""
    depths: list[int] = field(default_factory=list)
    """Distance of every pending node from the prefix's end: its position is ``first + length + depth``."""
    pending_slots: list[int] = field(default_factory=list)
    first: int = 0
    """Position of its first token in the text."""
    _branches: list[tuple[int, ...]] = field(default_factory=list, init=False)  # as far as they are known

    @property
    def pending(self) -> int:
        """Number of pending nodes."""
        return len(self.parents)

    @property
    def is_chain(self) -> bool:
        """Whether every pending node is the only child of the one before it."""
        return not self.parents or self.depths[-1] == len(self.depths) - 1

    @property
    def branches(self) -> list[tuple[int, ...]]:
        """Of every pending node the slots of those on its path, itself included, from the first not at home on.

        Found once for each node; whoever moves nodes forgets them.
        """
        found = self._branches
        if len(found) == len(self.parents):
            return found
        for node in range(len(found), len(self.parents)):
            parent, slot = self.parents[node], self.pending_slots[node]
            above = () if parent == ROOT else found[parent]
            at_home = not above and slot == self.home(self.length + self.depths[node])
            found.append(() if at_home else (*above, slot))
        return found

    def home(self, position: int) -> int:
        """The slot of the token at ``position`` once it is committed. There must be a block for it."""
        return self.blocks[position // self.block] * self.block + position % self.block

    def lineage(self, node: int) -> tuple[int, list[int]]:
        """How many tokens up to and with a pending node, from the first on, are at home; the slots of those behind."""
        path: list[int] = []
        while node != ROOT:
            path.append(node)
            node = self.parents[node]
        home = self.length
        while path and self.pending_slots[path[-1]] == self.home(home):
            path.pop()
            home += 1
        return home, [self.pending_slots[each] for each in reversed(path)]

    def committed_slots(self, start: int) -> list[int]:
        """Slots of the committed tokens from position ``start`` on."""
        return [self.home(position) for position in range(start, self.length)]

    def state(self) -> SequenceState:
        """A copy that stays as it is now, and can be pickled."""
        tree = self.parents[:], self.depths[:], self.pending_slots[:]
        return SequenceState(self.block, self.blocks[:], self.length, *tree, self.first)

    def __getstate__(self) -> dict[str, Any]:
        """With the block table as bytes, which need nothing but this class to be read again."""
        return {**vars(self), "blocks": array("i", self.blocks).tobytes()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, blocks=array("i", state["blocks"]))
