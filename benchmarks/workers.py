"""Worker processes for a benchmark, each on a core of its own, without Ray."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from router.dispatch import Dispatcher
from speculation.events import Role

READY_SECONDS = 180.0


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """One worker process."""

    role: Role
    model: Path
    core: int
    flags: Sequence[str] = ()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@asynccontextmanager
async def running(plan: WorkerPlan) -> AsyncIterator[str]:
    """The worker's address, while it runs."""
    address = f"127.0.0.1:{_free_port()}"
    command = [sys.executable, "-m", "cluster.cli", "worker", plan.role.value]
    command += ["--model", str(plan.model), "--listen", address, *plan.flags]
    cores = {plan.core % (os.cpu_count() or 1)}
    process = await asyncio.create_subprocess_exec(
        *command, preexec_fn=lambda: os.sched_setaffinity(0, cores), stdout=subprocess.DEVNULL
    )
    try:
        yield address
    finally:
        process.terminate()
        await process.wait()


@asynccontextmanager
async def connected(targets: Sequence[str], drafts: Sequence[str]) -> AsyncIterator[Dispatcher]:
    """A router's session side, in this process, connected to all of them."""
    dispatcher = Dispatcher()
    dispatcher.pool.set_workers(Role.TARGET, targets)
    dispatcher.pool.set_workers(Role.DRAFT, drafts)
    try:
        async with asyncio.timeout(READY_SECONDS):
            while not all(peer.welcome for peer in dispatcher.pool.peers.values()):
                await asyncio.sleep(0.05)
        yield dispatcher
    finally:
        await dispatcher.pool.close()
