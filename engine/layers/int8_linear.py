"""Linear layers with int8 weights on a CPU, at the speed that half the bytes promise.

torchao decides the weights (values and scales) but multiplies them in eager mode six times slower than bfloat16 ones,
and torch's own weight-only kernel is slower than bfloat16 from the second row on. Here activations are turned into
int8 as well and multiplied by oneDNN in int32, with one scale for each row:

- *one plane*, for weights that want their activations quantised: ``x = scale * high``, by torchao's formula.
- *two planes*, for weights alone: ``x = scale * (128 * high + low)``, 15 bits, finer than the bfloat16 that holds the
  result. The planes are rows of one product, which costs little as long as reading the weights is what takes time.

A sum of integers is exact in any order, and the scales are applied element by element, so a row's result has the same
bits alone and among others, in every dtype and for any number of inputs.

Tensor legend: N tokens, I inputs, O outputs, P planes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

LOW_STEPS = 128
"""Steps of the low plane in one of the high plane; a power of two, so that splitting and joining do not round."""

HALF_RANGE = {1: 127.5, 2: 127.0 * LOW_STEPS}
"""By number of planes: the integer that the largest activation of a row becomes."""

SMALLEST = 1e-30
"""A row is scaled as if its largest activation were at least this."""

MAX_INPUTS = 1 << 16
"""Inputs up to which no sum of products leaves the range of int32."""


def has_kernel() -> bool:
    """Whether this CPU adds up products of int8 in int32: without VNNI, oneDNN's sums overflow int16."""
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return available and bool(torch.cpu._is_vnni_supported())


def planes_of(weight: Tensor) -> int:
    """In how many planes :class:`Int8Linear` would read activations for this weight; 0: it cannot multiply it."""
    if not _by_row(weight) or weight.device.type != "cpu" or weight.shape[-1] > MAX_INPUTS or not has_kernel():
        return 0
    quantised: Any = weight
    activations = quantised.act_quant_kwargs
    if activations is None:
        return 2
    from torchao.quantization import PerRow
    from torchao.quantization.quant_primitives import MappingType

    usual = activations.mapping_type == MappingType.SYMMETRIC and not activations.reduce_range
    return 1 if usual and isinstance(activations.granularity, PerRow) else 0


def weights_alone(weight: Tensor) -> bool:
    """Whether it is ``values * scale``, with a scale for each row, and wants activations as they are."""
    quantised: Any = weight
    return _by_row(weight) and quantised.act_quant_kwargs is None


def _by_row(weight: Tensor) -> bool:
    """Whether torchao made it int8 with a scale for each row and nothing else."""
    if not is_traceable_wrapper_subclass(weight):
        return False
    from torchao.quantization import Int8Tensor

    if not isinstance(weight, Int8Tensor):
        return False
    plain = weight.act_pre_scale is None and weight.act_quant_scale is None
    centred = weight.zero_point is None or not weight.zero_point.any()
    return bool(plain and centred and list(weight.block_size) == [1, weight.shape[-1]])


class Int8Linear(nn.Module):
    """``x @ weight.T + bias`` for a weight that torchao quantised; stands in for :class:`torch.nn.Linear`."""

    def __init__(self, values_OI: Tensor, scale_O: Tensor, bias_O: Tensor | None, planes: int) -> None:
        """The weight is ``values_OI * scale_O[:, None]``: int8 and float32. ``planes``: 1 or 2."""
        super().__init__()
        self.out_features, self.in_features = values_OI.shape
        self.planes = planes
        # Plain attributes, not parameters: an opaque layout can be neither moved, cast nor saved.
        self._packed = torch.ops.onednn.qlinear_prepack(values_OI.contiguous(), None)
        self._scale_O = scale_O.contiguous()
        self._zeros_O = torch.zeros(self.out_features, dtype=torch.int32)
        self._bias_O = bias_O
        self._multiply = torch.ops.onednn.qlinear_pointwise.default

    def forward(self, x: Tensor) -> Tensor:
        """``[..., I] -> [..., O]`` in the dtype of ``x``."""
        x_NI = x.reshape(-1, self.in_features)
        scale_N1 = x_NI.abs().amax(-1, keepdim=True).float().clamp_min_(SMALLEST).div_(HALF_RANGE[self.planes])
        steps_NI = torch.mul(x_NI, scale_N1.reciprocal())
        if self.planes == 1:
            product_NO = self._product(steps_NI.round_().clamp_max_(127))
        else:
            high_NI = (steps_NI * (1 / LOW_STEPS)).round_()
            low_NI = steps_NI.sub_(high_NI, alpha=LOW_STEPS).round_()
            low_NO, high_NO = self._product(torch.cat((low_NI, high_NI))).chunk(2)
            product_NO = low_NO.add_(high_NO, alpha=LOW_STEPS)
        result_NO = product_NO.mul_(scale_N1)
        if self._bias_O is not None:
            result_NO += self._bias_O
        return result_NO.to(x.dtype).view(*x.shape[:-1], self.out_features)

    def _product(self, steps_NI: Tensor) -> Tensor:
        """Whole numbers times the weight, in float32."""
        # oneDNN has fast kernels for unsigned activations only: 128 more, which it takes off again.
        unsigned_NI = steps_NI.to(torch.int8).view(torch.uint8).bitwise_xor_(128)
        weight = (self._packed, self._scale_O, self._zeros_O, None)
        product_NO: Tensor = self._multiply(unsigned_NI, 1.0, 128, *weight, 1.0, 0, torch.float32, "none", [], "")
        return product_NO
