"""Worker processes for a benchmark, usually each on a core of its own, without Ray, and routers connected to them."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.processes import READY_SECONDS, WorkerFailed
from router.dispatch import Dispatcher
from speculation.events import Role

CONNECT_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """One worker process."""

    role: Role
    model: Path
    core: int | None
    """The one it is bound to; None: it may use all."""
    record: Path | None = None
    """Where it writes its step records; None: it keeps none."""
    flags: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class RunningWorker:
    """A worker that is ready."""

    address: str
    process: Process

    async def kill(self) -> None:
        """As ``kill -9``."""
        self.process.kill()
        await self.process.wait()


@asynccontextmanager
async def running(plan: WorkerPlan) -> AsyncIterator[RunningWorker]:
    """The worker, while it runs; raises :class:`WorkerFailed`."""
    command = [sys.executable, "-m", "cluster.cli", "worker", plan.role.value]
    command += ["--model", str(plan.model), "--listen", "127.0.0.1:0"]
    command += ["--record", str(plan.record)] if plan.record is not None else []
    # On CPUs unless the plan says otherwise: cores are what it divides, and what others are compared on.
    command += ["--device", "cpu", "--exit-with", str(os.getpid()), *plan.flags]
    cores = sorted(os.sched_getaffinity(0))
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE)
    if plan.core is not None:
        # From outside, long before it starts a thread: code run in a fork of this process would upset gRPC.
        os.sched_setaffinity(process.pid, {cores[plan.core % len(cores)]})
    try:
        yield RunningWorker(await _address(plan, process), process)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


@asynccontextmanager
async def all_running(plans: Sequence[WorkerPlan]) -> AsyncIterator[list[RunningWorker]]:
    """Several, started one after the other; raises :class:`WorkerFailed`."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(running(plan)) for plan in plans]


async def _address(plan: WorkerPlan, process: Process) -> str:
    """Where it listens: from the line it prints when it is ready."""
    assert process.stdout is not None
    async with asyncio.timeout(READY_SECONDS):
        while line := await process.stdout.readline():
            if ready := re.search(r"ready on (\S+)", line.decode()):
                return ready[1]
    raise WorkerFailed(f"the {plan.role.value} worker of {plan.model.name} did not start")


@asynccontextmanager
async def connected(target: RunningWorker, draft: RunningWorker | None = None) -> AsyncIterator[Dispatcher]:
    """A router's session side, in this process, connected to both (or to a target alone)."""
    dispatcher = Dispatcher()
    dispatcher.pool.set_workers(Role.TARGET, [target.address])
    if draft is not None:
        dispatcher.pool.set_workers(Role.DRAFT, [draft.address])
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            while not all(peer.welcome for peer in dispatcher.pool.peers.values()):
                await asyncio.sleep(0.05)
        yield dispatcher
    finally:
        await dispatcher.pool.close()


@asynccontextmanager
async def serving(target: Path, *flags: str, draft: Path | None = None) -> AsyncIterator[Dispatcher]:
    """A target on a core of its own, perhaps a draft on another, both in bfloat16, and a router's session side."""
    given = ("--dtype", "bfloat16", *flags)
    plans = [WorkerPlan(Role.TARGET, target, 0, flags=given)]
    plans += [WorkerPlan(Role.DRAFT, draft, 1, flags=given)] if draft else []
    async with all_running(plans) as workers, connected(*workers) as dispatcher:
        yield dispatcher


async def until_lost(dispatcher: Dispatcher, role: Role) -> None:
    """Return once the router knows that no worker of a role is left."""
    async with asyncio.timeout(CONNECT_SECONDS):
        while any(peer.welcome for peer in dispatcher.pool.peers.values() if peer.role is role):
            await asyncio.sleep(0.05)
