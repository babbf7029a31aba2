"""Decides what text of the target's own the bundled drafts also learn from: passages of the corpus, continued."""

from __future__ import annotations

import numpy as np
from tqdm import tqdm
from transformers import LlamaForCausalLM

from alignment.batches import TokenIds, joined
from alignment.writing import BATCH, TEMPERATURES, Writer

PROMPT_TOKENS = 48
NEW_TOKENS = 160


def write_text(model: LlamaForCausalLM, ids: TokenIds, tokens: int, end_of_text: int, seed: int) -> TokenIds:
    """At least `tokens` token ids: passages of `ids`, each continued by `model` and behind an `end_of_text`."""
    generator = np.random.default_rng(seed)
    writer = Writer(model, {end_of_text})
    rows: list[tuple[int, ...]] = []
    written = 0
    with tqdm(total=tokens, desc="target writes", mininterval=5.0) as bar:
        for round_ in range(tokens):
            starts = generator.integers(0, len(ids) - PROMPT_TOKENS, size=BATCH)
            prompts = [ids[start : start + PROMPT_TOKENS].tolist() for start in starts]
            temperature = TEMPERATURES[round_ % len(TEMPERATURES)]
            fresh = [row.tokens for row in writer.write(prompts, NEW_TOKENS, temperature, seed + round_)]
            rows += fresh
            more = sum(map(len, fresh))
            bar.update(more)
            written += more
            if written >= tokens:
                break
    return joined(rows, end_of_text)
