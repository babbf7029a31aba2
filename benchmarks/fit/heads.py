"""What Medusa heads say along the target's text: one forward over prompt and text, then the heads at every place.

Model, heads, guesses and noise are those of a target worker (:mod:`target_service.medusa`), so what they say at a place
is what they would say there while serving.

Tensor legend: R places, D hidden size, H heads, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.fit.serving import TargetText
from benchmarks.fit.settings import FitError, FitOptions
from engine.build import build
from engine.interface import Chunk
from engine.loading.loader import read_config
from engine.medusa import MedusaHeads, read
from engine.sampling.sampling import Draw, candidates
from engine.settings import EngineSettings
from engine.step import Engine
from speculation.drafting.medusa import HeadGuesses
from speculation.messages import Sampling
from target_service.medusa import WIDTH

FED = 512
"""Tokens of one forward."""
PLACES = 32
"""At which the heads are asked at once; each gives as many rows of logits as there are heads."""


def check(options: FitOptions) -> None:
    """Whether the heads are of the target's size. Raises FitError or :class:`engine.model.ModelError`."""
    found = read(Path(options.medusa).expanduser())
    wanted = read_config(options.target).get_text_config(decoder=True).hidden_size
    if found.hidden != wanted:
        reads = f"these heads read hidden states of {found.hidden} numbers, {options.target} has {wanted}"
        raise FitError(f"--medusa {options.medusa}: {reads}; give heads that were trained for it")


def guesses(options: FitOptions, texts: Sequence[TargetText]) -> list[tuple[HeadGuesses, ...]]:
    """For each text what the heads say at every place; nothing at the first. Raises :class:`engine.model.ModelError`.

    There the target has only just read the prompt, and nothing of its own was drawn yet.
    """
    longest = max(len(text.prompt) + len(text.tokens) for text in texts)
    settings = EngineSettings(
        options.target,
        dtype=options.dtype,
        device=options.device,
        threads=options.threads,
        medusa=options.medusa,
        cache_tokens=longest + FED,
    )
    engine = build(settings)
    try:
        assert engine.heads is not None
        return [((), *_said(engine, engine.heads, text, options.sampling)) for text in texts]
    finally:
        engine.close()


def _said(engine: Engine, heads: MedusaHeads, text: TargetText, sampling: Sampling) -> list[HeadGuesses]:
    """At the places from the second on.

    Heads guess from the state that the last token was drawn from, which the model was in when it had read the one
    before that.
    """
    words, first = text.prompt + text.tokens, len(text.prompt)
    sequence = engine.cache.sequence()
    found: list[HeadGuesses] = []
    for start in range(0, len(words) - 2, FED):
        fed = words[start : min(start + FED, len(words) - 2)]
        rows = range(max(first - 1 - start, 0), len(fed))
        engine.run([Chunk(sequence, fed, rows=rows)])
        if rows:
            assert engine.hidden is not None
            for some_RD in torch.split(engine.hidden, PLACES):
                found += _asked(heads, some_RD, engine.model.vocabulary, first + 1 + len(found), sampling)
    sequence.rollback()
    sequence.free()
    return found


@torch.inference_mode()
def _asked(heads: MedusaHeads, hidden: Tensor, vocabulary: int, position: int, sampling: Sampling) -> list[HeadGuesses]:
    """What the heads say at the places from ``position`` on; ``hidden``: their states, ``[R, D]``."""
    logits_HRV = heads(hidden)[..., :vocabulary].float()
    count = len(hidden)
    draws = [Draw(sampling, position + row + head) for head in range(len(heads)) for row in range(count)]
    said = candidates(logits_HRV.flatten(0, 1), draws, WIDTH)
    return [tuple(said[row::count]) for row in range(count)]
