"""How heads of a target are trained, whatever they are: data, rates, what is measured on the way, and going on again.

The target itself stays as it is; heads learn what it says of text. On text held out is measured how many of their
guesses in a row are right, and the weights that are best by that are kept. It knows neither what a head computes nor
its loss: :mod:`alignment.heads.medusa` and :mod:`alignment.heads.eagle` do.

Tensor legend: B sequences, T positions, V vocabulary, D hidden size.
"""

from __future__ import annotations

import copy
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from alignment.data import Data
from alignment.encoding import Batches, BatchSource, Encoder, gather, joined
from alignment.errors import DataError, Interrupted
from alignment.training import Optimizers, rate_share, set_rates, train_in_steps
from alignment.workplace import Workplace, read_checkpoint, write_checkpoint
from engine.hidden import HiddenTap
from engine.model import Model

FARTHER = 0.8
"""What the loss of a guess counts, relative to the one before it (as in Medusa's and EAGLE-3's own training)."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadOptions(ABC):
    """What the making of any heads is asked for. Any of it that differs makes them others."""

    data_tokens: int = 1_000_000
    """Most tokens that are taken from the data."""
    steps: int = 400
    """At most."""
    minutes: float = 0.0
    """Most minutes in steps; 0: as many as it takes."""
    batch_tokens: int = 2048
    """Of a step."""
    sequence: int = 256
    """Tokens of a sequence."""
    rate: float = 3e-3
    """Peak learning rate."""
    seed: int = 0
    """Same seed, same heads."""

    @property
    @abstractmethod
    def reach(self) -> int:
        """How many tokens ahead of a text's last one is guessed."""


Options = TypeVar("Options", bound=HeadOptions)


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Of heads, on held-out text."""

    by_head: tuple[float, ...]
    """How often each guess is the target's first choice, nearest first."""
    run: float
    """How many guesses in a row are right, from the first on, in the mean."""


@dataclass(slots=True)
class HeadProgress:
    """What was spent and found so far; survives a restart."""

    step: int = 0
    seconds: float = 0.0
    best_step: int = 0
    waited: int = 0
    """Measurements since the best."""
    before: dict[str, Any] = field(default_factory=dict)
    after: dict[str, Any] = field(default_factory=dict)

    def fraction(self, options: HeadOptions) -> float:
        """Share of the budget used, 0 to 1."""
        spent = self.seconds / (60 * options.minutes) if options.minutes else 0.0
        return min(1.0, max(self.step / options.steps, spent))


def run_of(hits_HN: Tensor) -> Accuracy:
    """``hits_HN``: of each place, which guesses were right, nearest first."""
    hits_HN = hits_HN.double()
    run = float(hits_HN.cumprod(0).sum(0).mean())
    return Accuracy(tuple(round(share, 4) for share in hits_HN.mean(-1).tolist()), round(run, 4))


