"""When requests are due, and who sends them: at a rate of their own, or as soon as one of a fixed number is free.

At a rate (an open loop), a request is due when the clock says so, however slow the server is; its latency counts from
that moment even if this process was late to send it. So a stall counts against all requests that it delays, not only
against the one that it hit (Tene's "coordinated omission").
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterator

from benchmarks.serve.settings import MOST_OPEN

Ask = Callable[[int, float], Awaitable[float]]
"""Send the request of this number, due then; when it is over, for how long its sender should pause."""
Skip = Callable[[int, float], None]
"""Note that a request was not sent, as too many were under way."""


def offsets(rate: float, seed: int, turn: int) -> Iterator[float]:
    """Seconds after the start at which requests are due, as a Poisson process, without end; the same for the same."""
    source = random.Random(f"arrivals {seed} {turn}")
    at = 0.0
    while True:
        at += source.expovariate(rate)
        yield at


async def at_rate(numbers: Iterator[int], due: Iterator[float], ask: Ask, skip: Skip) -> None:
    """Send each request when it is due; return when all are over."""
    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        running: set[asyncio.Task[float]] = set()
        for number, offset in zip(numbers, due, strict=False):
            await asyncio.sleep(max(began + offset - time.perf_counter(), 0.0))
            if len(running) >= MOST_OPEN:
                skip(number, began + offset)
                continue
            task = group.create_task(_asked(ask, number, began + offset))
            running.add(task)
            task.add_done_callback(running.discard)


async def _asked(ask: Ask, number: int, due: float) -> float:
    return await ask(number, due)


async def at_once(numbers: Iterator[int], concurrency: int, ask: Ask) -> None:
    """So many senders, each with one request after the other."""

    async def send() -> None:
        for number in numbers:
            pause = await ask(number, time.perf_counter())
            await asyncio.sleep(pause)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(send())
