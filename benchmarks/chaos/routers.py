"""The rows about routers: one of two killed, streams that last longer than any of them, a way to a target that stalls.

A router alone holds the connections of its clients. Killed, it takes their streams along; told to go, it stays until
they have ended.

Serve's replicas are connected to without anything in between, so the row of a stall in one direction has routers and
workers of its own: plain processes beside the pretend cluster, one target behind a proxy that can hold back what goes
one way.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from random import Random
from typing import Any

from benchmarks.chaos import faults, settings, workload
from benchmarks.chaos.processes import HAPROXY, ROUTER
from benchmarks.chaos.settings import ChaosOptions
from benchmarks.chaos.stage import Stage, until_nothing
from benchmarks.chaos.workload import FaultResult, Reply, Workload, meanwhile
from benchmarks.harness.processes import READY, WorkerPlan, all_running, child
from benchmarks.harness.proxy import Proxy
from cluster.config.environment import BUNDLED
from cluster.processes.child import HeldPort
from router.sessions.run import EventKind
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
    requests = stage.fresh(options, options.tokens)
    rng = Random(f"{options.seed} kill-router")
    replies, killed, outcome = await faults.under_load(stage, options, requests, faults.kill_router, rng)
    broken = [reply for reply in replies if reply.failed]
    again = [Reply(reply.number, due=time.perf_counter()) for reply in broken]
    async with workload.client() as http:
        await asyncio.gather(*(workload.stream(http, stage.url, requests[one.number], one) for one in again))
    right = await stage.right_texts(requests, replies)
    outcome.tally = workload.tally([*(reply for reply in replies if not reply.failed), *again], right)
    outcome.complaints += objections(replies, killed, right)
    completed = sum(not reply.failed for reply in again)
    outcome.notes = [f"{len(broken)} streams broke with their router; asked again, {completed} completed"]
    return outcome


def objections(replies: Sequence[Reply], killed: float, right: Mapping[int, str]) -> list[str]:
    """What is wrong with how streams broke when a router was killed, at the time ``killed``."""
    broken = [reply for reply in replies if reply.failed]
    struck = [reply for reply in replies if reply.sent < killed < reply.ended]
    found = []
    if not any(reply.failed and reply.text for reply in struck):
        found.append("no stream broke: the killed router had none")
    if all(reply.failed for reply in struck):
        found.append("every stream broke, also those of the other router")
    for reply in broken:
        after = reply.ended - killed
        if not 0 <= after <= BREAK_SECONDS:
            found.append(f"request {reply.number} broke {after:.1f} s after the router was killed: {reply.reason}")
        if reply.differs(right[reply.number]):
            found.append(f"request {reply.number}, broken: {workload.difference(reply.text, right[reply.number])}")
    return found


async def long_streams(stage: Stage, options: ChaosOptions) -> FaultResult:
    """A router comes while streams last, then all are replaced, the streams' own one too, which stays until they end.

    With every change Serve replaces HAProxy: the one that carries the streams has to stay as well. Not how fast a
    machine is decides how long a stream lasts, but that its target is stopped wherever it is ahead.
    """
    plain = {"speculation": {"enabled": False}}
    requests = [body | plain for body in stage.fresh(options, settings.LONG_TOKENS, options.streams)]
    before = {router.pid for router in await stage.found(ROUTER)}
    carriers = {haproxy.pid for haproxy in await stage.found(HAPROXY)}
    came, successors = set[int](), set[int]()

    async def sample() -> None:
        came.update({router.pid for router in await stage.found(ROUTER)} - before)
        successors.update({haproxy.pid for haproxy in await stage.found(HAPROXY)} - carriers)

    workers = await stage.workers(Role.TARGET)
    targets = [process for worker in workers for process in (worker.replica, *worker.ranks)]

    async def hold_back() -> None:
        """Stop all targets for a moment where a stream is ahead of its time."""
        due = settings.LONG_TOKENS * (time.perf_counter() - began) / HELD_BACK_SECONDS
        if max(len(reply.times) for reply in load.replies) > due:
            with faults.stopped(*targets):
                await asyncio.sleep(RESTS_SECONDS)

    async with Workload(stage.url, requests, options.streams) as load:
        await load.begun()
        load.resize(0)
        began = time.perf_counter()
        async with meanwhile(hold_back, WORKS_SECONDS), meanwhile(sample):
            await stage.update({"router": {"replicas": 2}})
            replaced = time.perf_counter()  # that takes until the last stream has ended
            replacing = asyncio.create_task(stage.update({"router": {"max_sessions": settings.MAX_SESSIONS + 1}}))
            await asyncio.sleep(LONG_SECONDS + SLACK_SECONDS)
        await load.finish()
        await replacing
    complaints = too_short(load.replies, replaced, LONG_SECONDS)
    if len(came) < COMING_ROUTERS:
        complaints.append(f"{len(came)} routers came while streams lasted, wanted at least {COMING_ROUTERS}")
    if not (carriers and successors):
        complaints.append(f"HAProxy was not replaced below the streams: {len(carriers)} ran, {len(successors)} came")
    counted = await stage.tally(requests, load.replies)
    lasted = [reply.ended - reply.sent for reply in load.replies]
    when = (
        f"all routers were replaced {replaced - began:.0f} s after they had begun; {len(came)} routers and "
        f"{len(successors)} HAProxies came meanwhile"
    )
    notes = [f"streams lasted {min(lasted):.0f} to {max(lasted):.0f} s, and {when}"]
    return FaultResult(options.streams, counted, 0.0, complaints, notes)


def too_short(replies: Sequence[Reply], since: float, seconds: float) -> list[str]:
    """Which streams ended so soon after a time, although they were to last longer."""
    lasted = {reply.number: reply.ended - since for reply in replies}
    return [f"request {number} went on for {took:.0f} s only" for number, took in lasted.items() if took <= seconds]


HELD_SECONDS = 12.0
NOTICED_SECONDS = 5.0
"""In which unanswered pings must have told: 2 s, and more where the router itself has no core."""


@asynccontextmanager
async def two_targets(dtype: str) -> AsyncIterator[tuple[str, Proxy]]:
    """A router, a drafter and two targets, one of them behind the proxy; where they serve. Raises WorkerFailed."""
    flags = ("--dtype", dtype, "--threads", "1")
    roles = (Role.TARGET, Role.TARGET, Role.DRAFT)
    plans = [WorkerPlan(role, BUNDLED / role.value, None, flags=flags) for role in roles]
    with closing(HeldPort()) as port:
        async with all_running(plans) as (one, other, draft), Proxy(one.first) as proxy:
            known = ("--target", proxy.address, "--target", other.first, "--draft", draft.first)
            served = ("--port", str(port.number), "--max-sessions", str(settings.MAX_SESSIONS))
            async with child("router", "cluster.cli", "router", *known, *served, ready=READY):
                yield f"http://{port.address}", proxy


async def one_way_stall(stage: Stage, options: ChaosOptions) -> FaultResult:
    """Hold back what goes to one of two targets under the steady load, for a while."""
    requests = stage.fresh(options, options.tokens)
    async with two_targets(options.dtype) as (url, proxy), Workload(url, requests, options.streams) as load:
        await load.begun()
        began, held_at = time.perf_counter(), time.time()
        async with proxy.held():
            await asyncio.sleep(HELD_SECONDS)
        events = await _until_back(url, f"target@{proxy.address}")
        healed = time.perf_counter() - began
        await load.finish()
    complaints, notes = noticed(events, f"target@{proxy.address}", held_at)
    counted = await stage.tally(requests, load.replies)
    return FaultResult(options.streams, counted, healed, complaints, notes)


def noticed(events: Iterable[Mapping[str, Any]], worker: str, held_at: float) -> tuple[list[str], list[str]]:
    """What is wrong with how soon a router noticed, and when it did; ``held_at``: seconds since 1970."""
    lost = [event for event in events if event["kind"] == EventKind.WORKER_LOST and event["worker"] == worker]
    if not lost:
        return ["the stall was not noticed"], []
    after = lost[0]["time"] - held_at
    late = [f"the stall was noticed after {after:.1f} s, wanted within {NOTICED_SECONDS:g} s"]
    return (late if after > NOTICED_SECONDS else []), [f"after {after:.1f} s: {lost[0]['text']}"]


async def _until_back(url: str, worker: str) -> list[Mapping[str, Any]]:
    """Wait until a router has a worker; its events. Raises StageError, httpx.HTTPError."""

    async def gone() -> str:
        workers = (await workload.cluster_view(url))["workers"]
        return "" if any(part["id"] == worker and part["state"] == "up" for part in workers) else worker

    await until_nothing(gone, settings.HEAL_SECONDS, "not reached again")
    return list((await workload.cluster_view(url))["events"])
