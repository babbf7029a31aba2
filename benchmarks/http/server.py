"""``python -m benchmarks.http.server KIND ...``: one of two servers for a benchmark.

``router`` is the whole router, between clients and workers at addresses; ``bare`` an application that reads a request
and streams events of the same size, its streams in so many GROUPS, each written to at once. Both go on until they are
told to end. Lines of input: ``usage``, answered by processor seconds and resident memory; of the bare one ``commits``,
answered by when each event of each request was made, by the clock that all processes of a machine share, and JSON with
the pace.

The first line of output is the port.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from benchmarks.harness.processes import answer_lines, until_up
from benchmarks.http.workers import StepPace
from router.answers.responses import DONE
from router.dispatch import DispatchLimits
from router.http.asgi import REQUEST_ID_HEADER
from router.http.exhaustion import raise_limit
from router.service import Router, RouterSettings, freeze_loaded

EVENT = b"data: " + json.dumps({"id": "cmpl-" + "0" * 32, "choices": [{"text": "x" * 150}]}).encode() + b"\n\n"
"""As long as one of ours."""
MAX_SESSIONS = 1 << 14


@dataclass(slots=True)
class Ticker:
    """Streams in groups, each of which is written to at once, until they are told to end."""

    groups: int
    pace: StepPace = field(default_factory=StepPace)
    commits: dict[str, list[float]] = field(default_factory=dict)
    """By request: when each of its events was made."""
    _queues: list[list[tuple[list[float], asyncio.Queue[bytes]]]] = field(default_factory=list)

    def start(self) -> list[asyncio.Task[None]]:
        """Begin to tick."""
        self._queues = [[] for _ in range(self.groups)]
        return [asyncio.create_task(self._tick(number)) for number in range(self.groups)]

    async def _tick(self, group: int) -> None:
        number = 0
        while True:
            number = await self.pace.step(group / self.groups, number)
            now, event = time.monotonic(), DONE if self.pace.ending else EVENT
            for times, queue in self._queues[group]:
                times.append(now)
                queue.put_nowait(event)

    async def stream(self, request: Request) -> StreamingResponse:
        """One that goes on until it is told to end."""
        await request.json()
        times, queue = self.commits.setdefault(request.headers[REQUEST_ID_HEADER], []), asyncio.Queue[bytes]()
        self._queues[(len(self.commits) - 1) % self.groups].append((times, queue))
        times.append(time.monotonic())
        queue.put_nowait(EVENT)

        async def events() -> AsyncIterator[bytes]:
            while (event := await queue.get()) is not DONE:
                yield event
            yield event

        return StreamingResponse(events(), media_type="text/event-stream")

    def answer(self, line: str) -> str:
        """For the benchmark."""
        if line.startswith("{"):
            self.pace.interval, self.pace.ending = json.loads(line).values()
        return json.dumps(self.commits) if line == "commits" else usage(line)


def usage(_: str) -> str:
    """Processor seconds so far, and what is resident."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return json.dumps({"cpu": time.process_time(), "memory_kb": pages * os.sysconf("SC_PAGE_SIZE") / 1024})


async def serve(app: ASGIApp, answer: Callable[[str], str]) -> None:
    """Serve until the input ends."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None))
    serving = asyncio.create_task(server.serve())
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    await answer_lines(str(server.servers[0].sockets[0].getsockname()[1]), answer)
    server.should_exit = True
    await serving


async def bare(groups: int) -> None:
    """The one that ticks."""
    ticker = Ticker(groups)
    ticking = ticker.start()
    await serve(Starlette(routes=[Route("/v1/completions", ticker.stream, methods=["POST"])]), ticker.answer)
    for task in ticking:
        task.cancel()


async def router(targets: str, drafts: str = "") -> None:
    """The whole router."""
    listed = [address.split(",") if address else [] for address in (targets, drafts)]
    whole = Router(RouterSettings(listed[0], listed[1], port=0, limits=DispatchLimits(sessions=MAX_SESSIONS)))
    await whole.start()
    await until_up(whole.dispatcher)
    freeze_loaded()
    await answer_lines(whole.address.rpartition(":")[2], usage)
    await whole.stop()


def main(kind: str, *given: str) -> None:
    """Run one kind."""
    raise_limit()
    match kind, given:
        case "bare", (groups,):
            asyncio.run(bare(int(groups)))
        case "router", _:
            asyncio.run(router(*given))
        case _:
            raise SystemExit(f"no such server: {kind} {given}")


if __name__ == "__main__":
    main(*sys.argv[1:])
