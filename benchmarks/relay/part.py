"""``python -m benchmarks.relay.part PART ...``: one process of the benchmark of the relay.

``target`` and ``draft`` are workers of the product around a machine that computes nothing: the target's step is a wait
for a device, and every verification is answered with a proposal at once. ``router`` is the product's dispatcher with
sessions that nobody reads aloud. Those called ``bare-`` pass as many bytes on, over the same kind of streams, and know
nothing of sessions: what they take is what gRPC takes.

The first line of output is the address of a worker, or says that the router runs. Each line of input is answered by a
line of JSON: processor seconds so far, and what was heard since the last answer. The input's end ends the process.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import AsyncExitStack
from typing import Any

import grpc

from benchmarks.harness.processes import answer_lines
from benchmarks.relay.run import CLOCK_US, COMMIT_TOKENS, PROPOSED_TOKENS
from router.dispatch import Dispatcher
from router.generation import Committed, Generation
from speculation import digest as digests
from speculation.demand import DraftDemand, WorkerDemand
from speculation.events import Role
from speculation.messages import (
    Close,
    Features,
    FromWorker,
    Load,
    Open,
    Proposal,
    Sampling,
    SessionId,
    Subscribe,
    ToWorker,
    Verification,
    Welcome,
)
from transport.worker import Outgoing, Worker

PROMPT = tuple(range(1, 65))
ENTRY_BYTES = 48
"""Of a verification or a proposal on the wire, about."""


def clock_us() -> int:
    """Now, as it is sent."""
    return time.monotonic_ns() // 1000 % CLOCK_US


def since(sent_us: int) -> float:
    """Milliseconds since then."""
    return (clock_us() - sent_us) % CLOCK_US / 1000


def work(seconds: float) -> None:
    """Keep the GIL busy."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


class StandIn:
    """What the two machines have in common: sessions, and how late what they hear is. Implements ``Machine``."""

    def __init__(self, role: Role, host_ms: float, width: int = 0) -> None:
        """No session is open. ``width``: numbers of the features that go with a committed token; 0: none do."""
        self.width = width
        self.heard: list[float] = []
        """Milliseconds from one machine to the event loop of the other."""
        self.taken: list[float] = []
        """And until the other took it up."""
        self._role, self._host = role, host_ms / 1e3
        self._opened: dict[tuple[Hashable, SessionId], Open] = {}

    def welcome(self) -> Welcome:
        """See ``Machine``."""
        head = int(self.width > 0)
        return Welcome(self._role.value, "stand-in", CLOCK_US, 1 << 30, tokenizer=1, revision=1, head=head)

    def forget(self, link: Hashable) -> None:
        """See ``Machine``."""
        self._opened = {key: opened for key, opened in self._opened.items() if key[0] != link}

    def due(self) -> float | None:
        """See ``Machine``."""
        return None

    def load(self) -> Load:
        """See ``Machine``."""
        return Load(len(self._opened), free_tokens=1 << 20, capacity_tokens=1 << 20)

    def demand(self) -> WorkerDemand:
        """See ``Machine``."""
        return DraftDemand()

    def _hear(self, sent_us: int, at: float) -> None:
        late = since(sent_us)
        self.taken.append(late)
        self.heard.append(max(late - 1e3 * (time.perf_counter() - at), 0.0))


