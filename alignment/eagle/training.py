"""Trains an EAGLE-3 head for a target, which itself stays as it is (Li et al. 2025, arXiv:2503.01840).

Training-time test, as in the paper (:mod:`alignment.eagle.unrolled`): every step is to say what the target says at its
place: forward KL over the tokens the head knows, where the target's first choice is among them; farther steps count
less.

Where shapes allow, the head starts from the target: its last layer reads the states and its first the embeddings, fc
passes on the last auxiliary state, and the output layer has the rows of the tokens that come most often. Or it starts
from another head for this target, such as a published one.

Measured on text that the target writes greedily behind passages held out: how many guesses in a row are right, which is
the acceptance length of greedy decoding less the token that every step gives. The weights that are best by that are
kept.

Tensor legend: B sequences, T positions, N rows, H guesses in a row, V draft vocabulary, D hidden size, A auxiliary
states side by side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from alignment.data import Data
from alignment.eagle.unrolled import guesses, read_target, unroll
from alignment.encoding import Batches, BatchSource, EncodedText, Encoder, gather, joined
from alignment.options import DataError, EagleOptions
from alignment.training import HeldOut, Optimizers, Trainer, TrainingPlan, muon_and_adamw, restore
from alignment.workplace import Workplace
from alignment.writing import Writer, WrittenRow
from engine.eagle.config import EagleConfig
from engine.eagle.head import EagleHead
from engine.eagle.loading import read_beside, save
from engine.model import Model, ModelError

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
MUON = 2.0
"""Learning rate of the matrices inside, relative to that of the output layer and the norms."""
COUNTED = 64
"""Batches whose tokens are counted for a reduced vocabulary."""
PROMPT = 48
"""Tokens that the target goes on from of a passage held out that may be cut anywhere."""


class EagleTraining:
    """The making of one head, in its folder."""

    def __init__(
        self,
        target: Model,
        encoder: Encoder,
        options: EagleOptions,
        place: Workplace,
        stopped: Callable[[], bool],
        report: Callable[[str], None],
    ) -> None:
        """``stopped`` is asked after every step; ``report`` hears a line before each part of :meth:`run`."""
        self._target, self._encoder, self._options, self._place = target, encoder, options, place
        self._stopped, self._report = stopped, report
        self._head: EagleHead

    def run(self, data: Data) -> dict[str, Any]:
        """Do all that is not done yet with text; the folder then holds the head. Returns the figures.

        Raises :class:`alignment.options.AlignmentError`: DataError, DiskError, or Interrupted when told to stop; and
        ModelError for a target that a head cannot be made for.
        """
        options = self._options
        self._report(f"reading {data}")
        train, apart = gather(data, self._encoder, options.data_tokens, HELD_OUT, options.seed)
        if not self._judgeable(apart):
            raise DataError(f"{data}: nothing held out is longer than the {options.reach} tokens guessed; give more")
        ids = joined([piece.ids for piece in train], self._encoder.separator)
        self._report(f"training on {len(ids)} tokens")
        return self.fit(Batches(ids, options.seed), apart)

    def fit(self, batches: BatchSource, held_out: Sequence[EncodedText]) -> dict[str, Any]:
        """The same with token ids."""
        rows = self._held_out(self._judgeable(held_out))
        trainer, best = self.begin(batches), self._place.work / "best.safetensors"
        measured = HeldOut(lambda: self.measure(rows), itemgetter("run"), EVALUATIONS, PATIENCE, best)
        trainer.train_to_best(batches, self._learn, "head", measured, self._stopped)
        restore(self._head, best)
        notes, progress = trainer.notes, trainer.progress
        spent = {"step": progress.step, "seconds": progress.seconds, "best_step": notes["best"]}
        waited = sum(step > notes["best"] for step, _ in notes["history"])
        figures = {**spent, "waited": waited, "before": notes["before"], "after": notes["after"]}
        self._place.finish(figures, lambda folder: save(self._head, folder, embedding=not self._targets_embedding()))
        return figures

    def begin(self, batches: BatchSource) -> Trainer[EagleHead]:
        """Make the head as training with these begins, and what trains it."""
        self._head = self._fresh(batches)
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
        return Trainer(self._head, plan, self._place.work / "checkpoint.pt", self._make_optimizers())

    @torch.no_grad()
    def measure(self, rows: Sequence[WrittenRow]) -> dict[str, Any]:
        """How right the head is behind these prompts, wherever all of its guesses can be judged.

        ``by_head``: how often each guess in a row is the target's first choice, nearest first; ``run``: how many of
        them are right, from the first on, in the mean.
        """
        hits_HN = torch.cat([self._hits(row) for row in rows], -1).double()
        run = float(hits_HN.cumprod(0).sum(0).mean())
        return {"by_head": [round(share, 4) for share in hits_HN.mean(-1).tolist()], "run": round(run, 4)}

    def _fresh(self, batches: BatchSource) -> EagleHead:
        """A head as training with these begins, on the target's device, in float32."""
        torch.manual_seed(self._options.seed)
        if self._options.start:
            begun = read_beside(self._options.start, self._target)
            if (layers := self._target.layers) in begun.config.aux_layers_of(layers):
                unread = f"reads the output of the target's last layer ({layers}), which training cannot give it"
                raise ModelError(f"{self._options.start}: this head {unread}; give one that reads states before it")
            for parameter in begun.parameters():  # some of them are the target's own
                parameter.data = parameter.data.to(torch.float32, copy=True)
            begun.embed_tokens.weight.requires_grad_(False)
            return begun.to(self._target.device)
        module: Any = self._target.module
        output = module.get_output_embeddings()
        if output is None:
            raise ModelError(
                f"model type {self._target.kind!r} has no output layer of its own that a head could start from"
            )
        config = _config_for(self._target.config.get_text_config(decoder=True), self._options)
        head = EagleHead(config)
        head.target_ids = self._most_frequent(batches, config.draft_vocab_size)
        head.embed_tokens.weight = nn.Parameter(
            module.get_input_embeddings().weight.detach()[: config.vocab_size].float(), requires_grad=False
        )
        with torch.no_grad():
            head.lm_head.weight.copy_(output.weight[head.target_ids.to(output.weight.device)])
            _start_from(head, dict(module.named_parameters()), self._target.layers)
        return head.to(self._target.device)

    def _targets_embedding(self) -> bool:
        """Whether the head reads the target's own, which is stored with the target alone."""
        module: Any = self._target.module
        own, targets = self._head.embed_tokens.weight, module.get_input_embeddings().weight.detach()
        return torch.equal(own, targets[: len(own)].to(own))

    def _make_optimizers(self) -> Optimizers:
        """Each with its share of the learning rate."""
        head, rate = self._head, self._options.rate
        trained = [(name, parameter) for name, parameter in head.named_parameters() if parameter.requires_grad]
        inner = [parameter for name, parameter in trained if parameter.ndim == 2 and name != "lm_head.weight"]
        others = [parameter for name, parameter in trained if parameter.ndim != 2 or name == "lm_head.weight"]
        return muon_and_adamw(inner, rate * MUON, others, rate)

    def _judgeable(self, pieces: Sequence[EncodedText]) -> list[EncodedText]:
        """Those behind which a head's guesses may be judged."""
        return [piece for piece in pieces if piece.start or len(piece.ids) > self._options.reach]

    def _held_out(self, pieces: Sequence[EncodedText]) -> list[WrittenRow]:
        """What is measured on: what the target writes behind prompts of these, or they as they are if that is short.

        Raises :class:`alignment.options.DataError` where no guesses could be judged.
        """
        target, length, reach = self._target, self._options.sequence, self._options.reach
        begin = min(PROMPT, length // 2)
        longest = min(length, target.context - (length - begin))
        prompts = [piece.ids[: piece.start][-longest:] if piece.start else piece.ids[:begin] for piece in pieces]
        writer = Writer(target.module, target.stop_tokens, target.vocabulary)
        written = writer.write(prompts, length - begin, 0.0, self._options.seed)
        for rows in (written, [_as_it_is(piece.ids[:length], reach) for piece in pieces]):
            if kept := [row for row in rows if len(row.tokens) > row.start + reach]:
                return kept
        short = f"the {reach} tokens guessed, nor is what is held out; give more text, or a smaller --depth"
        raise DataError(f"nothing that the target writes behind what is held out is longer than {short}")

    def _hits(self, row: WrittenRow) -> Tensor:
        """Which guesses behind the prompt are right, nearest first: ``[H, N]``."""
        tokens_1T = torch.tensor([row.tokens], device=self._target.device)
        aux_1TA, logits_1TV = self._read_target(tokens_1T)
        length, depth = tokens_1T.shape[1], self._options.depth
        said_HN = logits_1TV[0].argmax(-1).unfold(0, length - depth, 1)[1:]
        with self._mixed():
            guessed_HN = guesses(self._head, tokens_1T, aux_1TA, depth)
        return (guessed_HN == said_HN)[:, row.start :]

    def _read_target(self, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Auxiliary states and logits of the target, which never says what is no token."""
        aux_BTA, logits_BTV = read_target(self._target.module, tokens_BT, self._head.config)
        logits_BTV[..., self._target.vocabulary :] = float("-inf")
        return aux_BTA, logits_BTV

    def _learn(self, tokens_BT: Tensor) -> float:
        """Leave gradients of one batch; returns the mean loss, in nats."""
        with torch.no_grad():
            aux_BTA, logits_BTV = self._read_target(tokens_BT)
            known = torch.zeros(logits_BTV.shape[-1], dtype=torch.bool, device=logits_BTV.device)
            known[self._head.target_ids] = True
            counted_BT = known[logits_BTV.argmax(-1)].float()
            p_BTV = logits_BTV[..., self._head.target_ids].float().softmax(-1)
        total, loss = 0.0, tokens_BT.new_zeros((), dtype=torch.float32)
        with self._mixed():
            unrolled = unroll(self._head, tokens_BT, self._head.fuse(aux_BTA), self._options.depth)
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

    def _mixed(self) -> torch.autocast:
        """Products in the target's format, where that is a short one; the weights stay in float32."""
        short = self._target.dtype in (torch.bfloat16, torch.float16)
        return torch.autocast(self._target.device.type, self._target.dtype if short else None, enabled=short)

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


def _as_it_is(ids: tuple[int, ...], reach: int) -> WrittenRow:
    """Text of the data, judged behind its beginning."""
    return WrittenRow(ids, max(min(PROMPT, len(ids) // 2, len(ids) - reach - 1), 0), 0.0)


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
