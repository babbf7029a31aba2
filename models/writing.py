"""Decides what text of the target's own the draft also learns from.

A draft meets what the target writes, not what people write: greedy text repeats itself, sampled text wanders. So
part of the distillation runs on continuations by the target, at several temperatures, of passages of the corpus.
"""

# Tensor names carry their shapes: B sequences, T tokens.
# ruff: noqa: N803
from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import LlamaForCausalLM

from models.corpus import TokenIds

TEMPERATURES = (0.0, 0.8, 1.0)
BATCH = 64
PROMPT_TOKENS = 48
NEW_TOKENS = 160


def write_text(model: LlamaForCausalLM, ids: TokenIds, tokens: int, end_of_text: int, seed: int) -> TokenIds:
    """At least `tokens` token ids: passages of `ids`, each continued by `model` and closed by `end_of_text`."""
    generator = np.random.default_rng(seed)
    torch.manual_seed(seed)
    written: list[int] = []
    with tqdm(total=tokens, desc="target writes", mininterval=5.0) as bar:
        round_ = 0
        while len(written) < tokens:
            starts = generator.integers(0, len(ids) - PROMPT_TOKENS, size=BATCH)
            passages = np.stack([ids[start : start + PROMPT_TOKENS] for start in starts]).astype(np.int64)
            prompts_BT = torch.from_numpy(passages).to(model.device)
            rows_BT = continuations(model, prompts_BT, NEW_TOKENS, TEMPERATURES[round_ % len(TEMPERATURES)])
            before = len(written)
            for row in rows_BT.tolist():
                written.extend(_closed(row, end_of_text))
            bar.update(len(written) - before)
            round_ += 1
    return np.asarray(written, dtype=np.uint16)


def continuations(model: LlamaForCausalLM, prompts_BT: Tensor, tokens: int, temperature: float) -> Tensor:
    """rows_BT: the prompts, all of one length, and up to `tokens` tokens of the model's after each.

    Temperature 0 is greedy; otherwise the global seed decides.
    """
    sampling = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
    # transformers declares `generate` for a protocol that its own models do not satisfy.
    rows_BT = cast(Any, model).generate(
        prompts_BT,
        attention_mask=torch.ones_like(prompts_BT),
        max_new_tokens=tokens,
        do_sample=temperature > 0.0,
        **sampling,
    )
    assert isinstance(rows_BT, Tensor)
    return rows_BT


def _closed(row: list[int], end_of_text: int) -> list[int]:
    """The row up to its first end-of-text after the prompt, or with one added: what follows is padding."""
    tail = row[PROMPT_TOKENS:]
    end = tail.index(end_of_text) if end_of_text in tail else len(tail)
    return [*row[:PROMPT_TOKENS], *tail[:end], end_of_text]
