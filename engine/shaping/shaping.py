"""What a request does to logits before a token is drawn from them: penalties, bias, and what may not be said.

Decides the logits that :mod:`engine.sampling.sampling` and :mod:`engine.sampling.rejection` are given. They are shaped
in vLLM's order: bias, repetition penalty, frequency and presence penalty; then excluded are all tokens but the allowed
ones, those that would complete a banned sequence, stop tokens before their time, and what a mask rules out. Each rule
equals transformers' processor of that name; presence and frequency follow OpenAI's definition. A row depends on nothing
but its own session's text and its own drafts, so a session's text is the same however its tokens are batched or
drafted.

Knows nothing of temperature, noise or acceptance. Rows of sessions that shape nothing are passed through untouched, and
on CUDA nothing here waits for the device.

Tensor legend: N rows, M rows that are shaped, P rows that one rule applies to, V vocabulary, W words of a mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.host.upload import to_device, upload
from speculation.messages import Limits, Open, Sampling, Token

if TYPE_CHECKING:
    from engine.shaping.grammar import GrammarConstraint

NEVER = float("-inf")
"""The logit of a token that is not drawn."""


@dataclass(frozen=True, slots=True)
class RowShaping:
    """How one row is shaped: as the logits of the token after ``path``, draft tokens behind a session's text."""

    shaping: Shaping
    path: tuple[Token, ...] = ()

    @property
    def position(self) -> int:
        """Of the token that is drawn from the row."""
        return self.shaping.position + len(self.path)


class Shaping:
    """What one session does to its logits. It follows the session's text by itself."""

    def __init__(
        self, opened: Open, tokens: Sequence[Token], vocabulary: int, mask: GrammarConstraint | None = None
    ) -> None:
        """``tokens``: the session's committed ones, a list that grows as they are.

        Of those opened with, the prompt counts for the repetition penalty and as the beginning of banned sequences; the
        others as generated. What lies outside the ``vocabulary`` is never drawn and shapes nothing. ``mask`` has been
        told nothing yet, and is told every token once.
        """
        self.sampling: Sampling = opened.sampling
        self.mask = mask
        self._limits: Limits = opened.limits
        self._tokens, self._vocabulary = tokens, vocabulary
        self._followed = opened.prompt_length
        self._prompt = opened.tokens[: self._followed]
        self._stop = [token for token in sorted(opened.limits.stop_tokens) if token < vocabulary]
        self._banned: dict[tuple[Token, ...], list[Token]] = {}
        for *start, last in opened.sampling.banned:
            if last < vocabulary:
                self._banned.setdefault(tuple(start), []).append(last)
        self._starts = sorted({len(start) for start in self._banned if start})
        self._seen_2V: Tensor | None = None
        self._offset_V: Tensor | None = None

    @classmethod
    def of(
        cls, opened: Open, tokens: Sequence[Token], vocabulary: int, mask: GrammarConstraint | None = None
    ) -> Shaping | None:
        """The shaping of a session; None if it leaves all its logits as they are."""
        shaping = cls(opened, tokens, vocabulary, mask)
        return shaping if shaping.after(()) else None

    @property
    def position(self) -> int:
        """Of the token that is committed next."""
        return len(self._tokens)

    @property
    def penalises(self) -> bool:
        """Whether tokens fare worse, or better, for having been used."""
        sampling = self.sampling
        return (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) != (0.0, 0.0, 1.0)

    @property
    def offsets(self) -> bool:
        """Whether anything is the same for every row."""
        return bool(self.sampling.bias or self.sampling.allowed or () in self._banned)

    def after(self, path: Sequence[Token]) -> RowShaping | None:
        """How the row behind ``path`` is shaped; None if it stays as it is."""
        shape = RowShaping(self, tuple(path))
        early = bool(self._stop) and shape.position < self._limits.min_end
        shapes = early or self.mask is not None or self.penalises or self.offsets or bool(self._starts)
        return shape if shapes else None

    def follow(self) -> None:
        """Take in what was committed since. Costs time in those tokens, not in the text."""
        fresh = self._tokens[self._followed :]
        if not fresh:
            return
        self._followed += len(fresh)
        if self.mask is not None:
            self.mask.advance(fresh)
        if self._seen_2V is not None:
            _count(self._seen_2V[0], fresh)

    def seen(self, like: Tensor) -> Tensor:
        """How often each token was generated, and whether it is in the prompt (1 or 0), ``[2, V]``."""
        if self._seen_2V is None:
            self._seen_2V = like.new_zeros(2, self._vocabulary)
            _count(self._seen_2V[0], self._tokens[len(self._prompt) : self._followed])
            _count(self._seen_2V[1], self._prompt)
            self._seen_2V[1].clamp_(max=1.0)
        return self._seen_2V

    def offset(self, like: Tensor) -> Tensor:
        """What is added to every row, ``[V]``: the bias, and minus infinity for what is never allowed."""
        if self._offset_V is None:
            sampling = self.sampling
            offset_V = like.new_full((self._vocabulary,), NEVER if sampling.allowed else 0.0)
            _put(offset_V, [token for token in sampling.allowed if token < self._vocabulary], 0.0)
            bias = [(token, value) for token, value in sampling.bias if token < self._vocabulary]
            if bias:
                tokens, values = zip(*bias, strict=True)
                offset_V.index_add_(0, upload(tokens, like.device), upload(values, like.device, like.dtype))
            _put(offset_V, self._banned.get((), []), NEVER)
            self._offset_V = offset_V
        return self._offset_V

    def excluded(self, shape: RowShaping) -> Iterator[Token]:
        """What may not come next, for reasons that depend on the text."""
        if shape.position < self._limits.min_end:
            yield from self._stop
        if self._starts:
            end = (*self._tokens[-self._starts[-1] :], *shape.path)
            for length in self._starts:
                if length <= len(end):
                    yield from self._banned.get(end[len(end) - length :], ())


