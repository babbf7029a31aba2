"""A router told to stop, as a process: what runs ends well or with a word, what is new is sent elsewhere."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.cluster.processes import PATIENCE, Paceline
from tests.ports import free_port
from tests.stack import MODELS, Running, target_worker
from transport.worker import Machine, Outgoing

TOKENS = 200


def hold(machine: Machine, after: int = 3) -> threading.Event:
    """After so many commits a worker computes nothing until this is set, so that what it has begun is under way."""
    released, step, left = threading.Event(), machine.step, after

    def held() -> Outgoing | None:
        nonlocal left
        assert left > 0 or released.wait(PATIENCE)
        outgoing = step()
        left -= bool(outgoing)
        return outgoing

    machine.step = held  # type: ignore[method-assign]
    return released


@dataclass
class Stopping:
    """A router that was just told to stop, and a stream that had begun before."""

    router: Paceline
    client: httpx.AsyncClient
    events: list[str]
    released: threading.Event
    """Set: the stream goes on."""


@asynccontextmanager
async def stopping(target: Running, seconds: float) -> AsyncIterator[Stopping]:
    arguments = ("--target", target.worker.address, "--port", str(free_port()), "--tokenizer", str(MODELS / "target"))
    with Paceline("router", *arguments, "--drain-timeout", str(seconds)) as router:
        url = await asyncio.to_thread(router.expect, "router ready on (\\S+)")
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as client:
            released = hold(target.machine)
            body = {"prompt": "def fib(n):", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                lines = answer.aiter_lines()
                events = [await anext(lines)]

                async def rest() -> None:
                    events.extend([line async for line in lines if line])

                reading = asyncio.create_task(rest())
                router.process.send_signal(signal.SIGTERM)
                try:
                    yield Stopping(router, client, events, released)
                    await reading
                finally:
                    released.set()
                    reading.cancel()
        code = await asyncio.to_thread(router.ended)
        assert code == 0, router.output


async def told(client: httpx.AsyncClient) -> httpx.Response:
    """What probes are told as soon as the signal has come."""
    async with asyncio.timeout(PATIENCE):
        while (ready := await client.get("/ready")).status_code == 200:
            await asyncio.sleep(0.01)
    return ready


async def test_streams_end_well_while_new_requests_are_sent_elsewhere(slow_target: Path) -> None:
    async with target_worker(model=slow_target) as target:
        async with stopping(target, 60) as now:
            ready = await told(now.client)
            assert (ready.status_code, ready.json()["reason"]) == (503, "this router is draining")
            assert (await now.client.get("/health")).status_code == 200
            refused = await now.client.post("/v1/completions", json={"prompt": "x"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.headers["connection"] == "close"
            for _ in range(5):  # as long as the stream runs, and over new connections
                async with httpx.AsyncClient(base_url=now.client.base_url, timeout=PATIENCE) as probe:
                    assert (await probe.get("/ready")).status_code == 503
            assert now.router.process.poll() is None
            now.released.set()
        assert now.events[-1] == "data: [DONE]"


async def test_streams_that_take_too_long_end_with_an_error(slow_target: Path) -> None:
    async with target_worker(model=slow_target) as target:
        async with stopping(target, 0.5) as now:
            pass
        assert len(now.events) > 1
        error = json.loads(now.events[-1].removeprefix("data: "))["error"]
        assert error["code"] == "draining"
        assert error["message"].endswith("after 0.5 s"), "which may be less than the setting: it is not named"
