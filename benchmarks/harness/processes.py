"""Processes that a benchmark starts beside itself: each says a line when it is ready, and ends with the benchmark.

Some answer each line of their input with a line (:func:`answer_lines` is their end of it). Our workers are started
here, too: usually each on a core of its own, without Ray; and routers' session sides that are connected to them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.options import BenchError
from benchmarks.harness.proxy import Proxy
from cluster.console import complain, say
from router.dispatch import Dispatcher
from speculation.events import Role

READY_SECONDS = 300.0
READY = r"ready on (\S+)"
"""What a worker or a router says when it is, and where."""
CONNECT_SECONDS = 20.0
END_SECONDS = 90.0
"""That one may take to end once it is told to: longer than a worker drains."""
ABORT_SECONDS = 10.0
LINE_BYTES = 1 << 28


class WorkerFailed(BenchError):
    """A process of the benchmark ended before it was ready, or before it had answered; why is on stderr."""


@dataclass(frozen=True, slots=True)
class ReadyProcess:
    """One that is ready."""

    name: str
    process: Process
    first: str
    """What it said when it was, or where it listens."""

    async def ask(self, line: str = "") -> str:
        """Its answer. Raises :class:`WorkerFailed`."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{line}\n".encode())
        await self.process.stdin.drain()
        answer = await self.process.stdout.readline()
        if not answer:
            raise WorkerFailed(f"the {self.name} ended")
        return answer.decode().strip()

    async def kill(self) -> None:
        """As ``kill -9``."""
        self.process.kill()
        await self.process.wait()


@asynccontextmanager
async def child(
    name: str,
    module: str,
    *arguments: str,
    ready: str = "(.*)",
    core: int | None = None,
    env: Mapping[str, str] | None = None,
    patience: float = 0.0,
) -> AsyncIterator[ReadyProcess]:
    """A module run as a program, until it is left; it is ``ready`` with the first line that has this pattern.

    ``core``: the one it is bound to; None: it may use all. ``patience``: seconds in which it may end by itself when its
    input does. Raises :class:`WorkerFailed`, TimeoutError.
    """
    command = [sys.executable, "-X", "faulthandler", "-m", module, *arguments]  # see _abort
    cores = sorted(os.sched_getaffinity(0))
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, limit=LINE_BYTES, env=env)
    assert process.stdin is not None and process.stdout is not None
    if core is not None:
        # From outside, long before it starts a thread: code run in a fork of this process would upset gRPC.
        os.sched_setaffinity(process.pid, {cores[core % len(cores)]})
    try:
        found: re.Match[str] | None = None
        try:
            async with asyncio.timeout(READY_SECONDS):
                while found is None and (line := await process.stdout.readline()):
                    found = re.search(ready, line.decode().strip())
        except TimeoutError:
            await _abort(name, process)
            raise
        if found is None:
            raise WorkerFailed(f"the {name} did not start; why is on stderr")
        yield ReadyProcess(name, process, found[1])
    finally:
        process.stdin.close()
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), patience)
        finally:
            if process.returncode is None:
                process.terminate()
        try:
            await asyncio.wait_for(process.wait(), END_SECONDS)
        except TimeoutError:
            await _abort(name, process)


async def _abort(name: str, process: Process) -> None:
    """End one that stands still; by SIGABRT, so that it says on stderr where each of its threads stood."""
    complain(f"the {name} stands still, and is ended; where it stood:")
    for number in (signal.SIGABRT, signal.SIGKILL):
        with suppress(ProcessLookupError):
            process.send_signal(number)
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), ABORT_SECONDS)
            return


