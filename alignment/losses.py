"""What a draft is trained for: losses over next-token distributions, of text or of another model.

A draft token is kept with probability 1 - TV(p, q) at best, p the target's distribution and q the draft's (Leviathan
et al. 2023, "Fast Inference from Transformers via Speculative Decoding", corollary 3.6); coupled sampling stays just
below. Total variation is thus what acceptance loses. The two Kullback-Leibler divergences bound it (Pinsker) and have
better gradients far from the goal. Which is best depends on task and draft (Zhou et al. 2023, "DistillSpec",
arXiv:2310.08461).

Legend for tensor names: B sequences, T positions in each, N positions altogether, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

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
