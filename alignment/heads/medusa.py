"""Trains Medusa heads for a target, which itself stays as it is ("Medusa-1" of Cai et al. 2024, arXiv:2401.10774).

A head learns the target's own next-token distribution, not the text's: where it reads the hidden state that the token
after position t is drawn from, head i is to say what the target says after position t + 1 + i, by forward KL. The
hidden states of a batch are computed once for all heads. Heads start as the paper's do: blocks that change nothing, and
the target's output layer. Losses of farther heads count less.

Tensor legend: B sequences, T positions, V vocabulary, D hidden size, H heads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from alignment.encoding import BatchSource
from alignment.heads.training import HeadTraining
from alignment.options import FARTHER, MedusaOptions
from alignment.training import Optimizers
from engine.medusa import MedusaHeads, save


class MedusaTraining(HeadTraining[MedusaOptions]):
    """The making of one set of Medusa heads, in its folder."""

    _heads: MedusaHeads

    def _fresh(self, _batches: BatchSource) -> MedusaHeads:
        output: Any = self._tap.layer
        vocabulary, hidden = output.weight.shape
        options = self._options
        heads = MedusaHeads(hidden, vocabulary, options.heads, options.layers, shared=options.shared_output)
        with torch.no_grad():
            for layer in heads.outputs:
                assert isinstance(layer, nn.Linear)
                layer.weight.copy_(output.weight)
        return heads.to(self._target.device)

    def _make_optimizers(self) -> Optimizers:
        rate = self._options.rate
        return [(torch.optim.AdamW(self._heads.parameters(), rate, (0.9, 0.95), weight_decay=0.0), rate)]

    def _write(self, folder: Path) -> None:
        save(self._heads, folder, self._target.name)

    def _hits(self, tokens_1T: Tensor) -> Tensor:
        hidden_TD, logits_TV = (part[0] for part in self._read(tokens_1T))
        places = tokens_1T.shape[1] - len(self._heads)
        with self._mixed():
            guessed_HT: Tensor = self._heads(hidden_TD[:places]).argmax(-1)
        return guessed_HT == logits_TV.argmax(-1).unfold(0, places, 1)[1:]

    def _learn(self, tokens_BT: Tensor) -> float:
        with torch.no_grad():
            hidden_BTD, logits_BTV = self._read(tokens_BT)
            p_BTV = logits_BTV.float().softmax(-1)
        total = 0.0
        for head in range(len(self._heads)):
            with self._mixed():
                scores_BTV = self._heads.head(head, hidden_BTD[:, : -1 - head])
            # KL(p || q) but for the entropy of p, which has no gradient.
            scores_BTV = scores_BTV.float()
            loss = (scores_BTV.logsumexp(-1) - (p_BTV[:, 1 + head :] * scores_BTV).sum(-1)).mean()
            torch.autograd.backward(loss * FARTHER**head)
            total += float(loss.detach())
        return total / len(self._heads)

    def _read(self, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states ``[B, T, D]`` and logits ``[B, T, V]`` of the target."""
        answer = self._target.module(input_ids=tokens_BT, use_cache=False)
        return self._tap.take().to(torch.float32), answer.logits
