"""What one router carries: workers that compute nothing on one side of it, many clients on the other.

Workers and clients are this process, kept off the server's core where there are two, so that nothing of theirs is
measured but their being slow, which is told. Every event's delay is taken: the n-th of a stream belongs to the n-th
commit of its session.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass, field
from statistics import median

import psutil  # type: ignore[import-untyped]

from benchmarks.harness.options import BenchError
from benchmarks.harness.processes import CONNECT_SECONDS, ReadyProcess, child
from benchmarks.http.scale import BARE, FEATURES, LoadPoint, ScaleOptions, result
from benchmarks.http.workers import FakeWorker, Script, StepPace
from cluster.config.environment import BUNDLED
from cluster.console import stages
from cluster.processes.child import HeldPort
from router.answers.responses import DONE
from router.http.asgi import REQUEST_ID_HEADER
from router.http.exhaustion import raise_limit
from router.text.tokenizer import Tokenizer
from speculation.events import Role
from speculation.messages import Welcome
from transport.address import parse

MODEL = "target"
PROMPT = "def merge(left, right):\n"
TEXT = "    result = []\n    while left and right:\n        result.append(min(left, right))\n"
EVENT = b"data: "
CONTEXT = 1 << 20
MAX_SESSIONS = 1 << 14
SETTLE_SECONDS = 1.5
OPENING = 256
"""Requests that wait for their first event at once."""
SECONDS = 120.0
"""In which all streams are open, and in which they have ended."""


def main(options: ScaleOptions) -> int:
    """Measure, show, write."""
    raise_limit()
    with stages() as report:
        points = asyncio.run(measure(options, report))
    result(options, points).publish()
    return 0


async def measure(options: ScaleOptions, report: Callable[[str], None] = lambda _: None) -> list[LoadPoint]:
    """All points. Raises BenchError, TimeoutError."""
    points = []
    for streams in options.streams:
        for contender in options.contenders:
            points += await Contest(contender, streams, options, report).run()
    return points


@dataclass(slots=True)
class ProcessUsage:
    """What a process has used at one moment."""

    at: float
    cpu: float
    load_cpu: float
    memory_kb: float
    relayed: int


class Client(asyncio.Protocol):
    """One stream. It notes when events come and does nothing else."""

    def __init__(self, request: bytes) -> None:
        self.events: list[float] = []
        """When each came, those that only end the text included."""
        self.ended = asyncio.get_running_loop().create_future()
        self.begun = asyncio.get_running_loop().create_future()
        self.sent = 0.0
        self._request = request

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See :class:`asyncio.Protocol`."""
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]  # uvloop's is of no class of asyncio
        self.sent = time.monotonic()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """See :class:`asyncio.Protocol`."""
        count = data.count(EVENT)
        self.events += [time.monotonic()] * count if count != 1 else (time.monotonic(),)
        if not self.begun.done() and count:
            self.begun.set_result(None)
        if DONE in data:
            self.ended.set_result(None)
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """See :class:`asyncio.Protocol`."""
        for waited in (self.begun, self.ended):
            if not waited.done():
                waited.set_exception(BenchError(f"a connection ended early: {exc}"))


