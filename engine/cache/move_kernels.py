"""Copying slots of the cache in all of its tensors at once: two launches, however many layers there are.

A slot may be both a source and a destination, so all sources are read into memory of their own first.

Only for use on CUDA: it imports Triton. With ``TRITON_INTERPRET=1`` set before the import it also runs on a CPU.

Tensor legend: N tensors, M moves, W words of 4 bytes of the largest slot.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.host.upload import upload

BLOCK = 512
"""Words that a program has in hand."""


@triton.jit
def _read(address_N, words_N, moves_2M, kept_NMW, M, W: tl.constexpr, BLOCK: tl.constexpr):
    """A program is a move in a tensor. Sources below 0 are read as zeros."""
    n, m = tl.program_id(0), tl.program_id(1)
    words, source = tl.load(words_N + n), tl.load(moves_2M + m)
    stored = tl.load(address_N + n).to(tl.pointer_type(tl.int32)) + source * words
    kept = kept_NMW + (n.to(tl.int64) * M + m) * W
    for first in tl.static_range(0, W, BLOCK):
        at = first + tl.arange(0, BLOCK)
        word = tl.load(stored + at, mask=(at < words) & (source >= 0), other=0)
        tl.store(kept + at, word, mask=at < words)


@triton.jit
def _write(address_N, words_N, moves_2M, kept_NMW, M, W: tl.constexpr, BLOCK: tl.constexpr):
    n, m = tl.program_id(0), tl.program_id(1)
    words, destination = tl.load(words_N + n), tl.load(moves_2M + M + m)
    stored = tl.load(address_N + n).to(tl.pointer_type(tl.int32)) + destination * words
    kept = kept_NMW + (n.to(tl.int64) * M + m) * W
    for first in tl.static_range(0, W, BLOCK):
        at = first + tl.arange(0, BLOCK)
        tl.store(stored + at, tl.load(kept + at, mask=at < words), mask=at < words)


class SlotMover:
    """Moves slots of some tensors, ``[S, ...]`` each and contiguous, which it keeps alive."""

    def __init__(self, stored: Sequence[Tensor]) -> None:
        """Slots are of whole words of 4 bytes."""
        self.stored = tuple(stored)
        self._device = device = stored[0].device
        words = [tensor[0].nbytes // 4 for tensor in stored]
        assert all(tensor[0].nbytes % 4 == 0 for tensor in stored), "a slot of an odd size"
        self._address_N = upload([tensor.data_ptr() for tensor in stored], device)
        self._words_N = upload(words, device)
        self._widest = max(words)

    def __call__(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy from the first slot of each move to the second, all at once; from a negative one: zeros."""
        moves_2M = upload([*(source for source, _ in moves), *(destination for _, destination in moves)], self._device)
        grid = (len(self.stored), len(moves))
        kept_NMW = torch.empty(*grid, self._widest, dtype=torch.int32, device=self._device)
        for kernel in (_read, _write):
            kernel[grid](self._address_N, self._words_N, moves_2M, kept_NMW, len(moves), W=self._widest, BLOCK=BLOCK)