async def answer_lines(first: str, answer: Callable[[str], str]) -> None:
    """The other end: say the first line, then answer each line until the input ends."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    say(first)
    while line := await reader.readline():
        say(answer(line.decode().strip()))


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


def running(plan: WorkerPlan) -> AbstractAsyncContextManager[ReadyProcess]:
    """The worker, while it runs; raises :class:`WorkerFailed`."""
    flags = ["--model", str(plan.model), "--listen", "127.0.0.1:0"]
    flags += ["--record", str(plan.record)] if plan.record is not None else []
    # On CPUs unless the plan says otherwise: cores are what it divides, and what others are compared on.
    flags += ["--device", "cpu", "--exit-with", str(os.getpid()), *plan.flags]
    name, command = f"{plan.role.value} worker of {plan.model.name}", ("worker", plan.role.value, *flags)
    return child(name, "cluster.cli", *command, ready=READY, core=plan.core)


@asynccontextmanager
async def all_running(plans: Sequence[WorkerPlan], *, together: bool = False) -> AsyncIterator[list[ReadyProcess]]:
    """Several, started one after the other, since each takes the time of its steps; raises :class:`WorkerFailed`.

    ``together``: all at once, where what they compute with is not what starting takes.
    """
    async with AsyncExitStack() as stack:
        if not together:
            yield [await stack.enter_async_context(running(plan)) for plan in plans]
            return
        try:
            async with asyncio.TaskGroup() as group:  # one that fails ends the others' starts
                starts = [group.create_task(stack.enter_async_context(running(plan))) for plan in plans]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        yield [start.result() for start in starts]


@asynccontextmanager
async def connected(target: ReadyProcess, draft: ReadyProcess | None = None) -> AsyncIterator[Dispatcher]:
    """A router's session side, in this process, connected to both (or to a target alone)."""
    dispatcher = Dispatcher()
    dispatcher.pool.set_workers(Role.TARGET, [target.first])
    if draft is not None:
        dispatcher.pool.set_workers(Role.DRAFT, [draft.first])
    try:
        await until_up(dispatcher)
        yield dispatcher
    finally:
        await dispatcher.pool.close()


@asynccontextmanager
async def routed(
    plans: Sequence[WorkerPlan], pairs: Sequence[Sequence[int]], *, together: bool = False
) -> AsyncIterator[list[Dispatcher]]:
    """Workers, and for each of the pairs a router's session side: a target and perhaps a drafter, by their numbers.

    A worker may be in several; never should two of these be at work. ``together``: see :func:`all_running`.
    """
    async with all_running(plans, together=together) as workers, AsyncExitStack() as stack:
        yield [await stack.enter_async_context(connected(*(workers[number] for number in pair))) for pair in pairs]


async def until_up(dispatcher: Dispatcher) -> None:
    """Return once a router is connected to all its workers. Raises TimeoutError."""
    async with asyncio.timeout(CONNECT_SECONDS):
        while not all(peer.welcome for peer in dispatcher.pool.peers.values()):
            await asyncio.sleep(0.05)


@asynccontextmanager
async def drafting_late(dispatcher: Dispatcher, seconds: float) -> AsyncIterator[None]:
    """Meanwhile, all that goes to its drafter and comes from there takes so much longer, each way."""
    (near,) = (peer.connection for peer in dispatcher.pool.peers.values() if peer.role is Role.DRAFT)
    async with Proxy(near.address, lambda: seconds) as proxy:
        dispatcher.pool.set_workers(Role.DRAFT, [proxy.address])
        await until_up(dispatcher)
        yield
        dispatcher.pool.set_workers(Role.DRAFT, [near.address])
        await until_up(dispatcher)


@contextmanager
def losses_unsaid(name: str = "router.sessions.pool") -> Iterator[None]:
    """Have the logger of this name say no word of workers that are lost: where that is part of the plan."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


async def until_lost(dispatcher: Dispatcher, role: Role) -> None:
    """Return once the router knows that no worker of a role is left."""
    async with asyncio.timeout(CONNECT_SECONDS):
        while any(peer.welcome for peer in dispatcher.pool.peers.values() if peer.role is role):
            await asyncio.sleep(0.05)
