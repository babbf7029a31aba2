"""How what was decided on the host gets to the device without anyone waiting for it.

``torch.tensor(values, device="cuda")`` waits until the device has done everything asked of it so far. A copy from
pinned memory does not; torch keeps that memory until the copy is made.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def upload(values: Sequence[int] | Sequence[float], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """``values`` as a tensor on ``device``."""
    return to_device(torch.tensor(values, dtype=dtype), device)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor``, which is on the CPU or there already, on ``device``."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
