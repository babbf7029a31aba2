"""How weights are made smaller when a model is loaded, and where that is possible.

torchao decides the numbers; it is imported only where something is quantised. Decides which layers are quantised:
every linear layer but the last, which maps to the vocabulary, and those that transformers itself splits over ranks. The
last one's errors reach the logits as they are: with the bundled target and int8-dynamic, quantising it as well raises
the divergence from the original by 45 percent. Knows nothing about how quantised layers are multiplied fast: on a CPU
that is :mod:`engine.layers.int8_linear`'s business, on a GPU :mod:`engine.layers.int8_kernels`'.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers.distributed.utils import is_dtensor

from engine.layers.int8_linear import has_kernel
from engine.model import ModelError
from engine.settings import NONE

if TYPE_CHECKING:
    from torchao.core.config import AOBaseConfig

CHOICES = (NONE, "int8", "int8-dynamic", "fp8")
"""int8: weights alone. int8-dynamic: activations as well, by the row; on CPUs. fp8: both, on GPUs."""

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Number formats that torchao quantises."""

FP8_CAPABILITY = (8, 9)
"""First CUDA compute capability that multiplies fp8."""


def check(quantization: str, dtype: torch.dtype, device: torch.device) -> None:
    """Raise :class:`ModelError` for what cannot be had with this number format on this device."""
    if quantization not in CHOICES:
        raise ModelError(f"quantization {quantization!r} is unknown; choose one of {', '.join(CHOICES)}")
    if quantization != NONE and dtype not in DTYPES:
        raise ModelError(f"quantization {quantization} needs a dtype of at most 32 bits, got {_short(dtype)}")
    if quantization == "fp8":
        if device.type != "cuda":
            raise ModelError(f"quantization fp8 needs a GPU, got device {device.type}; int8 runs on CPUs too")
        if (capability := torch.cuda.get_device_capability(device)) < FP8_CAPABILITY:
            found, needed = (".".join(map(str, version)) for version in (capability, FP8_CAPABILITY))
            raise ModelError(f"quantization fp8 needs a GPU of compute capability {needed}, this has {found}; use int8")
        if dtype != torch.bfloat16:
            raise ModelError(f"quantization fp8 needs dtype bfloat16, got {_short(dtype)}")
    if quantization == "int8-dynamic" and device.type != "cpu":
        raise ModelError(f"quantization int8-dynamic is for CPUs, got device {device.type}; use int8 or fp8")
    if quantization.startswith("int8") and device.type == "cpu" and not has_kernel():
        raise ModelError(f"quantization {quantization} needs a CPU with VNNI instructions, this has none; use none")


def quantise(module: Any, quantization: str) -> int:
    """Quantise the linear layers of a transformers model in place, one after the other; return how many.

    ``quantization`` must have passed :func:`check`.
    """
    from torchao.quantization import quantize_

    last = module.get_output_embeddings()
    kept = set() if last is None else set(last.modules())  # a layer that is split over ranks has another inside
    plain = (layer for layer in module.modules() if type(layer) is nn.Linear and not is_dtensor(layer.weight))
    chosen = {id(layer) for layer in plain if layer not in kept}
    quantize_(module, _config(quantization), filter_fn=lambda layer, _: id(layer) in chosen)
    return len(chosen)


def weight_bytes(module: nn.Module) -> int:
    """Memory of the parameters, in bytes; shared ones count once."""
    return sum(_bytes(parameter) for parameter in module.parameters())


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _bytes(tensor: Tensor) -> int:
    if not is_traceable_wrapper_subclass(tensor):
        return tensor.nbytes
    parts = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
    return sum(_bytes(part) for part in parts if isinstance(part, Tensor))  # one split over ranks names them, too


def _config(quantization: str) -> AOBaseConfig:
    from torchao.quantization import (
        Float8DynamicActivationFloat8WeightConfig,
        Int8DynamicActivationInt8WeightConfig,
        Int8WeightOnlyConfig,
        PerRow,
    )

    # Settings of torch's compiler belong to whoever compiles.
    if quantization == "int8":
        return Int8WeightOnlyConfig(set_inductor_config=False)
    if quantization == "int8-dynamic":
        return Int8DynamicActivationInt8WeightConfig(set_inductor_config=False)
    return Float8DynamicActivationFloat8WeightConfig(granularity=PerRow(), set_inductor_config=False)
