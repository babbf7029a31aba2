"""How heads of a target are trained, whatever they are: on which data, and what is measured on the way.

The target itself stays as it is; heads learn what it says of text. On text held out is measured how many of their
guesses in a row are right, and the weights that are best by that are kept. It knows neither what a head computes nor
its loss: :mod:`alignment.heads.eagle` does.

Tensor legend: B sequences, T positions, V vocabulary, D hidden size.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from alignment.data import Data
from alignment.encoding import Batches, BatchSource, Encoder, gather, joined
from alignment.options import DataError, EagleOptions, Interrupted
from alignment.training import HeldOut, Optimizers, Trainer, TrainingPlan, restore
from alignment.workplace import Workplace
from engine.hidden import HiddenTap
from engine.model import Model

WARM_UP = 20
"""Steps in which the learning rate rises."""
DECAY_FROM = 0.4
"""Share of the training after which it falls, to nearly nothing."""
HELD_OUT = 16
"""Passages that accuracy is measured on."""
EVALUATIONS = 12
"""How often it is measured on the way."""
PATIENCE = 4
"""Measurements in a row without anything better, after which training ends."""


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Of heads, on held-out text."""

    by_head: tuple[float, ...]
    """How often each guess is the target's first choice, nearest first."""
    run: float
    """How many guesses in a row are right, from the first on, in the mean."""


class HeadTraining(ABC):
    """The making of one set of heads, in its folder."""

    def __init__(
        self, target: Model, encoder: Encoder, options: EagleOptions, place: Workplace, report: Callable[[str], None]
    ) -> None:
        """``report`` hears a line before each part. Raises ModelError if the target shows no hidden states."""
        self._target, self._encoder, self._options, self._place = target, encoder, options, place
        self._report = report
        self._tap = HiddenTap(target)
        self._heads: nn.Module

    @abstractmethod
    def _fresh(self, batches: BatchSource) -> nn.Module:
        """Heads as training with these begins, on the target's device, in float32."""

    @abstractmethod
    def _make_optimizers(self) -> Optimizers:
        """Each with its share of the learning rate."""

    @abstractmethod
    def _learn(self, tokens_BT: Tensor) -> float:
        """Leave gradients of one batch; returns the mean loss, in nats."""

    @abstractmethod
    def _write(self, folder: Path) -> None:
        """Write the heads in their published layout."""

    def _held_out(self, rows: list[Sequence[int]]) -> list[Sequence[int]]:
        """What is measured on, of the texts held out."""
        return rows

    @abstractmethod
    def _hits(self, tokens_1T: Tensor) -> Tensor:
        """Of a text's places where all guesses can be judged, which are right, nearest first: ``[guesses, places]``."""

    @torch.no_grad()
    def measure(self, rows: Sequence[Sequence[int]]) -> Accuracy:
        """How right the heads are on these texts, wherever all of them have something to say."""
        texts = (torch.tensor([row], device=self._target.device) for row in rows)
        hits_HN = torch.cat([self._hits(tokens_1T) for tokens_1T in texts], -1).double()
        run = float(hits_HN.cumprod(0).sum(0).mean())
        return Accuracy(tuple(round(share, 4) for share in hits_HN.mean(-1).tolist()), round(run, 4))

    def run(self, data: Data) -> dict[str, Any]:
        """Do all that is not done yet with text; the folder then holds the heads. Returns the figures.

        Raises :class:`alignment.options.AlignmentError`: DataError, DiskError, or Interrupted when told to stop.
        """
        options = self._options
        self._report(f"reading {data}")
        train, apart = gather(data, self._encoder, options.data_tokens, HELD_OUT, options.seed)
        held_out = [piece.ids for piece in apart]
        if not any(len(row) > options.reach for row in held_out):
            raise DataError(f"{data}: nothing held out is longer than the {options.reach} tokens guessed; give more")
        ids = joined([piece.ids for piece in train], self._encoder.separator)
        self._report(f"training on {len(ids)} tokens")
        return self.fit(Batches(ids, options.seed), held_out)

    def fit(self, batches: BatchSource, held_out: Sequence[Sequence[int]]) -> dict[str, Any]:
        """The same with token ids; of ``held_out`` as much of each row is read as a sequence has tokens."""
        rows = [row[: self._options.sequence] for row in held_out if len(row) > self._options.reach]
        rows = self._held_out(rows)
        trainer, best = self.begin(batches), self._place.work / "best.safetensors"
        measured = HeldOut(lambda: asdict(self.measure(rows)), itemgetter("run"), EVALUATIONS, PATIENCE, best)
        try:
            trainer.train_to_best(batches, self._learn, "heads", measured)
        except KeyboardInterrupt:
            again = "the same command goes on from the last checkpoint"
            raise Interrupted(f"{self._place.out}: stopped; {again}") from None
        restore(self._heads, best)
        notes, progress = trainer.notes, trainer.progress
        spent = {"step": progress.step, "seconds": progress.seconds, "best_step": notes["best"]}
        waited = sum(step > notes["best"] for step, _ in notes["history"])
        figures = {**spent, "waited": waited, "before": notes["before"], "after": notes["after"]}
        self._place.finish(figures, self._write)
        return figures

    def begin(self, batches: BatchSource) -> Trainer[nn.Module]:
        """Make the heads as training with these begins, and what trains them."""
        self._heads = self._fresh(batches)
        options = self._options
        plan = TrainingPlan(
            steps=options.steps,
            minutes=options.minutes or math.inf,
            batch_tokens=options.batch_tokens,
            sequence=options.sequence,
            muon_rate=options.rate,
            adam_rate=options.rate,
            device=self._target.device,
            dtype=torch.float32,
            decay_from=DECAY_FROM,
            warmup_steps=WARM_UP,
        )
        return Trainer(self._heads, plan, self._place.work / "checkpoint.pt", self._make_optimizers())

    def _mixed(self) -> torch.autocast:
        """Products in the target's format, where that is a short one; the weights stay in float32."""
        short = self._target.dtype in (torch.bfloat16, torch.float16)
        return torch.autocast(self._target.device.type, self._target.dtype if short else None, enabled=short)
