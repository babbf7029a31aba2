"""``python -m benchmarks.http.server KIND COMMITS``: a server whose tokens come at a fixed pace, for a benchmark.

Two kinds: the router's whole HTTP side over a generator that computes nothing, and a bare application that reads a
request and streams events of the same size at the same pace. Its first line of output is the port. Each line of input
is answered by a line of JSON: the processor seconds it has used, and when what of the requests since the last answer
was begun and committed, by the clock that all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass, field

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from benchmarks.harness.processes import answer_lines
from benchmarks.http.figures import COMMIT_SECONDS, COMMIT_TOKENS, ECHO, FIRST_SECONDS, PACELINE
from cluster.config.environment import BUNDLED
from router.generation import Committed, Ended, Generation, ServedModel
from router.http.api import build_app
from router.http.asgi import REQUEST_ID_HEADER
from router.text.tokenizer import Tokenizer
from router.text.tokenizers import Tokenizers
from speculation.messages import FinishReason

MODEL = "target"
TEXT = "def merge(left, right):\n    result = []\n    while left and right:\n        result.append(min(left, right))\n"
EVENT = b"data: " + json.dumps({"id": "cmpl-" + "0" * 32, "choices": [{"text": "x" * 150}]}).encode() + b"\n\n"
"""As long as one of ours."""


@dataclass(slots=True)
class Ledger:
    """When requests were begun and tokens committed, by the id of the request; the first time is its beginning."""

    commits: int
    times: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    async def paced(self, request_id: str) -> AsyncIterator[int]:
        """The numbers of the commits of a request, each when it is due."""
        times = self.times[request_id]
        times.append(time.monotonic())
        for number in range(self.commits):
            due = times[0] + FIRST_SECONDS + number * COMMIT_SECONDS
            await asyncio.sleep(max(due - time.monotonic(), 0.0))
            times.append(time.monotonic())
            yield number

    def answer(self) -> str:
        """For the benchmark; forgets."""
        told = {"cpu": time.process_time(), "times": dict(self.times)}
        self.times.clear()
        return json.dumps(told)


class PacedGenerator:
    """Commits the same text at a fixed pace. Implements :class:`router.generation.Generator`."""

    def __init__(self, ledger: Ledger, tokenizer: Tokenizer) -> None:
        """``tokenizer``: of the text."""
        tokens = tokenizer.encode(TEXT, special=False)
        self._ledger = ledger
        self._parts = [
            tuple(tokens[(start + i) % len(tokens)] for i in range(COMMIT_TOKENS)) for start in range(len(tokens))
        ]
        self._model = ServedModel(MODEL, tokenizer.size, 4096, tokenizer.digest, str(BUNDLED / MODEL))

    @property
    def models(self) -> Mapping[str, ServedModel]:
        """The one."""
        return {MODEL: self._model}

    async def generate(self, generation: Generation) -> AsyncGenerator[Committed | Ended]:
        """See :class:`router.generation.Generator`."""
        async for number in self._ledger.paced(generation.request_id):
            tokens = self._parts[number * COMMIT_TOKENS % len(self._parts)]
            yield Committed(tokens, accepted=COMMIT_TOKENS - 1, offered=COMMIT_TOKENS + 1)
        yield Ended(FinishReason.LENGTH)


async def paceline(ledger: Ledger) -> ASGIApp:
    """The router's own application."""
    tokenizers = Tokenizers()
    tokenizer = await tokenizers.read(str(BUNDLED / MODEL))
    return build_app(PacedGenerator(ledger, tokenizer), tokenizers)


async def echo(ledger: Ledger) -> ASGIApp:
    """The least that can stream."""

    async def stream(request: Request) -> StreamingResponse:
        await request.json()

        async def events() -> AsyncIterator[bytes]:
            async for _ in ledger.paced(request.headers[REQUEST_ID_HEADER]):
                yield EVENT
            yield b"data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    return Starlette(routes=[Route("/v1/completions", stream, methods=["POST"])])


async def serve(kind: str, commits: int) -> None:
    """Serve until the input ends."""
    ledger = Ledger(commits)
    app = await {PACELINE: paceline, ECHO: echo}[kind](ledger)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None))
    serving = asyncio.create_task(server.serve())
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    await answer_lines(str(server.servers[0].sockets[0].getsockname()[1]), ledger.answer)
    server.should_exit = True
    await serving


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2])))
