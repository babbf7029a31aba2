"""What can be done to a cluster: to a worker of a pool, to one of its ranks, to a node, to Serve's controller.

Each fault chooses its victim with the generator it is given, does its harm, undoes what would not heal by itself (a
stopped process goes on, a node comes back) and returns; whether the cluster is whole again is for others to see.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from random import Random
from typing import Any

from benchmarks.chaos import nodes
from benchmarks.chaos.processes import CONTROLLER, ROUTER, Process, WorkerReplica
from benchmarks.chaos.settings import Body, FaultOptions
from benchmarks.chaos.stage import POLL_SECONDS, Stage, StageError
from benchmarks.chaos.workload import FaultResult, Reply, Workload
from benchmarks.harness.options import BenchError
from router.sessions.run import EventKind
from speculation.events import Role

AFTER_SECONDS = 2.0
"""For which the streams go on when all is well again."""
CONTROLLER_SECONDS = 60.0
GONE_SECONDS = 0.02
AWAY_SECONDS = 10.0
"""How long a node is gone."""
STUCK_SECONDS = 90.0
"""In which a target must have ended itself because a step of it is stuck, or a rank does not answer."""
STARVED_SECONDS, FED_SECONDS = 2.6, 0.4
"""A starved process has no core for so long, longer than a worker may be silent, and then one for a moment."""
MAX_LOST = 2
"""How often a starved drafter may be taken for gone: until it is known to be slow."""
SPIN = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): [None for _ in range(10_000)]"
"""Keeps a core busy, until whoever began it is gone: the process of the number it is told."""

Fault = Callable[[Stage, Random], Awaitable[None]]


async def under_load(
    stage: Stage, options: FaultOptions, requests: Sequence[Body], inject: Fault, rng: Random
) -> tuple[list[Reply], float, FaultResult]:
    """Inject a fault under the steady load, wait until the cluster is whole, and let all streams complete.

    Returns what was said, when the fault began, and what there is to say without knowing the right texts.
    """
    complaints, healed, began = [], 0.0, time.perf_counter()
    async with Workload(stage.url, requests, options.streams) as load:
        try:
            await load.begun()
            began = time.perf_counter()
            await inject(stage, rng)
            await stage.whole()
            healed = time.perf_counter() - began
            await asyncio.sleep(AFTER_SECONDS)
        except (BenchError, TimeoutError) as error:
            complaints.append(in_words(error))
        await load.finish()
    return load.replies, began, FaultResult(options.streams, seconds=healed, complaints=complaints)


def in_words(error: Exception) -> str:
    """Never empty."""
    return str(error) or f"a wait took too long ({type(error).__name__})"


async def kill_replica(stage: Stage, rng: Random, role: Role) -> None:
    """Kill -9 of a worker's replica, which is its rank 0."""
    await kill((await _victim(stage, role, rng)).replica)


async def kill_rank(stage: Stage, rng: Random) -> None:
    """Kill -9 of rank 1 of a target."""
    await kill((await _ranked(stage, rng)).ranks[0])


async def kill_active(stage: Stage, rng: Random) -> None:
    """Kill -9 of a target that does not stand by."""
    active = {
        part["address"] for part in (await stage.view())["workers"] if part["role"] == "target" and not part["standby"]
    }
    targets = [worker for worker in await stage.workers(Role.TARGET) if worker.running and worker.address in active]
    if len(targets) != 1:
        raise StageError(f"{len(targets)} targets take sessions, wanted 1 beside the one that stands by")
    await kill(rng.choice(targets).replica)


async def stop_rank(stage: Stage, rng: Random) -> None:
    """SIGSTOP of rank 1 of a target, until the target has ended itself, whether it computes or not.

    Where all are up: one that still loads may take as long as ``load_timeout`` says, whatever its ranks do.
    """
    worker = await _ranked(stage, rng)
    with stopped(worker.ranks[0]):
        async with asyncio.timeout(STUCK_SECONDS):
            while worker.replica.running:
                await asyncio.sleep(POLL_SECONDS)


