"""The tensors of the cache: keys and values of every layer, one slot per token.

Decides how they are laid out in memory. Knows slots by number only; whose they are is :mod:`engine.kv_cache`'s, so that
each rank of a tensor-parallel group can have a store of its own for the heads it computes, under one set of books.

Tensor legend: H key/value heads, S slots, D key head size, E value head size, T tokens of one write.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Move = tuple[int, int]
"""From which slot to which."""


class KVStore:
    """Room for ``slots`` tokens in every layer.

    Stored per head, ``[1, H, S, D]``: that is the shape attention computes in, so a run of slots is read in place.
    """

    def __init__(self, layers: int, slots: int, *, dtype: torch.dtype, device: torch.device | str) -> None:
        self.slots = slots
        self.dtype = dtype
        self.device = torch.device(device)
        self._keys: list[Tensor | None] = [None] * layers
        self._values: list[Tensor | None] = [None] * layers

    def write(
        self, layer: int, slots_T: Tensor, first: int | None, key_1HTD: Tensor, value_1HTE: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Store one layer's keys and values; return all of that layer's, ``[1, H, S, D]`` and ``[1, H, S, E]``.

        ``first`` is the first slot when ``slots_T`` is one ascending run, which is copied faster than scattered ones.
        """
        keys_1HSD, values_1HSE = self._keys[layer], self._values[layer]
        if keys_1HSD is None or values_1HSE is None:
            keys_1HSD, values_1HSE = self._allocate(layer, key_1HTD), self._allocate(layer, value_1HTE)
            self._keys[layer], self._values[layer] = keys_1HSD, values_1HSE
        if first is not None:
            count = key_1HTD.shape[2]
            keys_1HSD.narrow(2, first, count).copy_(key_1HTD)
            values_1HSE.narrow(2, first, count).copy_(value_1HTE)
        else:
            keys_1HSD.index_copy_(2, slots_T, key_1HTD)
            values_1HSE.index_copy_(2, slots_T, value_1HTE)
        return keys_1HSD, values_1HSE

    def move(self, moves: Sequence[Move]) -> None:
        """Copy slots to slots in every layer, all at once: a slot may be both a source and a destination."""
        if not moves:
            return
        sources_M = torch.tensor([source for source, _ in moves], device=self.device)
        destinations_M = torch.tensor([destination for _, destination in moves], device=self.device)
        for stored in (*self._keys, *self._values):
            if stored is not None:
                stored.index_copy_(2, destinations_M, stored.index_select(2, sources_M))

    def _allocate(self, layer: int, like_1HTD: Tensor) -> Tensor:
        # Allocated at the first write because head counts and sizes differ between models and even between layers.
        # Zeros, not empty: a masked slot still takes part in the matmul, and 0 * NaN would be NaN.
        _, heads, _, size = like_1HTD.shape
        assert like_1HTD.dtype == self.dtype, f"layer {layer} writes {like_1HTD.dtype} into a {self.dtype} cache"
        return torch.zeros(1, heads, self.slots, size, dtype=self.dtype, device=self.device)
