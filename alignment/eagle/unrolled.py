"""Training-time test of an EAGLE-3 head (Li et al. 2025, arXiv:2503.01840): all places of a text, drafted from at once.

The head reads the target's fused states once, and then, for as many steps as it is to guess in a row, its own. At each
step a row stays at the token it began at and reads the next token of the text; it attends to the true states up to its
own place, and to what its own earlier steps left there. Hidden states are computed as they are needed and kept nowhere.

Tensor legend: B sequences, T positions, N rows, V draft vocabulary, D hidden size, Q query heads, K key/value heads, E
head size, A auxiliary states side by side.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engine.eagle.config import EagleConfig
from engine.eagle.head import EagleHead


class UnrolledAttention:
    """Attention of training-time test: causal over the first step's rows, and each row over its own of later steps."""

    def __init__(self) -> None:
        self._kept: defaultdict[int, list[tuple[Tensor, Tensor]]] = defaultdict(list)

    def __call__(self, layer: int, q_BNQE: Tensor, k_BNKE: Tensor, v_BNKE: Tensor) -> Tensor:
        """What the rows of the next step read, ``[B, N, Q, E]``."""
        groups = q_BNQE.shape[2] // k_BNKE.shape[2]
        kept = self._kept[layer]
        kept.append((k_BNKE.repeat_interleave(groups, 2), v_BNKE.repeat_interleave(groups, 2)))
        first_k, first_v = (part.transpose(1, 2) for part in kept[0])
        q_BQNE = q_BNQE.transpose(1, 2)
        if len(kept) == 1:
            causal_BQNE: Tensor = scaled_dot_product_attention(q_BQNE, first_k, first_v, is_causal=True)
            return causal_BQNE.transpose(1, 2)
        rows, scale = q_BNQE.shape[1], q_BNQE.shape[-1] ** -0.5
        ahead_NN = torch.ones(rows, rows, dtype=torch.bool, device=q_BNQE.device).triu(1)
        scores = (q_BQNE @ first_k.transpose(-1, -2)).masked_fill(ahead_NN, float("-inf"))
        own = [(q_BNQE * k_BNQE).sum(-1, keepdim=True).transpose(1, 2) for k_BNQE, _ in kept[1:]]
        weights = (torch.cat((scores, *own), -1).float() * scale).softmax(-1).to(v_BNKE.dtype)
        read_BQNE: Tensor = weights[..., :rows] @ first_v
        for step, (_, v_BNQE) in enumerate(kept[1:]):
            read_BQNE = read_BQNE + weights[..., rows + step, None] * v_BNQE.transpose(1, 2)
        return read_BQNE.transpose(1, 2)


def unroll(head: EagleHead, tokens_BT: Tensor, fused_BTD: Tensor, depth: int) -> list[Tensor]:
    """What the head says at each step, ``[B, N, V]`` with N = T - depth, from the target's fused states.

    Row i of step s guesses what follows token i + 1 + s, if the head's guesses before were the text's tokens.
    """
    rows = tokens_BT.shape[1] - depth
    attend, said = UnrolledAttention(), []
    states_BND = fused_BTD[:, :rows]
    for step in range(depth):
        embeddings_BND = head.embed(tokens_BT[:, 1 + step : 1 + step + rows])
        positions_BN = torch.arange(step, step + rows, device=tokens_BT.device).expand(len(tokens_BT), rows)
        states_BND, normed_BND = head(embeddings_BND, states_BND, positions_BN, attend)
        said.append(head.logits(normed_BND))
    return said


def guesses(head: EagleHead, tokens_1T: Tensor, aux_1TA: Tensor, depth: int) -> Tensor:
    """The target's ids of the first choices in :func:`unroll`, ``[depth, N]``."""
    unrolled = unroll(head, tokens_1T, head.fuse(aux_1TA), depth)
    return torch.stack([head.target_ids[said_1NV[0].argmax(-1)] for said_1NV in unrolled])


def read_target(module: Any, tokens_BT: Tensor, config: EagleConfig) -> tuple[Tensor, Tensor]:
    """Auxiliary states ``[B, T, A]`` and logits of a transformers model, over its whole vocabulary.

    Behind its last layer transformers has states normed; so that one can be had before only by listening.
    """
    layers = module.config.get_text_config(decoder=True).num_hidden_layers
    wanted = config.aux_layers_of(layers)
    assert layers not in wanted, "no head of ours reads the last output"
    answer = module(input_ids=tokens_BT, use_cache=False, output_hidden_states=True)
    return torch.cat([answer.hidden_states[layer] for layer in wanted], -1).float(), answer.logits
