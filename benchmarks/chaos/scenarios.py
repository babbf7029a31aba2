"""The rows of the table: for each, what is done to the cluster under which load, and what must be seen."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from random import Random
from typing import Any

import httpx

from benchmarks.chaos import faults, settings
from benchmarks.chaos.faults import Fault
from benchmarks.chaos.processes import ROUTER
from benchmarks.chaos.routers import LONG_SECONDS, kill_router, long_streams, one_way_stall
from benchmarks.chaos.settings import ChaosOptions, FaultOptions
from benchmarks.chaos.stage import Stage, StageError
from benchmarks.chaos.workload import FaultResult, Requirement, Workload, meanwhile
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

Drive = Callable[[Stage, Any], Awaitable[FaultResult]]
"""Told the options of its command."""


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
    hang, kill = options.hang, "kill -9 of "
    under = {seconds: Requirement(f"silence under {seconds:g} s", seconds) for seconds in (1.0, REOPENED, 5.0, 10.0)}
    stop = partial(faults.stop_replica, seconds=hang)
    disturbing: list[tuple[str, str, Requirement, Fault]] = [
        ("undisturbed", "none", under[1.0], _nothing),
        ("kill-draft", f"{kill}one of two drafters, then of both", under[1.0], _kill_drafters),
        ("stop-draft", f"SIGSTOP of a drafter for {hang:g} s", under[1.0], partial(stop, role=Role.DRAFT)),
        ("starve-draft", f"a drafter starved for {hang:g} s", SLOW, partial(faults.starve_drafter, seconds=hang)),
        ("kill-target", f"{kill}a target replica", under[REOPENED], partial(faults.kill_replica, role=Role.TARGET)),
        ("kill-rank", f"{kill}rank 1 of a target", under[REOPENED], faults.kill_rank),
        ("stop-rank", "SIGSTOP of rank 1 of a target, for good", STUCK, faults.stop_rank),
        ("stop-target", f"SIGSTOP of a target for {hang:g} s", under[5.0], partial(stop, role=Role.TARGET)),
        ("remove-small", "a small-GPU node removed", under[10.0], partial(faults.remove_node, gpu_class="small")),
        ("remove-large", "a large-GPU node removed", under[10.0], partial(faults.remove_node, gpu_class="large")),
        ("kill-controller", "Serve controller killed", under[1.0], faults.kill_controller),
        ("replace-targets", "target pool drained and replaced", under[1.0], _replace_targets),
        ("standby", f"{kill}the only active target, another one standing by", under[REOPENED], faults.kill_active),
    ]
    standby = {"standby": {"target": {"replicas": settings.TARGETS - 1, "standby": 1}}}
    rows = [
        Scenario(name, fault, wanted, partial(disturbed, name=name, inject=inject), standby.get(name))
        for name, fault, wanted, inject in disturbing
    ]
    found, again = "found by pings; silence under 5 s", "only its streams break; asked again, the same text"
    over, bounded = f"4 times capacity for {options.overload:g} s", "429s before acceptance only, bounded queue"
    replaced = "a router comes, then all are replaced, and HAProxy with each change, below long streams"
    whole, two = f"streams complete, {LONG_SECONDS:.0f} s later and more", {"router": {"replicas": 2}}
    stall, ramped = "the way to a target stalls, not the way back", "load ramp 1 to 32 to 0 streams"
    return [
        *rows,
        Scenario("one-way", stall, Requirement(found, 5.0), one_way_stall),
        Scenario("kill-router", f"{kill}one of two routers", Requirement(again, 1.0), kill_router, two),
        Scenario("ramp", ramped, Requirement("pools follow, no flapping"), ramp, FOLLOW),
        Scenario("overload", over, Requirement(bounded, refusals=True), overload),
        Scenario("long-streams", replaced, Requirement(whole), long_streams, {}, haproxy=True),
    ]


async def run(scenario: Scenario, stage: Stage, options: FaultOptions) -> FaultResult:
    """Drive it, and look at what is left afterwards."""
    try:
        async with nullcontext() if scenario.changes is None else stage.changed(scenario.changes):
            outcome = await scenario.drive(stage, options)
    except (BenchError, TimeoutError, httpx.HTTPError) as error:
        outcome = FaultResult(options.streams, complaints=[faults.in_words(error)])
    outcome.name, outcome.fault, outcome.wanted = scenario.name, scenario.fault, scenario.wanted
    outcome.complaints += await stage.left()
    return outcome


async def disturbed(stage: Stage, options: ChaosOptions, name: str, inject: Fault) -> FaultResult:
    """Inject the fault of this name under the steady load.

    Every request is a new one, computed undisturbed only afterwards: a target that takes over a session must not find
    its text in the cache because it has computed the same before.
    """
    requests, rng = stage.fresh(options, options.tokens), Random(f"{options.seed} {name}")
    replies, began, outcome = await faults.under_load(stage, options, requests, inject, rng)
    outcome.tally = await stage.tally(requests, replies)
    outcome.notes = [f"the longest silence began {outcome.tally.silence.began - began:.1f} s after the fault"]
    return outcome


async def _nothing(*_: object) -> None:
    await asyncio.sleep(BETWEEN_SECONDS)


async def _kill_drafters(stage: Stage, rng: Random) -> None:
    await faults.kill_replica(stage, rng, Role.DRAFT)
    await stage.whole()
    await asyncio.sleep(BETWEEN_SECONDS)
    await faults.kill_drafters(stage, rng)


async def _replace_targets(stage: Stage, _: Random) -> None:
    """Deploy another ``max_running``, and see that no old replica is left."""
    before = {worker.replica.pid for worker in await stage.workers(Role.TARGET)}
    now = stage.setting("target", "max_running")
    await stage.update({"target": {"max_running": next(value for value in MAX_RUNNING if value != now)}})
    await stage.whole()
    kept = before & {worker.replica.pid for worker in await stage.workers(Role.TARGET)}
    if kept:
        raise StageError(f"target processes {sorted(kept)} were not replaced")


RAMP_TOKENS, OVERLOAD_TOKENS = 200, 100
STEP_SECONDS = 1.0
"""From one more stream of the ramp to the next."""
HOLD_SECONDS = 15.0
QUIET_SECONDS = 45.0
"""After the ramp, in which the pools are to shrink."""
FOLLOW = {
    "target": {"min_replicas": 1, "max_replicas": settings.TARGETS},
    "draft": {"min_replicas": 1, "max_replicas": settings.DRAFTS},
    "autoscaling": {"up_s": 2, "down_s": 10, "pause_s": 5},
}
"""Pools that follow the load, with delays short enough to be watched."""
MOST_TURNS = {Role.TARGET: 1, Role.DRAFT: 3}
"""Work for targets rises and falls with the streams. That for drafters has two humps: at the peak, where drafts do not
pay, they may be told to rest."""
SHORTEST = 9
"""Samples for which a size is held at least, of the ten seconds for which a pool has to be too large to shrink."""
GROWTH_MB = 100
"""Most memory that a router may take for requests beyond its capacity."""
FIRST_TOKEN_SECONDS = 30.0
"""Longest wait of an accepted request for its first token under overload."""


def objections(role: Role, sizes: Sequence[int]) -> list[str]:
    """What is wrong with how a pool followed: it should have grown, then shrunk, and held every size."""
    found = []
    if not sizes[0] < max(sizes) > sizes[-1]:
        found.append(f"the {role} pool did not follow")
    # For how many samples each size was held between growing and shrinking, or the other way round.
    runs = [(size, len([*same])) for size, same in groupby(sizes)]
    around = zip(runs, runs[1:], runs[2:], strict=False)
    turns = [count for (before, _), (size, count), (after, _) in around if (before < size) == (after < size)]
    if len(turns) > MOST_TURNS[role] or min(turns, default=SHORTEST) < SHORTEST:
        found.append(f"the {role} pool flapped: {sizes}")
    return found


async def ramp(stage: Stage, options: ChaosOptions) -> FaultResult:
    """One stream more every second, then one less; the pools may follow from one worker to all that fit."""
    await stage.shrunk()
    await stage.whole()
    requests, sizes = options.requests(RAMP_TOKENS), {role: list[int]() for role in Role}

    async def sample() -> None:
        for role, seen in sizes.items():
            workers = await stage.workers(role)
            seen.append(sum(worker.running and bool(worker.address) for worker in workers))

    async with meanwhile(sample), Workload(stage.url, requests, 1) as load:
        for streams in range(1, settings.RAMP_STREAMS + 1):
            load.resize(streams)
            await asyncio.sleep(STEP_SECONDS)
        await asyncio.sleep(HOLD_SECONDS)
        for streams in reversed(range(settings.RAMP_STREAMS)):
            load.resize(streams)
            await asyncio.sleep(STEP_SECONDS)
        await load.finish()
        await asyncio.sleep(QUIET_SECONDS)
    outcome = FaultResult(settings.RAMP_STREAMS, await stage.tally(requests, load.replies))
    for role, seen in sizes.items():
        outcome.complaints += objections(role, seen)
        outcome.notes.append(f"{role} workers {seen[0]}, most {max(seen)}, at the end {seen[-1]}")
    return outcome


async def overload(stage: Stage, options: ChaosOptions) -> FaultResult:
    """Four times as many streams as the router accepts, for a while."""
    requests = options.requests(OVERLOAD_TOKENS)
    (router, *_) = await stage.found(ROUTER)
    before = router.resident_mb
    longest, most = 0, before

    async def sample() -> None:
        nonlocal longest, most
        most = max(most, router.resident_mb)
        with contextlib.suppress(httpx.HTTPError):
            workers = (await stage.view())["workers"]
            longest = max(longest, *(part["waiting"] for part in workers if part["role"] == Role.TARGET.value))

    began = time.monotonic()
    streams = settings.OVERLOAD * settings.MAX_SESSIONS
    async with meanwhile(sample), Workload(stage.url, requests, streams) as load:
        await asyncio.sleep(options.overload)
        await load.finish()
    seconds = time.monotonic() - began
    outcome = FaultResult(streams, await stage.tally(requests, load.replies))
    grown, first = most - before, outcome.tally.first_token
    accepted = outcome.tally.requests - outcome.tally.refused
    outcome.notes = [
        f"{accepted} accepted, {outcome.tally.refused} refused in {seconds:.0f} s",
        f"at most {longest} waiting at a target, router +{grown:.0f} MB",
        f"first token within {first:.1f} s",
    ]
    checks = [
        (outcome.tally.refused > 0, "nothing was refused"),
        (longest <= settings.MAX_SESSIONS, f"{longest} sessions waited at a target"),
        (grown <= GROWTH_MB, f"the router grew by {grown:.0f} MB, wanted at most {GROWTH_MB}"),
        (first <= FIRST_TOKEN_SECONDS, f"an accepted request waited {first:.1f} s for its first token"),
    ]
    outcome.complaints += [words for holds, words in checks if not holds]
    return outcome
