"""Whether a model can be split over so many ranks here. Asked before any rank is started."""

from __future__ import annotations

import math

import torch

from engine.loading.loader import read_config
from engine.model import ModelError

SPLIT_BY = {
    "num_key_value_heads": "key/value heads",
    "num_attention_heads": "attention heads",
    "intermediate_size": "inner units of a layer (intermediate_size)",
    "moe_intermediate_size": "inner units of an expert (moe_intermediate_size)",
}
"""What ranks divide among themselves: the name in configurations, and in words."""


def check_split(path: str, ranks: int) -> None:
    """Whether the model can be split; raises :class:`ModelError`, which names the possible sizes."""
    config = read_config(path)
    text = config.get_text_config(decoder=True)
    if not text.base_model_tp_plan:
        raise ModelError(
            f"{path}: model type {config.model_type!r} cannot be split over ranks, transformers has no plan for it; "
            "use tensor_parallel_size 1"
        )
    sizes = {name: size for name in SPLIT_BY if isinstance(size := getattr(text, name, None), int)}
    for name, size in sizes.items():
        if size % ranks:
            common = math.gcd(*sizes.values())
            possible = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
            units = f"{size} {SPLIT_BY[name]}"
            raise ModelError(f"{path}: tensor_parallel_size {ranks} does not divide its {units}; possible: {possible}")


def check_devices(device: torch.device, ranks: int, *, own_gpus: bool) -> None:
    """Whether every rank has a device; raises :class:`ModelError`. ``own_gpus``: those seen are rank 0's alone."""
    if device.type == "cuda":
        if device.index is not None and device.index != torch.cuda.current_device():
            raise ModelError(
                f"device {str(device)!r} is one GPU, tensor_parallel_size {ranks} uses the first {ranks}; "
                "give cuda, and choose GPUs with CUDA_VISIBLE_DEVICES"
            )
        if not own_gpus and torch.cuda.device_count() < ranks:
            raise ModelError(f"tensor_parallel_size {ranks} needs {ranks} GPUs, there are {torch.cuda.device_count()}")
    elif torch.cuda.is_available():
        raise ModelError(
            f"tensor_parallel_size {ranks} uses the GPUs where there are some; "
            f"for device {device.type!r} hide them: set CUDA_VISIBLE_DEVICES to nothing"
        )
