"""The bundled models and prompts, for tests that need nothing else of the stack."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer

from speculation.messages import Token

MODELS = Path(__file__).parent.parent / "models"


@cache
def held_out_prompts() -> list[tuple[Token, ...]]:
    """Token ids of the bundled held-out prompts."""
    tokenizer = Tokenizer.from_file(str(MODELS / "target" / "tokenizer.json"))
    lines = (MODELS / "prompts.jsonl").read_text().splitlines()
    return [tuple(tokenizer.encode(json.loads(line)["prompt"]).ids) for line in lines]
