"""The model that the engine benchmark runs: a Llama of random weights, and how much of everything it needs.

The weights are noise because speed does not depend on them. Its text is senseless but not degenerate, and its greedy
choices are close ones: in bfloat16 two correct implementations soon write different texts.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.engine_settings import EXPANSION, GROUP, HEAD_SIZE, Shape
from models.pair import parameter_count, placed

SEED = 0
VOCABULARY = 8192
LONGEST = 4096
"""Tokens of a sequence, at most."""
SPREAD = 0.03
"""Standard deviation of the weights. With less, such a model repeats one token for ever."""


def config(shape: Shape) -> LlamaConfig:
    """In the proportions of the Llama 3.2 of a billion: tied embeddings, grouped queries, a wide MLP."""
    heads = shape.hidden // HEAD_SIZE
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=shape.hidden,
        intermediate_size=EXPANSION * shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // GROUP,
        max_position_embeddings=LONGEST,
        tie_word_embeddings=True,
        initializer_range=SPREAD,
    )


def write_model(shape: Shape, folder: Path) -> None:
    """A checkpoint in bfloat16, the same for the same shape."""
    torch.manual_seed(SEED)
    placed(LlamaForCausalLM(config(shape)), torch.bfloat16).save_pretrained(folder)


def random_prompts(count: int, tokens: int, generator: torch.Generator) -> list[tuple[int, ...]]:
    """Prompts that share no beginning."""
    return [tuple(row) for row in torch.randint(VOCABULARY, (count, tokens), generator=generator).tolist()]


def parameters(shape: Shape) -> int:
    """Tied ones once. A step reads every one of them once: the embedding is the output layer."""
    with torch.device("meta"):
        return parameter_count(LlamaForCausalLM(config(shape)))


def cached_values(shape: Shape) -> int:
    """Numbers that the cache holds for a token."""
    return 2 * shape.layers * shape.hidden // GROUP


def activations(shape: Shape, tokens: int, rows: int) -> int:
    """Numbers alive at the widest place of a step, about: residual, norm, the MLP's three products, and logits.

    ``rows``: of logits, counted three times, as the model's number format and as float32.
    """
    return tokens * (2 * shape.hidden + 3 * EXPANSION * shape.hidden) + 3 * rows * VOCABULARY
