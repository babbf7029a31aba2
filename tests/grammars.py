"""A tiny random pair of models with a tokenizer, to be held to grammars."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
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


def random_schema(rng: Random, depth: int = 2) -> dict[str, Any]:
    """A schema that some short JSON fits."""
    simple = ("boolean", "null", "integer", "number", "string", "enum", "const", "anyOf")
    match rng.choice(simple + (("object", "object", "array") if depth else ())):
        case "integer":
            low = rng.randint(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 99)}
        case "number":
            return {"type": "number", "minimum": 0, "maximum": rng.randint(1, 9)}
        case "string" if rng.random() < 0.3:
            return {"type": "string", "pattern": rng.choice(("^[a-c]{2,4}$", "^x(yz)*$", "^[0-9]{3}-[0-9]{2}$"))}
        case "string":
            return {"type": "string", "maxLength": rng.randint(0, 6)}
        case "enum":
            values = ["red", "green", "greener", 1, 2.5, None, True, [1], {"a": 1}, 'q"\\']
            return {"enum": rng.sample(values, rng.randint(1, 4))}
        case "const":
            return {"const": rng.choice(["fixed", 7, False])}
        case "anyOf":
            return {"anyOf": [random_schema(rng, 0) for _ in range(2)]}
        case "array" | "object" as kind:
            return _nested(rng, kind, depth - 1)
        case plain:
            return {"type": plain}


def _nested(rng: Random, kind: str, depth: int) -> dict[str, Any]:
    if kind == "array":
        least = rng.randint(0, 2)
        items = random_schema(rng, depth)
        return {"type": kind, "items": items, "minItems": least, "maxItems": least + rng.randint(0, 2)}
    names = rng.sample(["name", "age", "ok", "tags", "kind", "é", "a b"], rng.randint(0, 3))
    properties = {name: random_schema(rng, depth) for name in names}
    required = [name for name in names if rng.random() < 0.7]
    return {"type": kind, "properties": properties, "required": required, "additionalProperties": False}
