"""Decides how one model is optimised: data order, learning rate, precision, checkpoints.

It does not know whether the model learns from text or from another model: the caller gives the loss. Legend
for tensor names: B sequences in a batch, T tokens in a sequence, V vocabulary.
"""

# Tensor names carry their shapes.
# ruff: noqa: N803
from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import LlamaForCausalLM

from models.corpus import TokenIds
from models.pair import placed

Loss = Callable[[Tensor, Tensor], Tensor]
"""(logits_BTV of the inputs, tokens_BT1 including the following token) -> scalar loss in nats per token."""

CHECKPOINT_SECONDS = 60.0
BAR = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"


@dataclass(frozen=True, slots=True)
class Plan:
    """How long and how one model is trained. Ends at `steps` or after `minutes`, whichever comes first."""

    steps: float
    minutes: float
    batch_tokens: int
    sequence: int
    long_sequence: int
    muon_rate: float
    adam_rate: float
    seed: int
    device: torch.device
    dtype: torch.dtype
    long_from: float = 0.7
    decay_from: float = 0.5
    warmup_steps: int = 40


@dataclass(slots=True)
class Progress:
    """What has been spent so far; survives a restart."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    recent_loss: float = math.nan

    def fraction(self, plan: Plan) -> float:
        """Share of the budget used, 0 to 1."""
        return min(1.0, max(self.step / plan.steps, self.seconds / (60 * plan.minutes)))


class Batches:
    """Packed windows of a token stream, in an order that depends only on the seed and the step."""

    def __init__(self, ids: TokenIds, seed: int) -> None:
        self._ids = ids
        self._seed = seed

    def at(self, step: int, sequences: int, length: int) -> Tensor:
        """tokens_BT1: the `step`-th batch of `sequences` windows of `length` + 1 tokens."""
        windows = (len(self._ids) - 1) // length - 1
        per_epoch = max(1, windows // sequences)
        epoch, place = divmod(step, per_epoch)
        generator = np.random.default_rng([self._seed, length, epoch])
        offset = int(generator.integers(length))
        chosen = generator.permutation(windows)[place * sequences : (place + 1) * sequences]
        rows = [self._ids[offset + w * length : offset + w * length + length + 1] for w in chosen]
        return torch.from_numpy(np.stack(rows).astype(np.int64))


@dataclass(slots=True)
class MasterWeights:
    """fp32 parameters that the optimizers see, beside the model in its working precision."""

    model: LlamaForCausalLM
    working: list[Tensor] = field(init=False)
    masters: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.working = list(self.model.parameters())
        self.masters = [p.detach().float().clone().requires_grad_() for p in self.working]

    def take_gradients(self, max_norm: float) -> None:
        """Move the model's gradients to the masters, clipped to `max_norm` in total."""
        for master, working in zip(self.masters, self.working, strict=True):
            assert working.grad is not None
            master.grad = working.grad.float()
            working.grad = None
        torch.nn.utils.clip_grad_norm_(self.masters, max_norm)

    @torch.no_grad()
    def give_weights(self) -> None:
        """Round the masters into the model."""
        for master, working in zip(self.masters, self.working, strict=True):
            working.copy_(master)

    def full_precision(self) -> LlamaForCausalLM:
        """A copy of the model with the fp32 weights, on the CPU."""
        copy = placed(LlamaForCausalLM(self.model.config), torch.float32)
        with torch.no_grad():
            for parameter, master in zip(copy.parameters(), self.masters, strict=True):
                parameter.copy_(master)
        return copy


