"""The rows of the table: for each, what is done to the cluster under which load, and what must be seen."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import Random

import httpx

from benchmarks.chaos import faults
from benchmarks.chaos.faults import Fault
from benchmarks.chaos.outcome import Outcome, Wanted
from benchmarks.chaos.pressure import overload, ramp
from benchmarks.chaos.records import tally
from benchmarks.chaos.routers import kill_router
from benchmarks.chaos.settings import AFTER_SECONDS, BEGIN_SECONDS, FINISH_SECONDS, FRESH, HEAL_SECONDS, Options
from benchmarks.chaos.stage import Stage, StageError
from benchmarks.chaos.workload import Workload
from speculation.events import Role

BETWEEN_SECONDS = 3.0
"""From the loss of one to the loss of both."""
REOPENED = 3.0
"""Seconds in which a session is to go on at another target: the loss is known at once, prefill is computed again."""
MAX_RUNNING = (24, 16)
"""Of the target pool, in turn: a setting whose change replaces it."""

Drive = Callable[[Stage, Options], Awaitable[Outcome]]


@dataclass(frozen=True, slots=True)
class Scenario:
    """One row."""

    name: str
    fault: str
    wanted: Wanted
    drive: Drive


def scenarios(options: Options) -> list[Scenario]:
    """All, in the order of the table."""
    hang = f"SIGSTOP of a {{}} for {options.hang:g} s"
    under = {seconds: Wanted(f"silence under {seconds:g} s", seconds) for seconds in (1.0, REOPENED, 5.0, 10.0)}
    rows = [
        _row("undisturbed", "none", under[1.0], _nothing),
        _row("kill-draft", "kill -9 of one of two drafters, then of both", under[1.0], _kill_drafters),
        _row("stop-draft", hang.format("drafter"), under[1.0], faults.stop_replica(Role.DRAFT, options.hang)),
        _row("kill-target", "kill -9 of a target replica", under[REOPENED], faults.kill_replica(Role.TARGET)),
        _row("kill-rank", "kill -9 of rank 1 of a target", under[REOPENED], faults.kill_rank),
        _row("stop-target", hang.format("target"), under[5.0], faults.stop_replica(Role.TARGET, options.hang)),
        _row("remove-small", "a small-GPU node removed", under[10.0], faults.remove_node("small")),
        _row("remove-large", "a large-GPU node removed", under[10.0], faults.remove_node("large")),
        _row("kill-controller", "Serve controller killed", under[1.0], faults.kill_controller),
        _row("replace-targets", "target pool drained and replaced", under[1.0], _replace_targets),
    ]
    again = Wanted("only its streams break; asked again, the same text", 1.0)
    rows.append(Scenario("kill-router", "kill -9 of one of two routers", again, kill_router))
    follow = Wanted("pools follow, no flapping")
    bounded = Wanted("429s before acceptance only, bounded queue")
    rows.append(Scenario("ramp", "load ramp 1 to 32 to 0 streams", follow, ramp))
    rows.append(Scenario("overload", f"4 times capacity for {options.overload:g} s", bounded, overload))
    return rows


async def run(scenario: Scenario, stage: Stage, options: Options) -> Outcome:
    """Drive it, and look at what is left afterwards."""
    try:
        outcome = await scenario.drive(stage, options)
    except (StageError, TimeoutError, httpx.HTTPError) as error:
        outcome = Outcome("", "", scenario.wanted, options.streams, tally([], {}), complaints=[_words(error)])
    outcome.name, outcome.fault, outcome.wanted = scenario.name, scenario.fault, scenario.wanted
    outcome.complaints += [words for words in (stage.ended, await stage.left()) if words]
    return outcome


def _row(name: str, fault: str, wanted: Wanted, inject: Fault) -> Scenario:
    async def drive(stage: Stage, options: Options) -> Outcome:
        return await disturbed(stage, options, inject, Random(f"{options.seed} {name}"))

    return Scenario(name, fault, wanted, drive)


async def disturbed(stage: Stage, options: Options, inject: Fault, rng: Random) -> Outcome:
    """Inject a fault under the steady load, wait until the cluster is whole, and let all streams complete.

    Every request is a new one, computed undisturbed only afterwards: a target that takes over a session must not find
    its text in the cache because it has computed the same before.
    """
    requests = options.requests(options.tokens, FRESH, first=stage.take_numbers(FRESH))
    complaints, healed, began = [], 0.0, time.monotonic()
    async with Workload(stage.url, requests, options.streams) as load:
        try:
            await load.begun(BEGIN_SECONDS)
            began = time.monotonic()
            await inject(stage, rng)
            await stage.whole(HEAL_SECONDS)
            healed = time.monotonic() - began
            await asyncio.sleep(AFTER_SECONDS)
        except (StageError, TimeoutError) as error:
            complaints.append(_words(error))
        await load.finish(FINISH_SECONDS)
    counted = tally(load.replies, await stage.right_texts(requests, load.replies))
    notes = [f"the longest silence began {counted.silence.began - began:.1f} s after the fault"]
    return Outcome("", "", Wanted(""), options.streams, counted, healed, complaints, notes)


def _words(error: Exception) -> str:
    return str(error) or "a wait took too long"


async def _nothing(stage: Stage, rng: Random) -> None:
    del stage, rng
    await asyncio.sleep(BETWEEN_SECONDS)


async def _kill_drafters(stage: Stage, rng: Random) -> None:
    await faults.kill_replica(Role.DRAFT)(stage, rng)
    await stage.whole(HEAL_SECONDS)
    await asyncio.sleep(BETWEEN_SECONDS)
    await faults.kill_all(Role.DRAFT)(stage, rng)


async def _replace_targets(stage: Stage, rng: Random) -> None:
    """Deploy another ``max_running``, and see that no old replica is left."""
    del rng
    before = {worker.replica.pid for worker in await stage.workers(Role.TARGET)}
    now = stage.setting("target", "max_running")
    await stage.update({"target": {"max_running": next(value for value in MAX_RUNNING if value != now)}})
    await stage.whole(HEAL_SECONDS)
    kept = before & {worker.replica.pid for worker in await stage.workers(Role.TARGET)}
    if kept:
        raise StageError(f"target processes {sorted(kept)} were not replaced")
