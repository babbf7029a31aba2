"""The tensors of the cache: keys and values of every layer, one slot per token.

Decides how they are laid out in memory. Knows slots by number only; whose they are is :mod:`engine.cache.kv_cache`'s,
so that each rank of a tensor-parallel group can have a store of its own for the heads it computes, under one set of
books.

Tensor legend: H key/value heads, S slots, D key head size, E value head size, T tokens of one write.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.host.upload import upload

if TYPE_CHECKING:
    from engine.cache.move_kernels import SlotMover

BLOCK = 16
"""Slots of a block of the cache, where no kernel wants more."""

PAGE = 64
"""Slots of a block where a step is computed by rows: a page (:mod:`engine.attention.row_attention`)."""

Move = tuple[int, int]
"""From which slot to which."""

CLEAR = -1
"""As the source of a move: no slot, but zeros."""


class Moves:
    """Which slots have to be copied where before the next forward: ``(source, destination)``, or CLEAR as the source.

    The books of the cache change at once, its tensors once a step: moves that follow one another become moves that are
    made all at once.

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


class KVStore:
    """Room for ``slots`` tokens in every layer.

    Stored token by token, ``[S, H, D]``: a run of slots is then one matrix of keys in place, for all heads together as
    for each, and a block of slots is a page as paged kernels expect it.
    """

    def __init__(
        self,
        layers: int,
        slots: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        spare: int = 0,
        kernels: bool = False,
    ) -> None:
        """``spare``: slots behind the others that are nobody's, for what pads a step.

        ``kernels``: move by kernels of our own on CUDA, since they can be launched here.
        """
        self.slots = slots
        self.spare = spare
        self.dtype = dtype
        self.device = torch.device(device)
        self._keys: list[Tensor | None] = [None] * layers
        self._values: list[Tensor | None] = [None] * layers
        self._kernels = kernels and self.device.type == "cuda"
        self._mover: SlotMover | None = None

    def write(self, layer: int, slots_T: Tensor, key_1HTD: Tensor, value_1HTE: Tensor) -> tuple[Tensor, Tensor]:
        """Store one layer's keys and values; return all of that layer's, ``[S, H, D]`` and ``[S, H, E]``."""
        assert key_1HTD.dtype == value_1HTE.dtype == self.dtype, (
            f"layer {layer} writes {key_1HTD.dtype} to {self.dtype}"
        )
        keys_SHD, values_SHE = self.layer(layer, key_1HTD.shape[1], key_1HTD.shape[-1], value_1HTE.shape[-1])
        keys_SHD.index_copy_(0, slots_T, key_1HTD[0].transpose(0, 1))
        values_SHE.index_copy_(0, slots_T, value_1HTE[0].transpose(0, 1))
        return keys_SHD, values_SHE

    def layer(self, layer: int, heads: int, key_size: int, value_size: int) -> tuple[Tensor, Tensor]:
        """All keys and values of one layer, ``[S, H, D]`` and ``[S, H, E]``, to be read and written in place."""
        keys_SHD, values_SHE = self._keys[layer], self._values[layer]
        if keys_SHD is None or values_SHE is None:
            # Allocated at the first use because head counts and sizes differ between models and even between layers.
            keys_SHD, values_SHE = self._allocate(heads, key_size), self._allocate(heads, value_size)
            self._keys[layer], self._values[layer] = keys_SHD, values_SHE
        return keys_SHD, values_SHE

    def beside(self, size: int) -> Tensor:
        """Room for so many numbers more in every slot, ``[S, size]``, which move with it. Zeros at first."""
        beside_S1D = self._allocate(1, size)
        self._values.append(beside_S1D)
        return beside_S1D[:, 0]

    def move(self, moves: Sequence[Move]) -> None:
        """Copy slots to slots in every layer, all at once: a slot may be both a source and a destination.

        Where memory is too short for that, nothing is copied.
        """
        everything = [stored for stored in (*self._keys, *self._values) if stored is not None]
        if not moves or not everything:
            return
        if self._kernels:
            self._move_together(everything, moves)
        else:
            _move_one_by_one(everything, moves)

    def _move_together(self, everything: Sequence[Tensor], moves: Sequence[Move]) -> None:
        from engine.cache.move_kernels import SlotMover

        if self._mover is None or len(self._mover.stored) < len(everything):
            self._mover = SlotMover(everything)
        self._mover(moves)

    def _allocate(self, heads: int, size: int) -> Tensor:
        """Zeros that, on a CPU, take up no memory before something is written: the operating system's empty pages.

        Not left as they are: a masked slot still takes part in the matmul, and 0 * NaN would be NaN. For the same
        reason what a broken step wrote is cleared.
        """
        shape = self.slots + self.spare, heads, size
        if self.device.type != "cpu":
            return torch.zeros(shape, dtype=self.dtype, device=self.device)
        pages = mmap.mmap(-1, math.prod(shape) * self.dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(pages, dtype=self.dtype).view(shape)


def _move_one_by_one(everything: Sequence[Tensor], moves: Sequence[Move]) -> None:
    device = everything[0].device
    copies = [move for move in moves if move[0] != CLEAR]
    sources_M, destinations_M = (upload([move[end] for move in copies], device) for end in (0, 1))
    cleared_C = upload([slot for source, slot in moves if source == CLEAR], device)
    # Of one tensor at a time, and allocated before the first is written.
    kept = everything[0].new_empty(len(copies) * max(stored[0].numel() for stored in everything))
    for stored in everything:
        moved_MHD = kept[: len(copies) * stored[0].numel()].view(len(copies), *stored.shape[1:])
        torch.index_select(stored, 0, sources_M, out=moved_MHD)
        stored.index_copy_(0, destinations_M, moved_MHD)
        if len(cleared_C):
            stored.index_fill_(0, cleared_C, 0)
