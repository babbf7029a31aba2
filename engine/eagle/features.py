"""Features on their way: the numbers that a target's EAGLE head makes of hidden states, as bytes and back.

Decides how they are rounded (:class:`speculation.messages.FeatureFormat`), and what a receiver takes for numbers.

Tensor legend: N tokens, D hidden size of the head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from speculation.messages import FeatureFormat, Features

FP8 = torch.float8_e4m3fn
MAX_FP8 = 448.0
MAX_FEATURE = 1e6
"""Larger ones are none that a head makes."""


def packed(states_ND: Tensor, wanted: FeatureFormat) -> tuple[bytes, bytes]:
    """The numbers of ``[N, D]`` in that format, and its scales if it has any."""
    if wanted is FeatureFormat.BF16:
        return _bytes(states_ND.to(torch.bfloat16)), b""
    states_ND = states_ND.float()
    scales_N1 = states_ND.abs().amax(-1, keepdim=True).clamp_min(1e-12) / MAX_FP8
    return _bytes((states_ND / scales_N1).to(FP8)), _bytes(scales_N1)


def unpacked(features: Features, width: int, dtype: torch.dtype) -> Tensor:
    """``[N, D]`` on the CPU. Raises ValueError if they are no features of a head of this ``width``."""
    if features.width != width:
        raise ValueError(f"features of {features.width} numbers a token, for a head of {width}")
    own = torch.bfloat16 if features.format is FeatureFormat.BF16 else FP8
    states_ND = torch.frombuffer(bytearray(features.values), dtype=own).view(-1, width).float()
    if features.scales:
        states_ND *= torch.frombuffer(bytearray(features.scales), dtype=torch.float32)[:, None]
    if not bool((states_ND.abs() <= MAX_FEATURE).all()):  # NaN is not
        raise ValueError("features that are no numbers, or beyond all bounds")
    return states_ND.to(dtype)


def _bytes(numbers: Tensor) -> bytes:
    return numbers.cpu().contiguous().view(torch.uint8).numpy().tobytes()
