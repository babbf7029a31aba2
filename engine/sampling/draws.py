"""Plain draws as a part of a step: what :func:`.sampling.drawn` gives for rows without filters or shaping.

Such a draw needs of its request a temperature and a key, which travel with the rows of the step. So it is recorded
with the forward, and a step ends with a download of two numbers a row. Computes with the same operations as
:mod:`engine.sampling.sampling`, so the choice is the same.

Tensor legend: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.sampling.noise import gumbel
from engine.sampling.sampling import Draw
from speculation.messages import Sampling
from speculation.noise import GOLDEN_64, MASK64, Stream

DRAWN_ROWS = 64
"""Rows of the largest steps that draw: noise for more would take memory that few steps need."""

TINY = torch.finfo(torch.float32).tiny

DRAW_FIELDS = 3
"""Numbers of a row: temperature as the bits of a float32, 0 for greedy; low and high word of the key."""


def is_plain(sampling: Sampling) -> bool:
    """Whether a draw takes no more than a temperature."""
    return sampling.greedy or (sampling.top_k <= 0 and sampling.top_p >= 1.0 and sampling.min_p <= 0.0)


def draw_numbers(draws: Sequence[Draw]) -> NDArray[np.int32]:
    """What rows need to be drawn, int32 ``[3, R]``: zeros for greedy ones, if all are."""
    numbers = np.zeros((DRAW_FIELDS, len(draws)), np.int32)
    temperatures = [draw.sampling.temperature for draw in draws]
    if not any(temperatures):
        return numbers
    # Above 0 they stay so, however small.
    numbers[0] = np.array([t and max(t, TINY) for t in temperatures], np.float32).view(np.int32)
    keys = _keys([draw.sampling.seed & MASK64 for draw in draws], [draw.position for draw in draws])
    numbers[1:] = keys.view(np.int32).reshape(-1, 2).T
    return numbers


def drawn_in_step(logits_RV: Tensor, numbers_3R: Tensor, *, noise: bool) -> Tensor:
    """The token drawn on each row, and whether all its logits are numbers, int32 ``[R, 2]``.

    ``logits_RV`` are float32; ``noise``: whether any row may be drawn at a temperature above 0.
    """
    largest_R1 = logits_RV.amax(-1, keepdim=True)
    if noise:
        temperature_R1 = numbers_3R[0].view(torch.float32)[:, None]
        greedy_R1 = temperature_R1 == 0.0
        keys_R = numbers_3R[1:].t().contiguous().view(torch.int64)[:, 0]
        scores_RV = (logits_RV - largest_R1).div_(temperature_R1.masked_fill(greedy_R1, 1.0))
        noise_RV = gumbel(keys_R, logits_RV.shape[-1], logits_RV.dtype, logits_RV.device)
        scores_RV += noise_RV.masked_fill_(greedy_R1, 0.0)
    else:
        scores_RV = logits_RV
    return torch.cat((scores_RV.argmax(-1, keepdim=True), largest_R1.isfinite()), -1).int()


def _keys(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.uint64]:
    """:func:`speculation.noise.key` of the target's draws."""
    mixed = _splitmix64(np.array(seeds, np.uint64)) ^ np.array(positions, np.uint64)
    return _splitmix64(_splitmix64(mixed) ^ np.uint64(Stream.SAMPLE))


def _splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """:func:`speculation.noise.splitmix64`; unsigned arrays wrap."""
    x = x + np.uint64(GOLDEN_64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return x ^ (x >> np.uint64(31))
