"""The cost of the HTTP path: streams through it whose tokens come at a fixed pace, beside a bare server that streams.

Both servers are processes of their own and have the same requests in turn, so that what else the machine does falls
on both. What the router sees of a request is the time from the generator's start to its first commit; what the client
sees begins with the request's first byte and ends with its first event. The difference is what the HTTP path adds.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime

from benchmarks import http_report
from benchmarks.http_client import Connection, Heard
from benchmarks.http_figures import Round
from benchmarks.http_settings import (
    BURST,
    COMMIT_SECONDS,
    COMMIT_TOKENS,
    CONTENDERS,
    FIRST_SECONDS,
    PATTERNS,
    Options,
)
from benchmarks.workers import WorkerFailed
from cluster.checkout import BUNDLED
from cluster.console import stages

READY_SECONDS = 60.0


def main(options: Options) -> int:
    """Measure, show, write."""
    with stages() as report:
        rounds = asyncio.run(measure(options, report))
    result = http_report.Result(datetime.now(UTC).date(), options, rounds)
    http_report.show(result)
    if options.json is not None:
        http_report.write_json(result, options.json)
    if not options.quick:
        http_report.write_folder(result, options.out)
    return 0


async def measure(options: Options, report: http_report.Report = lambda _: None) -> list[Round]:
    """All rounds, the first of which is left out: it warms up. Raises WorkerFailed, BadAnswer, TimeoutError."""
    body = {**_prompt(), "max_tokens": options.commits * COMMIT_TOKENS, "stream": True, "ignore_eos": True}
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(_serving(kind, options.commits)) for kind in CONTENDERS]
        found = []
        for turn in range(1 + options.turns):
            report(f"round {turn} of {options.turns}")
            # Whoever comes second may find a warmer machine.
            for server in servers if turn % 2 else reversed(servers):
                for pattern in PATTERNS:
                    measured = await _round(server, pattern, options, body)
                    found += [measured] if turn else []
        return found


def _prompt() -> dict[str, object]:
    line = (BUNDLED / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[0]
    return {"prompt": json.loads(line)["prompt"], "seed": 1, "temperature": 0.8}


@dataclass(frozen=True, slots=True)
class _Server:
    kind: str
    port: int
    process: Process

    async def told(self) -> tuple[float, dict[str, list[float]]]:
        """Its processor seconds, and its times since it was last asked."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(b"\n")
        line = await self.process.stdout.readline()
        if not line:
            raise WorkerFailed(f"the {self.kind} server ended")
        answer = json.loads(line)
        return answer["cpu"], answer["times"]


@asynccontextmanager
async def _serving(kind: str, commits: int) -> AsyncIterator[_Server]:
    command = [sys.executable, "-m", "benchmarks.http_server", kind, str(commits)]
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, limit=1 << 28)
    assert process.stdin is not None and process.stdout is not None
    try:
        line = await asyncio.wait_for(process.stdout.readline(), READY_SECONDS)
        if not line:
            raise WorkerFailed(f"the {kind} server did not start")
        yield _Server(kind, int(line), process)
    finally:
        process.stdin.close()
        await process.wait()


async def _round(server: _Server, pattern: str, options: Options, body: dict[str, object]) -> Round:
    began, (before, _) = time.monotonic(), await server.told()
    length = FIRST_SECONDS + options.commits * COMMIT_SECONDS
    burst = pattern == BURST

    async def stream(number: int) -> list[Heard]:
        async with Connection(server.port, body) as connection:
            offset = 0.0 if burst else length * number / options.streams
            await asyncio.sleep(max(began + 0.5 + offset - time.monotonic(), 0.0))
            return [await connection.ask() for _ in range(1 if burst else options.requests)]

    own = time.process_time()
    answers = await asyncio.gather(*(stream(number) for number in range(options.streams)))
    used = time.process_time() - own
    after, times = await server.told()
    # With the first request of a steady stream, not all others run yet.
    return Round.of(
        server.kind,
        pattern,
        [heard for of_one in answers for heard in (of_one if burst else of_one[1:])],
        times,
        cpu=after - before,
        client_cpu=used,
        seconds=time.monotonic() - began,
    )
