"""Starting a target worker: model, cache, verify loop, server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.build import EngineSettings, build_target, welcome
from engine.parallel.leader import Ranks
from engine.recorder import Recorder
from target_service.verify_loop import TargetLimits, VerifyLoop
from transport.tls import Identity
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


async def start_target(
    settings: TargetSettings,
    listen: str,
    progress: Callable[[str], None] | None = None,
    ranks: Ranks | None = None,
    identity: Identity | None = None,
) -> Worker:
    """Load the model and listen on ``HOST:PORT``, with TLS as ``identity``. ``ranks``: see :func:`engine.build.build`.

    Raises :class:`engine.model.ModelError`, :class:`engine.parallel.group.RankError`,
    :class:`engine.recorder.RecordError` or :class:`transport.address.AddressError`, each one line.
    """
    recorder = Recorder(Path(settings.record)) if settings.record else None
    engine = await asyncio.to_thread(build_target, settings.engine, progress, ranks)
    machine = VerifyLoop(engine, welcome(settings.engine, engine.model, ROLE), settings.limits, recorder)
    worker = Worker(machine, ROLE, engine.close, settings.step_timeout)
    await worker.start(listen, identity)
    return worker
