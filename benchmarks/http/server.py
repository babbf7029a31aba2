"""``python -m benchmarks.http.server GROUPS``: what a router is compared with, a bare application on the same server.

It reads a request and streams events as large as a router's, its streams in so many groups, each written to at once,
until they are told to end. Lines of input: JSON with the pace, and ``commits``, answered by when each event of each
request was made, by the clock that all processes of a machine share. The first line of output is the address.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from benchmarks.harness.processes import answer_lines
from benchmarks.http.workers import StepPace
from router.answers.responses import DONE
from router.http.asgi import REQUEST_ID_HEADER
from router.http.exhaustion import raise_limit

EVENT = b"data: " + json.dumps({"id": "cmpl-" + "0" * 32, "choices": [{"text": "x" * 150}]}).encode() + b"\n\n"
"""As long as one of ours."""


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
        if line == "commits":
            return json.dumps(self.commits)
        self.pace.interval, self.pace.ending = json.loads(line).values()
        return ""


async def serve(groups: int) -> None:
    """Serve until the input ends."""
    ticker = Ticker(groups)
    app = Starlette(routes=[Route("/v1/completions", ticker.stream, methods=["POST"])])
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None))
    serving = asyncio.create_task(server.serve())
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    ticking = ticker.start()
    await answer_lines(f"127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", ticker.answer)
    for task in ticking:
        task.cancel()
    server.should_exit = True
    await serving


if __name__ == "__main__":
    raise_limit()
    asyncio.run(serve(int(sys.argv[1])))
