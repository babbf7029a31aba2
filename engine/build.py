"""A ready engine from settings: the model, a cache for it, and how its worker introduces itself."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.cache_size import fitting_tokens
from engine.interface import StepEngine
from engine.kv_cache import KVCache
from engine.loader import load
from engine.model import Model
from engine.quantisation import NONE
from engine.stateful import StatefulCache, StatefulEngine
from engine.step import Engine
from speculation.messages import Welcome

log = logging.getLogger(__name__)

STATEFUL_TOKENS = 32_768
"""What sessions of a model without a slot cache may hold together, unless settings or its context say more."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What to run and how."""

    model: str
    """Folder or hub id."""
    dtype: str = "auto"
    device: str = "auto"
    quantization: str = NONE
    """One of :data:`engine.quantisation.CHOICES`."""
    threads: int = 1
    """CPU threads of a step."""
    cache_tokens: int = 0
    """Room of the cache in tokens; 0: what the free memory allows (:mod:`engine.cache_size`)."""
    name: str = ""
    """Name the model is served under; default: the last part of ``model``."""


def build(settings: EngineSettings, progress: Callable[[str], None] | None = None, *, invariant: bool = True) -> Engine:
    """Load the model and set up its cache; raises :class:`engine.model.ModelError`.

    ``invariant``: see :class:`engine.step.Engine`. A drafter, whose tokens are only hints, does without.
    """
    return _engine(settings, _load(settings, progress), invariant=invariant)


def build_target(settings: EngineSettings, progress: Callable[[str], None] | None = None) -> StepEngine:
    """As :func:`build`, but a model that cannot speculate is served without, if that can be had."""
    model = _load(settings, progress, without_speculation=True)
    if not model.no_speculation:
        return _engine(settings, model)
    log.warning("%s is served without speculation: %s", settings.model, model.no_speculation)
    capacity = settings.cache_tokens or max(model.context, STATEFUL_TOKENS)
    return StatefulEngine(model, StatefulCache(capacity, dtype=model.dtype, device=model.device))


def _load(
    settings: EngineSettings, progress: Callable[[str], None] | None, *, without_speculation: bool = False
) -> Model:
    return load(
        settings.model,
        dtype=settings.dtype,
        device=settings.device,
        quantization=settings.quantization,
        threads=settings.threads,
        without_speculation=without_speculation,
        progress=progress,
    )


def _engine(settings: EngineSettings, model: Model, *, invariant: bool = True) -> Engine:
    capacity = settings.cache_tokens or fitting_tokens(model)
    cache = KVCache(model.layers, capacity, dtype=model.dtype, device=model.device)
    return Engine(model, cache, invariant=invariant)


def welcome(settings: EngineSettings, model: Model, role: str) -> Welcome:
    """What a worker with this model says of itself."""
    folder = Path(settings.model)
    return Welcome(
        role=role,
        model=settings.name or folder.name,
        vocabulary=model.vocabulary,
        context=model.context,
        tokenizer=model.tokenizer_digest,
        instance=f"{os.getpid()}-{uuid.uuid4().hex[:8]}",
        dtype=", ".join(filter(None, (str(model.dtype).removeprefix("torch."), model.weights))),
        source=str(folder.resolve()) if folder.is_dir() else settings.model,
        speculates=not model.no_speculation,
    )
