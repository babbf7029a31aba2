"""The rows about routers: one of two killed, and streams that last longer than any of them.

A router alone holds the connections of its clients. Killed, it takes their streams along; told to go, it stays until
they have ended.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from random import Random

from benchmarks.chaos import faults, settings
from benchmarks.chaos.pressure import meanwhile, sampled
from benchmarks.chaos.records import FaultResult, Reply, difference, tally
from benchmarks.chaos.settings import Body, ChaosOptions
from benchmarks.chaos.stage import Stage, StageError
from benchmarks.chaos.workload import Workload, client, stream
from speculation.events import Role

BREAK_SECONDS = 5.0
"""In which Serve's proxy must know that a router is gone: no stream may break later."""
LONG_SECONDS = 120.0
"""What long streams go on for after their router was replaced: longer than a proxy lets old ones unless told to."""
SLACK_SECONDS = 10.0
HELD_BACK_SECONDS = LONG_SECONDS + 90
"""In which a stream that is held back would end."""
COMING_ROUTERS = 2
"""Routers that must have come meanwhile: one more, and one in the place of another."""
RESTS_SECONDS, WORKS_SECONDS = 1.0, 0.1
"""A target that is held back is stopped for less than would have it taken for gone, then computes for a moment."""


async def kill_router(stage: Stage, options: ChaosOptions) -> FaultResult:
    """Of two, kill one under the steady load, and let clients whose streams broke ask again.

    A router alone holds the connections of its clients, so their streams break: nothing can hide that. What must hold
    is that nobody else's do, that what was said until then was right, that the other router gives the same text for the
    same seed when it is asked again, and that the workers forget the sessions.
    """
    rng = Random(f"{options.seed} kill-router")
    requests = stage.fresh(options, options.tokens)
    async with Workload(stage.url, requests, options.streams) as load:
        await load.begun(settings.BEGIN_SECONDS)
        routers = await asyncio.to_thread(stage.processes.routers)
        if len(routers) != 2:
            raise StageError(f"{len(routers)} routers run, wanted 2")
        killed = time.monotonic()
        await faults.kill(rng.choice(routers))
        await stage.whole(settings.HEAL_SECONDS)
        healed = time.monotonic() - killed
        await asyncio.sleep(settings.AFTER_SECONDS)
        await load.finish(settings.FINISH_SECONDS)
    broken = [reply for reply in load.replies if reply.failed]
    again = await ask_again(stage.url, requests, broken)
    right = await stage.right_texts(requests, load.replies)
    counted = tally([*(reply for reply in load.replies if not reply.failed), *again], right)
    complaints = objections(load.replies, killed, right)
    notes = [
        f"{len(broken)} streams broke with their router; asked again, {sum(not r.failed for r in again)} completed"
    ]
    return FaultResult(options.streams, counted, healed, complaints, notes)


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


async def long_streams(stage: Stage, options: ChaosOptions) -> FaultResult:
    """A router comes while streams last, then all are replaced, the streams' own one too, which stays until they end.

    With every change Serve replaces HAProxy: the one that carries the streams has to stay as well. Not how fast a
    machine is decides how long a stream lasts, but that its target is stopped wherever it is ahead.
    """
    plain = {"speculation": {"enabled": False}}
    requests = [body | plain for body in stage.fresh(options, settings.LONG_TOKENS, options.streams)]
    before = {router.pid for router in await asyncio.to_thread(stage.processes.routers)}
    carriers = {haproxy.pid for haproxy in await asyncio.to_thread(stage.processes.haproxies)}
    came, successors = set[int](), set[int]()

    async def sample() -> None:
        came.update({router.pid for router in await asyncio.to_thread(stage.processes.routers)} - before)
        successors.update({haproxy.pid for haproxy in await asyncio.to_thread(stage.processes.haproxies)} - carriers)

    async with Workload(stage.url, requests, options.streams) as load:
        await load.begun(settings.BEGIN_SECONDS)
        load.resize(0)
        began = time.monotonic()
        async with _held_back(stage, load.replies), sampled(sample):
            await stage.update({"router": {"replicas": 2}})
            replaced = time.monotonic()  # that takes until the last stream has ended
            replacing = asyncio.create_task(stage.update({"router": {"max_sessions": settings.MAX_SESSIONS + 1}}))
            await asyncio.sleep(LONG_SECONDS + SLACK_SECONDS)
        await load.finish(settings.FINISH_SECONDS)
        await replacing
    complaints = too_short(load.replies, replaced, LONG_SECONDS)
    if len(came) < COMING_ROUTERS:
        complaints.append(f"{len(came)} routers came while streams lasted, wanted at least {COMING_ROUTERS}")
    if not (carriers and successors):
        complaints.append(f"HAProxy was not replaced below the streams: {len(carriers)} ran, {len(successors)} came")
    counted = await stage.tally(requests, load.replies)
    lasted = [(reply.ended or 0.0) - reply.sent for reply in load.replies]
    when = (
        f"all routers were replaced {replaced - began:.0f} s after they had begun; {len(came)} routers and "
        f"{len(successors)} HAProxies came meanwhile"
    )
    notes = [f"streams lasted {min(lasted):.0f} to {max(lasted):.0f} s, and {when}"]
    return FaultResult(options.streams, counted, 0.0, complaints, notes)


def too_short(replies: Sequence[Reply], since: float, seconds: float) -> list[str]:
    """Which streams ended so soon after a time, although they were to last longer."""
    lasted = {reply.request: (reply.ended or 0.0) - since for reply in replies}
    return [f"request {number} went on for {took:.0f} s only" for number, took in lasted.items() if took <= seconds]


@asynccontextmanager
async def _held_back(stage: Stage, replies: Sequence[Reply]) -> AsyncIterator[None]:
    """Meanwhile stop all targets for a moment wherever a stream is ahead of its time."""
    workers = await stage.workers(Role.TARGET)
    processes = [process for worker in workers for process in (worker.replica, *worker.ranks)]

    async def hold() -> None:
        began = time.monotonic()
        while True:
            due = settings.LONG_TOKENS * (time.monotonic() - began) / HELD_BACK_SECONDS
            if max(len(reply.chunks) for reply in replies) > due:
                with faults.stopped(*processes):
                    await asyncio.sleep(RESTS_SECONDS)
            await asyncio.sleep(WORKS_SECONDS)

    async with meanwhile(hold()):
        yield
