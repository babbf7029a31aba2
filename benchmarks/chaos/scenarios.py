"""The rows of the table: for each, what is done to the cluster under which load, and what must be seen."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

import httpx

from benchmarks.chaos import faults
from benchmarks.chaos.faults import Fault
from benchmarks.chaos.pressure import overload, ramp
from benchmarks.chaos.records import FaultResult, Reply, Requirement, difference, tally
from benchmarks.chaos.settings import (
    AFTER_SECONDS,
    BEGIN_SECONDS,
    FINISH_SECONDS,
    FRESH,
    HEAL_SECONDS,
    ROUTERS,
    Body,
    ChaosOptions,
)
from benchmarks.chaos.stage import Stage, StageError
from benchmarks.chaos.workload import Workload, client, stream
from speculation.events import Role

BETWEEN_SECONDS = 3.0
"""From the loss of one to the loss of both."""
REOPENED = 3.0
"""Seconds in which a session is to go on at another target: the loss is known at once, prefill is computed again."""
BREAK_SECONDS = 5.0
"""In which Serve's proxy must know that a router is gone: no stream may break later."""
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


def scenarios(options: ChaosOptions) -> list[Scenario]:
    """All, in the order of the table."""
    hang = f"SIGSTOP of a {{}} for {options.hang:g} s"
    under = {seconds: Requirement(f"silence under {seconds:g} s", seconds) for seconds in (1.0, REOPENED, 5.0, 10.0)}
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
    again = Requirement("only its streams break; asked again, the same text", 1.0)
    rows.append(Scenario("kill-router", "kill -9 of one of two routers", again, kill_router))
    follow = Requirement("pools follow, no flapping")
    bounded = Requirement("429s before acceptance only, bounded queue")
    rows.append(Scenario("ramp", "load ramp 1 to 32 to 0 streams", follow, ramp))
    rows.append(Scenario("overload", f"4 times capacity for {options.overload:g} s", bounded, overload))
    return rows


async def run(scenario: Scenario, stage: Stage, options: ChaosOptions) -> FaultResult:
    """Drive it, and look at what is left afterwards."""
    try:
        outcome = await scenario.drive(stage, options)
    except (StageError, TimeoutError, httpx.HTTPError) as error:
        outcome = FaultResult("", "", scenario.wanted, options.streams, tally([], {}), complaints=[_words(error)])
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
    return FaultResult("", "", Requirement(""), options.streams, counted, healed, complaints, notes)


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


async def kill_router(stage: Stage, options: ChaosOptions) -> FaultResult:
    """Deploy two, kill one under the steady load, and let clients whose streams broke ask again.

    A router alone holds the connections of its clients, so their streams break: nothing can hide that. What must hold
    is that nobody else's do, that what was said until then was right, that the other router gives the same text for the
    same seed when it is asked again, and that the workers forget the sessions.
    """
    await stage.update({"router": {"replicas": 2}})
    await stage.whole(HEAL_SECONDS)
    rng = Random(f"{options.seed} kill-router")
    requests = options.requests(options.tokens, FRESH, first=stage.take_numbers(FRESH))
    async with Workload(stage.url, requests, options.streams) as load:
        await load.begun(BEGIN_SECONDS)
        routers = await asyncio.to_thread(stage.processes.routers)
        if len(routers) != 2:
            raise StageError(f"{len(routers)} routers run, wanted 2")
        killed = time.monotonic()
        await faults.kill(rng.choice(routers))
        await stage.whole(HEAL_SECONDS)
        healed = time.monotonic() - killed
        await asyncio.sleep(AFTER_SECONDS)
        await load.finish(FINISH_SECONDS)
    broken = [reply for reply in load.replies if reply.failed]
    again = await ask_again(stage.url, requests, broken)
    right = await stage.right_texts(requests, load.replies)
    counted = tally([*(reply for reply in load.replies if not reply.failed), *again], right)
    complaints = objections(load.replies, killed, right)
    notes = [
        f"{len(broken)} streams broke with their router; asked again, {sum(not r.failed for r in again)} completed"
    ]
    await stage.update({"router": {"replicas": ROUTERS}})
    await stage.whole(HEAL_SECONDS)
    return FaultResult("", "", Requirement(""), options.streams, counted, healed, complaints, notes)


async def ask_again(url: str, requests: Sequence[Body], broken: Sequence[Reply]) -> list[Reply]:
    """The same requests, as a client would send them whose stream broke."""
    again = [Reply(reply.request, time.monotonic()) for reply in broken]
    async with client(max(len(again), 1)) as http:
        await asyncio.gather(*(stream(http, url, requests[reply.request], reply) for reply in again))
    return again


def objections(replies: Sequence[Reply], killed: float, right: Mapping[int, str]) -> list[str]:
    """What is wrong with how streams broke when a router was killed, at the time ``killed``."""
    broken = [reply for reply in replies if reply.failed]
    struck = [reply for reply in replies if reply.ended is not None and reply.sent < killed < reply.ended]
    found = []
    if not any(reply.failed and reply.parts for reply in struck):
        found.append("no stream broke: the killed router had none")
    if all(reply.failed for reply in struck):
        found.append("every stream broke, also those of the other router")
    for reply in broken:
        after = (reply.ended or 0.0) - killed
        if not 0 <= after <= BREAK_SECONDS:
            found.append(f"request {reply.request} broke {after:.1f} s after the router was killed: {reply.reason}")
        if reply.differs(right[reply.request]):
            found.append(f"request {reply.request}, broken: {difference(reply.text, right[reply.request])}")
    return found
