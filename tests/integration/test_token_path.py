"""Which files a token passes: one request from HTTP to text and back, traced through router, target and drafter.

Each runs on an event loop of its own thread, so what runs there is known to be its own. Counted are the files with a
function that runs for every commit of a text under way; docs/architecture.md names them, in order.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from types import FrameType

import httpx
import pytest

from router.service import Router, RouterSettings
from tests.bundled import held_out_prompts
from tests.stack import draft_worker, target_worker
from tests.structure import ROOT, Product

BEGINS, COUNTED = 8, 24
"""Events of the stream before the text is well under way, and those during which calls are counted."""
MOST_CALLS = 320
"""By a router for an event of a stream; about 200 were measured, with what drafts take."""
PROCESSES = ("router", "target", "drafter")
PAGE = ROOT / "docs" / "architecture.md"


class Trace:
    """Calls of the product's functions by process, which its threads are named after, and file."""

    def __init__(self) -> None:
        self.counting = self.resting = False
        self.at_rest: set[tuple[str, str]] = set()
        """What runs while there is no request: heartbeats, of which a slow machine sees several an event."""
        self.ever: set[tuple[str, str]] = set()
        self._calls: Counter[tuple[str, str]] = Counter()
        self._files = {str(ROOT / module.path): module.path for module in Product(ROOT).modules}

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and (path := self._files.get(frame.f_code.co_filename)):
            process = threading.current_thread().name.partition("-")[0]
            key = "drafter" if process == "draft" else process, path
            self.ever.add(key)
            if self.counting:
                self._calls[key] += 1
            if self.resting:
                self.at_rest.add(key)

    def per_event(self, process: str) -> float:
        """Calls of our functions for each event."""
        return sum(times for (named, _), times in self._calls.items() if named == process) / COUNTED

    def passed(self, process: str) -> set[str]:
        """The files with a call for every event; the engine's are a story of their own."""
        calls = {path: times for (named, path), times in self._calls.items() if named == process}
        return {path for path, times in calls.items() if times >= COUNTED and not path.startswith("engine/")}


@contextmanager
def traced() -> Iterator[Trace]:
    trace = Trace()
    threading.setprofile(trace)
    try:
        yield trace
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]


@contextmanager
def in_thread(name: str, running: Callable[[], AbstractAsyncContextManager[str]]) -> Iterator[str]:
    """Something with an address, on an event loop of its own thread."""
    found: list[str] = []
    failures: list[BaseException] = []
    up, down = threading.Event(), threading.Event()

    async def run() -> None:
        async with running() as address:
            found.append(address)
            up.set()
            await asyncio.to_thread(down.wait)

    def main() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:  # for the test's own thread
            failures.append(error)
        finally:
            up.set()

    thread = threading.Thread(target=main, name=name)
    thread.start()
    try:
        up.wait()
        assert found, failures
        yield found[0]
    finally:
        down.set()
        thread.join()
    assert not failures, failures


@asynccontextmanager
async def target() -> AsyncIterator[str]:
    async with target_worker(validate=False) as running:
        yield running.worker.address


@asynccontextmanager
async def drafter() -> AsyncIterator[str]:
    async with draft_worker(validate=False) as running:
        yield running.worker.address


@asynccontextmanager
async def router(target: str, drafter: str) -> AsyncIterator[str]:
    router = Router(RouterSettings([target], [drafter], port=0))
    await router.start()
    try:
        while not all(peer.welcome for peer in router.dispatcher.pool.peers.values()):
            await asyncio.sleep(0.01)
        yield router.address
    finally:
        await router.stop()


def stream(url: str, trace: Trace) -> str:
    """The text of one request; calls are counted in the middle of it."""
    text, number = "", 0
    fields = {"prompt": list(held_out_prompts()[0]), "max_tokens": 200, "temperature": 0, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=fields, timeout=120, trust_env=False) as response:
        assert response.status_code == 200, response.read()
        for number, line in enumerate(line for line in response.iter_lines() if line.startswith("data: {")):
            trace.counting = BEGINS <= number < BEGINS + COUNTED
            text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
    assert number > BEGINS + COUNTED, "too short to count"
    return text


@pytest.fixture(scope="module")
def trace() -> Iterator[Trace]:
    with (
        traced() as trace,
        in_thread("target", target) as target_address,
        in_thread("draft", drafter) as draft_address,
        in_thread("router", lambda: router(target_address, draft_address)) as url,
    ):
        trace.resting = True
        time.sleep(1.0)
        trace.resting = False
        assert stream(url, trace)
        yield trace


def listed() -> dict[str, list[str]]:
    """What the page says, in its order: lines ``| router | a.py, b.py |`` of its table, with a link to none."""
    rows = re.findall(
        r"^\| (router|target|drafter) \|.*\| (`[^|]+`) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
    found: dict[str, list[str]] = {process: [] for process in PROCESSES}
    for process, files in rows:
        found[process] += re.findall(r"`([^`]+)`", files)
    return found


@pytest.mark.parametrize("process", PROCESSES)
def test_the_page_names_every_file_that_a_token_passes(trace, process, capsys):
    named, passed = listed()[process], trace.passed(process)
    with capsys.disabled():
        sys.stdout.write(f"\n{process}: a token passes {len(passed)} files, the page names {len(named)}\n")
    assert passed, "nothing was traced"
    unnamed = {path for path in passed - set(named) if (process, path) not in trace.at_rest}
    assert not unnamed, f"{sorted(unnamed)} run for every commit and are not named"


def test_a_commit_costs_a_router_few_calls(trace, capsys):
    """What a router carries is bounded by its CPU for each (docs/size.md); heartbeats and drafts are among them."""
    calls = trace.per_event("router")
    with capsys.disabled():
        sys.stdout.write(f"\nrouter: {calls:.0f} calls of our functions for each event of a stream\n")
    assert calls < MOST_CALLS


@pytest.mark.parametrize("process", PROCESSES)
def test_the_page_names_no_file_that_no_request_runs_through(trace, process):
    named = listed()[process]
    assert len(named) == len(set(named))
    assert {(process, path) for path in named} <= trace.ever
