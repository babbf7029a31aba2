"""The row of a stall in one direction: what a router sends a target does not arrive, what the target says does.

Serve's replicas are connected to without anything in between, so this row has routers and workers of its own: plain
processes beside the pretend cluster, one target behind a proxy that can hold back what goes one way.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, closing
from typing import Any

from benchmarks.chaos.records import FaultResult
from benchmarks.chaos.settings import BEGIN_SECONDS, FINISH_SECONDS, HEAL_SECONDS, MAX_SESSIONS, ChaosOptions
from benchmarks.chaos.stage import POLL_SECONDS, Stage, StageError
from benchmarks.chaos.workload import Workload, client
from benchmarks.harness.processes import READY, WorkerPlan, all_running, child
from cluster.config.environment import BUNDLED
from cluster.processes.child import HeldPort
from router.sessions.run import EventKind
from speculation.events import Role
from transport.address import parse

HELD_SECONDS = 12.0
NOTICED_SECONDS = 5.0
"""In which unanswered pings must have told: 2 s, and more where the router itself has no core."""
CHUNK_BYTES = 1 << 16


class OneWayProxy:
    """Passes TCP connections on, and can hold back all that comes from those who connect, ends of streams too."""

    def __init__(self, address: str) -> None:
        """``address``: where to, HOST:PORT."""
        self.address = ""
        self._there = parse(address)
        self._open = asyncio.Event()
        self._open.set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> OneWayProxy:
        """Listen on a free port of this machine."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_error: object) -> None:
        """Cut all connections."""
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Meanwhile nothing arrives there. What is held back arrives afterwards."""
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._connect(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers, always = [writer], asyncio.Event()
        always.set()
        with contextlib.suppress(OSError):  # who is there is gone: whoever has connected sees that
            try:
                there_reader, there_writer = await asyncio.open_connection(*self._there)
                writers.append(there_writer)
                ways = [(reader, there_writer, self._open), (there_reader, writer, always)]
                passing = [asyncio.create_task(_pass_on(*way)) for way in ways]
                try:
                    await asyncio.wait(passing, return_when=asyncio.FIRST_COMPLETED)
                    await self._open.wait()
                finally:
                    for task in passing:
                        task.cancel()
                    await asyncio.gather(*passing, return_exceptions=True)
            finally:
                for each in writers:
                    each.close()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, may: asyncio.Event) -> None:
    """Until there is no more, each piece once it ``may`` go on."""
    with contextlib.suppress(OSError):
        while data := await reader.read(CHUNK_BYTES):
            await may.wait()
            writer.write(data)
            await writer.drain()


@asynccontextmanager
async def two_targets(dtype: str) -> AsyncIterator[tuple[str, OneWayProxy]]:
    """A router, a drafter and two targets, one of them behind the proxy; where they serve. Raises WorkerFailed."""
    flags = ("--dtype", dtype, "--threads", "1")
    roles = (Role.TARGET, Role.TARGET, Role.DRAFT)
    plans = [WorkerPlan(role, BUNDLED / role.value, None, flags=flags) for role in roles]
    with closing(HeldPort()) as port:
        async with all_running(plans) as (one, other, draft), OneWayProxy(one.first) as proxy:
            known = ("--target", proxy.address, "--target", other.first, "--draft", draft.first)
            served = ("--port", str(port.number), "--max-sessions", str(MAX_SESSIONS))
            async with child("router", "cluster.cli", "router", *known, *served, ready=READY):
                yield f"http://{port.address}", proxy


async def one_way_stall(stage: Stage, options: ChaosOptions) -> FaultResult:
    """Hold back what goes to one of two targets under the steady load, for a while."""
    requests = stage.fresh(options, options.tokens)
    async with two_targets(options.dtype) as (url, proxy), Workload(url, requests, options.streams) as load:
        await load.begun(BEGIN_SECONDS)
        began, held_at = time.monotonic(), time.time()
        async with proxy.held():
            await asyncio.sleep(HELD_SECONDS)
        events = await _until_back(url, f"target@{proxy.address}", HEAL_SECONDS)
        healed = time.monotonic() - began
        await load.finish(FINISH_SECONDS)
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


async def _until_back(url: str, worker: str, seconds: float) -> list[Mapping[str, Any]]:
    """Wait until a router has a worker; its events. Raises StageError, httpx.HTTPError."""
    deadline = time.monotonic() + seconds
    async with client(1) as http:
        while True:
            view = (await http.get(f"{url}/cluster")).raise_for_status().json()
            if any(part["id"] == worker and part["state"] == "up" for part in view["workers"]):
                events: list[Mapping[str, Any]] = view["events"]
                return events
            if time.monotonic() > deadline:
                raise StageError(f"{worker} was not reached again within {seconds:.0f} s")
            await asyncio.sleep(POLL_SECONDS)
