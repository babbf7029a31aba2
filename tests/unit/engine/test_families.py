"""Model families, as tiny random models: which are served, how, and that their text is transformers' own.

Six of them run with every `make test`; `make families` (`pytest -m families`) runs all, and some on ranks. Needs no
network: the models are built from configurations. The windows are shorter than the prompts, so sliding layers slide.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.loading.loader import load
from engine.model import CannotSpeculate, ModelError
from engine.settings import EngineSettings
from engine.stateful import StatefulCache, StatefulEngine
from engine.step import Engine
from tests.ranks import needs_no_gpu, on_ranks
from tests.structure import ROOT
from tests.unit.engine.engine_models import (
    Stock,
    decode_plainly,
    decode_with_trees,
    random_tokens,
    save_model,
    slot_engine,
)

PROMPT = random_tokens(30, seed=1)
WINDOW = 8
NEW_TOKENS = 20
"""Together six windows."""
VARIETY = 4
"""Different tokens that a text must have to prove anything."""


@dataclass(frozen=True)
class Family:
    """What becomes of a model with this configuration."""

    changes: dict[str, Any] = field(default_factory=dict)
    """To the tiny configuration of tests/unit/engine/engine_models.py."""
    plain: str = ""
    """If it is served without speculation: why."""
    whole_prompts: bool = False
    """Then also: whether prompts must be fed in one go, because transformers gets them wrong in parts."""
    refused: str = ""
    """If it is refused: why."""


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED_EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
HEAD = {"head_dim": 16}
SLIDES = {"sliding_window": WINDOW}
GEMMA = {**HEAD, "query_pre_attn_scalar": 16}
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}
OLD = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16}
LINEAR = {
    **HEAD,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
STATE = "it keeps a recurrent state, which cannot roll back"
DIFFERS = "nor can it be served without: .* through its own cache its logits differ"
NEVER_CALLS = "its layers must each call the registered attention once, layer 0 called it 0 times"

FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "qwen3": Family(HEAD),
    "gemma2": Family({**GEMMA, **SLIDES, **CAPS}),
    "gpt_oss": Family({**HEAD, **LOCAL_EXPERTS, **SLIDES}),
    "mistral": Family(SLIDES),
    "mixtral": Family(LOCAL_EXPERTS),
    "afmoe": Family({**HEAD, **EXPERTS, **SLIDES, "num_local_experts": 4, "num_dense_layers": 1}),
    "apertus": Family(),
    "arcee": Family(),
    "biogpt": Family(),
    "bitnet": Family(),
    "cohere": Family(),
    "cohere2": Family({**SLIDES, "sliding_window_pattern": 2, "num_hidden_layers": 4}),
    "deepseek_v2": Family({**LATENT, **ROUTED_EXPERTS, **HEAD, "topk_method": "greedy"}),
    "deepseek_v3": Family({**LATENT, **ROUTED_EXPERTS, "head_dim": 8}),
    "dots1": Family({**HEAD, **ROUTED_EXPERTS}),
    "ernie4_5": Family(),
    "ernie4_5_moe": Family({"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 48, "moe_layer_start_index": 1}),
    "exaone4": Family({**SLIDES, "sliding_window_pattern": 2, "num_hidden_layers": 4}),
    "flex_olmo": Family(EXPERTS),
    "gemma": Family(HEAD),
    "gemma3_text": Family({**GEMMA, **SLIDES, "num_hidden_layers": 7}),
    "gemma3n_text": Family(
        {
            **HEAD,
            **SLIDES,
            "num_hidden_layers": 5,
            "num_kv_shared_layers": 2,
            "layer_types": [f"{kind}_attention" for kind in ("sliding", "full", "sliding", "sliding", "full")],
            "intermediate_size": [96] * 5,
            "activation_sparsity_pattern": [0.0] * 5,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 256,
            "laurel_rank": 8,
            "altup_num_inputs": 2,
        }
    ),
    "gemma4_text": Family(
        {**HEAD, **SLIDES, "global_head_dim": 32, "num_hidden_layers": 6, "num_kv_shared_layers": 2}
        | {"num_global_key_value_heads": 1, "attention_k_eq_v": True}
        | {"layer_types": ["sliding_attention", "full_attention"] * 3}
        | {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 256}
    ),
    "glm": Family(HEAD),
    "glm4": Family(HEAD),
    "glm4_moe": Family({**HEAD, **ROUTED_EXPERTS}),
    "glm4_moe_lite": Family({**LATENT, **ROUTED_EXPERTS}),
    "gpt2": Family(),
    "gpt_bigcode": Family(OLD),
    "gpt_neox": Family(),
    "granite": Family(),
    "granitemoe": Family(LOCAL_EXPERTS),
    "granitemoeshared": Family({**LOCAL_EXPERTS, "shared_intermediate_size": 48}),
    "helium": Family(HEAD),
    "hunyuan_v1_dense": Family(HEAD),
    "hunyuan_v1_moe": Family({**HEAD, "num_experts": 4, "moe_topk": 2}),
    "internlm3": Family(),
    "jais2": Family(),
    "jetmoe": Family({**LOCAL_EXPERTS, "kv_channels": 16}),
    "llama4_text": Family(
        {**HEAD, "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 96}
        | {"attention_chunk_size": 64, "num_hidden_layers": 4}
    ),
    "minimax_m2": Family({**HEAD, **LOCAL_EXPERTS}),
    "ministral3": Family(),
    "nanochat": Family(),
    "nemotron": Family(),
    "olmo": Family(),
    "olmo2": Family(),
    "olmo3": Family({**SLIDES, "num_hidden_layers": 4}),
    "olmoe": Family(EXPERTS),
    "opt": Family({"ffn_dim": 96, "word_embed_proj_dim": 64, "do_layer_norm_before": True}),
    "persimmon": Family(),
    "phi": Family(),
    "phi3": Family(SLIDES),
    "phimoe": Family(LOCAL_EXPERTS),
    "qwen2": Family(),
    "qwen2_moe": Family({**EXPERTS, "shared_expert_intermediate_size": 48}),
    "qwen3_moe": Family({**HEAD, **EXPERTS}),
    "seed_oss": Family(HEAD),
    "smollm3": Family(),
    "stablelm": Family(),
    "starcoder2": Family(SLIDES),
    "vaultgemma": Family({**GEMMA, **SLIDES, **CAPS}),
    "youtu": Family(LATENT),
    # A recurrent state.
    "bamba": Family({**MAMBA2, "attn_layer_indices": [1]}, plain=STATE),
    "deepseek_v4": Family(plain=STATE),
    "falcon_h1": Family({**MAMBA2, **HEAD, "mamba_d_ssm": 128}, plain=STATE),
    "falcon_mamba": Family({"state_size": 8}, plain=STATE, whole_prompts=True),
    "granitemoehybrid": Family(
        {**MAMBA2, **LOCAL_EXPERTS, "shared_intermediate_size": 48, "layer_types": ["mamba", "attention", "mamba"]},
        plain=STATE,
    ),
    "jamba": Family(
        {"num_experts": 2, "num_experts_per_tok": 1, "attn_layer_period": 2, "attn_layer_offset": 1}
        | {"mamba_d_state": 8, "use_mamba_kernels": False},
        plain=STATE,
        whole_prompts=True,
    ),
    "mamba": Family({"state_size": 8}, plain=STATE, whole_prompts=True),
    "mamba2": Family(
        {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "expand": 2, "chunk_size": 16}, plain=STATE
    ),
    "nemotron_h": Family(
        {**HEAD, "hybrid_override_pattern": "M*M-", "num_hidden_layers": 4, "mamba_num_heads": 8}
        | {"mamba_head_dim": 16, "n_groups": 1, "ssm_state_size": 16},
        plain=STATE,
    ),
    "olmo_hybrid": Family(plain=STATE),
    "qwen3_5_moe_text": Family({**LINEAR, **EXPERTS, "shared_expert_intermediate_size": 48}, plain=STATE),
    "qwen3_5_text": Family(LINEAR, plain=STATE),
    "qwen3_next": Family({**LINEAR, **EXPERTS, "shared_expert_intermediate_size": 48}, plain=STATE),
    "rwkv": Family({"context_length": 256, "attention_hidden_size": 64}, plain=STATE),
    "zamba2": Family(
        {"mamba_d_state": 16, "mamba_ngroups": 1, "n_mamba_heads": 8, "mamba_headdim": 16, "num_mem_blocks": 1}
        | {"layers_block_type": ["mamba", "hybrid", "mamba"], "hybrid_layer_ids": [1], "num_key_value_heads": 4}
        | {"chunk_size": 16, "attention_hidden_size": 128, "attention_head_dim": 32},
        plain=STATE,
    ),
    "zaya": Family(plain=STATE),
    # No recurrent state, but layers or attention of their own.
    "bloom": Family({"hidden_size": 64, "n_layer": 2, "n_head": 4}, plain=NEVER_CALLS),
    "codegen": Family({**OLD, "rotary_dim": 8}, plain=NEVER_CALLS),
    "diffllama": Family(plain="layer 0 called it 2 times"),
    "doge": Family(plain="the model adds its own bias to the attention scores"),
    "falcon": Family({"num_kv_heads": 2, "new_decoder_architecture": True, "alibi": False}, plain=NEVER_CALLS),
    "gptj": Family({**OLD, "rotary_dim": 8}, plain=NEVER_CALLS),
    "gpt_neo": Family(
        {"num_layers": 2, "num_hidden_layers": 2, "num_heads": 4, "window_size": WINDOW}
        | {"attention_types": [[["global", "local"], 1]]},
        plain=NEVER_CALLS,
    ),
    "lfm2": Family({"layer_types": ["conv", "full_attention", "conv"], "block_ff_dim": 96}, plain=NEVER_CALLS),
    "lfm2_moe": Family(
        {**EXPERTS, "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1}, plain=NEVER_CALLS
    ),
    "lfm3": Family({"layer_types": ["conv", "full_attention", "conv"]}, plain=NEVER_CALLS),
    "minimax": Family({**HEAD, **LOCAL_EXPERTS, "block_size": 16}, plain="layer 1 called it 0 times"),
    "minimax_m3_vl_text": Family(
        {**HEAD, **LOCAL_EXPERTS, "rotary_dim": 8, "dense_intermediate_size": 96, "shared_intermediate_size": 48}
        | {"index_n_heads": 2, "index_head_dim": 16}
        | {"layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"]},
        plain="attends to a choice of its keys only",
    ),
    "mpt": Family({"d_model": 64, "n_heads": 4, "n_layers": 3, "max_seq_len": 256}, plain=NEVER_CALLS),
    "xglm": Family({"d_model": 64, "ffn_dim": 96, "num_layers": 3, "attention_heads": 4}, plain=NEVER_CALLS),
    # Not causal, or without a cache for each sequence.
    "bert": Family(refused=DIFFERS),
    "recurrent_gemma": Family(
        {**HEAD, "lru_width": 64, "attention_window_size": WINDOW, "num_key_value_heads": 1}
        | {"block_types": ["recurrent", "recurrent", "attention"]},
        refused="its own cache mixes sequences",
    ),
    "openai-gpt": Family(OLD, refused="it takes none of past_key_values, cache_params, state"),
}
EVERY_RUN = ("llama", "qwen3", "gemma2", "gpt_oss", "mistral", "mixtral")
"""What is special: mistral, gemma2 and gpt_oss slide, gemma2 caps scores, gpt_oss has sinks, mixtral has experts."""
ON_RANKS = ("llama4_text", "mixtral", "phi3", "deepseek_v3", "glm4_moe", "qwen3_moe")
"""What is special: llama4_text looks at its embedding's weight; in all transformers splits some layers itself."""


