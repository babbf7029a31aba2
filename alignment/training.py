"""Decides how one model is optimised: data order, learning rate, precision, checkpoints.

It does not know whether the model learns from text or from another model: the caller gives the loss. Legend
for tensor names: B sequences in a batch, T tokens in a sequence, V vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel

from alignment.encoding import BatchSource
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


class Trainer(Generic[Kind]):
    """Optimises one model: Muon for the matrices inside the layers, AdamW for embeddings and norms.

    Takes the model over: it is moved to the plan's device and precision. What the optimizers see are fp32 weights
    beside it.
    """

    def __init__(self, model: Kind, plan: TrainingPlan, checkpoint: Path) -> None:
        self.model, self.plan = model, plan
        self.progress = Progress()
        self.notes: dict[str, Any] = {}
        """Plain values that checkpoints keep for whoever watches."""
        self._checkpoint = checkpoint
        placed(model, plan.dtype, plan.device).train()
        self._working = list(model.parameters())
        self._masters = [p.detach().float().clone().requires_grad_() for p in self._working]
        inner = _inner_matrices(model)
        matrices = [m for m, i in zip(self._masters, inner, strict=True) if i]
        others = [m for m, i in zip(self._masters, inner, strict=True) if not i]
        self._optimizers = muon_and_adamw(matrices, plan.muon_rate, others, plan.adam_rate, decay=0.01)

    def weights(self) -> dict[str, Tensor]:
        """The fp32 weights by name, tied ones once. They change with the next step."""
        names = (name for name, _ in self.model.named_parameters())
        return {name: master.detach() for name, master in zip(names, self._masters, strict=True)}

    def run(self, batches: BatchSource, loss_of: Loss, title: str) -> Kind:
        """:meth:`train`, and return a copy of the model with the fp32 weights, on the CPU."""
        self.train(batches, loss_of, title)
        copy = type(self.model)(self.model.config)
        nn.Module.to(copy, dtype=torch.float32)
        with torch.no_grad():
            for parameter, master in zip(copy.parameters(), self._masters, strict=True):
                parameter.copy_(master)
        return copy

    def train(self, batches: BatchSource, loss_of: Loss, title: str, watch: Watch[Kind] | None = None) -> None:
        """Train until the plan's budget is used. Resumes from the checkpoint.

        ``watch`` is called after every step, and ends the training by saying False. Raises
        :class:`alignment.errors.DiskError` when a checkpoint cannot be written; the one before is still there.
        """
        self.resume()

        def step() -> bool:
            self._step(batches, loss_of)
            return watch is None or watch(self)

        def shown() -> str:
            return f"step {self.progress.step}, loss {self.progress.recent_loss:.3f}"

        train_in_steps(title, lambda: self.progress.fraction(self.plan), step, shown, self.save)

    def save(self) -> None:
        """Write the checkpoint. Raises :class:`alignment.errors.DiskError`."""
        state = {
            "masters": [master.detach().cpu() for master in self._masters],
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
        for master, saved in zip(self._masters, state["masters"], strict=True):
            master.copy_(saved)
        for (optimizer, _), saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.progress = Progress(*state["progress"])
        self.notes = state["notes"]
        self._round_masters()

    def _step(self, batches: BatchSource, loss_of: Loss) -> None:
        plan, progress, began = self.plan, self.progress, time.monotonic()
        fraction = progress.fraction(plan)
        set_rates(self._optimizers, rate_share(progress.step, plan.warmup_steps, fraction, plan.decay_from))
        length = plan.long_sequence if fraction >= plan.long_from else plan.sequence
        tokens_BT1 = batches.at(progress.step, max(1, plan.batch_tokens // length), length).to(plan.device)
        answer: Any = self.model(input_ids=tokens_BT1[:, :-1], use_cache=False)
        loss = loss_of(answer.logits, tokens_BT1)
        torch.autograd.backward(loss)
        for master, working in zip(self._masters, self._working, strict=True):
            master.grad = None if working.grad is None else working.grad.float()
            working.grad = None
        nn.utils.clip_grad_norm_(self._masters, 1.0)
        for optimizer, _ in self._optimizers:
            optimizer.step()
        self._round_masters()
        progress.step += 1
        progress.tokens += tokens_BT1[:, 1:].numel()
        progress.seconds += time.monotonic() - began
        found = float(loss.detach())
        old = found if math.isnan(progress.recent_loss) else progress.recent_loss
        progress.recent_loss = 0.98 * old + 0.02 * found

    @torch.no_grad()
    def _round_masters(self) -> None:
        for master, working in zip(self._masters, self._working, strict=True):
            working.copy_(master)


Watch = Callable[[Trainer[Kind]], bool]
"""Whether the training goes on."""


def muon_and_adamw(
    matrices: Iterable[Tensor], muon_rate: float, others: Iterable[Tensor], adam_rate: float, decay: float = 0.0
) -> Optimizers:
    """Muon for ``matrices``, AdamW for ``others``, with peak rates as AdamW knows them; ``decay``: of the others."""
    muon = torch.optim.Muon(matrices, muon_rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    return [(muon, muon_rate), (torch.optim.AdamW(others, adam_rate, (0.9, 0.95), weight_decay=decay), adam_rate)]


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
