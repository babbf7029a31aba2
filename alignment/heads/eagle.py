"""Trains an EAGLE-3 head for a target, which itself stays as it is (Li et al. 2025, arXiv:2503.01840).

Training-time test, as in the paper: the head reads the target's fused states once, and then, for as many steps as it is
to guess in a row, its own. At each step a row stays at the token it began at and reads the next token of the text; it
attends to the true states up to its own place, and to what its own earlier steps left there. Every step is to say what
the target says at its place: forward KL over the tokens the head knows, where the target's first choice is among them;
farther steps count less. Hidden states are computed as they are needed and kept nowhere.

Where shapes allow, the head starts from the target: its last layer reads the states and its first the embeddings, fc
passes on the last auxiliary state, and the output layer has the rows of the tokens that come most often. Or it starts
from another head for this target, such as a published one.

Measured on text that the target writes greedily behind passages held out: how many guesses in a row are right, which is
the acceptance length of greedy decoding less the token that every step gives.

Tensor legend: B sequences, T positions, N rows, V draft vocabulary, D hidden size, Q query heads, K key/value heads, E
head size, A auxiliary states side by side.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from alignment.encoding import BatchSource
from alignment.heads.training import HeadTraining
from alignment.options import EagleOptions
from alignment.training import Optimizers, muon_and_adamw
from alignment.writing import Writer
from engine.eagle.config import EagleConfig
from engine.eagle.head import EagleHead
from engine.eagle.loading import read_beside, save

MUON = 2.0
"""Learning rate of the matrices inside, relative to that of the output layer and the norms."""
COUNTED = 64
"""Batches whose tokens are counted for a reduced vocabulary."""
PROMPT = 48
"""Tokens of a passage held out that the target goes on from."""


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


def unroll(head: EagleHead, tokens_BT: Tensor, aux_BTA: Tensor, depth: int) -> list[Tensor]:
    """What the head says at each step, ``[B, N, V]`` with N = T - depth.

    Row i of step s guesses what follows token i + 1 + s, if the head's guesses before were the text's tokens.
    """
    rows = tokens_BT.shape[1] - depth
    attend, said = UnrolledAttention(), []
    states_BND = head.fuse(aux_BTA[:, :rows])
    for step in range(depth):
        embeddings_BND = head.embed(tokens_BT[:, 1 + step : 1 + step + rows])
        positions_BN = torch.arange(step, step + rows, device=tokens_BT.device).expand(len(tokens_BT), rows)
        states_BND, normed_BND = head(embeddings_BND, states_BND, positions_BN, attend)
        said.append(head.logits(normed_BND))
    return said


def guesses(head: EagleHead, tokens_1T: Tensor, aux_1TA: Tensor, depth: int) -> Tensor:
    """The target's ids of the first choices in :func:`unroll`, ``[depth, N]``."""
    return torch.stack([head.target_ids[said[0].argmax(-1)] for said in unroll(head, tokens_1T, aux_1TA, depth)])


def read_target(module: Any, tokens_BT: Tensor, config: EagleConfig) -> tuple[Tensor, Tensor]:
    """Auxiliary states ``[B, T, A]`` and logits of a transformers model, over its whole vocabulary.

    Behind its last layer transformers has states normed; so that one can be had before only by listening.
    """
    layers = module.config.get_text_config(decoder=True).num_hidden_layers
    wanted = config.aux_layers_of(layers)
    assert layers not in wanted, "no head of ours reads the last output"
    answer = module(input_ids=tokens_BT, use_cache=False, output_hidden_states=True)
    return torch.cat([answer.hidden_states[layer] for layer in wanted], -1).float(), answer.logits


