"""Which slots have to be copied where before the next forward.

The books of the cache change at once, its tensors once a step. Decides how moves that follow one another come to moves
that are made all at once; knows nothing about whose slots they are.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.cache.kv_store import Move


class Moves:
    """Moves that were noted and are still to be made, ``(source, destination)`` each; a source may be CLEAR.

    A move into a slot that was given away since does no harm: whoever has the slot now writes it after the moves, or
    has noted a move into it himself, which replaces the old one.
    """

    def __init__(self) -> None:
        self._sources: dict[int, int] = {}  # by destination; in terms of what the slots hold now, before any move

    def note(self, moves: Iterable[Move]) -> None:
        """Add moves that are made at the same time as each other, and after all noted before."""
        self._sources |= {destination: self._sources.get(source, source) for source, destination in moves}

    def take(self) -> list[Move]:
        """All of them, to be made at once; then none are left."""
        moves = [(source, destination) for destination, source in self._sources.items() if source != destination]
        self._sources = {}
        return moves
