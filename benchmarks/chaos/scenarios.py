"""The rows of the table: for each, what is done to the cluster under which load, and what must be seen."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import httpx

from benchmarks.chaos import faults, settings
from benchmarks.chaos.faults import Fault
from benchmarks.chaos.one_way import one_way_stall
from benchmarks.chaos.pressure import FOLLOW, overload, ramp
from benchmarks.chaos.records import FaultResult, Requirement, tally
from benchmarks.chaos.routers import LONG_SECONDS, kill_router, long_streams
from benchmarks.chaos.settings import ChaosOptions
from benchmarks.chaos.stage import Stage, StageError
from benchmarks.chaos.workload import Workload
from benchmarks.harness.options import BenchError
from speculation.events import Role

BETWEEN_SECONDS = 3.0
"""From the loss of one to the loss of both."""
REOPENED = 3.0
"""Seconds in which a session is to go on at another target: the loss is known at once, prefill is computed again."""
STUCK = Requirement("found as a stuck step; silence under 30 s", 30.0)
SLOW = Requirement(f"slow, not gone: lost at most {faults.MAX_LOST} times; silence under 3 s", 3.0)
MAX_RUNNING = (24, 16)
"""Of the target pool, in turn: a setting whose change replaces it."""

Drive = Callable[[Stage, ChaosOptions], Awaitable[FaultResult]]


@dataclass(frozen=True, slots=True)
class Scenario:
    """One row."""

    name: str
    fault: str
    wanted: Requirement
    drive: Drive
    changes: Mapping[str, Mapping[str, Any]] | None = None
    """Settings that are deployed meanwhile, by section; not None: what was deployed before is deployed afterwards."""
    haproxy: bool = False
    """Whether clients come by HAProxy, and not by Serve's own proxy."""


def scenarios(options: ChaosOptions) -> list[Scenario]:
    """All, in the order of the table."""
    hang = f"SIGSTOP of a {{}} for {options.hang:g} s"
    under = {seconds: Requirement(f"silence under {seconds:g} s", seconds) for seconds in (1.0, REOPENED, 5.0, 10.0)}
    rows = [
        _row("undisturbed", "none", under[1.0], _nothing),
        _row("kill-draft", "kill -9 of one of two drafters, then of both", under[1.0], _kill_drafters),
        _row("stop-draft", hang.format("drafter"), under[1.0], faults.stop_replica(Role.DRAFT, options.hang)),
        _row("starve-draft", f"a drafter starved for {options.hang:g} s", SLOW, faults.starve_drafter(options.hang)),
        _row("kill-target", "kill -9 of a target replica", under[REOPENED], faults.kill_replica(Role.TARGET)),
        _row("kill-rank", "kill -9 of rank 1 of a target", under[REOPENED], faults.kill_rank),
        _row("stop-rank", "SIGSTOP of rank 1 of a target, for good", STUCK, faults.stop_rank),
        _row("stop-target", hang.format("target"), under[5.0], faults.stop_replica(Role.TARGET, options.hang)),
        _row("remove-small", "a small-GPU node removed", under[10.0], faults.remove_node("small")),
        _row("remove-large", "a large-GPU node removed", under[10.0], faults.remove_node("large")),
        _row("kill-controller", "Serve controller killed", under[1.0], faults.kill_controller),
        _row("replace-targets", "target pool drained and replaced", under[1.0], _replace_targets),
    ]
    takeover = _row(
        "standby", "kill -9 of the only active target, another one standing by", under[REOPENED], faults.kill_active
    )
    rows.append(replace(takeover, changes={"target": {"replicas": settings.TARGETS - 1, "standby": 1}}))
    heard = "the way to a target stalls, not the way back"
    rows.append(Scenario("one-way", heard, Requirement("found by pings; silence under 5 s", 5.0), one_way_stall))
    again = Requirement("only its streams break; asked again, the same text", 1.0)
    rows.append(
        Scenario("kill-router", "kill -9 of one of two routers", again, kill_router, {"router": {"replicas": 2}})
    )
    follow = Requirement("pools follow, no flapping")
    bounded = Requirement("429s before acceptance only, bounded queue")
    rows.append(Scenario("ramp", "load ramp 1 to 32 to 0 streams", follow, ramp, FOLLOW))
    rows.append(Scenario("overload", f"4 times capacity for {options.overload:g} s", bounded, overload))
    replaced = "a router comes, then all are replaced, and HAProxy with each change, below long streams"
    whole = Requirement(f"streams complete, {LONG_SECONDS:.0f} s later and more")
    rows.append(Scenario("long-streams", replaced, whole, long_streams, {}, haproxy=True))
    return rows


