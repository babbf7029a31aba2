"""A ready engine from settings: the model, a cache for it, and how its worker introduces itself."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.kv_cache import KVCache
from engine.loader import load
from engine.model import Model
from engine.step import Engine
from speculation.messages import Welcome

DEFAULT_CACHE_TOKENS = 32_768


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What to run and how."""

    model: str
    """Folder or hub id."""
    dtype: str = "auto"
    device: str = "auto"
    threads: int = 1
    """CPU threads of a step."""
    cache_tokens: int = 0
    """Room of the cache in tokens; 0: the model's context, at least :data:`DEFAULT_CACHE_TOKENS`."""
    name: str = ""
    """Name the model is served under; default: the last part of ``model``."""


def build(settings: EngineSettings, progress: Callable[[str], None] | None = None, *, invariant: bool = True) -> Engine:
    """Load the model and set up its cache; raises :class:`engine.model.ModelError`.

    ``invariant``: see :class:`engine.step.Engine`. A drafter, whose tokens are only hints, does without.
    """
    model = load(
        settings.model,
        dtype=settings.dtype,
        device=settings.device,
        threads=settings.threads,
        progress=progress,
    )
    capacity = settings.cache_tokens or max(model.context, DEFAULT_CACHE_TOKENS)
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
        dtype=str(model.dtype).removeprefix("torch."),
        source=str(folder.resolve()) if folder.is_dir() else settings.model,
    )
