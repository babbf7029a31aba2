"""What a draft is trained for, losses over next-token distributions, and how often its tokens would be kept.

A draft token is kept with probability 1 - TV(p, q) at best, p the target's distribution and q the draft's (Leviathan
et al. 2023, "Fast Inference from Transformers via Speculative Decoding", corollary 3.6); coupled sampling stays just
below. Total variation is thus what acceptance loses. The two Kullback-Leibler divergences bound it (Pinsker) and have
better gradients far from the goal. Which is best depends on task and draft (Zhou et al. 2023, "DistillSpec",
arXiv:2310.08461).

Acceptance is told without serving, teacher-forced: both models read the same text, and at every position the question
is whether the draft's token would have been the target's.

Legend for tensor names: B sequences, T positions in each, N positions altogether, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from alignment.writing import WrittenRow

Loss = Callable[[Tensor, Tensor], Tensor]
"""(logits_BTV of the inputs, tokens_BT1 including the following token) -> scalar loss in nats per token."""
Divergence = Callable[[Tensor, Tensor], Tensor]
"""(log_p_NV of the target, log_q_NV of the draft) -> divergence_N."""


def forward_kl(log_p_NV: Tensor, log_q_NV: Tensor) -> Tensor:
    """KL(p || q) in nats: the draft is to cover all that the target may say."""
    return nn.functional.kl_div(log_q_NV, log_p_NV, log_target=True, reduction="none").sum(-1)


def reverse_kl(log_p_NV: Tensor, log_q_NV: Tensor) -> Tensor:
    """KL(q || p) in nats: the draft is to say nothing that the target would not."""
    return nn.functional.kl_div(log_p_NV, log_q_NV, log_target=True, reduction="none").sum(-1)


def total_variation(log_p_NV: Tensor, log_q_NV: Tensor) -> Tensor:
    """TV(p, q) from 0 to 1: the chance that a draft token is refused, at best."""
    return (log_p_NV.exp() - log_q_NV.exp()).abs().sum(-1) / 2


OBJECTIVES: Mapping[str, Divergence] = {"forward-kl": forward_kl, "reverse-kl": reverse_kl, "tv": total_variation}


def next_token_loss(logits_BTV: Tensor, tokens_BT1: Tensor) -> Tensor:
    """Cross-entropy of the tokens that really follow."""
    return nn.functional.cross_entropy(logits_BTV.float().flatten(0, 1), tokens_BT1[:, 1:].flatten())


def distillation_loss(
    teacher: nn.Module, data_weight: float = 0.0, divergence: Divergence = forward_kl, vocabulary: int | None = None
) -> Loss:
    """The mean divergence from ``teacher`` at temperature 1, plus ``data_weight`` times the cross-entropy of the text.

    ``vocabulary``: only so many tokens exist; what is beyond is padding, of which the two models may have
    differently much.
    """

    def loss_of(logits_BTV: Tensor, tokens_BT1: Tensor) -> Tensor:
        log_p_NV = log_probabilities(logits_of(teacher, tokens_BT1[:, :-1]), vocabulary)
        log_q_NV = log_probabilities(logits_BTV, vocabulary)
        loss = divergence(log_p_NV, log_q_NV).mean()
        if data_weight == 0.0:
            return loss
        return loss + data_weight * nn.functional.nll_loss(log_q_NV, tokens_BT1[:, 1:].flatten())

    return loss_of


@torch.no_grad()
def logits_of(model: nn.Module, tokens_BT: Tensor) -> Tensor:
    """logits_BTV, without anything kept for gradients."""
    answer: Any = model(input_ids=tokens_BT, use_cache=False)
    logits_BTV: Tensor = answer.logits
    return logits_BTV


def log_probabilities(logits_BTV: Tensor, vocabulary: int | None = None) -> Tensor:
    """log_NV in fp32 of the first ``vocabulary`` tokens; all by default."""
    return torch.log_softmax(logits_BTV[..., :vocabulary].float().flatten(0, 1), dim=-1)


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
