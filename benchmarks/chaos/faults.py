"""What can be done to a cluster: to a worker of a pool, to one of its ranks, to a node, to Serve's controller.

Each fault chooses its victim with the generator it is given, does its harm, undoes what would not heal by itself (a
stopped process goes on, a node comes back) and returns; whether the cluster is whole again is for others to see.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from random import Random

from benchmarks.chaos import nodes
from benchmarks.chaos.processes import CONTROLLER, Process, WorkerReplica
from benchmarks.chaos.stage import POLL_SECONDS, Stage, StageError
from speculation.events import Role

CONTROLLER_SECONDS = 60.0
GONE_SECONDS = 0.02
AWAY_SECONDS = 10.0
"""How long a node is gone."""

Fault = Callable[[Stage, Random], Awaitable[None]]


def kill_replica(role: Role) -> Fault:
    """Kill -9 of a worker's replica, which is its rank 0."""

    async def inject(stage: Stage, rng: Random) -> None:
        await kill((await _victim(stage, role, rng)).replica)

    return inject


async def kill_rank(stage: Stage, rng: Random) -> None:
    """Kill -9 of rank 1 of a target."""
    worker = await _victim(stage, Role.TARGET, rng)
    if not worker.ranks:
        raise StageError(f"the target on {worker.node} has no rank 1")
    await kill(worker.ranks[0])


def kill_all(role: Role) -> Fault:
    """Kill -9 of all workers of a role at once."""

    async def inject(stage: Stage, rng: Random) -> None:
        del rng
        await kill(*(worker.replica for worker in await stage.workers(role)))

    return inject


def stop_replica(role: Role, seconds: float) -> Fault:
    """SIGSTOP of a worker's replica, and SIGCONT later."""

    async def inject(stage: Stage, rng: Random) -> None:
        replica = (await _victim(stage, role, rng)).replica
        replica.send(signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            replica.send(signal.SIGCONT)

    return inject


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
