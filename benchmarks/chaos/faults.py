"""What can be done to a cluster: to a worker of a pool, to one of its ranks, to a node, to Serve's controller.

Each fault chooses its victim with the generator it is given, does its harm, undoes what would not heal by itself (a
stopped process goes on, a node comes back) and returns; whether the cluster is whole again is for others to see.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from random import Random
from typing import Any

from benchmarks.chaos import nodes
from benchmarks.chaos.processes import CONTROLLER, Process, WorkerReplica
from benchmarks.chaos.stage import POLL_SECONDS, Stage, StageError
from router.sessions.run import EventKind
from speculation.events import Role

CONTROLLER_SECONDS = 60.0
GONE_SECONDS = 0.02
AWAY_SECONDS = 10.0
"""How long a node is gone."""
STUCK_SECONDS = 90.0
"""In which a target must have ended itself because a step of it is stuck."""
STARVED_SECONDS, FED_SECONDS = 2.6, 0.4
"""A starved process has no core for so long, longer than a worker may be silent, and then one for a moment."""
MAX_LOST = 2
"""How often a starved drafter may be taken for gone: until it is known to be slow."""

Fault = Callable[[Stage, Random], Awaitable[None]]


def kill_replica(role: Role) -> Fault:
    """Kill -9 of a worker's replica, which is its rank 0."""

    async def inject(stage: Stage, rng: Random) -> None:
        await kill((await _victim(stage, role, rng)).replica)

    return inject


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
    """SIGSTOP of rank 1 of a target, until the target has ended itself for its stuck step."""
    worker = await _ranked(stage, rng)
    with stopped(worker.ranks[0]):
        try:
            async with asyncio.timeout(STUCK_SECONDS):
                while worker.replica.running:
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError:
            raise StageError(f"a target whose rank 1 hangs still ran after {STUCK_SECONDS:.0f} s") from None


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


def kill_all(role: Role) -> Fault:
    """Kill -9 of all workers of a role at once."""

    async def inject(stage: Stage, rng: Random) -> None:
        del rng
        await kill(*(worker.replica for worker in await stage.workers(role)))

    return inject


def stop_replica(role: Role, seconds: float) -> Fault:
    """SIGSTOP of a worker's replica, and SIGCONT later."""

    async def inject(stage: Stage, rng: Random) -> None:
        with stopped((await _victim(stage, role, rng)).replica):
            await asyncio.sleep(seconds)

    return inject


def starve_drafter(seconds: float) -> Fault:
    """A drafter that seldom gets a core, on a machine all of whose cores are busy; it must not be taken for gone."""

    async def inject(stage: Stage, rng: Random) -> None:
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

    return inject


def times_lost(events: Iterable[Mapping[str, Any]], worker: str, after: int) -> int:
    """How often a router lost a worker, by its events numbered above ``after``."""
    lost = (event for event in events if event["kind"] == EventKind.WORKER_LOST and event["worker"] == worker)
    return sum(event["times"] for event in lost if event["number"] > after)


@asynccontextmanager
async def _busy_cores() -> AsyncIterator[None]:
    """Meanwhile each core has a process that never rests."""
    spin = [sys.executable, "-c", "while True: pass"]
    busy = [await asyncio.create_subprocess_exec(*spin) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
        await asyncio.gather(*(process.wait() for process in busy))


def remove_node(gpu_class: str, away: float = AWAY_SECONDS) -> Fault:
    """All processes of a node killed at once; later the node is started again."""

    async def inject(stage: Stage, rng: Random) -> None:
        name = rng.choice([node.name for node in (*nodes.SMALL, *nodes.LARGE) if node.gpu_class == gpu_class])
        await stage.node("remove", name)
        await asyncio.sleep(away)
        await stage.node("add", name)

    return inject


async def kill_controller(stage: Stage, rng: Random) -> None:
    """Kill -9 of Serve's controller; returns when Ray has started another."""
    del rng
    before = await asyncio.to_thread(stage.processes.found, CONTROLLER)
    await kill(*before)
    async with asyncio.timeout(CONTROLLER_SECONDS):
        while not {p.pid for p in await asyncio.to_thread(stage.processes.found, CONTROLLER)} - {p.pid for p in before}:
            await asyncio.sleep(POLL_SECONDS)


async def kill(*victims: Process) -> None:
    """Kill -9 of all at once; returns when none runs, so that nobody takes the dead for the healed."""
    for process in victims:
        process.send(signal.SIGKILL)
    while any(process.running for process in victims):
        await asyncio.sleep(GONE_SECONDS)


async def _victim(stage: Stage, role: Role, rng: Random) -> WorkerReplica:
    """Any worker of the role that runs."""
    running = [worker for worker in await stage.workers(role) if worker.running]
    if not running:
        raise StageError(f"no {role} worker runs")
    return rng.choice(running)


async def _ranked(stage: Stage, rng: Random) -> WorkerReplica:
    """Any target that runs on several ranks."""
    worker = await _victim(stage, Role.TARGET, rng)
    if not worker.ranks:
        raise StageError(f"the target on {worker.node} has no rank 1")
    return worker