class HeadTraining(ABC, Generic[Options]):
    """The making of one set of heads, in its folder."""

    def __init__(
        self, target: Model, encoder: Encoder, options: Options, place: Workplace, report: Callable[[str], None]
    ) -> None:
        """``report`` hears a line before each part. Raises ModelError if the target shows no hidden states."""
        self._target, self._encoder, self._options, self._place = target, encoder, options, place
        self._report = report
        self._tap = HiddenTap(target)
        self._checkpoint = place.work / "heads.pt"
        self._progress = HeadProgress()
        self._heads: nn.Module
        self._best: dict[str, Any]
        self._optimizers: Optimizers

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
    def measure(self, rows: Sequence[Sequence[int]]) -> Accuracy:
        """How right the heads are on these texts, wherever all of them have something to say."""

    def run(self, data: Data) -> dict[str, Any]:
        """Do all that is not done yet with text; the folder then holds the heads. Returns the figures.

        Raises :class:`alignment.errors.AlignmentError`: DataError, DiskError, or Interrupted when told to stop.
        """
        options = self._options
        self._report(f"reading {data}")
        pieces = gather(data, self._encoder, options.data_tokens, HELD_OUT, options.seed)
        held_out = [piece.ids for piece in pieces.held_out]
        if not any(len(row) > options.reach for row in held_out):
            raise DataError(f"{data}: nothing held out is longer than the {options.reach} tokens guessed; give more")
        ids = joined([piece.ids for piece in pieces.train], self._encoder.separator)
        self._report(f"training on {len(ids)} tokens")
        return self.fit(Batches(ids, options.seed), held_out)

    def fit(self, batches: BatchSource, held_out: Sequence[Sequence[int]]) -> dict[str, Any]:
        """The same with token ids; of ``held_out`` as much of each row is read as a sequence has tokens."""
        rows = [row[: self._options.sequence] for row in held_out if len(row) > self._options.reach]
        rows = self._held_out(rows)
        self.begin(batches)
        self._resume()
        if not self._progress.before:
            self._progress.before = self._progress.after = asdict(self.measure(rows))
        try:
            self._train(batches, rows)
        except KeyboardInterrupt:
            again = "the same command goes on from the last checkpoint"
            raise Interrupted(f"{self._place.out}: stopped; {again}") from None
        self._heads.load_state_dict(self._best)
        figures = asdict(self._progress)
        self._place.finish(figures, self._write)
        return figures

    def begin(self, batches: BatchSource) -> None:
        """Make the heads as training with these begins."""
        self._heads = self._fresh(batches)
        self._best = copy.deepcopy(self._heads.state_dict())
        self._optimizers = self._make_optimizers()

    def _train(self, batches: BatchSource, held_out: Sequence[Sequence[int]]) -> None:
        progress, options = self._progress, self._options
        sequences = max(1, options.batch_tokens // options.sequence)
        loss = 0.0

        def step() -> bool:
            nonlocal loss
            began, fraction = time.monotonic(), progress.fraction(options)
            tokens_BT = batches.at(progress.step, sequences, options.sequence).to(self._target.device)
            set_rates(self._optimizers, rate_share(progress.step, WARM_UP, fraction, DECAY_FROM))
            loss = self._learn(tokens_BT)
            nn.utils.clip_grad_norm_(self._heads.parameters(), 1.0)
            for optimizer, _ in self._optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            progress.step += 1
            progress.seconds += time.monotonic() - began
            if int(progress.fraction(options) * EVALUATIONS) > int(fraction * EVALUATIONS):
                self._evaluate(held_out)
            return progress.waited < PATIENCE

        if progress.waited < PATIENCE:
            shown = lambda: f"step {progress.step}, loss {loss:.3f}"  # noqa: E731
            train_in_steps("heads", lambda: progress.fraction(options), step, shown, self._save)

    def _mixed(self) -> torch.autocast:
        """Products in the target's format, where that is a short one; the weights stay in float32."""
        short = self._target.dtype in (torch.bfloat16, torch.float16)
        return torch.autocast(self._target.device.type, self._target.dtype if short else None, enabled=short)

    def _evaluate(self, held_out: Sequence[Sequence[int]]) -> None:
        """Measure, and keep the weights if they are the best so far."""
        progress, found = self._progress, self.measure(held_out)
        if found.run > progress.after["run"]:
            progress.after, progress.best_step, progress.waited = asdict(found), progress.step, 0
            self._best = copy.deepcopy(self._heads.state_dict())
        else:
            progress.waited += 1

    def _save(self) -> None:
        state = {
            "heads": self._heads.state_dict(),
            "best": self._best,
            "optimizers": [optimizer.state_dict() for optimizer, _ in self._optimizers],
            "progress": asdict(self._progress),
        }
        write_checkpoint(self._checkpoint, state)

    def _resume(self) -> None:
        state = read_checkpoint(self._checkpoint)
        if state is None:
            return
        self._heads.load_state_dict(state["heads"])
        self._best = state["best"]
        for (optimizer, _), saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self._progress = HeadProgress(**state["progress"])
