"""Tiny random models that engine tests load, and what their stock forward says."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.attention.row_attention import RowAttention
from engine.cache.kv_cache import KVCache
from engine.interface import Chunk, StepEngine
from engine.loading.loader import load
from engine.model import Model
from engine.step import Engine

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
    "jetmoe": {**TINY, "kv_channels": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma4_text": {
        **TINY,
        "head_dim": 16,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "sliding_window": 8,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 256,
    },
    "deepseek_v3": {
        **TINY,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
    },
    "bloom": {"hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 256},
    "mamba": TINY,
    "bert": TINY,
}
"""What is special: mistral, gemma2 and gpt_oss slide, gemma2 caps scores, gpt_oss has sinks, gpt2 learns positions,
gemma4_text has other heads from layer to layer."""


def save_model(family: str, folder: Path, **changes: Any) -> str:
    """Write a random model of ``family``; return its folder. Families not in FAMILIES start from TINY."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**FAMILIES.get(family, TINY), **changes})
    module = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1:  # large enough that attention matters to the logits
                parameter.normal_(0.0, 0.15)
    module.save_pretrained(folder)
    return str(folder)


def as_hub_id(folder: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The same model as ``Org/Tiny``, fetched from a hub into ``cache``."""
    commit, files = "0" * 40, cache / "models--Org--Tiny"
    (files / "refs").mkdir(parents=True)
    (files / "refs" / "main").write_text(commit)
    (files / "snapshots").mkdir()
    (files / "snapshots" / commit).symlink_to(folder)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    return "Org/Tiny"


def load_tiny(family: str, folder: Path, dtype: str = "fp32", *, by_rows: bool = False, **changes: Any) -> Model:
    """A random model, loaded without the self-test, which would hide what a test looks for."""
    return load(save_model(family, folder, **changes), dtype=dtype, device="cpu", self_test=False, by_rows=by_rows)


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

    @torch.inference_mode()
    def generate(self, prompt: Sequence[int], count: int) -> list[int]:
        """What its own ``generate`` writes, greedily, behind ``prompt``; end-of-sequence tokens do not end it."""
        tokens = torch.tensor([list(prompt)])
        self._module.generation_config.eos_token_id = None
        out = self._module.generate(
            tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=count, pad_token_id=0
        )
        return out[0, len(prompt) :].tolist()


def random_tokens(count: int, seed: int) -> list[int]:
    """Token ids that mean nothing special."""
    rng = random.Random(seed)
    return [rng.randrange(3, 250) for _ in range(count)]


def slot_engine(model: Model, capacity: int = 512) -> Engine:
    """Over a slot cache, with small blocks where attention takes them."""
    if type(model.attention) is RowAttention:
        model = replace(model, attention=RowAttention(page=8))
    return Engine(model, KVCache(model.layers, capacity, block=model.block, dtype=model.dtype, device=model.device))


def decode_plainly(engine: StepEngine, prompt: Sequence[int], count: int, part: int = 7) -> list[int]:
    """``count`` greedy tokens behind ``prompt``, which is fed ``part`` tokens at a time."""
    sequence = engine.cache.sequence()
    text = list(prompt)
    while len(text) < len(prompt) + count:
        fed = text[sequence.length :][:part]
        ends = sequence.length + len(fed) == len(text)
        logits_RV = engine.run([Chunk(sequence, fed, rows=[len(fed) - 1] if ends else [])])
        sequence.advance(range(len(fed)))
        text += logits_RV.argmax(-1).tolist()
    sequence.free()
    return text[len(prompt) :]


def decode_with_trees(
    engine: Engine, prompt: Sequence[int], count: int, hints: Sequence[int], part: int = 7
) -> tuple[list[int], torch.Tensor]:
    """``count`` or more greedy tokens and their logits ``[T, V]``, beside another sequence.

    Each step verifies the next three of ``hints``, the text hoped for, with a wrong sibling before each.
    """
    sequence, other = engine.cache.sequence(), engine.cache.sequence()
    for start in range(0, len(prompt) - 1, part):
        fed = prompt[start : min(start + part, len(prompt) - 1)]
        engine.run([Chunk(other, prompt[:5]), Chunk(sequence, fed)])
        sequence.advance(range(len(fed)))
        other.advance(range(5))
    text: list[int] = []
    rows: list[torch.Tensor] = []
    while len(text) < count:
        tokens, parents, last = [(*prompt, *text)[-1]], [-1], 0
        for hint in hints[len(text) : len(text) + 3]:
            tokens += [(hint + 1) % 250, hint]
            parents += [last, last]
            last = len(tokens) - 1
        logits_RV = engine.run([Chunk(sequence, tokens, parents, range(len(tokens)))])
        path = [0]
        while True:
            rows.append(logits_RV[path[-1]])
            text.append(int(rows[-1].argmax()))
            children = [i for i, parent in enumerate(parents) if parent == path[-1] and tokens[i] == text[-1]]
            if not children:
                break
            path += children
        sequence.advance(path)
        sequence.rollback()
    return text, torch.stack(rows)
