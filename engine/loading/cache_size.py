"""How many tokens the cache has room for, where nobody says: as many as the free memory allows.

The tensors of the cache take what they take from the start on a GPU; on a CPU only once they are used, so there a
share of what is available is enough, and several workers can do so on one machine. Workers that share a GPU are told
what part of it they have: what is free says nothing of what others are about to take.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch

from engine.host.memory import GIB, GpuMemory, available_bytes, gpu_memory
from engine.model import Model, ModelError, key_heads_of, layers_of

log = logging.getLogger(__name__)

CUDA_SHARE, CPU_SHARE = 0.9, 0.25
"""What the cache may have: of a GPU's memory together with the weights, the rest being for activations; of what is free
on a CPU."""

CONTEXTS = 4 * GIB
"""Of a GPU that is nobody else's: what the driver and CUDA hold beside torch, for this process and small ones."""
RELEASE_SECONDS, POLL_SECONDS = 30.0, 0.5
"""How long the memory of a process that has just died is waited for."""

WITHOUT_KEYS = ("linear_attention", "conv", "mlp", "moe")
"""What transformers calls layers whose state does not grow with the text, or that have none."""

MAX_CONTEXTS = 64
"""More of the longest sequences than that are never needed at once: a worker computes so many sessions in a step."""


def fitting_tokens(model: Model, parts: int = 1, copies: int = 1, *, gpu_share: float = 1.0, beside: int = 0) -> int:
    """Room for the memory left after loading ``model``. Raises :class:`ModelError` if no context fits.

    ``parts``: among how many ranks the heads are divided; ``copies``: how many ranks have all of them. Each has a GPU
    of its own, or ``gpu_share`` of one; on a CPU they share the memory. ``beside``: bytes that a token takes in another
    cache on the same device.
    """
    on_cuda = model.device.type == "cuda"
    allowed = allowed_bytes(model.device, gpu_share)
    a_token = (-(-token_bytes(model) // parts) if on_cuda else copies * token_bytes(model)) + beside
    fitting = allowed // a_token
    if fitting < model.context:
        needed = model.context * a_token / GIB
        of = (
            f"{CUDA_SHARE * gpu_share:.0%} of the GPU, less the weights"
            if on_cuda
            else f"{CPU_SHARE:.0%} of what is free"
        )
        raise ModelError(
            f"{model.name}: a cache for one context of {model.context} tokens needs {needed:.2f} GiB, it may "
            f"have {allowed / GIB:.2f} GiB ({of}); "
            f"set cache_tokens to serve shorter texts: {fitting} fit"
        )
    return min(fitting, MAX_CONTEXTS * model.context)


def allowed_bytes(device: torch.device, gpu_share: float, sleep: Callable[[float], None] = time.sleep) -> int:
    """What a cache may take, in bytes."""
    if device.type != "cuda":
        return int(CPU_SHARE * available_bytes())
    gpu = _released(device, gpu_share, sleep)
    # What is free counts too: there may be others who know nothing of shares.
    return max(0, int(min(CUDA_SHARE * gpu_share * gpu.total - gpu.own, CUDA_SHARE * gpu.free)))


def _released(device: torch.device, gpu_share: float, sleep: Callable[[float], None]) -> GpuMemory:
    """The memory of a GPU once others hold no more than is theirs: a process that died may hold it for seconds."""
    gpu = gpu_memory(device)
    theirs = (1 - gpu_share) * gpu.total + CONTEXTS
    for _ in range(round(RELEASE_SECONDS / POLL_SECONDS)):
        if gpu.total - gpu.free - gpu.own <= theirs:
            return gpu
        sleep(POLL_SECONDS)
        gpu = gpu_memory(device)
    held = (gpu.total - gpu.free - gpu.own) / GIB
    log.warning(
        "others hold %.1f GiB of the GPU and keep it; the cache gets what is left. Say by gpus that it is shared", held
    )
    return gpu


def token_bytes(model: Model) -> int:
    """What one token takes in the cache, in all layers, in bytes."""
    return bytes_a_token(model.config.get_text_config(decoder=True), model.dtype.itemsize)


def bytes_a_token(config: Any, itemsize: int) -> int:
    """The same of a text model's configuration, with ``itemsize`` bytes a number; 0 if it has no attention."""
    layers = layers_of(config)
    kinds = getattr(config, "layer_types", None) or [""] * len(layers)
    kept = (layer for layer, kind in zip(layers, kinds, strict=False) if kind not in WITHOUT_KEYS)
    return itemsize * sum(map(_numbers_a_token, kept))


def _numbers_a_token(layer: Any) -> int:
    heads: int = getattr(layer, "num_attention_heads", 0)
    if not heads:
        return 0
    if getattr(layer, "kv_lora_rank", None):  # the latent is spread out to all heads before it is cached
        return int(heads * (layer.qk_nope_head_dim + layer.qk_rope_head_dim + layer.v_head_dim))
    size = getattr(layer, "head_dim", None) or layer.hidden_size // heads
    # JetMoE repeats its keys for each expert of a token before they are cached.
    keys = heads if layer.model_type == "jetmoe" else key_heads_of(layer)
    return int(2 * size * keys)
