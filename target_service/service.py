"""Starting a target worker: model, cache, verify loop, server."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from draft_service.in_turn import InTurn
from engine.build import build_target, welcome
from engine.interface import StepEngine
from engine.leader import Ranks
from engine.recorder import Recorder
from engine.settings import EngineSettings
from speculation.messages import Progress
from speculation.sources.registry import SourceError, register, registered
from target_service.drafting.draft_model import check_drafter
from target_service.step_account import time_steps
from target_service.verify_loop import TargetLimits, VerifyLoop
from transport.tracing import TraceSettings, Tracing
from transport.worker import Door, Worker

ROLE = "target"

MakeInTurn = Callable[[Progress | None], InTurn]
"""Loads a draft model; is told where to report progress. Raises :class:`engine.model.ModelError`."""


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
    sources: tuple[str, ...] = ()
    """Draft sources to draft with besides the built-in ones; see :func:`load_sources`."""
    validate: bool = False
    """Whether to check its own books whenever it is idle."""


def load_sources(named: Iterable[str]) -> None:
    """Import draft sources that an operator names, never a request, and register what they have.

    ``MODULE`` is imported and registers it (:mod:`speculation.sources.registry`); of ``MODULE:NAME`` the class or
    function ``NAME`` is registered, under the name in its attribute ``source``. Raises
    :class:`speculation.sources.registry.SourceError`, one line.
    """
    for entry in named:
        module_name, _, maker_name = entry.partition(":")
        before, fresh = registered(), module_name not in sys.modules
        if not all(part.isidentifier() for part in module_name.split(".")):
            raise SourceError(f"draft source {entry!r} is not MODULE or MODULE:NAME, such as my_drafts:Again")
        try:
            module = importlib.import_module(module_name)
        except SourceError:
            raise
        except Exception as error:  # whatever a module may raise
            why = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise SourceError(
                f"draft source {entry!r} cannot be imported ({why}); a module must be installed, or in a folder that "
                "PYTHONPATH names"
            ) from error
        if maker_name:
            maker = getattr(module, maker_name, None)
            name = getattr(maker, "source", None)
            if not callable(maker) or not isinstance(name, str):
                raise SourceError(
                    f"draft source {entry!r}: {module_name} has no class or function {maker_name!r} with a name in its "
                    "attribute 'source'"
                )
            register(name, maker)
        elif fresh and registered() == before:
            raise SourceError(f"draft source {entry!r}: the module registers none; see speculation/sources/registry.py")


async def start_target(
    settings: TargetSettings,
    door: Door,
    progress: Progress | None = None,
    ranks: Ranks | None = None,
    make_drafter: MakeInTurn | None = None,
) -> Worker:
    """Load the model, saying so at ``door``, and be the worker there. ``ranks``: see :func:`engine.build.build`.

    ``make_drafter``: loads the draft model that this process is to have too, if any.

    Raises :class:`engine.model.ModelError`, :class:`engine.parallel.group.RankError`,
    :class:`engine.recorder.RecordError` or :class:`speculation.sources.registry.SourceError`, each one line.
    """
    async with door:
        load_sources(settings.sources)
        recorder = Recorder(Path(settings.record)) if settings.record else None
        tracing = Tracing.to(settings.trace, ROLE) if settings.trace else None
        own = settings.engine
        load = partial(_load, own, ranks=ranks, make_drafter=make_drafter)
        engine, drafter, seconds = await door.load(load, own.served_name, own.join_timeout + own.load_timeout, progress)
        introduction = welcome(settings.engine, engine.model, ROLE, engine.exactness)
        if engine.eagle is not None:
            introduction = replace(introduction, head=engine.eagle.fingerprint)
        machine = VerifyLoop(engine, introduction, settings.limits, recorder, tracing, drafter, seconds)
        ending = ExitStack()
        for ended in (engine, drafter, tracing):
            if ended is not None:
                ending.callback(ended.close)
        worker = Worker(
            machine,
            ROLE,
            ending.close,
            settings.step_timeout,
            longest_step=machine.longest_step,
            check=engine.check,
            validate=settings.validate,
        )
        await worker.start(door)
        return worker


def _load(
    settings: EngineSettings, progress: Progress, ranks: Ranks | None, make_drafter: MakeInTurn | None
) -> tuple[StepEngine, InTurn | None, Mapping[int, float]]:
    """The draft model first: the target's cache takes what memory is left. And what steps of the target take."""
    with ExitStack() as loaded:
        drafter = None if make_drafter is None else make_drafter(progress)
        if drafter is not None:
            loaded.callback(drafter.close)
        engine = build_target(settings, progress, ranks)
        loaded.callback(engine.close)
        if drafter is not None:
            check_drafter(drafter.welcome(), engine)
        seconds = time_steps(engine)
        loaded.pop_all()
        return engine, drafter, seconds
