"""Streams that ask for the next request as soon as one ends, what they saw, and what of it counts against the server.

So a fault always hits running streams. Times are seconds of one monotonic clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx

from benchmarks.chaos.settings import Body
from benchmarks.serve.client import BUSY_LATER, LATE, Heard, ask


@dataclass(frozen=True, slots=True, order=True)
class Silence:
    """A time in which a stream said nothing."""

    seconds: float
    began: float


NO_SILENCE = Silence(0.0, 0.0)


@dataclass(slots=True)
class Reply(Heard):
    """One streamed request, and what of it counts."""

    @property
    def refused(self) -> bool:
        """Whether it was turned away as it should be: before acceptance, and told when to come again."""
        return self.error == BUSY_LATER

    @property
    def failed(self) -> bool:
        """Whether it ended in any other way than complete or refused."""
        return bool(self.error) and not self.refused

    @property
    def reason(self) -> str:
        """Why it failed."""
        return f"{self.error}: {self.detail}"

    @property
    def silence(self) -> Silence:
        """Longest time without a piece of text after the first, up to the end."""
        ends = [self.ended] if self.ended and self.times else []
        gaps = (Silence(later - earlier, earlier) for earlier, later in pairwise([*self.times, *ends]))
        return max(gaps, default=NO_SILENCE)

    def differs(self, right: str) -> bool:
        """Whether its text is not the right one, or not its beginning if the stream did not complete."""
        complete = self.ended and not self.error
        return self.text != right if complete else not right.startswith(self.text)


@dataclass(frozen=True, slots=True)
class ReplyTally:
    """What a number of replies amount to."""

    requests: int
    refused: int
    """Before acceptance, with status 429 and Retry-After."""
    failed: int
    different: int
    silence: Silence
    first_token: float
    """The longest wait for one, in seconds."""
    complaints: tuple[str, ...] = ()


COMPLAINTS = 5


def tally(replies: Iterable[Reply], right: Mapping[int, str]) -> ReplyTally:
    """Count; ``right`` has the text of each request that was asked for."""
    asked = list(replies)
    failed = [reply for reply in asked if reply.failed]
    different = [reply for reply in asked if reply.differs(right[reply.number])]
    first = min((reply.sent for reply in asked), default=0.0)
    complaints = [
        f"request {reply.number}, sent after {reply.sent - first:.0f} s, {len(reply.times)} pieces: {reply.reason}"
        for reply in failed
    ]
    complaints += [f"request {reply.number}: {difference(reply.text, right[reply.number])}" for reply in different]
    return ReplyTally(
        requests=len(asked),
        refused=sum(reply.refused for reply in asked),
        failed=len(failed),
        different=len(different),
        silence=max((reply.silence for reply in asked), default=NO_SILENCE),
        first_token=max((reply.ttft or 0.0 for reply in asked), default=0.0),
        complaints=tuple(complaints[:COMPLAINTS]),
    )


def difference(got: str, right: str) -> str:
    """Where a text leaves the right one."""
    at = next((i for i, (a, b) in enumerate(zip(got, right, strict=False)) if a != b), min(len(got), len(right)))
    return f"text differs from character {at} on: {got[at : at + 20]!r} instead of {right[at : at + 20]!r}"


@dataclass(frozen=True, slots=True)
class Requirement:
    """What a row must show, besides no failed or refused request and no different text."""

    text: str
    silence: float | None = None
    """Seconds that the longest silence stays below; None: no bound."""
    refusals: bool = False
    """Whether requests may be refused: there are more streams than places."""


@dataclass(slots=True)
class FaultResult:
    """What was measured under one fault."""

    streams: int
    tally: ReplyTally = field(default_factory=lambda: tally([], {}))
    seconds: float = 0.0
    """From the fault until all workers were back; 0 where nothing was lost."""
    complaints: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    name: str = ""
    fault: str = ""
    wanted: Requirement = Requirement("")

    @property
    def problems(self) -> list[str]:
        """Everything that keeps the row from holding, the requests' own complaints last."""
        found = list(self.complaints)
        bound = self.wanted.silence
        silence = self.tally.silence.seconds
        if bound is not None and silence >= bound:
            found.append(f"a silence of {silence:.2f} s, wanted under {bound:g} s")
        if not self.tally.requests:
            found.append("nothing was asked for")
        if self.tally.refused and not self.wanted.refusals:
            found.append(f"{self.tally.refused} requests were refused")
        return [*found, *self.tally.complaints]

    @property
    def holds(self) -> bool:
        """Whether the row shows what it must."""
        return not self.problems


