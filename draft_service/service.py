"""Starting a draft worker: models, caches, lookahead, server."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from draft_service.eagle import HeadLookahead
from draft_service.head_engine import HeadEngine
from draft_service.in_turn import InTurn, limits_in_turn
from draft_service.levels import DraftLevels
from draft_service.lookahead import Lookahead, LookaheadLimits
from draft_service.staged_drafting import Assistant, Guesser, Lookup, StagedDrafting
from draft_service.translation import read_vocabularies, translator
from engine.build import build, welcome
from engine.cpu.thread_choice import set_threads
from engine.eagle.cached import CachedHead
from engine.eagle.loading import check_fit, load_alone
from engine.leader import Ranks
from engine.loading.checkpoint import head_revision
from engine.loading.loader import describe
from engine.model import ModelError
from engine.recorder import Recorder
from engine.settings import EngineSettings
from engine.step import Engine
from speculation.drafting.draft_session import DraftLimits
from speculation.messages import FeatureFormat, Loading, Progress, Welcome
from transport.tracing import TraceSettings, Tracing
from transport.worker import Door, Worker

ROLE = "draft"
HEAD_TOKENS = 65_536
"""Room of an EAGLE head's cache, unless settings say."""
ASSISTANT_TOKENS = 32_768
"""Room of an assistant's cache, unless settings say how much the draft model's has. It is not asked what is free, of
which the draft model shall have most; a session without room goes without guesses."""


@dataclass(frozen=True, slots=True)
class DraftSettings:
    """A draft worker."""

    engine: EngineSettings
    limits: LookaheadLimits = LookaheadLimits()
    record: str = ""
    """File to record every step in; none if empty."""
    step_timeout: float = 60.0
    """Seconds after which a step counts as stuck, and the process ends; 0: never."""
    trace: TraceSettings | None = None
    target_tokenizer: str = ""
    """Folder or hub id of the target's tokenizer; empty: the draft model has the same."""
    lookup: bool = True
    """Whether the draft model's own steps verify guesses copied from the text, unless that is in other tokens."""
    assistant: str = ""
    """Folder or hub id of a still smaller model, whose guesses they verify; none if empty."""
    eagle_format: str = FeatureFormat.BF16
    """How a target sends what the EAGLE head in ``engine`` reads, if there is one to draft with instead of a model."""
    validate: bool = False
    """Whether to check its own books whenever it is idle."""


async def start_draft(
    settings: DraftSettings, door: Door, progress: Progress | None = None, ranks: Ranks | None = None
) -> Worker:
    """Load the model, saying so at ``door``, and be the worker there. ``ranks``: see :func:`engine.build.build`.

    Raises :class:`engine.model.ModelError`, :class:`engine.parallel.group.RankError` or
    :class:`engine.recorder.RecordError`, each one line.
    """
    async with door:
        recorder = Recorder(Path(settings.record)) if settings.record else None
        tracing = Tracing.to(settings.trace, ROLE) if settings.trace else None
        own = settings.engine
        load = partial(_load, settings, recorder=recorder, tracing=tracing, ranks=ranks)
        machine, close = await door.load(load, own.served_name, own.join_timeout + own.load_timeout, progress)
        ending = ExitStack()
        ending.callback(close)
        if tracing is not None:
            ending.callback(tracing.close)
        worker = Worker(machine, ROLE, ending.close, settings.step_timeout, validate=settings.validate)
        await worker.start(door)
        return worker


def build_in_turn(settings: DraftSettings, progress: Progress | None = None) -> InTurn:
    """The same model for the process of a target, on one rank; see :mod:`draft_service.in_turn`.

    Raises :class:`engine.model.ModelError`.
    """
    engine = build(replace(settings.engine, tensor_parallel_size=1), progress, invariant=False)
    limits = limits_in_turn(settings.limits.draft, settings.limits.sessions)
    introduction = welcome(settings.engine, engine.model, ROLE)
    return InTurn(engine, introduction, limits, levels=_levels(engine, limits.draft))