class EagleTraining(HeadTraining):
    """The making of one head, in its folder."""

    _heads: EagleHead

    def _fresh(self, batches: BatchSource) -> EagleHead:
        torch.manual_seed(self._options.seed)
        if self._options.start:
            begun = read_beside(self._options.start, self._target)
            for parameter in begun.parameters():  # some of them are the target's own
                parameter.data = parameter.data.to(torch.float32, copy=True)
            begun.embed_tokens.weight.requires_grad_(False)
            return begun.to(self._target.device)
        output: Any = self._tap.layer
        config = _config_for(self._target.config.get_text_config(decoder=True), self._options)
        head = EagleHead(config)
        head.target_ids = self._most_frequent(batches, config.draft_vocab_size)
        module: Any = self._target.module
        head.embed_tokens.weight = nn.Parameter(
            module.get_input_embeddings().weight.detach()[: config.vocab_size].float(), requires_grad=False
        )
        with torch.no_grad():
            head.lm_head.weight.copy_(output.weight[head.target_ids.to(output.weight.device)])
            _start_from(head, dict(module.named_parameters()), self._target.layers)
        return head.to(self._target.device)

    def _make_optimizers(self) -> Optimizers:
        head, rate = self._heads, self._options.rate
        trained = [(name, parameter) for name, parameter in head.named_parameters() if parameter.requires_grad]
        inner = [parameter for name, parameter in trained if parameter.ndim == 2 and name != "lm_head.weight"]
        others = [parameter for name, parameter in trained if parameter.ndim != 2 or name == "lm_head.weight"]
        return muon_and_adamw(inner, rate * MUON, others, rate)

    def _write(self, folder: Path) -> None:
        save(self._heads, folder)

    def _held_out(self, rows: list[Sequence[int]]) -> list[Sequence[int]]:
        """Their beginnings, with what the target writes behind them."""
        module: Any = self._target.module
        length = self._options.sequence
        begin = min(PROMPT, length // 2)
        writer = Writer(module, self._target.stop_tokens)
        written = writer.write([row[:begin] for row in rows], length - begin, 0.0, self._options.seed)
        kept = [row.tokens for row in written if len(row.tokens) > row.start + self._options.reach]
        return list(kept or rows)

    def _hits(self, tokens_1T: Tensor) -> Tensor:
        """Behind the prompts of the texts held out."""
        aux_1TA, logits_1TV = read_target(self._target.module, tokens_1T, self._heads.config)
        length, depth = tokens_1T.shape[1], self._options.depth
        said_HN = logits_1TV[0].argmax(-1).unfold(0, length - depth, 1)[1:]
        with self._mixed():
            guessed_HN = guesses(self._heads, tokens_1T, aux_1TA, depth)
        return (guessed_HN == said_HN)[:, min(PROMPT, length // 2) :]

    def _learn(self, tokens_BT: Tensor) -> float:
        with torch.no_grad():
            aux_BTA, logits_BTV = read_target(self._target.module, tokens_BT, self._heads.config)
            known = torch.zeros(logits_BTV.shape[-1], dtype=torch.bool, device=logits_BTV.device)
            known[self._heads.target_ids] = True
            counted_BT = known[logits_BTV.argmax(-1)].float()
            p_BTV = logits_BTV[..., self._heads.target_ids].float().softmax(-1)
        total, loss = 0.0, tokens_BT.new_zeros((), dtype=torch.float32)
        with self._mixed():
            unrolled = unroll(self._heads, tokens_BT, aux_BTA, self._options.depth)
        for step, scores_BNV in enumerate(unrolled):
            scores_BNV = scores_BNV.float()
            here = slice(1 + step, 1 + step + scores_BNV.shape[1])
            # KL(p || q) but for the entropy of p, which has no gradient.
            each_BN = scores_BNV.logsumexp(-1) - (p_BTV[:, here] * scores_BNV).sum(-1)
            mean = (each_BN * counted_BT[:, here]).sum() / counted_BT[:, here].sum().clamp(min=1.0)
            loss = loss + mean * self._options.farther**step
            total += float(mean.detach())
        torch.autograd.backward(loss)
        return total / self._options.depth

    def _most_frequent(self, batches: BatchSource, size: int) -> Tensor:
        """So many tokens, ascending; of those that come equally often, the lowest."""
        vocabulary = self._target.config.get_text_config(decoder=True).vocab_size
        if size == vocabulary:
            return torch.arange(size)
        options = self._options
        counts = torch.zeros(vocabulary, dtype=torch.long)
        for step in range(min(COUNTED, options.steps)):
            tokens_BT = batches.at(step, max(1, options.batch_tokens // options.sequence), options.sequence)
            counts += torch.bincount(tokens_BT.flatten(), minlength=vocabulary)
        return counts.sort(descending=True, stable=True).indices[:size].sort().values


def _config_for(target: Any, options: EagleOptions) -> EagleConfig:
    """A head of the target's own shape. All auxiliary states are the published ones, where there are so many layers."""
    layers = target.num_hidden_layers
    published = (2, layers // 2, layers - 3)
    spread = (max(1, layers // 3), max(1, layers * 2 // 3), max(1, layers - 1))
    return EagleConfig.beside(
        target,
        draft_vocab_size=min(options.vocabulary or target.vocab_size, target.vocab_size),
        num_hidden_layers=options.layers,
        rope_parameters=dict(getattr(target, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 1e4}),
        aux_layers=published if published[0] < published[1] < published[2] else spread,
    )


def _start_from(head: EagleHead, target: dict[str, Tensor], layers: int) -> None:
    """Copy what fits of the target's last layer, and of its first what reads embeddings."""
    size = head.config.hidden_size
    head.fc.weight.mul_(0.1)
    head.fc.weight[:, -size:] += torch.eye(size)

    def fitting(ending: str, like: Tensor) -> Tensor | None:
        found = [tensor for name, tensor in target.items() if name.endswith(ending) and tensor.shape == like.shape]
        return found[0].float().to(like.device) if len(found) == 1 else None

    last = f"layers.{layers - 1}."
    for name, parameter in head.layers[0].named_parameters():
        if parameter.ndim == 2 and parameter.shape[1] == 2 * size and name.startswith("self_attn"):
            halves = [fitting(f"{place}{name}", parameter[:, size:]) for place in ("layers.0.", last)]
            if halves[0] is not None and halves[1] is not None:
                parameter.copy_(torch.cat((halves[0], halves[1]), -1))
        else:
            place = {
                "input_layernorm.weight": "layers.0.input_layernorm.weight",
                "hidden_norm.weight": f"{last}input_layernorm.weight",
            }
            copied = fitting(place.get(name, f"{last}{name}"), parameter)
            if copied is not None:
                parameter.copy_(copied)
    norm = fitting("model.norm.weight", head.norm.weight)
    if norm is not None:
        head.norm.weight.copy_(norm)
