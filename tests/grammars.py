"""A tiny random pair of models with a tokenizer, to be held to grammars."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from llguidance import LLMatcher
from tokenizers import decoders, models, pre_tokenizers, trainers

from engine.cache.kv_cache import KVCache
from engine.loading.loader import load
from engine.step import Engine
from tests.unit.engine.engine_models import save_model

STOP = 0
CORPUS = ['{"name": "Ann", "age": 31, "tags": ["a", "bc"], "ok": true, "none": null, "size": -1.5}', "false [] {} kind"]
TINY = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}


def save_tokenizer(folder: Path, size: int = 300) -> tokenizers.Tokenizer:
    """Byte-level BPE with one special token, which ends texts."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS * 5, trainer)
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return backend


def tiny_engine(folder: Path, capacity: int = 4096) -> tuple[Engine, tokenizers.Tokenizer]:
    """A random model in float64, in which it does not matter to a token how it is batched."""
    backend = save_tokenizer(folder)
    size = {**TINY, "vocab_size": backend.get_vocab_size(), "eos_token_id": STOP}
    model = load(save_model("llama", folder, **size), dtype="fp64", device="cpu", self_test=False)
    return Engine(model, KVCache(model.layers, capacity, dtype=model.dtype, device=model.device)), backend


def json_grammar(schema: Any, compact: bool = False) -> str:
    """As the router makes one; ``compact``: without any whitespace."""
    layout: Any = {"whitespace_flexible": False} if compact else {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,3}"}
    return LLMatcher.grammar_from_json_schema(schema, overrides=layout)


def regex(pattern: str) -> str:
    """A grammar of one regular expression."""
    return LLMatcher.grammar_from_regex(pattern)
