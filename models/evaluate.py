"""Decides which figures describe the pair, and measures them on held-out text.

Acceptance is taken teacher-forced: both models read the same text, and at every position the question is
whether the draft's token would have been the target's. Tensor names: T positions, V vocabulary.
"""

# Tensor names carry their shapes.
# ruff: noqa: N803
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import LlamaForCausalLM

from alignment.encoding import TokenIds
from alignment.losses import Acceptance, Mean, logits_of, measure
from alignment.writing import Writer

TEMPERATURE = 0.8
POSITION_BUCKETS = 4


@dataclass(slots=True)
class Fit:
    """How well one model predicts the text itself."""

    nats: Mean = field(default_factory=Mean)
    top1: Mean = field(default_factory=Mean)
    nats_by_position: list[Mean] = field(default_factory=lambda: [Mean() for _ in range(POSITION_BUCKETS)])

    def add(self, logits_TV: Tensor, following_T: Tensor) -> None:
        """Score fp32 logits against the tokens that really follow."""
        nats_T = torch.nn.functional.cross_entropy(logits_TV, following_T, reduction="none")
        self.nats.add(nats_T)
        self.top1.add(logits_TV.argmax(-1) == following_T)
        for mean, part in zip(self.nats_by_position, nats_T.chunk(POSITION_BUCKETS), strict=False):
            mean.add(part)

    def figures(self) -> dict[str, object]:
        """Cross-entropy in nats per token (also by quarter of the context) and top-1 accuracy."""
        return {
            "nats": self.nats.value(),
            "top1": self.top1.value(),
            "nats_by_quarter_of_context": [mean.value() for mean in self.nats_by_position],
        }


def measure_pair(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, held_out: TokenIds, context: int, seed: int
) -> dict[str, object]:
    """Fit of both models and acceptance between them over windows of `context` held-out tokens."""
    generator = torch.Generator(device=target.device).manual_seed(seed)
    fits = {"target": Fit(), "draft": Fit()}
    acceptance = Acceptance(TEMPERATURE)
    # Consecutive windows; the remainder is left out.
    for start in tqdm(range(0, len(held_out) - context, context), desc="evaluate", mininterval=5.0):
        tokens_T1 = torch.from_numpy(held_out[start : start + context + 1].astype(np.int64)).to(target.device)
        target_TV, draft_TV = (logits_of(model, tokens_T1[None, :-1])[0].float() for model in (target, draft))
        fits["target"].add(target_TV, tokens_T1[1:])
        fits["draft"].add(draft_TV, tokens_T1[1:])
        acceptance.add(target_TV, draft_TV, generator)
    return {name: fit.figures() for name, fit in fits.items()} | {"acceptance": acceptance.figures()}


def measure_continuations(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, prompts: Sequence[Sequence[int]], tokens: int, seed: int
) -> dict[str, dict[str, float]]:
    """Acceptance on text the target writes itself after `prompts`: greedily, and sampled at 0.8."""
    end_of_text = target.config.eos_token_id
    assert isinstance(end_of_text, int)
    writer = Writer(target, {end_of_text}, target.config.vocab_size)
    texts = {"greedy_text": 0.0, "sampled_text": TEMPERATURE}
    rows = {name: writer.write(prompts, tokens, temperature, seed) for name, temperature in texts.items()}
    return {name: measure(target, draft, written, None, seed, TEMPERATURE) for name, written in rows.items()}
