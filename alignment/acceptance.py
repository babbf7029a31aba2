"""Decides how to tell, without serving, how often a draft's tokens would be kept.

Taken teacher-forced: both models read the same text, and at every position the question is whether the draft's token
would have been the target's. Legend for tensor names: T positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from alignment.losses import logits_of
from alignment.writing import WrittenRow


@dataclass(slots=True)
class Mean:
    """A running mean over positions."""

    total: float = 0.0
    count: int = 0

    def add(self, values_T: Tensor) -> None:
        """Take in one value per position."""
        self.total += float(values_T.double().sum())
        self.count += values_T.numel()

    def value(self) -> float:
        """The mean, to four decimals; nan when nothing was added."""
        return round(self.total / self.count, 4) if self.count else float("nan")


@dataclass(slots=True)
class Acceptance:
    """How often the draft's token would be kept, by three readings of the same two distributions."""

    temperature: float = 1.0
    greedy: Mean = field(default_factory=Mean)
    coupled: Mean = field(default_factory=Mean)
    overlap: Mean = field(default_factory=Mean)

    def add(self, target_TV: Tensor, draft_TV: Tensor, generator: torch.Generator) -> None:
        """Compare fp32 logits of both models at the same positions."""
        self.greedy.add(target_TV.argmax(-1) == draft_TV.argmax(-1))
        gumbel_TV = -torch.empty_like(target_TV).exponential_(generator=generator).log()
        target_TV, draft_TV = target_TV / self.temperature, draft_TV / self.temperature
        self.coupled.add((target_TV + gumbel_TV).argmax(-1) == (draft_TV + gumbel_TV).argmax(-1))
        self.overlap.add(torch.minimum(target_TV.softmax(-1), draft_TV.softmax(-1)).sum(-1))

    def figures(self) -> dict[str, float]:
        """`greedy` at temperature 0; `coupled` (same noise) and `overlap` (1 - TV, the optimum) at `temperature`."""
        return {"greedy": self.greedy.value(), "coupled": self.coupled.value(), "overlap": self.overlap.value()}


def measure(
    target: nn.Module,
    draft: nn.Module,
    rows: Sequence[WrittenRow],
    vocabulary: int | None,
    seed: int,
    temperature: float = 1.0,
) -> dict[str, float]:
    """The figures over what stands behind the prompts of ``rows``, if they have some; ``vocabulary`` None: of all."""
    device = next(target.parameters()).device
    generator = torch.Generator(device=device).manual_seed(seed)
    acceptance = Acceptance(temperature)
    for row in rows:
        tokens_1T = torch.tensor([row.tokens], device=device)
        target_TV, draft_TV = (
            logits_of(model, tokens_1T[:, :-1])[0, max(row.start - 1, 0) :, :vocabulary].float()
            for model in (target, draft)
        )
        acceptance.add(target_TV, draft_TV, generator)
    return acceptance.figures()
