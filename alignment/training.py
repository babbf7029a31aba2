"""Decides how one model is optimised: data order, learning rate, precision, checkpoints.

It does not know whether the model learns from text or from another model: the caller gives the loss. Legend
for tensor names: B sequences in a batch, T tokens in a sequence, V vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel

from alignment.batches import BatchSource
from alignment.losses import Loss
from alignment.workplace import read_checkpoint, write_checkpoint
from engine.head_files import placed

Kind = TypeVar("Kind", bound=PreTrainedModel)
Optimizers = Sequence[tuple[torch.optim.Optimizer, float]]
"""Each with its peak learning rate."""

CHECKPOINT_SECONDS = 60.0
BAR = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"


@dataclass(frozen=True, slots=True)
class TrainingPlan:
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

    def fraction(self, plan: TrainingPlan) -> float:
        """Share of the budget used, 0 to 1."""
        return min(1.0, max(self.step / plan.steps, self.seconds / (60 * plan.minutes)))


@dataclass(slots=True)
class MasterWeights(Generic[Kind]):
    """fp32 parameters that the optimizers see, beside the model in its working precision."""

    model: Kind
    working: list[Tensor] = field(init=False)
    masters: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.working = list(self.model.parameters())
        self.masters = [p.detach().float().clone().requires_grad_() for p in self.working]

    def take_gradients(self, max_norm: float) -> None:
        """Move the model's gradients to the masters, clipped to `max_norm` in total."""
        for master, working in zip(self.masters, self.working, strict=True):
            master.grad = None if working.grad is None else working.grad.float()
            working.grad = None
        nn.utils.clip_grad_norm_(self.masters, max_norm)

    @torch.no_grad()
    def give_weights(self) -> None:
        """Round the masters into the model."""
        for master, working in zip(self.masters, self.working, strict=True):
            working.copy_(master)

    def by_name(self) -> dict[str, Tensor]:
        """The fp32 weights, tied ones once. They change with the next step."""
        names = (name for name, _ in self.model.named_parameters())
        return {name: master.detach() for name, master in zip(names, self.masters, strict=True)}

    def full_precision(self) -> Kind:
        """A copy of the model with the fp32 weights, on the CPU."""
        copy = type(self.model)(self.model.config)
        nn.Module.to(copy, dtype=torch.float32)
        with torch.no_grad():
            for parameter, master in zip(copy.parameters(), self.masters, strict=True):
                parameter.copy_(master)
        return copy


