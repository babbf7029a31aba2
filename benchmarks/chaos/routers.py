"""The row about routers: one of two is killed in mid-stream.

A router alone holds the connections of its clients, so their streams break: nothing can hide that. What must hold is
that nobody else's do, that what was said until then was right, that the other router gives the same text for the same
seed when it is asked again, and that the workers forget the sessions.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from random import Random

from benchmarks.chaos import faults
from benchmarks.chaos.outcome import Outcome, Wanted
from benchmarks.chaos.records import Reply, difference, tally
from benchmarks.chaos.settings import (
    AFTER_SECONDS,
    BEGIN_SECONDS,
    FINISH_SECONDS,
    FRESH,
    HEAL_SECONDS,
    ROUTERS,
    Options,
)
from benchmarks.chaos.stage import Stage, StageError
from benchmarks.chaos.workload import Body, Workload, client, stream

BREAK_SECONDS = 5.0
"""In which Serve's proxy must know that a router is gone: no stream may break later."""


async def kill_router(stage: Stage, options: Options) -> Outcome:
    """Deploy two, kill one under the steady load, and let clients whose streams broke ask again."""
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
    return Outcome("", "", Wanted(""), options.streams, counted, healed, complaints, notes)


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