@dataclass
class Contest:
    """One contender with so many streams."""

    contender: str
    streams: int
    options: ScaleOptions
    report: Callable[[str], None]
    pace: StepPace = field(default_factory=StepPace)
    clients: dict[str, Client] = field(default_factory=dict)
    workers: dict[Role, list[FakeWorker]] = field(default_factory=dict)

    async def run(self) -> list[LoadPoint]:
        """Open all streams, measure each pace, end them."""
        async with AsyncExitStack() as stack:
            server = await self._start(stack)
            gc.collect()
            gc.freeze()
            await self._open(server, 1)
            before = self._usage(server)
            await self._open(server, self.streams)
            opened = self._usage(server)
            points = []
            for tokens in self.options.tokens:
                self.report(f"{self.contender}, {self.streams} streams, {tokens} tokens/s")
                await self._set(server, self.options.commit * self.streams / tokens)
                await asyncio.sleep(SETTLE_SECONDS)
                first = self._usage(server)
                await self._listen()
                points.append(await self._point(server, tokens, before, opened, first))
                if not points[-1].kept_up:
                    break
            await self._set(server, self.pace.interval, ending=True)
            async with asyncio.timeout(SECONDS):
                await asyncio.gather(*(client.ended for client in self.clients.values()))
        return points

    async def _start(self, stack: AsyncExitStack) -> ReadyProcess:
        """The server, and its workers, until the stack is left."""
        groups, cores = -(-self.streams // self.options.sessions), sorted(os.sched_getaffinity(0))
        command = ["benchmarks.http.server", str(groups)]
        if self.contender != BARE:
            roles = [*Role] if self.options.drafters or self.options.features else [Role.TARGET]
            port = stack.enter_context(closing(HeldPort())).number
            command = ["cluster.cli", "router", "--port", str(port), "--max-sessions", str(MAX_SESSIONS)]
            command += ["--drain-timeout", "0"]  # streams end when told to: where that fails, never
            for role in roles:
                command += [word for at in await self._workers(stack, role, groups) for word in (f"--{role}", at)]
        starting = child(f"{self.contender} server", *command, ready=r"(127\.0\.0\.1:\d+)")
        server = await stack.enter_async_context(starting)
        async with asyncio.timeout(CONNECT_SECONDS):
            while not all(worker.link for workers in self.workers.values() for worker in workers):
                await asyncio.sleep(0.05)
        if len(cores) > 1:
            for process, kept in ((server.process.pid, cores[-1:]), (os.getpid(), cores[:-1])):
                for thread in os.listdir(f"/proc/{process}/task"):
                    os.sched_setaffinity(int(thread), kept)
            stack.callback(os.sched_setaffinity, 0, cores)
        return server

    async def _workers(self, stack: AsyncExitStack, role: Role, groups: int) -> list[str]:
        tokenizer = Tokenizer.load(str(BUNDLED / MODEL))
        width = self.options.features if self.contender == FEATURES else 0
        model = MODEL, tokenizer.size, CONTEXT, tokenizer.digest, "1"
        welcome = Welcome(role.value, *model, source=str(BUNDLED / MODEL), revision=1, head=int(width > 0))
        prompt, text = tokenizer.encode(PROMPT, special=True), tokenizer.encode(TEXT, special=False)
        script = Script(prompt, text, self.options.commit, welcome, width)
        workers = [FakeWorker(role, script, self.pace, number / groups) for number in range(groups)]
        for worker in workers:
            await stack.enter_async_context(worker.serving())
        self.workers[role] = workers
        return [worker.address for worker in workers]

    async def _open(self, server: ReadyProcess, streams: int) -> None:
        gate = asyncio.Semaphore(OPENING)
        body = {"prompt": PROMPT, "max_tokens": CONTEXT // 2, "stream": True, "ignore_eos": True, "seed": 1}
        encoded = json.dumps(body).encode()

        async def open_one(name: str) -> None:
            head = (
                f"POST /v1/completions HTTP/1.1\r\nhost: paceline\r\ncontent-type: application/json\r\n"
                f"content-length: {len(encoded)}\r\n{REQUEST_ID_HEADER}: {name}\r\n\r\n"
            )
            async with gate:
                client = self.clients[name] = Client(head.encode() + encoded)
                await asyncio.get_running_loop().create_connection(lambda: client, *parse(server.first))
                await client.begun

        self.report(f"{self.contender}: opening {streams} streams")
        async with asyncio.timeout(SECONDS):
            await asyncio.gather(*(open_one(f"s{number}") for number in range(len(self.clients), streams)))

    async def _listen(self) -> None:
        """As long as a pace is measured, and until anything has come."""
        before = self._events()
        await asyncio.sleep(self.options.seconds)
        async with asyncio.timeout(SECONDS):
            while self._events() == before:
                await asyncio.sleep(0.05)

    def _events(self) -> int:
        return sum(len(client.events) for client in self.clients.values())

    async def _set(self, server: ReadyProcess, interval: float, *, ending: bool = False) -> None:
        self.pace.interval, self.pace.ending = interval, ending
        if self.contender == BARE:
            await server.ask(json.dumps({"interval": interval, "ending": ending}))

    def _usage(self, server: ReadyProcess) -> ProcessUsage:
        # The clock that clock_getcpuclockid(3) gives: of all its threads, those that have ended included.
        cpu = time.clock_gettime((~server.process.pid << 3) | 2)
        relayed = sum(worker.relayed_bytes for workers in self.workers.values() for worker in workers)
        memory_kb = psutil.Process(server.process.pid).memory_info().rss / 1024
        return ProcessUsage(time.monotonic(), cpu, time.process_time(), memory_kb, relayed)

    async def _commits(self, server: ReadyProcess) -> dict[str, list[float]]:
        if self.contender == BARE:
            return dict(json.loads(await server.ask("commits")))
        return {name: times for worker in self.workers[Role.TARGET] for name, times in worker.made.items()}

    def _relayed(self, source: Role, to: Role, first: float, last: float) -> float | None:
        """Milliseconds on the way from one worker to the other through the router, in the median; None: nothing is."""
        made = {name: times for worker in self.workers.get(source, ()) for name, times in worker.made.items()}
        delays = [
            1e3 * (came - made[name][number])
            for worker in self.workers.get(to, ())
            for name, times in worker.heard.items()
            for number, came in times.items()
            if first <= came <= last and number < len(made[name])
        ]
        return median(delays) if delays else None

    async def _point(
        self, server: ReadyProcess, tokens: float, before: ProcessUsage, opened: ProcessUsage, first: ProcessUsage
    ) -> LoadPoint:
        """What has come since ``first``; ``before`` there was one stream, and ``opened`` are all."""
        last = self._usage(server)
        seconds, cpu = last.at - first.at, last.cpu - first.cpu
        delays: list[float] = []
        for name, made in (await self._commits(server)).items():
            arrived = self.clients[name].events
            delays += [came - at for at, came in zip(made, arrived, strict=False) if first.at <= came <= last.at]
        delays.sort()
        delivered = self.options.commit * len(delays)
        more = max(self.streams - 1, 1)
        return LoadPoint(
            self.contender,
            self.streams,
            tokens,
            delivered / seconds,
            tuple(1e3 * delays[int(share * (len(delays) - 1))] for share in (0.5, 0.99, 1.0)),  # type: ignore[arg-type]
            1e6 * cpu / delivered,
            cpu / seconds,
            (last.load_cpu - first.load_cpu) / seconds,
            1e3 * (opened.cpu - before.cpu) / more,
            1e3 * median(client.events[0] - client.sent for client in self.clients.values()),
            (first.memory_kb - before.memory_kb) / more,
            self._relayed(Role.TARGET, Role.DRAFT, first.at, last.at),
            self._relayed(Role.DRAFT, Role.TARGET, first.at, last.at),
            (last.relayed - first.relayed) / delivered,
        )
