"""How many tokens the cache has room for, where nobody says: as many as the free memory allows.

The tensors of the cache take what they take from the start on a GPU; on a CPU only once they are used, so there a
share of what is available is enough, and several workers can do so on one machine.
"""

from __future__ import annotations

from typing import Any

from engine.memory import GIB, free_bytes
from engine.model import Model, ModelError

CUDA_SHARE, CPU_SHARE = 0.9, 0.25
"""Of the free memory, what the cache may have. On a GPU the rest is for activations."""

MOST_CONTEXTS = 64
"""More of the longest sequences than that are never needed at once: a worker computes so many sessions in a step."""


def fitting_tokens(model: Model, parts: int = 1) -> int:
    """Room for the free memory left after loading ``model``. Raises :class:`ModelError` if no context fits.

    ``parts``: among how many ranks the heads are divided. Each has a GPU of its own; on a CPU they share the memory.
    """
    share = CUDA_SHARE if model.device.type == "cuda" else CPU_SHARE
    allowed = int(share * free_bytes(model.device))
    a_token = -(-token_bytes(model) // (parts if model.device.type == "cuda" else 1))
    fitting = allowed // a_token
    if fitting < model.context:
        needed = model.context * a_token / GIB
        raise ModelError(
            f"{model.name}: a cache for one context of {model.context} tokens needs {needed:.2f} GiB, it may "
            f"have {allowed / GIB:.2f} GiB ({share:.0%} of what is free); "
            f"set cache_tokens to serve shorter texts: {fitting} fit"
        )
    return min(fitting, MOST_CONTEXTS * model.context)


def token_bytes(model: Model) -> int:
    """What one token takes in the cache, in all layers, in bytes."""
    return bytes_a_token(model.config.get_text_config(decoder=True), model.dtype.itemsize)


def bytes_a_token(config: Any, itemsize: int) -> int:
    """The same of a text model's configuration, with ``itemsize`` bytes a number."""
    heads = config.num_attention_heads
    if getattr(config, "kv_lora_rank", None):  # the latent is spread out to all heads before it is cached
        sizes = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim)
    else:
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        sizes = 2 * size * (getattr(config, "num_key_value_heads", None) or heads)
    return int(config.num_hidden_layers * sizes * itemsize)