BEGIN_SECONDS = 60.0
"""In which all streams must be under way."""
FINISH_SECONDS = 180.0
"""In which all streams must complete once no more are begun."""
SILENT_SECONDS = 60.0
"""A stream that says nothing for so long has failed."""
CHUNKS_BEGUN = 3
"""Pieces after which a stream is under way."""
AFTER_FAILURE_SECONDS = 0.5


def client() -> httpx.AsyncClient:
    """One with as many connections as there are streams."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(timeout=SILENT_SECONDS, limits=limits, trust_env=False)


async def plain_text(http: httpx.AsyncClient, url: str, request: Body) -> str:
    """The text without drafts and without streaming. Raises httpx.HTTPError."""
    answer = await http.post(f"{url}/v1/completions", json={**request, "speculation": {"enabled": False}})
    answer.raise_for_status()
    return str(answer.json()["choices"][0]["text"])


async def stream(http: httpx.AsyncClient, url: str, request: Body, reply: Reply) -> None:
    """Ask once, and note in ``reply`` whatever happens, as it happens."""
    asked = {**request, "stream": True, "stream_options": {"include_speculation": True}}
    await ask(http, f"{url}/v1/completions", asked, None, reply)


async def cluster_view(url: str) -> dict[str, Any]:
    """What a router tells of the cluster. Raises httpx.HTTPError."""
    async with client() as http:
        return dict((await http.get(f"{url}/cluster")).raise_for_status().json())


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
        self._http = client()
        self.resize(self._wanted)
        return self

    async def __aexit__(self, *_error: object) -> None:
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

    async def begun(self) -> None:
        """Wait until all streams are under way at once. Raises TimeoutError."""
        async with asyncio.timeout(BEGIN_SECONDS):
            while (
                sum(len(one.times) >= CHUNKS_BEGUN and not one.ended for one in self._running.values()) < self._wanted
            ):
                await asyncio.sleep(0.05)

    async def finish(self, seconds: float = FINISH_SECONDS) -> None:
        """Ask for nothing more; wait until all has ended. What has not by then is cut, and so has failed."""
        self.resize(0)
        _, late = await asyncio.wait(self._slots.values(), timeout=seconds) if self._slots else (set(), set())
        for slot, task in self._slots.items():
            if task in late:
                self._running[slot].error = LATE
                self._running[slot].detail = f"not complete within {seconds:.0f} s"
                task.cancel()
        await asyncio.gather(*late, return_exceptions=True)

    async def _repeat(self, slot: int) -> None:
        number = next(self._numbers)
        while slot < self._wanted:
            reply = self._running[slot] = Reply(number, due=time.perf_counter())
            self.replies.append(reply)
            await stream(self._http, self._url, self._requests[number], reply)
            if reply.refused:
                await asyncio.sleep(reply.pause)
                continue
            if reply.failed:
                await asyncio.sleep(AFTER_FAILURE_SECONDS)
            number = next(self._numbers)


@asynccontextmanager
async def meanwhile(work: Callable[[], Awaitable[None]], pause: float = 1.0) -> AsyncIterator[None]:
    """Do it again and again, so many seconds apart, until this is left."""

    async def repeat() -> None:
        while True:
            await work()
            await asyncio.sleep(pause)

    task = asyncio.create_task(repeat())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
