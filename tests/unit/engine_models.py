"""Tiny random models that engine tests load, and what their stock forward says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.loader import Model, load

TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 256, "n_positions": 256}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": TINY,
    "qwen3": {**TINY, "head_dim": 16},
    "mistral": {**TINY, "sliding_window": 8},
    "gemma2": {**TINY, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8},
    "gpt2": {**GPT2, "bos_token_id": 1, "eos_token_id": 2},
    "gpt_oss": {**TINY, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "bloom": {"hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 256},
    "mamba": TINY,
    "bert": TINY,
}
"""What is special: mistral, gemma2 and gpt_oss slide, gemma2 caps scores, gpt_oss has sinks, gpt2 learns positions."""


def save_model(family: str, folder: Path, **changes: Any) -> str:
    """Write a random model of ``family``; return its folder."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**FAMILIES[family], **changes})
    module = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1:  # large enough that attention matters to the logits
                parameter.normal_(0.0, 0.15)
    module.save_pretrained(folder)
    return str(folder)


def load_tiny(family: str, folder: Path, dtype: str = "fp32", **changes: Any) -> Model:
    """A random model, loaded without the self-test, which would hide what a test looks for."""
    return load(save_model(family, folder, **changes), dtype=dtype, device="cpu", self_test=False)


class Stock:
    """The same model as transformers runs it."""

    def __init__(self, folder: str) -> None:
        self._module = AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32
        ).eval()

    @torch.inference_mode()
    def __call__(self, tokens: Sequence[int]) -> torch.Tensor:
        """Logits of every position, ``[T, V]``."""
        logits: torch.Tensor = self._module(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]
        return logits