class Trainer:
    """Optimises one model: Muon for the matrices inside the layers, AdamW for embeddings and norms."""

    def __init__(self, model: LlamaForCausalLM, plan: Plan, checkpoint: Path) -> None:
        self.plan = plan
        self.progress = Progress()
        self._checkpoint = checkpoint
        self._model = placed(model, plan.dtype, plan.device).train()
        self._weights = MasterWeights(self._model)
        names = [name for name, _ in self._model.named_parameters()]
        inner = [m.ndim == 2 and "embed" not in n for n, m in zip(names, self._weights.masters, strict=True)]
        matrices = [m for m, i in zip(self._weights.masters, inner, strict=True) if i]
        others = [m for m, i in zip(self._weights.masters, inner, strict=True) if not i]
        self._optimizers: list[tuple[torch.optim.Optimizer, float]] = [
            (
                torch.optim.Muon(matrices, lr=plan.muon_rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
                plan.muon_rate,
            ),
            (
                torch.optim.AdamW(others, lr=plan.adam_rate, betas=(0.9, 0.95), weight_decay=0.01),
                plan.adam_rate,
            ),
        ]

    def run(self, batches: Batches, loss_of: Loss, title: str) -> LlamaForCausalLM:
        """Train until the plan's budget is used and return the fp32 model. Resumes from the checkpoint."""
        self._load()
        saved = time.monotonic()
        done = self.progress.fraction(self.plan)
        with tqdm(total=1.0, initial=done, desc=title, mininterval=5.0, bar_format=BAR) as bar:
            while (fraction := self.progress.fraction(self.plan)) < 1.0:
                self._step(batches, loss_of)
                bar.set_postfix_str(f"step {self.progress.step}, loss {self.progress.recent_loss:.3f}", refresh=False)
                bar.update(self.progress.fraction(self.plan) - fraction)
                if time.monotonic() - saved > CHECKPOINT_SECONDS:
                    self._save()
                    saved = time.monotonic()
        self._save()
        return self._weights.full_precision()

    def _step(self, batches: Batches, loss_of: Loss) -> None:
        began = time.monotonic()
        fraction = self.progress.fraction(self.plan)
        self._set_rates(fraction)
        length = self.plan.long_sequence if fraction >= self.plan.long_from else self.plan.sequence
        tokens_BT1 = batches.at(self.progress.step, max(1, self.plan.batch_tokens // length), length)
        tokens_BT1 = tokens_BT1.to(self.plan.device)
        logits_BTV = self._model(input_ids=tokens_BT1[:, :-1], use_cache=False).logits
        loss = loss_of(logits_BTV, tokens_BT1)
        torch.autograd.backward(loss)
        self._weights.take_gradients(max_norm=1.0)
        for optimizer, _ in self._optimizers:
            optimizer.step()
        self._weights.give_weights()
        self._account(float(loss.detach()), tokens_BT1[:, 1:].numel(), time.monotonic() - began)

    def _account(self, loss: float, tokens: int, seconds: float) -> None:
        progress = self.progress
        progress.step += 1
        progress.tokens += tokens
        progress.seconds += seconds
        old = loss if math.isnan(progress.recent_loss) else progress.recent_loss
        progress.recent_loss = 0.98 * old + 0.02 * loss

    def _set_rates(self, fraction: float) -> None:
        """Linear warm-up, a plateau, then linear decay to nearly nothing over the rest of the budget."""
        warm = min(1.0, (self.progress.step + 1) / self.plan.warmup_steps)
        cool = min(1.0, (1.0 - fraction) / (1.0 - self.plan.decay_from))
        for optimizer, rate in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * warm * max(0.01, cool)

    def _save(self) -> None:
        state: dict[str, Any] = {
            "masters": [master.detach().cpu() for master in self._weights.masters],
            "optimizers": [optimizer.state_dict() for optimizer, _ in self._optimizers],
            "progress": [
                self.progress.step,
                self.progress.tokens,
                self.progress.seconds,
                self.progress.recent_loss,
            ],
        }
        fresh = self._checkpoint.with_suffix(".new")
        torch.save(state, fresh)
        fresh.replace(self._checkpoint)

    @torch.no_grad()
    def _load(self) -> None:
        if not self._checkpoint.exists():
            return
        state = torch.load(self._checkpoint, map_location="cpu", weights_only=True)
        for master, saved in zip(self._weights.masters, state["masters"], strict=True):
            master.copy_(saved)
        for (optimizer, _), saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.progress = Progress(*state["progress"])
        self._weights.give_weights()


def next_token_loss(logits_BTV: Tensor, tokens_BT1: Tensor) -> Tensor:
    """Cross-entropy of the tokens that really follow."""
    return torch.nn.functional.cross_entropy(logits_BTV.float().flatten(0, 1), tokens_BT1[:, 1:].flatten())


def distillation_loss(teacher: LlamaForCausalLM, data_weight: float) -> Loss:
    """Forward KL from `teacher` at temperature 1, plus `data_weight` times the cross-entropy of the text."""

    def loss_of(logits_BTV: Tensor, tokens_BT1: Tensor) -> Tensor:
        with torch.inference_mode():
            teacher_BTV = teacher(input_ids=tokens_BT1[:, :-1], use_cache=False).logits
            log_p_NV = torch.log_softmax(teacher_BTV.float().flatten(0, 1), dim=-1)
        log_q_NV = torch.log_softmax(logits_BTV.float().flatten(0, 1), dim=-1)
        divergence = torch.nn.functional.kl_div(log_q_NV, log_p_NV.clone(), log_target=True, reduction="batchmean")
        if data_weight == 0.0:
            return divergence
        return divergence + data_weight * torch.nn.functional.nll_loss(log_q_NV, tokens_BT1[:, 1:].flatten())

    return loss_of
