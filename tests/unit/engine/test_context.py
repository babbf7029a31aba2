"""The context ends where a model begins to compute a position by more than the tokens that its queries see."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, MptConfig

from engine.interface import Chunk
from engine.loading.loader import Model, load
from engine.stateful import StatefulCache, StatefulEngine
from tests.unit.engine.engine_models import Stock, decode_plainly, random_tokens, save_model, slot_engine

LIMIT = 48
FACTORS = {"short_factor": [1.0] * 8, "long_factor": [3.0] * 8}
LIMITED: dict[str, tuple[str, dict[str, Any]]] = {
    "chunked attention": (
        "llama4_text",
        {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 96}
        | {"attention_chunk_size": LIMIT, "num_hidden_layers": 4},
    ),
    "longrope": (
        "phi3",
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, **FACTORS}}
        | {"original_max_position_embeddings": LIMIT},
    ),
    "dynamic": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}}
        | {"max_position_embeddings": LIMIT},
    ),
}
TEXT = random_tokens(LIMIT + 16, seed=4)


@pytest.fixture(params=LIMITED)
def limited(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Model, Stock]:
    family, changes = LIMITED[request.param]
    path = save_model(family, tmp_path, **changes)
    return load(path, dtype="fp32", device="cpu"), Stock(path)


def computed(model: Model, text: list[int]) -> torch.Tensor:
    """Logits ``[T, V]`` of a text fed in two parts."""
    engine = slot_engine(model)
    sequence = engine.cache.sequence()
    first_TV = engine.run([Chunk(sequence, text[:20], rows=range(20))])
    sequence.advance(range(20))
    return torch.cat((first_TV, engine.run([Chunk(sequence, text[20:], rows=range(len(text) - 20))])))


def difference(actual_TV: torch.Tensor, expected_TV: torch.Tensor) -> float:
    return float((actual_TV - expected_TV).abs().max() / expected_TV.abs().max())


def test_right_up_to_the_limit_and_refused_beyond(limited: tuple[Model, Stock]) -> None:
    model, stock = limited
    assert model.context == LIMIT
    assert difference(computed(model, TEXT[:LIMIT]), stock(TEXT[:LIMIT])) < 1e-4
    with pytest.raises(ValueError, match=f"position {LIMIT} is beyond the model's context of {LIMIT} tokens"):
        computed(model, TEXT[: LIMIT + 1])


def test_beyond_the_limit_it_would_be_wrong(limited: tuple[Model, Stock]) -> None:
    model, stock = limited
    assert difference(computed(replace(model, context=256), TEXT), stock(TEXT)) > 1e-2


def test_a_limit_by_the_name_that_mpt_has_for_it(tmp_path: Path) -> None:
    """Saved without what other families call it. Its bias for distances is made up to there."""
    config = MptConfig(d_model=64, n_heads=4, n_layers=2, vocab_size=256, max_seq_len=LIMIT)
    assert not hasattr(config, "max_position_embeddings")
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = load(str(tmp_path), dtype="fp32", device="cpu", without_speculation=True)
    assert model.context == LIMIT
    engine = StatefulEngine(model, StatefulCache(512, dtype=model.dtype, device=model.device))
    assert len(decode_plainly(engine, TEXT[: LIMIT - 4], 4)) == 4
