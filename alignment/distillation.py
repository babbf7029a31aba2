"""Decides the course of an alignment: what is gathered, written, trained on and measured, and when it is enough.

The draft keeps its architecture and its tokenizer; its weights are those that were best on what is held out. What it
brought is shown as a table of before and after, a sentence, and a plot of the way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table
from torch import nn
from transformers import PreTrainedModel

from alignment.data import Data
from alignment.encoding import Batches, BatchesInTurn, EncodedText, Encoder, gather, joined, tokenizer_of
from alignment.losses import OBJECTIVES, distillation_loss, measure
from alignment.options import DistillationOptions, Interrupted
from alignment.pair import ModelPair
from alignment.training import HeldOut, Trainer, TrainingPlan, restore
from alignment.workplace import Workplace
from alignment.writing import BATCH, Writer, WrittenRow, written_rows
from engine.loading.checkpoint import read_config

HELD_OUT_ROWS = 16
"""Continuations that acceptance is measured on, for each temperature; and as many pieces of the data."""
EVALUATIONS = 10
"""How often it is measured on the way."""
PATIENCE = 5
"""Measurements in a row without anything better, after which training ends."""
RATE_WIDTH = 0.2
"""The learning rate is this over the hidden size, unless it is given: the wider a model, the smaller its steps."""
MAX_TURNS = 100
"""Steps in which the share of the data is what it should be."""
DATA = "the data, held out"

Figures = Mapping[str, Mapping[str, float]]
"""By kind of text, ``greedy``, ``coupled`` and ``overlap`` from 0 to 1."""


@dataclass(frozen=True, slots=True)
class DistillationOutcome:
    """What an alignment brought."""

    before: Figures
    after: Figures
    history: Sequence[Sequence[float]]
    """(step, score) of every measurement; see :func:`score`."""
    best_step: int
    steps: int
    """That were taken."""


def score(figures: Figures) -> float:
    """Acceptance of the target's own text, the mean of greedy agreement and 1 - TV at temperature 1."""
    own = [told for kind, told in figures.items() if kind != DATA]
    return sum(told["greedy"] + told["overlap"] for told in own) / (2 * len(own))


