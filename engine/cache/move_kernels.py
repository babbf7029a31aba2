"""Copying slots of the cache in all of its tensors at once: two launches for as many tensors as the scratch is for.

A slot may be both a source and a destination, so all sources are read into memory of their own first.

Only for use on CUDA: it imports Triton. With ``TRITON_INTERPRET=1`` set before the import it also runs on a CPU.

Tensor legend: N tensors, K of them at a time, M moves, C of them from a slot, W words of 4 bytes of the largest slot.
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

SCRATCH = 64 << 20
"""Bytes of sources that are kept at a time, unless those of one tensor are more."""

VARYING = ("first", "C", "M")
"""Arguments that differ from step to step: nothing is compiled anew for some of them."""


@triton.jit(do_not_specialize=VARYING)
def _read(address_N, words_N, moves_2M, kept_KCW, first, C, W: tl.constexpr, BLOCK: tl.constexpr):
    """A program is a move from a slot in a tensor."""
    m, k = tl.program_id(0), tl.program_id(1)
    words, source = tl.load(words_N + first + k), tl.load(moves_2M + m)
    stored = tl.load(address_N + first + k).to(tl.pointer_type(tl.int32)) + source * words
    kept = kept_KCW + (k.to(tl.int64) * C + m) * W
    for start in tl.static_range(0, W, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(kept + at, tl.load(stored + at, mask=at < words), mask=at < words)


@triton.jit(do_not_specialize=VARYING)
def _write(address_N, words_N, moves_2M, kept_KCW, first, C, M, W: tl.constexpr, BLOCK: tl.constexpr):
    """A program is a move in a tensor. Behind those from slots are those of zeros."""
    m, k = tl.program_id(0), tl.program_id(1)
    words, destination = tl.load(words_N + first + k), tl.load(moves_2M + M + m)
    stored = tl.load(address_N + first + k).to(tl.pointer_type(tl.int32)) + destination * words
    kept = kept_KCW + (k.to(tl.int64) * C + m) * W
    for start in tl.static_range(0, W, BLOCK):
        at = start + tl.arange(0, BLOCK)
        word = tl.load(kept + at, mask=(at < words) & (m < C), other=0)
        tl.store(stored + at, word, mask=at < words)


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
        """Copy from the first slot of each move to the second, all at once; from a negative one: zeros.

        Where memory is too short for that, nothing is copied.
        """
        moves = sorted(moves, key=lambda move: move[0] < 0)
        copies = sum(source >= 0 for source, _ in moves)
        moves_2M = upload([*(source for source, _ in moves), *(destination for _, destination in moves)], self._device)
        together = min(len(self.stored), max(1, SCRATCH // max(1, 4 * copies * self._widest)))
        kept_KCW = torch.empty(together, copies, self._widest, dtype=torch.int32, device=self._device)
        for first in range(0, len(self.stored), together):
            tensors = min(together, len(self.stored) - first)
            told = (self._address_N, self._words_N, moves_2M, kept_KCW, first, copies)
            if copies:  # CUDA refuses a grid of none
                _read[copies, tensors](*told, W=self._widest, BLOCK=BLOCK)
            _write[len(moves), tensors](*told, len(moves), W=self._widest, BLOCK=BLOCK)