def load_head(settings: DraftSettings, progress: Progress | None = None) -> tuple[HeadEngine, Welcome]:
    """An EAGLE-3 head without its target, of whose folder only the tokens and what the head lacks are read.

    Raises :class:`engine.model.ModelError`.
    """
    chosen = settings.engine
    others = {
        "assistant": settings.assistant,
        "target_tokenizer": settings.target_tokenizer,
        "tensor_parallel_size": chosen.tensor_parallel_size > 1 and str(chosen.tensor_parallel_size),
    }
    for name, value in others.items():
        if value:
            raise ModelError(
                f"{chosen.eagle}: an EAGLE head drafts alone, in the target's tokens; leave {name} ({value}) out"
            )
    if progress is not None:
        progress(Loading(f"reading an EAGLE-3 head from {Path(chosen.eagle).name}"))
    set_threads(chosen.threads, chosen.max_threads)
    model = describe(chosen.model, chosen.dtype, chosen.device)
    check_fit(chosen.eagle, model)
    head = load_alone(chosen.eagle, chosen.model, model.device, model.dtype)
    engine = HeadEngine(CachedHead(head, chosen.cache_tokens or HEAD_TOKENS, model.context), model)
    introduction = replace(
        welcome(chosen, model, ROLE),
        model=chosen.name or Path(chosen.eagle).name,
        head=head_revision(chosen.eagle, head.embed_tokens.weight),
        features=FeatureFormat(settings.eagle_format),
    )
    return engine, introduction


def _load(
    settings: DraftSettings, progress: Progress, recorder: Recorder | None, tracing: Tracing | None, ranks: Ranks | None
) -> tuple[Lookahead, Callable[[], None]]:
    """The machine, and what lets go of its engine."""
    if settings.engine.eagle:
        head, introduction = load_head(settings, progress)
        return HeadLookahead(head, introduction, settings.limits, recorder, tracing), head.close
    known = read_vocabularies(settings.engine.model, settings.target_tokenizer)
    if known is not None and settings.assistant:
        raise ModelError(
            f"--assistant {settings.assistant}: guesses are tokens of the target, and the draft model "
            f"{settings.engine.model} has others; leave the assistant out, or choose another draft model"
        )
    # Before the draft model, whose cache takes what memory is left.
    assistant: Engine | None = None
    chosen = settings.engine
    if settings.assistant:  # on one rank, whatever the draft model has
        tokens = chosen.cache_tokens or ASSISTANT_TOKENS
        small = replace(chosen, model=settings.assistant, name="", cache_tokens=tokens, tensor_parallel_size=1)
        assistant = build(small, progress, invariant=False)
    engine = build(chosen, progress, invariant=False, ranks=ranks)
    introduction, reader = welcome(chosen, engine.model, ROLE), None
    guessers: list[Guesser] = [Lookup()] if settings.lookup and known is None else []
    try:
        if assistant is not None:
            guesser, draft = assistant.model, engine.model
            if (guesser.tokenizer_digest, guesser.vocabulary) != (draft.tokenizer_digest, draft.vocabulary):
                raise ModelError(
                    f"--assistant {guesser.name}: its tokenizer ({guesser.vocabulary} tokens) is not that of the draft "
                    f"model {draft.name} ({draft.vocabulary} tokens); choose a model with the draft model's tokenizer"
                )
            guessers.append(Assistant(assistant))
        if known is not None:
            reader = translator(engine, known, progress)
            introduction = replace(introduction, vocabulary=reader.model.vocabulary, tokenizer=known.digest)
    except ModelError:
        engine.close()
        raise
    levels = _levels(engine, settings.limits.draft) if reader is None else None
    staged = StagedDrafting(introduction.vocabulary, guessers)
    return Lookahead(engine, introduction, settings.limits, recorder, tracing, reader, staged, levels), engine.close


def _levels(engine: Engine, limits: DraftLimits) -> DraftLevels:
    return DraftLevels(engine.levels(limits.width, limits.children))