async def run(scenario: Scenario, stage: Stage, options: ChaosOptions) -> FaultResult:
    """Drive it, and look at what is left afterwards."""
    try:
        async with nullcontext() if scenario.changes is None else stage.changed(scenario.changes):
            outcome = await scenario.drive(stage, options)
    except (BenchError, TimeoutError, httpx.HTTPError) as error:
        outcome = FaultResult(options.streams, tally([], {}), complaints=[_words(error)])
    outcome.name, outcome.fault, outcome.wanted = scenario.name, scenario.fault, scenario.wanted
    outcome.complaints += [words for words in (stage.ended, await stage.left()) if words]
    return outcome


def _row(name: str, fault: str, wanted: Requirement, inject: Fault) -> Scenario:
    async def drive(stage: Stage, options: ChaosOptions) -> FaultResult:
        return await disturbed(stage, options, inject, Random(f"{options.seed} {name}"))

    return Scenario(name, fault, wanted, drive)


async def disturbed(stage: Stage, options: ChaosOptions, inject: Fault, rng: Random) -> FaultResult:
    """Inject a fault under the steady load, wait until the cluster is whole, and let all streams complete.

    Every request is a new one, computed undisturbed only afterwards: a target that takes over a session must not find
    its text in the cache because it has computed the same before.
    """
    requests = stage.fresh(options, options.tokens)
    complaints, healed, began = [], 0.0, time.monotonic()
    async with Workload(stage.url, requests, options.streams) as load:
        try:
            await load.begun(settings.BEGIN_SECONDS)
            began = time.monotonic()
            await inject(stage, rng)
            await stage.whole(settings.HEAL_SECONDS)
            healed = time.monotonic() - began
            await asyncio.sleep(settings.AFTER_SECONDS)
        except (BenchError, TimeoutError) as error:
            complaints.append(_words(error))
        await load.finish(settings.FINISH_SECONDS)
    counted = await stage.tally(requests, load.replies)
    notes = [f"the longest silence began {counted.silence.began - began:.1f} s after the fault"]
    return FaultResult(options.streams, counted, healed, complaints, notes)


def _words(error: Exception) -> str:
    return str(error) or f"a wait took too long ({type(error).__name__})"


async def _nothing(stage: Stage, rng: Random) -> None:
    del stage, rng
    await asyncio.sleep(BETWEEN_SECONDS)


async def _kill_drafters(stage: Stage, rng: Random) -> None:
    await faults.kill_replica(Role.DRAFT)(stage, rng)
    await stage.whole(settings.HEAL_SECONDS)
    await asyncio.sleep(BETWEEN_SECONDS)
    await faults.kill_all(Role.DRAFT)(stage, rng)


async def _replace_targets(stage: Stage, rng: Random) -> None:
    """Deploy another ``max_running``, and see that no old replica is left."""
    del rng
    before = {worker.replica.pid for worker in await stage.workers(Role.TARGET)}
    now = stage.setting("target", "max_running")
    await stage.update({"target": {"max_running": next(value for value in MAX_RUNNING if value != now)}})
    await stage.whole(settings.HEAL_SECONDS)
    kept = before & {worker.replica.pid for worker in await stage.workers(Role.TARGET)}
    if kept:
        raise StageError(f"target processes {sorted(kept)} were not replaced")