class Target(StandIn):
    """Steps at a fixed pace, with all sessions in each step."""

    def __init__(self, host_ms: float, steps: float, width: int = 0) -> None:
        """``steps``: a second."""
        super().__init__(Role.TARGET, host_ms, width)
        self._subscribed: set[tuple[Hashable, SessionId]] = set()
        self._values = bytes(2 * width * COMMIT_TOKENS)
        self._interval = 1 / steps
        self._next = 0.0
        self._ends: dict[tuple[Hashable, SessionId], tuple[int, int]] = {}
        """Position and digest that each session has come to."""

    def receive(self, link: Hashable, message: ToWorker, at: float) -> Outgoing:
        """See ``Machine``."""
        match message:
            case Open():
                self._opened[link, message.session] = message
                self._ends[link, message.session] = len(message.tokens), digests.of(message.tokens)
            case Close():
                self._opened.pop((link, message.session), None)
            case Proposal():
                self._hear(message.tokens[0], at)
            case Subscribe():
                self._subscribed.add((link, message.session))
        return []

    def step(self) -> Outgoing | None:
        """Work on the host, then wait for the device."""
        if not self._opened:
            return None
        work(self._host)
        self._next = max(self._next + self._interval, time.perf_counter())
        time.sleep(max(self._next - time.perf_counter(), 0.0))
        said: Outgoing = [(link, self._commit(link, opened)) for (link, _), opened in self._opened.items()]
        return said + [(key[0], self._features(key)) for key in self._opened if key in self._subscribed]

    def _features(self, key: tuple[Hashable, SessionId]) -> Features:
        """Of what was committed just now."""
        opened, (end, _) = self._opened[key], self._ends[key]
        return Features(opened.session, opened.epoch, end - COMMIT_TOKENS, 1, self.width, self._values)

    def _commit(self, link: Hashable, opened: Open) -> Verification:
        position, digest = self._ends[link, opened.session]
        tokens = (*range(1, COMMIT_TOKENS), clock_us())
        for token in tokens:
            digest = digests.extend(digest, token)
        self._ends[link, opened.session] = position + len(tokens), digest
        return Verification(
            opened.session, opened.epoch, position, tokens, digest, COMMIT_TOKENS - 1, PROPOSED_TOKENS, lead=8
        )


class Draft(StandIn):
    """Answers every verification with a proposal."""

    def __init__(self, host_ms: float, width: int = 0) -> None:
        """No session is open."""
        super().__init__(Role.DRAFT, host_ms, width)
        self._verified: list[tuple[Hashable, Verification]] = []

    def receive(self, link: Hashable, message: ToWorker, at: float) -> Outgoing:
        """See ``Machine``."""
        match message:
            case Open():
                self._opened[link, message.session] = message
            case Close():
                self._opened.pop((link, message.session), None)
            case Verification():
                self._hear(message.tokens[-1], at)
                self._verified.append((link, message))
        return []

    def step(self) -> Outgoing | None:
        """Propose for all that were verified."""
        if not self._verified:
            return None
        verified, self._verified = self._verified, []
        proposals: Outgoing = [(link, self._propose(message)) for link, message in verified]
        return proposals

    def _propose(self, verification: Verification) -> FromWorker:
        tokens = (clock_us(), *range(1, PROPOSED_TOKENS))
        chain = tuple(range(-1, PROPOSED_TOKENS - 1))
        return Proposal(
            verification.session,
            verification.epoch,
            verification.end,
            verification.digest,
            tokens,
            chain,
            (0.5,) * PROPOSED_TOKENS,
        )


async def serve(first: str, answer: Callable[[], dict[str, Any]]) -> None:
    """Say the first line, then answer until the input ends."""
    await answer_lines(first, lambda _: json.dumps({"cpu": time.process_time(), **answer()}))


async def worker(machine: StandIn, role: Role) -> None:
    """A worker process."""
    shell = Worker(machine, role.value)  # type: ignore[arg-type]  # each kind of machine takes messages and steps
    await shell.start("127.0.0.1:0")

    def answer() -> dict[str, Any]:
        told = {"heard": machine.heard[:], "taken": machine.taken[:]}
        machine.heard.clear()
        machine.taken.clear()
        return told

    try:
        await serve(shell.address, answer)
    finally:
        await shell.stop()


async def router(target: str, draft: str, sessions: int) -> None:
    """A router process whose sessions go on for ever."""
    dispatcher = Dispatcher()
    dispatcher.pool.set_workers(Role.TARGET, [target])
    dispatcher.pool.set_workers(Role.DRAFT, [draft])
    while not all(peer.welcome for peer in dispatcher.pool.peers.values()):
        await asyncio.sleep(0.01)
    commits = 0

    async def read() -> None:
        nonlocal commits
        async for item in dispatcher.generate(Generation(PROMPT, Sampling(), 1 << 29)):
            commits += isinstance(item, Committed)

    reading = [asyncio.create_task(read()) for _ in range(sessions)]
    try:
        await serve("running", lambda: {"commits": commits})
    finally:
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        await dispatcher.pool.close()


