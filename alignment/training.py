"""Decides how one model is optimised: data order, learning rate, precision, checkpoints, which weights are the best.

It does not know whether the model learns from text or from another model: the caller gives what leaves gradients.
Legend for tensor names: B sequences in a batch, T tokens in a sequence, V vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as tensors_bytes
from torch import Tensor, nn
from tqdm import tqdm

from alignment.encoding import BatchSource
from alignment.losses import Loss
from alignment.options import Interrupted
from alignment.workplace import read_checkpoint, write_checkpoint, write_whole
from engine.model import placed

Kind = TypeVar("Kind", bound=nn.Module)
Optimizers = Sequence[tuple[torch.optim.Optimizer, float]]
"""Each with its peak learning rate."""
Learn = Callable[[Tensor], float]
"""Leaves the gradients of tokens_BT1, the following token included, and says the mean loss, in nats."""
Watch = Callable[[float], bool]
"""Called after a step with the share of the budget that was used before it; whether training goes on."""

CHECKPOINT_SECONDS = 60.0
BAR = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """How long and how one model is trained. Ends at `steps` or after `minutes`, whichever comes first."""

    steps: float
    batch_tokens: int
    sequence: int
    muon_rate: float
    adam_rate: float
    device: torch.device
    dtype: torch.dtype
    minutes: float = math.inf
    long_sequence: int = 0
    """That of the last part of the training; 0: it stays as it is."""
    long_from: float = 0.7
    decay_from: float = 0.5
    warmup_steps: int = 40
    """For which the learning rate rises linearly; it stays, and falls linearly from ``decay_from`` on, to nearly 0."""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """How a model is measured while it is trained, on what is held out."""

    measure: Callable[[], Mapping[str, Any]]
    """Its figures as it is."""
    score: Callable[[Any], float]
    """Of such figures: the more the better."""
    times: int
    """How often it is measured on the way."""
    patience: int
    """Measurements in a row without anything better, after which training ends."""
    best: Path
    """Where the best weights are kept."""


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
    """Optimises one model: Muon for the matrices inside the layers, AdamW for embeddings and norms, unless told others.

    Takes the model over: it is moved to the plan's device and precision, and goes on from the checkpoint, if there is
    one. What the optimizers see are fp32 weights beside it, or its own where these are.
    """

    def __init__(self, model: Kind, plan: TrainingPlan, checkpoint: Path, optimizers: Optimizers | None = None) -> None:
        self.model, self.plan = model, plan
        self.progress = Progress()
        self.notes: dict[str, Any] = {}
        """What :meth:`train_to_best` has measured: ``before``, ``after``, ``history`` (step, score), ``best`` step."""
        self._checkpoint = checkpoint
        placed(model, plan.dtype, plan.device).train()
        self._working = [parameter for parameter in model.parameters() if parameter.requires_grad]
        own = plan.dtype == torch.float32
        self._masters = [p if own else p.detach().float().clone().requires_grad_() for p in self._working]
        self._optimizers = optimizers or self._usual_optimizers()
        self._resume()

    def run(self, batches: BatchSource, loss_of: Loss, title: str) -> Any:
        """:meth:`train` a language model, and return a copy of it with the fp32 weights, on the CPU."""
        self.train(batches, self.learn_by(loss_of), title)
        model: Any = self.model
        copy = type(model)(model.config)
        nn.Module.to(copy, dtype=torch.float32)
        with torch.no_grad():
            for parameter, master in zip(copy.parameters(), self._masters, strict=True):
                parameter.copy_(master)
        return copy

    def learn_by(self, loss_of: Loss) -> Learn:
        """What a language model learns by a loss of its logits."""

        def learn(tokens_BT1: Tensor) -> float:
            answer: Any = self.model(input_ids=tokens_BT1[:, :-1], use_cache=False)
            loss = loss_of(answer.logits, tokens_BT1)
            torch.autograd.backward(loss)
            return float(loss.detach())

        return learn

    def train(self, batches: BatchSource, learn: Learn, title: str, watch: Watch | None = None) -> None:
        """Train until the plan's budget is used, or ``watch`` says so. The checkpoint is written now and then.

        Raises :class:`alignment.options.DiskError` when that cannot be; the one before is still there.
        """
        saved, goes_on, progress = time.monotonic(), True, self.progress
        initial = progress.fraction(self.plan)
        with tqdm(total=1.0, initial=initial, desc=title, mininterval=5.0, bar_format=BAR) as bar:
            while goes_on and (before := progress.fraction(self.plan)) < 1.0:
                self._step(batches, learn)
                goes_on = watch is None or watch(before)
                bar.set_postfix_str(f"step {progress.step}, loss {progress.recent_loss:.3f}", refresh=False)
                bar.update(progress.fraction(self.plan) - before)
                if goes_on and time.monotonic() - saved > CHECKPOINT_SECONDS:
                    self.save()
                    saved = time.monotonic()
        self.save()

    def train_to_best(
        self,
        batches: BatchSource,
        learn: Learn,
        title: str,
        measured: HeldOut,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """:meth:`train`, measuring on the way: the best weights are kept, and it ends when nothing gets better.

        ``stopped`` is asked after every step. Raises :class:`alignment.options.Interrupted` when it says so.
        """
        progress, notes = self.progress, self.notes

        def keep(figures: Mapping[str, Any]) -> None:
            notes.update(after=figures, best=progress.step)
            names = [name for name, parameter in self.model.named_parameters() if parameter.requires_grad]
            masters = zip(names, self._masters, strict=True)
            weights = {name: master.detach().cpu().contiguous() for name, master in masters}
            write_whole(measured.best, lambda file: file.write(tensors_bytes(weights)))

        def enough() -> bool:
            return len([step for step, _ in notes["history"] if step > notes["best"]]) >= measured.patience

        def watch(before: float) -> bool:
            if _reached(progress.fraction(self.plan), measured.times) > _reached(before, measured.times):
                figures = measured.measure()
                score, best = measured.score(figures), max(found for _, found in notes["history"])
                notes["history"].append([progress.step, score])
                if score > best:
                    keep(figures)
                self.save()
            if stopped():
                self.save()
                done = f"stopped after step {progress.step} of {self.plan.steps}"
                raise Interrupted(f"{done}; the same command goes on from there")
            return not enough()

        if not notes:
            figures = measured.measure()
            notes.update(before=figures, history=[[0, measured.score(figures)]])
            keep(figures)
        if not enough():
            self.train(batches, learn, title, watch)

    def save(self) -> None:
        """Write the checkpoint. Raises :class:`alignment.options.DiskError`."""
        state = {
            "masters": [master.detach().cpu() for master in self._masters],
            "optimizers": [optimizer.state_dict() for optimizer, _ in self._optimizers],
            "progress": list(astuple(self.progress)),
            "notes": self.notes,
        }
        write_checkpoint(self._checkpoint, state)

    @torch.no_grad()
    def _resume(self) -> None:
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

    def _step(self, batches: BatchSource, learn: Learn) -> None:
        plan, progress, began = self.plan, self.progress, time.monotonic()
        fraction = progress.fraction(plan)
        warm, cool = (progress.step + 1) / plan.warmup_steps, (1.0 - fraction) / (1.0 - plan.decay_from)
        for optimizer, rate in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * min(1.0, warm) * max(0.01, min(1.0, cool))
        length = plan.long_sequence if plan.long_sequence and fraction >= plan.long_from else plan.sequence
        tokens_BT1 = batches.at(progress.step, max(1, plan.batch_tokens // length), length).to(plan.device)
        loss = learn(tokens_BT1)
        for master, working in zip(self._masters, self._working, strict=True):
            if master is not working:
                master.grad = None if working.grad is None else working.grad.float()
                working.grad = None
        nn.utils.clip_grad_norm_(self._masters, 1.0)
        for optimizer, _ in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self._round_masters()
        progress.step += 1
        progress.tokens += tokens_BT1[:, 1:].numel()
        progress.seconds += time.monotonic() - began
        old = loss if math.isnan(progress.recent_loss) else progress.recent_loss
        progress.recent_loss = 0.98 * old + 0.02 * loss

    @torch.no_grad()
    def _round_masters(self) -> None:
        for master, working in zip(self._masters, self._working, strict=True):
            working.copy_(master)

    def _usual_optimizers(self) -> Optimizers:
        """By what each parameter is: a matrix that maps features to features, and not tokens, or something else."""
        model: Any = self.model
        parts = (model.get_input_embeddings(), model.get_output_embeddings())
        of_tokens = {id(part.weight) for part in parts if part is not None}
        inner: list[Tensor] = []
        others: list[Tensor] = []
        for working, master in zip(self._working, self._masters, strict=True):
            (inner if working.ndim == 2 and id(working) not in of_tokens else others).append(master)
        return muon_and_adamw(inner, self.plan.muon_rate, others, self.plan.adam_rate, decay=0.01)


def _reached(fraction: float, times: int) -> int:
    """How many of so many equal parts of the budget are used."""
    return math.floor(fraction * times + 1e-9)


@torch.no_grad()
def restore(model: nn.Module, best: Path) -> None:
    """Give a model the weights that were kept as the best."""
    kept = load_tensors(best.read_bytes())
    for name, parameter in model.named_parameters():
        if name in kept:
            parameter.copy_(kept[name])


def muon_and_adamw(
    matrices: Iterable[Tensor], muon_rate: float, others: Iterable[Tensor], adam_rate: float, decay: float = 0.0
) -> Optimizers:
    """Muon for ``matrices``, AdamW for ``others``, with peak rates as AdamW knows them; ``decay``: of the others."""
    muon = torch.optim.Muon(matrices, muon_rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    return [(muon, muon_rate), (torch.optim.AdamW(others, adam_rate, (0.9, 0.95), weight_decay=decay), adam_rate)]
