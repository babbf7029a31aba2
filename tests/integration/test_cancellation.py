"""A client that goes: whatever its request was doing, both workers soon have their cache back, its text unfinished."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from router.dispatch import Dispatcher
from router.service import Router, RouterSettings
from target_service.verify_loop import TargetLimits
from tests.stack import MODELS, Running, draft_worker, target_worker

MAX_COMMITTED = 240
"""Tokens that the target may still commit of a text whose client has left: at most half of one that nobody stops."""
LONG = {"prompt": "def fib(n):\n    return n\n\n" * 40, "max_tokens": 480}
WAYS = [(stream, n) for stream in (False, True) for n in (1, 4)]
"""Of asking."""


@dataclass
class Stack:
    """A router with HTTP over a target that computes one session at a time, and a drafter."""

    router: Router
    target: Running
    draft: Running
    left: int = 0
    """Tokens that the target had committed when a client left last."""

    @property
    def dispatcher(self) -> Dispatcher:
        return self.router.dispatcher

    def taken(self) -> tuple[int, int]:
        """Tokens of cache in use at the two workers, as their loads say."""
        loads = (self.target.machine.load(), self.draft.machine.load())
        return tuple(load.capacity_tokens - load.free_tokens for load in loads)  # type: ignore[return-value]

    @property
    def committed(self) -> int:
        return self.target.machine.load().counters["committed"]

    def sessions(self) -> int:
        target, draft = self.target.machine.load(), self.draft.machine.load()
        return target.sessions + target.waiting + draft.sessions

    async def until(self, happens: Callable[[], bool], seconds: float = 60.0) -> None:
        async with asyncio.timeout(seconds):
            while not happens():
                await asyncio.sleep(0.001)

    @asynccontextmanager
    async def asking(self, **fields: object) -> AsyncIterator[asyncio.StreamReader]:
        """A request over a socket of its own, which is cut at the end of the block."""
        host, port = self.router.address.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 10)
        body = json.dumps({"prompt": "def fib(n):", "max_tokens": 900, "ignore_eos": True} | fields).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        try:
            yield reader
        finally:
            writer.transport.abort()
            self.left = self.committed

    async def all_free(self, n: int) -> None:
        """Everything is given back of ``n`` texts."""
        await self.soon(n, lambda: not (any(self.taken()) or self.sessions() or self.dispatcher.demand().streams))

    async def soon(self, n: int, happens: Callable[[], bool]) -> None:
        """It happens, and not because the ``n`` texts under way were finished."""
        await self.until(happens)
        assert self.committed - self.left < n * MAX_COMMITTED


@pytest_asyncio.fixture
async def stack(slow_target: Path) -> AsyncIterator[Stack]:
    """The target is slow, so that nothing is over before its client goes."""
    limits = TargetLimits(running=4)
    async with target_worker(limits, model=slow_target) as target, draft_worker() as draft:
        addresses = {"targets": (target.worker.address,), "drafts": (draft.worker.address,)}
        router = Router(RouterSettings(**addresses, port=0, tokenizer=str(MODELS / "target"), drain_timeout=1.0))
        await router.start()
        try:
            yield Stack(router, target, draft)
        finally:
            await router.stop()


@pytest.mark.thorough
async def test_during_its_prompt(stack: Stack) -> None:
    for stream, n in WAYS:
        committed = stack.dispatcher.metrics.tally.committed
        async with stack.asking(**LONG, stream=stream, n=n):
            await stack.until(lambda: stack.taken()[0] > 0)
            assert stack.dispatcher.metrics.tally.committed == committed
        await stack.all_free(n)


async def test_in_the_middle_of_its_text(stack: Stack) -> None:
    for stream, n in WAYS:
        committed = stack.dispatcher.metrics.tally.committed
        async with stack.asking(stream=stream, n=n):
            await stack.until(
                lambda committed_before=committed + 8 * n: (
                    stack.dispatcher.metrics.tally.committed > committed_before and all(stack.taken())
                )
            )
        await stack.all_free(n)


@pytest.mark.thorough
async def test_while_it_waits_for_a_place(stack: Stack) -> None:
    async with stack.asking(n=4):
        await stack.until(lambda: stack.dispatcher.metrics.tally.committed > 0)
        for stream, n in WAYS:
            async with stack.asking(**LONG, stream=stream, n=n):
                await stack.until(lambda n=n: stack.target.machine.load().waiting == n)
            await stack.soon(4, lambda: stack.target.machine.load().waiting == 0)
            assert stack.target.machine.load().sessions == 4, "the others go on"
    await stack.all_free(4)


@pytest.mark.thorough
async def test_while_it_does_not_read(stack: Stack) -> None:
    async with stack.asking(stream=True, n=4, stream_options={"include_speculation": True}) as reader:
        await reader.read(100)
        await stack.until(lambda: stack.dispatcher.metrics.tally.committed > 200)
        assert stack.dispatcher.demand().streams == 4
    await stack.all_free(4)