class Trainer(Generic[Kind]):
    """Optimises one model: Muon for the matrices inside the layers, AdamW for embeddings and norms.

    Takes the model over: it is moved to the plan's device and precision.
    """

    def __init__(self, model: Kind, plan: TrainingPlan, checkpoint: Path) -> None:
        self.plan = plan
        self.progress = Progress()
        self.notes: dict[str, Any] = {}
        """Plain values that checkpoints keep for whoever watches."""
        self._checkpoint = checkpoint
        placed(model, plan.dtype, plan.device).train()
        self.weights = MasterWeights(model)
        inner = _inner_matrices(model)
        matrices = [m for m, i in zip(self.weights.masters, inner, strict=True) if i]
        others = [m for m, i in zip(self.weights.masters, inner, strict=True) if not i]
        self._optimizers: Optimizers = [
            (
                torch.optim.Muon(matrices, lr=plan.muon_rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
                plan.muon_rate,
            ),
            (
                torch.optim.AdamW(others, lr=plan.adam_rate, betas=(0.9, 0.95), weight_decay=0.01),
                plan.adam_rate,
            ),
        ]

    def run(self, batches: BatchSource, loss_of: Loss, title: str) -> Kind:
        """:meth:`train`, and return the fp32 model."""
        self.train(batches, loss_of, title)
        return self.weights.full_precision()

    def train(self, batches: BatchSource, loss_of: Loss, title: str, watch: Watch[Kind] | None = None) -> None:
        """Train until the plan's budget is used. Resumes from the checkpoint.

        ``watch`` is called after every step, and ends the training by saying False. Raises
        :class:`alignment.errors.DiskError` when a checkpoint cannot be written; the one before is still there.
        """
        self.resume()

        def step() -> bool:
            self._step(batches, loss_of)
            return watch is None or watch(self)

        train_in_steps(
            title,
            lambda: self.progress.fraction(self.plan),
            step,
            lambda: f"step {self.progress.step}, loss {self.progress.recent_loss:.3f}",
            self.save,
        )

    def save(self) -> None:
        """Write the checkpoint. Raises :class:`alignment.errors.DiskError`."""
        state = {
            "masters": [master.detach().cpu() for master in self.weights.masters],
            "optimizers": [optimizer.state_dict() for optimizer, _ in self._optimizers],
            "progress": list(astuple(self.progress)),
            "notes": self.notes,
        }
        write_checkpoint(self._checkpoint, state)

    @torch.no_grad()
    def resume(self) -> None:
        """Go back to where the checkpoint was written, if there is one."""
        state = read_checkpoint(self._checkpoint)
        if state is None:
            return
        for master, saved in zip(self.weights.masters, state["masters"], strict=True):
            master.copy_(saved)
        for (optimizer, _), saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.progress = Progress(*state["progress"])
        self.notes = state["notes"]
        self.weights.give_weights()

    def _step(self, batches: BatchSource, loss_of: Loss) -> None:
        began = time.monotonic()
        fraction = self.progress.fraction(self.plan)
        share = rate_share(self.progress.step, self.plan.warmup_steps, fraction, self.plan.decay_from)
        set_rates(self._optimizers, share)
        length = self.plan.long_sequence if fraction >= self.plan.long_from else self.plan.sequence
        tokens_BT1 = batches.at(self.progress.step, max(1, self.plan.batch_tokens // length), length)
        tokens_BT1 = tokens_BT1.to(self.plan.device)
        answer: Any = self.weights.model(input_ids=tokens_BT1[:, :-1], use_cache=False)
        loss = loss_of(answer.logits, tokens_BT1)
        torch.autograd.backward(loss)
        self.weights.take_gradients(max_norm=1.0)
        for optimizer, _ in self._optimizers:
            optimizer.step()
        self.weights.give_weights()
        self._account(float(loss.detach()), tokens_BT1[:, 1:].numel(), time.monotonic() - began)

    def _account(self, loss: float, tokens: int, seconds: float) -> None:
        progress = self.progress
        progress.step += 1
        progress.tokens += tokens
        progress.seconds += seconds
        old = loss if math.isnan(progress.recent_loss) else progress.recent_loss
        progress.recent_loss = 0.98 * old + 0.02 * loss


Watch = Callable[[Trainer[Kind]], bool]
"""Whether the training goes on."""


def rate_share(step: int, warm_up: int, fraction: float, decay_from: float) -> float:
    """What part of the peak learning rate a step has, when ``fraction`` of the budget is used.

    It rises linearly for ``warm_up`` steps, stays, and falls linearly from ``decay_from`` on, to nearly nothing.
    """
    warm = min(1.0, (step + 1) / warm_up)
    cool = min(1.0, (1.0 - fraction) / (1.0 - decay_from))
    return warm * max(0.01, cool)


def set_rates(optimizers: Optimizers, share: float) -> None:
    """Have every optimizer go on at this share of its peak rate."""
    for optimizer, rate in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate * share


def train_in_steps(
    title: str,
    fraction: Callable[[], float],
    step: Callable[[], bool],
    shown: Callable[[], str],
    save: Callable[[], None],
) -> None:
    """Call ``step`` until ``fraction`` of the budget used, 0 to 1, is 1, or it says False: nothing more is to be done.

    Draws a bar with what is ``shown``, and saves every :data:`CHECKPOINT_SECONDS` and at the end.
    """
    saved = time.monotonic()
    with tqdm(total=1.0, initial=fraction(), desc=title, mininterval=5.0, bar_format=BAR) as bar:
        goes_on = True
        while goes_on and (before := fraction()) < 1.0:
            goes_on = step()
            bar.set_postfix_str(shown(), refresh=False)
            bar.update(fraction() - before)
            if goes_on and time.monotonic() - saved > CHECKPOINT_SECONDS:
                save()
                saved = time.monotonic()
    save()


def _inner_matrices(model: PreTrainedModel) -> list[bool]:
    """Of each parameter, whether it is a matrix that maps features to features, and not tokens."""
    embeds: Any = model
    parts = (embeds.get_input_embeddings(), embeds.get_output_embeddings())
    of_tokens = {id(part.weight) for part in parts if part is not None}
    return [parameter.ndim == 2 and id(parameter) not in of_tokens for parameter in model.parameters()]
