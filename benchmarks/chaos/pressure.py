"""The rows about load: a ramp that the pools are to follow, and more than the cluster can take."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from benchmarks.chaos import settings
from benchmarks.chaos.records import FaultResult
from benchmarks.chaos.settings import ChaosOptions
from benchmarks.chaos.stage import Stage, load_of
from benchmarks.chaos.workload import Workload
from speculation.events import Role

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
SAMPLE_SECONDS = 1.0
MOST_TURNS = {Role.TARGET: 1, Role.DRAFT: 3}
"""Work for targets rises and falls with the streams. That for drafters has two humps: at the peak, where drafts do not
pay, they may be told to rest."""
SHORTEST = 9
"""Samples for which a size is held at least, of the ten seconds for which a pool has to be too large to shrink."""
MEGABYTE = 1 << 20
GROWTH_MB = 100
"""Most memory that a router may take for requests beyond its capacity."""
FIRST_TOKEN_SECONDS = 30.0
"""Longest wait of an accepted request for its first token under overload."""


@dataclass(slots=True)
class PoolSizes:
    """How many workers of each role there were, over time."""

    seen: dict[Role, list[int]] = field(default_factory=lambda: {Role.TARGET: [], Role.DRAFT: []})

    def objections(self) -> list[str]:
        """What is wrong with how the pools followed: each should have grown, then shrunk, and held every size."""
        found = []
        for role, seen in self.seen.items():
            if not seen[0] < max(seen) > seen[-1]:
                found.append(f"the {role} pool did not follow")
            turns = self.turns(role)
            if len(turns) > MOST_TURNS[role] or min(turns, default=SHORTEST) < SHORTEST:
                found.append(f"the {role} pool flapped: {seen}")
        return found

    def turns(self, role: Role) -> list[int]:
        """For how many samples each size was held between growing and shrinking, or the other way round."""
        runs = [(size, len([*same])) for size, same in groupby(self.seen[role])]
        around = zip(runs, runs[1:], runs[2:], strict=False)
        return [count for (before, _), (size, count), (after, _) in around if (before < size) == (after < size)]

    def about(self, role: Role) -> str:
        """For the notes."""
        seen = self.seen[role]
        return f"{role} workers {seen[0]}, most {max(seen)}, at the end {seen[-1]}" if seen else ""


@asynccontextmanager
async def meanwhile(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Do it until this is left, then cancel it."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@asynccontextmanager
async def sampled(sample: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Meanwhile take a sample every second."""

    async def repeat() -> None:
        while True:
            await sample()
            await asyncio.sleep(SAMPLE_SECONDS)

    async with meanwhile(repeat()):
        yield


async def ramp(stage: Stage, options: ChaosOptions) -> FaultResult:
    """One stream more every second, then one less; the pools may follow from one worker to all that fit."""
    await stage.shrunk(settings.HEAL_SECONDS)
    await stage.whole(settings.HEAL_SECONDS)
    requests, sizes = options.requests(RAMP_TOKENS), PoolSizes()

    async def sample() -> None:
        for role, seen in sizes.seen.items():
            workers = await stage.workers(role)
            seen.append(sum(worker.running and bool(worker.address) for worker in workers))

    async with sampled(sample), Workload(stage.url, requests, 1) as load:
        for streams in range(1, settings.RAMP_STREAMS + 1):
            load.resize(streams)
            await asyncio.sleep(STEP_SECONDS)
        await asyncio.sleep(HOLD_SECONDS)
        for streams in reversed(range(settings.RAMP_STREAMS)):
            load.resize(streams)
            await asyncio.sleep(STEP_SECONDS)
        await load.finish(settings.FINISH_SECONDS)
        await asyncio.sleep(QUIET_SECONDS)
    outcome = FaultResult(settings.RAMP_STREAMS, await stage.tally(requests, load.replies))
    outcome.complaints += sizes.objections()
    if outcome.tally.refused:
        outcome.complaints.append(f"{outcome.tally.refused} requests were refused")
    outcome.notes = [sizes.about(role) for role in sizes.seen]
    return outcome


async def overload(stage: Stage, options: ChaosOptions) -> FaultResult:
    """Four times as many streams as the router accepts, for a while."""
    requests = options.requests(OVERLOAD_TOKENS)
    (router, *_) = stage.processes.routers()
    before = router.resident
    longest, most = 0, before

    async def sample() -> None:
        nonlocal longest, most
        most = max(most, router.resident)
        for worker in await stage.workers(Role.TARGET):
            with contextlib.suppress(TimeoutError):
                longest = max(longest, (await load_of(worker.address, Role.TARGET)).waiting)

    began = time.monotonic()
    async with sampled(sample), Workload(stage.url, requests, settings.OVERLOAD * settings.MAX_SESSIONS) as load:
        await asyncio.sleep(options.overload)
        await load.finish(settings.FINISH_SECONDS)
    seconds = time.monotonic() - began
    outcome = FaultResult(settings.OVERLOAD * settings.MAX_SESSIONS, await stage.tally(requests, load.replies))
    grown, first = (most - before) / MEGABYTE, outcome.tally.first_token
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