class Distillation:
    """One alignment, in its folder."""

    def __init__(
        self,
        pair: ModelPair,
        encoder: Encoder,
        options: DistillationOptions,
        place: Workplace,
        stopped: Callable[[], bool],
        report: Callable[[str], None],
    ) -> None:
        """``stopped`` is asked between steps and rounds; ``report`` hears a line before each part."""
        self._pair, self._encoder, self._options, self._place = pair, encoder, options, place
        self._stopped, self._report = stopped, report
        self._writer = Writer(pair.target.module, pair.target.stop_tokens, pair.vocabulary)
        self._best = place.work / "best.safetensors"

    def run(self, data: Data) -> DistillationOutcome:
        """Do all that is not done yet; the folder then holds the model.

        Raises :class:`alignment.options.AlignmentError`: DataError, DiskError, or Interrupted when told to stop.
        """
        options, pair = self._options, self._pair
        self._report(f"reading {data}")
        train, apart = gather(data, self._encoder, options.data_tokens, HELD_OUT_ROWS, options.seed)
        held_out, separator = self._held_out(apart), self._encoder.separator
        rounds = math.ceil(options.samples / (BATCH * options.new_tokens))
        written = self._written(train, rounds, BATCH, "target writes")
        samples = Batches(joined([row.tokens for row in written], separator), options.seed)
        texts = Batches(joined([piece.ids for piece in train], separator), options.seed + 1)
        share = Fraction(options.data_share).limit_denominator(MAX_TURNS)
        batches = BatchesInTurn((samples, share.denominator - share.numerator), (texts, share.numerator))
        trainer = self._trainer()
        if not trainer.notes:
            self._report("measuring the draft as it is")
        read, said = sum(len(piece.ids) for piece in train), sum(len(row.tokens) - row.start for row in written)
        self._report(f"training on {read} tokens of data and {said} that the target wrote")
        loss = distillation_loss(
            pair.target.module, divergence=OBJECTIVES[options.objective], vocabulary=pair.vocabulary
        )
        measured = HeldOut(lambda: self._measure(trainer, held_out), score, EVALUATIONS, PATIENCE, self._best)
        trainer.train_to_best(batches, trainer.learn_by(loss), "draft", measured, self._stopped)
        notes = trainer.notes
        outcome = DistillationOutcome(
            notes["before"], notes["after"], notes["history"], notes["best"], trainer.progress.step
        )
        self._place.finish(asdict(outcome), self._save)
        return outcome

    def _trainer(self) -> Trainer[PreTrainedModel]:
        options, module = self._options, self._pair.draft_module
        rate = options.rate or RATE_WIDTH / self._pair.draft.config.get_text_config(decoder=True).hidden_size
        plan = TrainingPlan(
            steps=options.steps,
            batch_tokens=options.batch_tokens,
            sequence=options.sequence,
            muon_rate=rate,
            adam_rate=rate,
            device=self._pair.target.device,
            dtype=self._pair.target.dtype,
            warmup_steps=max(1, min(40, options.steps // 10)),
            decay_from=0.0,  # on a plateau nothing may get better before the rate falls, and the run would end early
        )
        return Trainer(module, plan, self._place.work / "checkpoint.pt")

    def _held_out(self, pieces: Sequence[EncodedText]) -> dict[str, list[WrittenRow]]:
        """What is measured, by kind of text."""
        options = self._options
        written = self._written(pieces, len(options.temperatures), HELD_OUT_ROWS, "target writes what is held out")
        found = {
            f"written at {temperature:g}": [row for row in written if row.temperature == temperature]
            for temperature in options.temperatures
        }
        texts = [WrittenRow(piece.ids[: options.sequence], 0, 1.0) for piece in pieces if len(piece.ids) > 1]
        return found | {DATA: texts}

    def _written(self, pieces: Sequence[EncodedText], rounds: int, batch: int, title: str) -> list[WrittenRow]:
        """What the target writes behind prompts of these pieces, at the temperatures in turn."""
        options = self._options
        longest = min(options.sequence, self._pair.context - options.new_tokens)
        order = np.random.default_rng(options.seed).permutation(len(pieces))

        def write(number: int) -> list[WrittenRow]:
            draw = np.random.default_rng([options.seed, number])
            chosen = [pieces[order[(number * batch + place) % len(order)]] for place in range(batch)]
            prompts = [self._encoder.prompt(piece, draw, longest) for piece in chosen]
            temperature = options.temperatures[number % len(options.temperatures)]
            return self._writer.write(prompts, options.new_tokens, temperature, seed=options.seed + number)

        folder, vocabulary = self._place.work / "written", self._pair.vocabulary
        return written_rows(folder, rounds, title, vocabulary, write, self._check_stopped)

    def _check_stopped(self) -> None:
        if self._stopped():
            raise Interrupted("stopped while the target wrote samples; the same command goes on from there")

    def _measure(
        self, trainer: Trainer[PreTrainedModel], held_out: Mapping[str, Sequence[WrittenRow]]
    ) -> dict[str, Any]:
        target, draft = self._pair.target.module, trainer.model
        draft.train(False)
        figures = {
            kind: measure(target, draft, rows, self._pair.vocabulary, self._options.seed)
            for kind, rows in held_out.items()
        }
        draft.train(True)
        return figures

    def _save(self, folder: Path) -> None:
        """The draft with its best weights, as it was stored before."""
        module, name = self._pair.draft_module, self._pair.draft.name
        nn.Module.to(module, device="cpu", dtype=getattr(read_config(name), "dtype", None) or torch.float32)
        restore(module, self._best)
        module.save_pretrained(folder)
        tokenizer_of(name).save_pretrained(folder)


# -- what it brought, for people ---------------------------------------------------------------------------------------

READINGS = {"greedy": "greedy agreement", "overlap": "1 - TV", "coupled": "same noise"}
"""The last two at temperature 1."""


def table(outcome: DistillationOutcome) -> Table:
    """A line for every kind of text."""
    shown = Table(title="acceptance before and after: text held out, and what the target writes at temperatures")
    shown.add_column("text")
    for reading in READINGS.values():
        shown.add_column(reading, justify="right")
    for kind, before in outcome.before.items():
        after = outcome.after[kind]
        shown.add_row(kind, *(f"{before[name]:.3f} → {after[name]:.3f}" for name in READINGS))
    return shown


def verdict(outcome: DistillationOutcome, out: Path) -> str:
    """In one sentence."""
    gained = score(outcome.after) - score(outcome.before)
    if not outcome.best_step:
        return f"nothing was gained: no step made the draft better on held-out text; {out} holds the draft as it was"
    kept = f"the weights of step {outcome.best_step} of {outcome.steps}"
    return f"acceptance of the target's own text rose by {gained:.3f}; {out} holds {kept}: paceline up --draft {out}"


def plot(outcome: DistillationOutcome, folder: Path) -> Path | None:
    """Draw acceptance against steps into ``folder``; None without matplotlib, which is optional."""
    if not find_spec("matplotlib"):
        return None
    from matplotlib.figure import Figure

    figure = Figure((6, 3.6), layout="constrained")
    axes = figure.add_subplot()
    steps, scores = zip(*outcome.history, strict=True)
    axes.plot(steps, scores, marker="o", color="tab:blue", label="held out, the target's own text")
    axes.axhline(scores[0], color="tab:grey", linestyle="--", label="before")
    axes.axvline(outcome.best_step, color="tab:green", linestyle=":", label="kept")
    axes.set_xlabel("step")
    axes.set_ylabel("acceptance")
    axes.legend(fontsize=8)
    path = folder / "alignment.png"
    figure.savefig(path, dpi=120)
    return path
