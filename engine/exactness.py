"""Whether a token's logits have the same bits however it is computed: the ground of "the same text for a seed".

Measured at load for this model on this device, since kernels of libraries may add up in another order when a step has
another size. Of the numbers of rows that steps are padded to, the most that agree with each other are used; whatever
still differs is named. Knows steps and bits; nothing about kernels.

Tensor legend: N tokens compared, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from random import Random

import torch
from torch import Tensor

from engine.forward import Chunk
from engine.model import ModelError
from engine.step import Engine
from speculation.messages import EXACT

PREFIX, COMPARED = 41, 8
"""Tokens of the probed text: before what is compared, and compared."""

log = logging.getLogger(__name__)

OTHERS = 3
"""Other sequences that are computed beside it."""

PIECE = 16
"""Tokens of a piece in which the text is computed again."""


def warm_up(engine: Engine) -> None:
    """Record steps of every size that is replayed, so that no request has to wait for that, and see how exact they are.

    On CUDA one step is computed at least, with which the cache takes its memory. Raises ModelError if there is too
    little.
    """
    try:
        if not engine.record_steps() and engine.model.device.type == "cuda":
            sequence = engine.cache.sequence()
            engine.run([Chunk(sequence, [0], rows=[0])])
            sequence.free()
        if engine.wants_exact:
            engine.exactness = measure(engine)
            log.info("%s: %s", engine.model.name, engine.exactness)
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"{engine.model.name}: a cache of {engine.cache.capacity} tokens does not fit beside the weights "
            "and whatever else uses this GPU; lower cache_tokens, or set gpus where workers share one"
        ) from error


def measure(engine: Engine) -> str:
    """:data:`EXACT`, or in one line what changes the bits of a token. Steps of sizes that do are avoided from now on.

    Leaves nothing in the cache. Where it has too little room, what cannot be tried counts as not exact.
    """
    end = PREFIX + COMPARED
    needed = (1 + OTHERS) * (max((end, *engine.row_classes)) + COMPARED)
    if engine.model.context < end or engine.cache.free_tokens < needed:
        return f"not measured: that takes a cache of {needed} tokens and a context of {end}"
    probe = _Probe(engine)
    try:
        return probe.run()
    finally:
        probe.close()


class _Probe:
    """A text, computed in every way that a step can be made of."""

    def __init__(self, engine: Engine) -> None:
        rng = Random(5)
        self._engine = engine
        self._text = [rng.randrange(engine.model.vocabulary) for _ in range(PREFIX + COMPARED)]
        self._rng = rng
        self._sequence = engine.cache.sequence()
        self._others = [engine.cache.sequence() for _ in range(OTHERS)]

    def close(self) -> None:
        for sequence in (self._sequence, *self._others):
            sequence.free()

    def run(self) -> str:
        self._read(PREFIX)
        classes = self._engine.row_classes
        for rows in set(classes).difference(_majority([(rows, self._among(rows)) for rows in classes])):
            self._engine.avoid_rows(rows)
        self._read(PREFIX)  # once more, as it may have been read in steps that are not used any longer
        expected_NV = self._one_by_one()
        ways: Sequence[tuple[str, Callable[[], Tensor]]] = (
            ("in a chain", lambda: self._step(self._text[PREFIX:])),
            ("in a tree", self._as_branch),
            ("in a batch", lambda: self._among(0)),
            ("computed again in other pieces", self._again),
        )
        for told, compute in ways:
            found_NV = compute()
            if not torch.equal(found_NV, expected_NV):
                differ = (found_NV != expected_NV).any(-1).float().mean()
                return f"not exact: {told}, {differ:.0%} of the tokens have other bits than alone"
        return EXACT

    def _step(
        self,
        tokens: Sequence[int],
        parents: Sequence[int] | None = None,
        rows: Sequence[int] | None = None,
        beside: Sequence[int] = (),
    ) -> Tensor:
        """The wanted logits of the text's next tokens, which stay pending; others compute ``beside`` tokens each."""
        chunks = [
            Chunk(sequence, [self._rng.randrange(self._engine.model.vocabulary) for _ in range(count)])
            for sequence, count in zip(self._others, beside, strict=False)
            if count
        ]
        own = Chunk(self._sequence, tokens, parents, range(len(tokens)) if rows is None else rows)
        logits_NV = self._engine.run([*chunks[:1], own, *chunks[1:]]).clone()
        for chunk in chunks:
            chunk.sequence.rollback()
        if rows is None:
            self._sequence.rollback()
        return logits_NV

    def _one_by_one(self) -> Tensor:
        found = []
        for token in self._text[PREFIX:]:
            found.append(self._step([token], rows=[0]))
            self._sequence.advance([0])
        self._sequence.truncate(PREFIX)
        return torch.cat(found)

    def _as_branch(self) -> Tensor:
        """With a wrong sibling before each token."""
        tokens: list[int] = []
        parents: list[int] = []
        last = -1
        for token in self._text[PREFIX:]:
            parents += [last, last]
            tokens += [(token + 1) % self._engine.model.vocabulary, token]
            last = len(tokens) - 1
        return self._step(tokens, parents)[1::2]

    def _among(self, rows: int) -> Tensor:
        """Beside others, in a step that is as large as ``rows`` rows, where steps have classes."""
        room = max(0, rows - COMPARED)
        first = min(room, self._engine.model.context)
        beside = (first, min(room - first, self._engine.model.context)) if rows else (5, 1, 2)
        return self._step(self._text[PREFIX:], beside=beside)

    def _again(self) -> Tensor:
        """In another order and other pieces, as after a failover; what is compared in one piece of them."""
        self._read(PIECE)
        return self._step(self._text[PREFIX:])

    def _read(self, piece: int) -> None:
        """Begin anew with what is before the compared tokens, so many tokens in a step."""
        self._sequence.truncate(0)
        for start in range(0, PREFIX, piece):
            part = self._text[start : min(start + piece, PREFIX)]
            self._step(part, rows=())
            self._sequence.advance(range(len(part)))


def _majority(found: Sequence[tuple[int, Tensor]]) -> Sequence[int]:
    """The most numbers of rows that gave the same bits; of several such sets, the one that reaches furthest."""
    alike: list[tuple[Tensor, list[int]]] = []
    for rows, logits_NV in found:
        known = next((sizes for first_NV, sizes in alike if torch.equal(first_NV, logits_NV)), None)
        if known is None:
            alike.append((logits_NV, [rows]))
        else:
            known.append(rows)
    return max((sizes for _, sizes in alike), key=lambda sizes: (len(sizes), max(sizes)), default=())
