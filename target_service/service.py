"""Starting a target worker: model, cache, verify loop, server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from engine.build import EngineSettings, build_target, welcome
from engine.parallel.leader import Ranks
from engine.recorder import Recorder
from target_service.named_sources import load_sources
from target_service.verify_loop import TargetLimits, VerifyLoop
from transport.tls import Identity
from transport.tracing import TraceSettings, Tracing
from transport.worker import Worker

ROLE = "target"


@dataclass(frozen=True, slots=True)
class TargetSettings:
    """A target worker."""

    engine: EngineSettings
    limits: TargetLimits = TargetLimits()
    record: str = ""
    """File to record every step in; none if empty."""
    step_timeout: float = 60.0
    """Seconds after which a step counts as stuck, and the process ends; 0: never."""
    trace: TraceSettings | None = None
    """Where spans go; None: tracing is off."""
    sources: tuple[str, ...] = ()
    """Draft sources to draft with besides the built-in ones; see :mod:`target_service.named_sources`."""


async def start_target(
    settings: TargetSettings,
    listen: str,
    progress: Callable[[str], None] | None = None,
    ranks: Ranks | None = None,
    identity: Identity | None = None,
) -> Worker:
    """Load the model and listen on ``HOST:PORT``, with TLS as ``identity``. ``ranks``: see :func:`engine.build.build`.

    Raises :class:`engine.model.ModelError`, :class:`engine.parallel.group.RankError`,
    :class:`engine.recorder.RecordError`, :class:`speculation.sources.registry.SourceError` or
    :class:`transport.address.AddressError`, each one line.
    """
    load_sources(settings.sources)
    recorder = Recorder(Path(settings.record)) if settings.record else None
    tracing = Tracing.to(settings.trace, ROLE) if settings.trace else None
    engine = await asyncio.to_thread(build_target, settings.engine, progress, ranks)
    machine = VerifyLoop(
        engine, welcome(settings.engine, engine.model, ROLE, engine.exactness), settings.limits, recorder, tracing
    )
    ending = ExitStack()
    ending.callback(engine.close)
    if tracing is not None:
        ending.callback(tracing.close)
    worker = Worker(machine, ROLE, ending.close, settings.step_timeout)
    await worker.start(listen, identity)
    return worker
