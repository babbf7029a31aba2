"""Decides which windows of which tokens make a batch: a function of the seed and the step, so that training can resume.

Legend for tensor names: B sequences in a batch, T tokens in a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

TokenIds = npt.NDArray[np.unsignedinteger[Any]]
"""Token ids, one after another."""


class BatchSource(Protocol):
    """What a trainer learns from."""

    def at(self, step: int, sequences: int, length: int) -> Tensor:
        """tokens_BT1: the ``step``-th batch of ``sequences`` windows of ``length`` + 1 tokens, int64."""
        ...


class Batches:
    """Packed windows of a token stream, in an order that depends only on the seed and the step."""

    def __init__(self, ids: TokenIds, seed: int) -> None:
        self._ids = ids
        self._seed = seed

    def at(self, step: int, sequences: int, length: int) -> Tensor:
        """tokens_BT1: fewer sequences than asked for only where all tokens together make fewer windows."""
        windows = max((len(self._ids) - 1) // length - 1, 1)
        per_epoch = max(1, windows // sequences)
        epoch, place = divmod(step, per_epoch)
        generator = np.random.default_rng([self._seed, length, epoch])
        offset = int(generator.integers(max(1, min(length, len(self._ids) - windows * length))))
        chosen = generator.permutation(windows)[place * sequences : (place + 1) * sequences]
        rows = [self._ids[offset + w * length : offset + w * length + length + 1] for w in chosen]
        return torch.from_numpy(np.stack(rows).astype(np.int64))


class BatchesInTurn:
    """Batches of several sources, each as often as its weight says, spread evenly."""

    def __init__(self, *parts: tuple[BatchSource, int]) -> None:
        """Sources and whole weights; 0: never."""
        self._parts = parts
        turns = [
            ((place + 0.5) / weight, number, place)
            for number, (_, weight) in enumerate(parts)
            for place in range(weight)
        ]
        self._turns = [(number, place) for _, number, place in sorted(turns)]

    def at(self, step: int, sequences: int, length: int) -> Tensor:
        """tokens_BT1 of the source whose turn it is."""
        around, turn = divmod(step, len(self._turns))
        number, place = self._turns[turn]
        part, weight = self._parts[number]
        return part.at(around * weight + place, sequences, length)


def joined(rows: Sequence[Sequence[int]], separator: int | None) -> TokenIds:
    """All rows one after another, each behind a ``separator``, if there is one."""
    before = [] if separator is None else [separator]
    return np.asarray([token for row in rows for token in (*before, *row)], dtype=np.uint32)