@contextmanager
def stopped(*processes: Process) -> Iterator[None]:
    """Meanwhile they are held by SIGSTOP."""
    try:
        for process in processes:
            process.send(signal.SIGSTOP)
        yield
    finally:
        for process in processes:
            process.send(signal.SIGCONT)


async def kill_drafters(stage: Stage, rng: Random) -> None:  # noqa: ARG001 - as faults are called
    """Kill -9 of all drafters at once."""
    await kill(*(worker.replica for worker in await stage.workers(Role.DRAFT)))


async def kill_router(stage: Stage, rng: Random) -> None:
    """Kill -9 of one of two routers."""
    routers = await stage.found(ROUTER)
    if len(routers) != 2:
        raise StageError(f"{len(routers)} routers run, wanted 2")
    await kill(rng.choice(routers))


async def stop_replica(stage: Stage, rng: Random, role: Role, seconds: float) -> None:
    """SIGSTOP of a worker's replica, and SIGCONT later."""
    with stopped((await _victim(stage, role, rng)).replica):
        await asyncio.sleep(seconds)


async def starve_drafter(stage: Stage, rng: Random, seconds: float) -> None:
    """A drafter that seldom gets a core, on a machine all of whose cores are busy; it must not be taken for gone."""
    worker = await _victim(stage, Role.DRAFT, rng)
    before = max((event["number"] for event in (await stage.view())["events"]), default=0)
    async with _busy_cores():
        for _ in range(max(1, round(seconds / (STARVED_SECONDS + FED_SECONDS)))):
            with stopped(worker.replica):
                await asyncio.sleep(STARVED_SECONDS)
            await asyncio.sleep(FED_SECONDS)
    lost = times_lost((await stage.view())["events"], f"draft@{worker.address}", before)
    if lost > MAX_LOST:
        raise StageError(f"the starved drafter was taken for gone {lost} times, wanted at most {MAX_LOST}")


def times_lost(events: Iterable[Mapping[str, Any]], worker: str, after: int) -> int:
    """How often a router lost a worker, by its events numbered above ``after``."""
    lost = (event for event in events if event["kind"] == EventKind.WORKER_LOST and event["worker"] == worker)
    return sum(event["times"] for event in lost if event["number"] > after)


@asynccontextmanager
async def _busy_cores() -> AsyncIterator[None]:
    spin = [sys.executable, "-c", SPIN, str(os.getpid())]
    busy = [await asyncio.create_subprocess_exec(*spin) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
        await asyncio.gather(*(process.wait() for process in busy))


async def remove_node(stage: Stage, rng: Random, gpu_class: str) -> None:
    """All processes of a node killed at once; later the node is started again."""
    name = rng.choice([node.name for node in (*nodes.SMALL, *nodes.LARGE) if node.gpu_class == gpu_class])
    await stage.node("remove", name)
    await asyncio.sleep(AWAY_SECONDS)
    await stage.node("add", name)


async def kill_controller(stage: Stage, rng: Random) -> None:  # noqa: ARG001 - as faults are called
    """Kill -9 of Serve's controller; returns when Ray has started another."""
    before = await stage.found(CONTROLLER)
    await kill(*before)
    async with asyncio.timeout(CONTROLLER_SECONDS):
        while not {p.pid for p in await stage.found(CONTROLLER)} - {p.pid for p in before}:
            await asyncio.sleep(POLL_SECONDS)


async def kill(*victims: Process) -> None:
    """Kill -9 of all at once; returns when none runs, so that nobody takes the dead for the healed."""
    for process in victims:
        process.send(signal.SIGKILL)
    while any(process.running for process in victims):
        await asyncio.sleep(GONE_SECONDS)


async def _victim(stage: Stage, role: Role, rng: Random) -> WorkerReplica:
    running = [worker for worker in await stage.workers(role) if worker.running]
    if not running:
        raise StageError(f"no {role} worker runs")
    return rng.choice(running)


async def _ranked(stage: Stage, rng: Random) -> WorkerReplica:
    worker = await _victim(stage, Role.TARGET, rng)
    if not worker.ranks:
        raise StageError(f"the target on {worker.node} has no rank 1")
    return worker
