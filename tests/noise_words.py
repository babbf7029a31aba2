"""The words that noise in torch is made of, to be compared with the reference."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.sampling.noise import _halves, _words
from speculation.noise import MASK32


def noise_bits(keys: Sequence[int] | Tensor, vocabulary: int, device: torch.device | str) -> Tensor:
    """``speculation.noise.bits(key, token)`` for every key and token, int64 ``[N, V]``."""
    low_N1, high_N1 = _halves(keys, torch.device(device))
    words_NV = _words(low_N1, high_N1, torch.arange(vocabulary, device=device, dtype=torch.int32))
    return words_NV.to(torch.int64) & MASK32
