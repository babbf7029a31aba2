"""Streams that ask for the next request as soon as one ends, so that a fault always hits running streams."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Sequence
from types import TracebackType

import httpx

from benchmarks.chaos.records import OK, REFUSED, Reply
from benchmarks.chaos.settings import Body

SILENT_SECONDS = 60.0
"""A stream that says nothing for so long has failed."""
CHUNKS_BEGUN = 3
"""Pieces after which a stream is under way."""
AFTER_FAILURE_SECONDS = 0.5


def client(connections: int) -> httpx.AsyncClient:
    """One with as many connections as there are streams."""
    limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
    return httpx.AsyncClient(timeout=httpx.Timeout(SILENT_SECONDS), limits=limits, trust_env=False)


async def plain_text(http: httpx.AsyncClient, url: str, request: Body) -> str:
    """The text without drafts and without streaming. Raises httpx.HTTPError."""
    answer = await http.post(f"{url}/v1/completions", json={**request, "speculation": {"enabled": False}})
    answer.raise_for_status()
    text: str = answer.json()["choices"][0]["text"]
    return text


async def stream(http: httpx.AsyncClient, url: str, request: Body, reply: Reply) -> None:
    """Ask once, and note in ``reply`` whatever happens, as it happens."""
    asked = {**request, "stream": True, "stream_options": {"include_speculation": True}}
    try:
        async with http.stream("POST", f"{url}/v1/completions", json=asked) as response:
            reply.status = response.status_code
            reply.retry_after = response.headers.get("retry-after", "")
            if response.status_code == OK:
                await _read(response, reply)
            elif response.status_code != REFUSED:
                reply.error = (
                    f"status {response.status_code}: {(await response.aread())[:200].decode(errors='replace')}"
                )
    except httpx.HTTPError as error:
        reply.error = f"{type(error).__name__}: {error}"
    finally:
        reply.ended = time.monotonic()


async def _read(response: httpx.Response, reply: Reply) -> None:
    async for line in response.aiter_lines():
        if line == "data: [DONE]":
            reply.done = True
        elif line.startswith("data: "):
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                reply.error = f"error event: {event['error']}"
                return
            reply.chunks.append(time.monotonic())
            reply.parts.append(event["choices"][0]["text"])


class Workload:
    """Some streams at once, each of one request after another."""

    def __init__(self, url: str, requests: Sequence[Body], streams: int) -> None:
        """``streams``: at the start. They take the requests in turn, and begin again when all were asked for."""
        self.replies: list[Reply] = []
        self._url, self._requests, self._wanted = url, requests, streams
        self._numbers = itertools.cycle(range(len(requests)))
        self._slots: dict[int, asyncio.Task[None]] = {}
        self._running: dict[int, Reply] = {}

    async def __aenter__(self) -> Workload:
        """Start the streams."""
        self._http = client(1000)
        self.resize(self._wanted)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cut what still runs."""
        for task in self._slots.values():
            task.cancel()
        await asyncio.gather(*self._slots.values(), return_exceptions=True)
        await self._http.aclose()

    def resize(self, streams: int) -> None:
        """From now on so many. Surplus ones complete what they have begun."""
        self._wanted = streams
        for slot in range(streams):
            if slot not in self._slots or self._slots[slot].done():
                self._slots[slot] = asyncio.create_task(self._repeat(slot))

    @property
    def streaming(self) -> int:
        """Streams that are under way."""
        return sum(len(reply.chunks) >= CHUNKS_BEGUN and reply.ended is None for reply in self._running.values())

    async def begun(self, seconds: float) -> None:
        """Wait until all streams are under way at once. Raises TimeoutError."""
        async with asyncio.timeout(seconds):
            while self.streaming < self._wanted:
                await asyncio.sleep(0.05)

    async def finish(self, seconds: float) -> None:
        """Ask for nothing more; wait until all has ended. What has not by then is cut, and so has failed."""
        self.resize(0)
        _, late = await asyncio.wait(self._slots.values(), timeout=seconds) if self._slots else (set(), set())
        for slot, task in self._slots.items():
            if task in late:
                self._running[slot].error = f"not complete within {seconds:.0f} s"
                task.cancel()
        await asyncio.gather(*late, return_exceptions=True)

    async def _repeat(self, slot: int) -> None:
        number = next(self._numbers)
        while slot < self._wanted:
            reply = self._running[slot] = Reply(number, time.monotonic())
            self.replies.append(reply)
            await stream(self._http, self._url, self._requests[number], reply)
            if reply.refused:
                await asyncio.sleep(float(reply.retry_after))
                continue
            if reply.failed:
                await asyncio.sleep(AFTER_FAILURE_SECONDS)
            number = next(self._numbers)
