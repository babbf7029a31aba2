"""What draft models and EAGLE heads say along the target's text: a forward over prompt and text, all places at once.

The model, the shape of its candidates and the noise are those of a draft worker, so what it says at a place is what it
would say there while serving, whatever was drafted before.

One with another tokenizer is asked place by place, since how it reads the text depends on its drafts: a token that it
drafted stays as it is, and where the text leaves its drafts the end is cut anew
(:mod:`draft_service.translation`). Its first choice is taken to have been read ahead, as by a worker that is
not late.

What an EAGLE head says of a place depends on how far it has gone on by itself to get there, and on that alone as long
as its guesses before were right, which is all that counts; so each place is asked once for each such age.

Tensor legend: R places, T tokens, N rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace

import torch
from torch import Tensor

from alignment.eagle.unrolled import unroll
from benchmarks.fit.command import FitError, FitOptions
from benchmarks.fit.serving import TargetText
from draft_service.sequence import Reader
from draft_service.translation import TEXTS, Vocabularies, read_vocabularies, translator
from engine.build import build
from engine.cache.kv_cache import CachedSequence
from engine.cache.kv_store import PAGE
from engine.eagle.head import EagleHead
from engine.interface import Chunk
from engine.sampling.sampling import Draw, candidates
from engine.settings import EngineSettings
from engine.step import Engine
from simulation.agreement import AgreementPassage, ByAge
from speculation.drafting.draft_session import Candidate, DraftLimits
from speculation.messages import Sampling, Token
from target_service.drafting.features import KEPT

FED = 512
SAID = DraftLimits().of_head().children
"""Tokens that are kept of what a head says of a place; what it thinks of each depends on how many it says."""
AGES = 16
"""At which an EAGLE head is asked: twice as far as it guesses at a target, as drafters run ahead of their features."""


def translated(options: FitOptions) -> frozenset[str]:
    """Those of the drafts that have another tokenizer than the target.

    Raises :class:`engine.model.ModelError` as their workers would, where the two have too little in common.
    """
    found = {draft: known for draft in options.drafts if (known := read_vocabularies(draft, options.target))}
    for draft, known in found.items():
        with closing(build(_settings(options, draft, 0), invariant=False)) as engine:
            translator(engine, known)
    return frozenset(found)


def passages(options: FitOptions, draft: str, texts: Sequence[TargetText]) -> list[AgreementPassage]:
    """``texts`` with what ``draft`` says at every place. Raises FitError or :class:`engine.model.ModelError`."""
    known = read_vocabularies(draft, options.target)
    longest = max(_length(text, known) for text in texts)
    with closing(build(_settings(options, draft, longest), invariant=False)) as engine:
        if longest > engine.model.context:
            holds = f"its context holds {engine.model.context} tokens, prompt and text have up to {longest}"
            raise FitError(f"--draft {draft}: {holds}; give shorter prompts or fewer --tokens")
        if known is None:
            return [_passage(engine, text, options.sampling) for text in texts]
        reader = translator(engine, known)
        return [_translated(engine, reader, text, options.sampling) for text in texts]


def _settings(options: FitOptions, draft: str, longest: int) -> EngineSettings:
    # The overlap of vocabularies is measured on several texts at once, each of which takes a page on a GPU.
    room = max(longest + FED, TEXTS * PAGE)
    return EngineSettings(draft, dtype=options.dtype, device=options.device, threads=options.threads, cache_tokens=room)


def _length(text: TargetText, known: Vocabularies | None) -> int:
    """Tokens of the draft model; at most, where it translates, since of drafts it keeps the target's."""
    words = text.prompt + text.tokens
    if known is None:
        return len(words)
    own = known.own.beginning + known.own.encode(known.target.decode(words))[0]
    return len(own) + len(text.tokens)


def _along(engine: Engine, text: TargetText) -> Iterator[tuple[range, Tensor]]:
    """Read prompt and text but for the last token; yields the places, by position, whose rows were computed."""
    words, first = text.prompt + text.tokens, len(text.prompt)
    sequence, end = engine.cache.sequence(), len(words) - 1
    for start in range(0, end, FED):
        fed = words[start : min(start + FED, end)]
        # The row of a token says what follows it.
        rows = range(max(first - 1 - start, 0), len(fed))
        yield range(start + rows.start + 1, start + rows.stop + 1), engine.run([Chunk(sequence, fed, rows=rows)])
    sequence.rollback()
    sequence.free()


