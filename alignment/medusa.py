"""Trains Medusa heads for a target, which itself stays as it is ("Medusa-1" of Cai et al. 2024, arXiv:2401.10774).

A head learns the target's own next-token distribution, not the text's: where it reads the hidden state that the token
after position t is drawn from, head i is to say what the target says after position t + 1 + i, by forward KL. The
hidden states of a batch are computed once for all heads. Heads start as the paper's do: blocks that change nothing, and
the target's output layer. Losses of farther heads count less.

Measured on text held out: how often the first choice of a head is the target's, and how many heads
in a row are right. The weights that are best by the latter are kept.

Tensor legend: B sequences, T positions, V vocabulary, D hidden size.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from alignment.batches import Batches, BatchSource, joined
from alignment.checkpoints import read_checkpoint, write_checkpoint
from alignment.data import Data
from alignment.encoding import Encoder, gather
from alignment.errors import DataError, Interrupted, SettingsError
from alignment.training import BAR, CHECKPOINT_SECONDS, rate_share
from alignment.workplace import Workplace
from engine.loading.checkpoint import revision_of
from engine.loading.loader import load
from engine.loading.self_test import STOCK
from engine.medusa import MedusaHeads, save
from engine.model import HiddenTap, Model

FARTHER = 0.8
"""What the loss of a head counts, relative to the one before (as in the authors' training)."""
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
class MedusaOptions:
    """How heads are made. Any of it that differs makes them others."""

    heads: int = 4
    layers: int = 1
    """Residual blocks of a head."""
    shared_output: bool = False
    """Whether all heads have one output layer."""
    data_tokens: int = 1_000_000
    """Most tokens that are taken from the data."""
    steps: int = 400
    minutes: float = 0.0
    """Most minutes in steps; 0: as many as it takes."""
    batch_tokens: int = 2048
    sequence: int = 256
    rate: float = 3e-3
    """Peak learning rate."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Of heads, on held-out text."""

    by_head: tuple[float, ...]
    """How often each head's first choice is the target's."""
    run: float
    """How many heads in a row are right, from the first on, in the mean."""


@dataclass(slots=True)
class MedusaProgress:
    """What was spent and found so far; survives a restart."""

    step: int = 0
    seconds: float = 0.0
    best_step: int = 0
    waited: int = 0
    """Measurements since the best."""
    before: dict[str, Any] = field(default_factory=dict)
    after: dict[str, Any] = field(default_factory=dict)

    def fraction(self, options: MedusaOptions) -> float:
        """Share of the budget used, 0 to 1."""
        spent = self.seconds / (60 * options.minutes) if options.minutes else 0.0
        return min(1.0, max(self.step / options.steps, spent))


def settings_of(options: MedusaOptions, target: Model, data: object) -> dict[str, Any]:
    """All that the heads depend on, as plain values; ``data`` in words."""
    fingerprint = revision_of(target.name, str(target.dtype))
    machine = {"device": target.device.type, "dtype": str(target.dtype).removeprefix("torch.")}
    return asdict(options) | machine | {"target": f"{target.name} ({fingerprint:016x})", "data": str(data)}


def load_target(path: str, dtype: str, device: str, threads: int) -> Model:
    """A target to train heads for, as transformers computes it. Raises ModelError, SettingsError."""
    model = load(path, dtype=dtype, device=device, threads=threads, pack=False, self_test=False)
    if not model.tokenizer_digest:
        raise SettingsError(f"{path}: has no tokenizer; training needs it to read the data")
    module: Any = model.module
    module.set_attn_implementation("sdpa" if module._supports_sdpa else STOCK)
    return model


class HeadTraining:
    """The making of one set of heads, in its folder."""

    def __init__(
        self, target: Model, encoder: Encoder, options: MedusaOptions, place: Workplace, report: Callable[[str], None]
    ) -> None:
        """``report`` hears a line before each part. Raises ModelError if the target shows no hidden states."""
        self._target, self._encoder, self._options, self._place = target, encoder, options, place
        self._report = report
        self._tap = HiddenTap(target)
        self._checkpoint = place.work / "heads.pt"
        output: Any = self._tap.layer
        vocabulary, hidden = output.weight.shape
        self._heads = MedusaHeads(hidden, vocabulary, options.heads, options.layers, shared=options.shared_output)
        with torch.no_grad():
            for layer in self._heads.outputs:
                assert isinstance(layer, nn.Linear)
                layer.weight.copy_(output.weight)
        self._heads.to(target.device)
        self._best = copy.deepcopy(self._heads.state_dict())
        self._optimizer = torch.optim.AdamW(self._heads.parameters(), options.rate, (0.9, 0.95), weight_decay=0.0)
        self._progress = MedusaProgress()

    def run(self, data: Data) -> dict[str, Any]:
        """Do all that is not done yet with text; the folder then holds the heads. Returns the figures.

        Raises :class:`alignment.errors.AlignmentError`: DataError, DiskError, or Interrupted when told to stop.
        """
        options = self._options
        self._report(f"reading {data}")
        pieces = gather(data, self._encoder, options.data_tokens, HELD_OUT, options.seed)
        held_out = [piece.ids for piece in pieces.held_out]
        if not any(len(row) > options.heads + 1 for row in held_out):
            raise DataError(f"{data}: nothing held out is longer than the {options.heads} heads reach; give more")
        ids = joined([piece.ids for piece in pieces.train], self._encoder.separator)
        self._report(f"training on {len(ids)} tokens")
        return self.fit(Batches(ids, options.seed), held_out)

    def fit(self, batches: BatchSource, held_out: Sequence[Sequence[int]]) -> dict[str, Any]:
        """The same with token ids; of ``held_out`` as much of each row is read as a sequence has tokens."""
        min_tokens = self._options.heads + 1
        rows = [row[: self._options.sequence] for row in held_out if len(row) > min_tokens]
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
        self._place.finish(figures, lambda folder: save(self._heads, folder, self._target.name))
        return figures

    @torch.no_grad()
    def measure(self, rows: Sequence[Sequence[int]]) -> Accuracy:
        """How right the heads are on these texts, wherever all of them have something to say."""
        heads = len(self._heads)
        hits: list[Tensor] = []
        for row in rows:
            hidden_TD, logits_TV = (part[0] for part in self._read(torch.tensor([row], device=self._target.device)))
            said_T = logits_TV.argmax(-1)
            places = len(row) - heads
            with self._mixed():
                guessed_HT = self._heads(hidden_TD[:places]).argmax(-1)
            right_HT = torch.stack([said_T[head + 1 : head + 1 + places] for head in range(heads)])
            hits.append(guessed_HT == right_HT)
        hits_HT = torch.cat(hits, -1).double()
        runs_T = hits_HT.cumprod(0).sum(0)
        return Accuracy(tuple(round(share, 4) for share in hits_HT.mean(-1).tolist()), round(float(runs_T.mean()), 4))

    def _train(self, batches: BatchSource, held_out: Sequence[Sequence[int]]) -> None:
        progress, options = self._progress, self._options
        sequences = max(1, options.batch_tokens // options.sequence)
        saved = time.monotonic()
        with tqdm(total=1.0, initial=progress.fraction(options), desc="heads", mininterval=5.0, bar_format=BAR) as bar:
            while (fraction := progress.fraction(options)) < 1.0 and progress.waited < PATIENCE:
                began = time.monotonic()
                tokens_BT = batches.at(progress.step, sequences, options.sequence).to(self._target.device)
                loss = self._step(tokens_BT, fraction)
                progress.step += 1
                progress.seconds += time.monotonic() - began
                now = progress.fraction(options)
                bar.set_postfix_str(f"step {progress.step}, loss {loss:.3f}", refresh=False)
                bar.update(now - fraction)
                if int(now * EVALUATIONS) > int(fraction * EVALUATIONS):
                    self._evaluate(held_out)
                if time.monotonic() - saved > CHECKPOINT_SECONDS:
                    self._save()
                    saved = time.monotonic()
        self._save()

    def _step(self, tokens_BT: Tensor, fraction: float) -> float:
        """Learn from one batch; returns the mean loss of the heads, in nats."""
        for group in self._optimizer.param_groups:
            group["lr"] = self._options.rate * rate_share(self._progress.step, WARM_UP, fraction, DECAY_FROM)
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
        nn.utils.clip_grad_norm_(self._heads.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return total / len(self._heads)

    def _read(self, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states ``[B, T, D]`` and logits ``[B, T, V]`` of the target."""
        answer = self._target.module(input_ids=tokens_BT, use_cache=False)
        return self._tap.take().to(torch.float32), answer.logits

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
            "optimizer": self._optimizer.state_dict(),
            "progress": asdict(self._progress),
        }
        write_checkpoint(self._checkpoint, state)

    def _resume(self) -> None:
        state = read_checkpoint(self._checkpoint)
        if state is None:
            return
        self._heads.load_state_dict(state["heads"])
        self._best = state["best"]
        self._optimizer.load_state_dict(state["optimizer"])
        self._progress = MedusaProgress(**state["progress"])
