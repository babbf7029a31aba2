"""What a target worker is started with: how long its steps and its loading may take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from draft_service import service as draft
from draft_service.service import DraftSettings, start_draft
from target_service import service as target
from target_service.service import TargetSettings, start_target
from tests.stack import settings
from transport.worker import Door, Worker


@pytest.mark.parametrize(
    ("module", "start", "kind"),
    [(target, start_target, TargetSettings), (draft, start_draft, DraftSettings)],
    ids=["target", "draft"],
)
async def test_a_worker_is_watched_while_it_loads_and_in_every_step(
    module: Any, start: Callable[..., Any], kind: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The configuration's bounds hold, and for a target what its own steps took besides."""
    loads, workers, machines = [], [], []
    load = Door.load

    async def loaded(door: Door, do: Any, model: str, seconds: float, *args: Any) -> Any:
        loads.append(seconds)
        return await load(door, do, model, seconds, *args)

    class Watched(Worker):
        def __init__(self, *args: Any, **named: Any) -> None:
            super().__init__(*args, **named)
            workers.append((args[3], named.get("longest_step")))
            machines.append(args[0])

    monkeypatch.setattr(Door, "load", loaded)
    monkeypatch.setattr(module, "Worker", Watched)
    engine = replace(settings(module.ROLE, cache_tokens=256), join_timeout=1.5, load_timeout=77.0)
    worker = await start(kind(engine, step_timeout=33.0), await Door.open(module.ROLE, "127.0.0.1:0"))
    await worker.drain(0.0)
    assert loads == [78.5]
    (machine,) = machines
    assert workers == [(33.0, machine.longest_step if module is target else None)]