@pytest.mark.parametrize("name", EVERY_RUN)
def test_families_of_every_run(name: str, tmp_path: Path) -> None:
    check(name, FAMILIES[name], tmp_path)


@pytest.mark.families
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(name: str, tmp_path: Path) -> None:
    check(name, FAMILIES[name], tmp_path)


def test_the_page_about_the_engine_counts_the_families() -> None:
    refused = sum(bool(family.refused) for family in FAMILIES.values())
    plain = sum(bool(family.plain) for family in FAMILIES.values())
    speculate = len(FAMILIES) - plain - refused
    counted = (
        f"{len(FAMILIES)} configurations as tiny random models: {speculate} speculate, {plain} are served without, "
    )
    page = (ROOT / "docs" / "engine.md").read_text(encoding="utf-8")
    assert f"{counted}{refused} are refused" in " ".join(page.split())


@pytest.mark.families
@needs_no_gpu
@pytest.mark.parametrize("name", ON_RANKS)
def test_families_on_two_ranks(name: str, tmp_path: Path) -> None:
    path = save_model(name, tmp_path, tie_word_embeddings=False, **FAMILIES[name].changes)
    stock = Stock(path)
    expected = stock.generate(PROMPT, NEW_TOKENS)
    with on_ranks(EngineSettings(path, dtype="fp32", device="cpu", cache_tokens=512)) as engine:
        check_text(engine, stock, expected)