def shaped(logits_NV: Tensor, shapes: Sequence[RowShaping | None]) -> Tensor:
    """Logits to draw from, ``[N, V]``; -inf for what must not be drawn. The argument itself if nothing is shaped.

    A row that is -inf throughout leaves nothing to draw: whoever draws must find out.
    """
    assert len(logits_NV) == len(shapes), "one row of logits per shape"
    rows = [row for row, shape in enumerate(shapes) if shape is not None]
    if not rows:
        return logits_NV
    chosen = [shape for shape in shapes if shape is not None]
    for shaping in dict.fromkeys(shape.shaping for shape in chosen):
        shaping.follow()
    rows_M = upload(rows, logits_NV.device)
    shaped_MV = logits_NV[rows_M]
    _offset(shaped_MV, chosen)
    _penalise(shaped_MV, chosen)
    _exclude(shaped_MV, chosen)
    _mask(shaped_MV, chosen)
    return shaped_MV if len(rows) == len(shapes) else logits_NV.index_copy(0, rows_M, shaped_MV)


def _offset(scores_MV: Tensor, shapes: Sequence[RowShaping]) -> None:
    """Add the bias, and exclude what is never allowed."""
    rows = [row for row, shape in enumerate(shapes) if shape.shaping.offsets]
    if rows:
        offsets_PV = torch.stack([shapes[row].shaping.offset(scores_MV) for row in rows])
        scores_MV.index_add_(0, upload(rows, scores_MV.device), offsets_PV)


def _penalise(scores_MV: Tensor, shapes: Sequence[RowShaping]) -> None:
    """Repetition, frequency and presence penalty, for the text and for the drafts behind it."""
    rows = [row for row, shape in enumerate(shapes) if shape.shaping.penalises]
    if not rows:
        return
    device = scores_MV.device
    seen_P2V = torch.stack([shapes[row].shaping.seen(scores_MV) for row in rows])
    drafted = [(place, 0, token) for place, row in enumerate(rows) for token in shapes[row].path]
    if drafted:
        places = upload([number for place in drafted for number in place], device).view(-1, 3).unbind(1)
        seen_P2V.index_put_(places, seen_P2V.new_ones(1), accumulate=True)
    count_PV, prompt_PV = seen_P2V.unbind(1)
    settings = [shapes[row].shaping.sampling for row in rows]
    penalties = [(each.repetition_penalty, each.frequency_penalty, each.presence_penalty) for each in settings]
    flat = upload([penalty for each in penalties for penalty in each], device, scores_MV.dtype)
    repetition_P1, frequency_P1, presence_P1 = flat.view(-1, 3, 1).unbind(1)
    rows_P = upload(rows, device)
    scores_PV = scores_MV[rows_P]
    repeated_PV = torch.where(scores_PV > 0.0, scores_PV / repetition_P1, scores_PV * repetition_P1)
    generated_PV = count_PV > 0.0
    scores_PV = torch.where(generated_PV | (prompt_PV > 0.0), repeated_PV, scores_PV)
    scores_PV -= frequency_P1 * count_PV + presence_P1 * generated_PV
    scores_MV[rows_P] = scores_PV


def _exclude(scores_MV: Tensor, shapes: Sequence[RowShaping]) -> None:
    """Banned sequences are not completed, and a text does not end before its time."""
    excluded = [(row, token) for row, shape in enumerate(shapes) for token in shape.shaping.excluded(shape)]
    if excluded:
        places = upload([number for place in excluded for number in place], scores_MV.device).view(-1, 2).unbind(1)
        scores_MV.index_put_(places, scores_MV.new_full((1,), NEVER))


def _mask(scores_MV: Tensor, shapes: Sequence[RowShaping]) -> None:
    """Only what the masks leave open is said."""
    masks = [(row, shape.shaping.mask, shape.path) for row, shape in enumerate(shapes)]
    asked = [(row, mask.bits(path)) for row, mask, path in masks if mask is not None]
    closed = [(row, bits_W) for row, bits_W in asked if bits_W is not None]
    if not closed:
        return
    device, vocabulary = scores_MV.device, scores_MV.shape[-1]
    bits_PW = to_device(torch.stack([bits_W for _, bits_W in closed]), device)
    assert bits_PW.shape[-1] == -(-vocabulary // 32), f"a mask of {bits_PW.shape[-1]} words for {vocabulary} tokens"
    each_PWB = (bits_PW[..., None] >> torch.arange(32, dtype=torch.int32, device=device)) & 1
    open_PV = each_PWB.flatten(1)[:, :vocabulary].bool()
    rows_P = upload([row for row, _ in closed], device)
    scores_MV[rows_P] = scores_MV[rows_P].masked_fill(~open_PV, NEVER)


def _count(counts_V: Tensor, tokens: Sequence[Token]) -> None:
    tokens_T = upload(tokens, counts_V.device)
    counts_V.index_put_((tokens_T,), counts_V.new_ones(1), accumulate=True)


def _put(values_V: Tensor, tokens: Sequence[Token], value: float) -> None:
    values_V.index_fill_(0, upload(tokens, values_V.device), value)