class BareWorker:
    """Either end of the bare relay: frames with their time in front."""

    def __init__(self, sessions: int, steps: float | None) -> None:
        """With ``steps`` a second it sends of itself; without, it answers each frame with one."""
        self.heard: list[float] = []
        self._padding, self._steps = bytes(ENTRY_BYTES * sessions), steps

    async def serve(self) -> None:
        """Until the input ends."""
        server = grpc.aio.server()
        handler = grpc.stream_stream_rpc_method_handler(self._run)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare", {"Run": handler}),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            await serve(f"127.0.0.1:{port}", self.answer)
        finally:
            await server.stop(0)

    def answer(self) -> dict[str, Any]:
        """What was heard since the last answer."""
        told, self.heard = self.heard, []
        return {"heard": told, "taken": told}

    def reply(self, frame: bytes) -> bytes:
        """To a frame that came."""
        self._hear(frame)
        return self._frame()

    def _frame(self) -> bytes:
        return clock_us().to_bytes(8, "little") + self._padding

    async def _run(self, frames: AsyncIterator[bytes], _: object) -> AsyncIterator[bytes]:
        if self._steps is None:
            async for frame in frames:
                yield self.reply(frame)
            return
        reading = asyncio.create_task(self._read(frames))
        try:
            while True:
                await asyncio.sleep(1 / self._steps)
                yield self._frame()
        finally:
            reading.cancel()

    async def _read(self, frames: AsyncIterator[bytes]) -> None:
        async for frame in frames:
            self._hear(frame)

    def _hear(self, frame: bytes) -> None:
        self.heard.append(since(int.from_bytes(frame[:8], "little")))


async def bare_caller(target: str, sessions: int) -> None:
    """The end of the bare relay that answers, without a router between it and the target."""
    worker = BareWorker(sessions, None)

    async def reply(call: Any) -> None:
        while isinstance(frame := await call.read(), bytes):
            await call.write(worker.reply(frame))

    async with grpc.aio.insecure_channel(target) as channel:
        call = channel.stream_stream("/bare/Run", None, None)(None)
        replying = asyncio.create_task(reply(call))
        try:
            await serve("running", worker.answer)
        finally:
            call.cancel()
            replying.cancel()
            await asyncio.gather(replying, return_exceptions=True)


async def bare_router(target: str, draft: str) -> None:
    """Pass on whatever comes, both ways."""
    passed = 0

    async def pass_on(source: Any, sink: Any) -> None:
        nonlocal passed
        while isinstance(frame := await source.read(), bytes):
            passed += 1
            await sink.write(frame)

    async with AsyncExitStack() as stack:
        calls = []
        for address in (target, draft):
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(address))
            calls.append(channel.stream_stream("/bare/Run", None, None)(None))
        passing = [asyncio.create_task(pass_on(*pair)) for pair in (calls, reversed(calls))]
        try:
            await serve("running", lambda: {"commits": passed})
        finally:
            for call in calls:
                call.cancel()
            for task in passing:
                task.cancel()
            await asyncio.gather(*passing, return_exceptions=True)


def main(part: str, *given: str) -> None:
    """Run one part."""
    match part, given:
        case "target", (host_ms, steps, _, width):
            asyncio.run(worker(Target(float(host_ms), float(steps), int(width)), Role.TARGET))
        case "draft", (host_ms, _, _, width):
            asyncio.run(worker(Draft(float(host_ms), int(width)), Role.DRAFT))
        case "router", (target, draft, sessions):
            asyncio.run(router(target, draft, int(sessions)))
        case "bare-target", (_, steps, sessions, _):
            asyncio.run(BareWorker(int(sessions), float(steps)).serve())
        case "bare-draft", (_, _, sessions, _):
            asyncio.run(BareWorker(int(sessions), None).serve())
        case "bare-caller", (target, sessions):
            asyncio.run(bare_caller(target, int(sessions)))
        case "bare-router", (target, draft, _):
            asyncio.run(bare_router(target, draft))
        case _:
            raise SystemExit(f"no such part: {part} {given}")


if __name__ == "__main__":
    main(*sys.argv[1:])
