"""The bundled models and prompts, for tests that need nothing else of the stack."""

from __future__ import annotations

import json
import shutil
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


def with_other_vocabulary(folder: Path) -> Path:
    """A copy of the bundled draft model in the new ``folder``, but with two tokens exchanged."""
    shutil.copytree(MODELS / "draft", folder)
    document = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = document["model"]["vocab"]
    one, other = list(vocabulary)[300:302]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    (folder / "tokenizer.json").write_text(json.dumps(document))
    return folder