def _passage(engine: Engine, text: TargetText, sampling: Sampling) -> AgreementPassage:
    places: list[tuple[Candidate, ...]] = []
    for positions, logits_RV in _along(engine, text):
        draws = [Draw(sampling, position) for position in positions]
        places += map(tuple, candidates(logits_RV, draws, DraftLimits().children))
    return AgreementPassage(text.prompt, text.tokens, tuple(places))


def _translated(engine: Engine, reader: Reader, text: TargetText, sampling: Sampling) -> AgreementPassage:
    """The same, place by place. Nothing is said where the draft model has no token for where the text ends."""
    committed = list(text.prompt)
    own = reader.text(committed)
    cached = engine.cache.sequence()
    places: list[tuple[Candidate, ...]] = []
    for token in text.tokens:
        said: tuple[Candidate, ...] = ()
        if own.complete:
            cached.truncate(min(cached.length, len(own.tokens) - 1))
            logits_RV = reader.read(_fed(engine, cached, own.tokens))
            said = tuple(candidates(logits_RV, [Draw(sampling, len(committed))], DraftLimits().children)[0])
        places.append(said)
        committed.append(token)
        if said and said[0].token == token:
            own.follow(1)
        else:
            cached.truncate(min(cached.length, own.settle()))
    cached.free()
    return AgreementPassage(text.prompt, text.tokens, tuple(places))


def _fed(engine: Engine, cached: CachedSequence, tokens: Sequence[Token]) -> Tensor:
    """Feed what is not cached; returns the logits behind the last token, ``[1, V]``."""
    while True:
        fed = tokens[cached.length : cached.length + FED]
        logits_RV = engine.run([Chunk(cached, fed, rows=[len(fed) - 1])])
        cached.advance(range(len(fed)))
        if cached.length == len(tokens):
            return logits_RV


def by_age(options: FitOptions, texts: Sequence[TargetText]) -> list[ByAge]:
    """For each text what the EAGLE head says at every place, by age. Raises :class:`engine.model.ModelError`."""
    longest = max(len(text.prompt) + len(text.tokens) for text in texts)
    settings = replace(_settings(options, options.target, longest), eagle=options.eagle)
    with closing(build(settings)) as engine:
        assert engine.eagle is not None
        return [_said_by_age(engine, engine.eagle, text, options.sampling) for text in texts]


@torch.inference_mode()
def _said_by_age(engine: Engine, head: EagleHead, text: TargetText, sampling: Sampling) -> ByAge:
    """Of a prompt it reads as much as targets send to one elsewhere."""
    aux: list[Tensor] = []
    for _ in _along(engine, text):
        assert engine.aux is not None
        aux.append(engine.aux)
    cut = max(len(text.prompt) - KEPT, 0)
    words, first = (text.prompt + text.tokens)[cut:], len(text.prompt) - cut
    # Row i of an age guesses token i + 2 + age; the last token needs one row at age 0, and at others rows before it.
    tokens_1T = torch.tensor([[*words, *[0] * (AGES - 2)]], device=aux[0].device)
    read_1TX = torch.cat(aux)[None, cut:]
    fused_1TD = read_1TX if engine.fuses else head.fuse(read_1TX)
    found: list[tuple[tuple[Candidate, ...], ...]] = []
    for age, said_1NV in enumerate(unroll(head, tokens_1T, fused_1TD, AGES)):
        rows_RV = said_1NV[0, max(first - 2 - age, 0) : len(words) - 2 - age].float()
        logits_RV = head.by_token(rows_RV)
        missing = len(text.tokens) - len(rows_RV)
        draws = [Draw(sampling, len(text.prompt) + place) for place in range(missing, len(text.tokens))]
        said = candidates(logits_RV[:, : engine.model.vocabulary], draws, SAID)
        found.append(((),) * missing + tuple(map(tuple, said)))
    return tuple(found)
