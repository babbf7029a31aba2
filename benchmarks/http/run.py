"""The cost of the HTTP path: streams through it whose tokens come at a fixed pace, beside a bare server that streams.

Both servers are processes of their own and have the same requests in turn, so that what else the machine does falls
on both. What the router sees of a request is the time from the generator's start to its first commit; what the client
sees begins with the request's first byte and ends with its first event. The difference is what the HTTP path adds.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Callable
from contextlib import AsyncExitStack

from benchmarks.harness.processes import ReadyProcess, child
from benchmarks.http.figures import (
    BURST,
    COMMIT_SECONDS,
    COMMIT_TOKENS,
    CONTENDERS,
    FIRST_SECONDS,
    PATTERNS,
    BadAnswer,
    HttpOptions,
    Round,
    StreamedReply,
    result,
)
from cluster.config.environment import BUNDLED
from cluster.console import stages
from router.http.asgi import REQUEST_ID_HEADER

EVENT, LAST = b"data: ", b"data: [DONE]\n\n"
SECONDS = 120.0
"""In which an answer must be complete."""


def main(options: HttpOptions) -> int:
    """Measure, show, write."""
    with stages() as report:
        rounds = asyncio.run(measure(options, report))
    result(options, rounds).publish()
    return 0


async def measure(options: HttpOptions, report: Callable[[str], None] = lambda _: None) -> list[Round]:
    """All rounds, the first of which is left out: it warms up. Raises WorkerFailed, BadAnswer, TimeoutError."""
    body = {**_prompt(), "max_tokens": options.commits * COMMIT_TOKENS, "stream": True, "ignore_eos": True}
    async with AsyncExitStack() as stack:
        servers = {
            kind: await stack.enter_async_context(
                child(f"{kind} server", "benchmarks.http.server", kind, str(options.commits))
            )
            for kind in CONTENDERS
        }
        found = []
        for turn in range(1 + options.rounds):
            report(f"round {turn} of {options.rounds}")
            # Whoever comes second may find a warmer machine.
            for kind in CONTENDERS if turn % 2 else reversed(CONTENDERS):
                for pattern in PATTERNS:
                    measured = await _round(kind, servers[kind], pattern, options, body)
                    found += [measured] if turn else []
        return found


def _prompt() -> dict[str, object]:
    line = (BUNDLED / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[0]
    return {"prompt": json.loads(line)["prompt"], "seed": 1, "temperature": 0.8}


async def _round(kind: str, server: ReadyProcess, pattern: str, options: HttpOptions, body: dict[str, object]) -> Round:
    began, before = time.monotonic(), json.loads(await server.ask())
    length = FIRST_SECONDS + options.commits * COMMIT_SECONDS
    burst = pattern == BURST

    async def stream(number: int) -> list[StreamedReply]:
        async with Connection(int(server.first), body) as connection:
            offset = 0.0 if burst else length * number / options.streams
            await asyncio.sleep(max(began + 0.5 + offset - time.monotonic(), 0.0))
            return [await connection.ask() for _ in range(1 if burst else options.requests)]

    own = time.process_time()
    answers = await asyncio.gather(*(stream(number) for number in range(options.streams)))
    used = time.process_time() - own
    told = json.loads(await server.ask())
    # With the first request of a steady stream, not all others run yet.
    return Round.of(
        kind,
        pattern,
        [heard for of_one in answers for heard in (of_one if burst else of_one[1:])],
        told["times"],
        cpu=told["cpu"] - before["cpu"],
        client_cpu=used,
        seconds=time.monotonic() - began,
    )


class Connection:
    """A connection that is kept; one request after another, chunked answers of an event or more a read.

    It notes when events come and does nothing else, so that it is not what is measured.
    """

    def __init__(self, port: int, body: dict[str, object]) -> None:
        """``body``: of every request."""
        self._port = port
        self._body = json.dumps(body).encode()

    async def __aenter__(self) -> Connection:
        """Connect."""
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Disconnect."""
        self._writer.close()
        await self._writer.wait_closed()

    async def ask(self) -> StreamedReply:
        """One request, to its end. Raises :class:`BadAnswer`, TimeoutError."""
        heard = StreamedReply(uuid.uuid4().hex, time.monotonic())
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: paceline\r\ncontent-type: application/json\r\n"
            f"content-length: {len(self._body)}\r\n{REQUEST_ID_HEADER}: {heard.request_id}\r\n\r\n"
        )
        self._writer.write(head.encode() + self._body)
        async with asyncio.timeout(SECONDS):
            status = await self._reader.readuntil(b"\r\n\r\n")
            if b" 200 " not in status.split(b"\r\n", 1)[0]:
                raise BadAnswer(status.split(b"\r\n", 1)[0].decode(errors="replace"))
            while True:
                length = int(await self._reader.readuntil(b"\r\n"), 16)
                chunk = await self._reader.readexactly(length + 2)
                if not length:
                    return heard
                now = time.monotonic()
                heard.events += [now] * (chunk.count(EVENT) - chunk.count(LAST))