def check(name: str, family: Family, folder: Path) -> None:
    path = save_model(name, folder, tie_word_embeddings=False, **family.changes)
    if family.refused:
        with pytest.raises(ModelError, match=family.refused):
            load(path, dtype="fp32", device="cpu", without_speculation=True)
        return
    stock = Stock(path)
    expected = stock.generate(PROMPT, NEW_TOKENS)
    assert len(set(expected)) >= VARIETY, "this text proves nothing"
    if family.plain:
        with pytest.raises(CannotSpeculate, match=family.plain):
            load(path, dtype="fp32", device="cpu")
        model = load(path, dtype="fp32", device="cpu", without_speculation=True)
        assert family.plain in model.no_speculation
        assert model.whole_prompts is family.whole_prompts
        engine = StatefulEngine(model, StatefulCache(512, dtype=model.dtype, device=model.device))
        assert decode_plainly(engine, PROMPT, NEW_TOKENS) == expected
        return
    model = load(path, dtype="fp32", device="cpu", without_speculation=True)
    assert not model.no_speculation
    check_text(slot_engine(model), stock, expected)


def check_text(engine: Engine, stock: Stock, expected: list[int]) -> None:
    text, logits_TV = decode_with_trees(engine, PROMPT, NEW_TOKENS, expected)
    assert text[:NEW_TOKENS] == expected
    stock_TV = stock([*PROMPT, *text])[len(PROMPT) - 1 : -1]
    torch.testing.assert_close(logits_TV, stock_TV, atol=2e-5 * float(stock_TV.abs().max()), rtol=1e-4)
