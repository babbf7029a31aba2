"""Requests with grammars take turns among callers, and one caller's take no more than its part."""

from __future__ import annotations

import asyncio
import threading
from functools import partial

import pytest

from router.errors import ApiError
from router.http.request_reader import SHARE, TRIAL_SECONDS_PER_MINUTE, GrammarQueue
from router.text.grammar_checker import trial_seconds

PATIENCE = 30.0


class Work:
    """What waits until it is let, and notes who began."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.began: list[str] = []

    def __call__(self, name: str) -> str:
        self.began.append(name)
        assert self.gate.wait(PATIENCE)
        return name

    async def until(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE):
            while len(self.began) < count:
                await asyncio.sleep(0)


def took(seconds: float) -> None:
    trial_seconds.get().append(seconds)


async def start(queue: GrammarQueue, work: Work, *names: str) -> list[asyncio.Task[str]]:
    tasks = [asyncio.create_task(queue.run(name, partial(work, name))) for name in names]
    while len(queue) < len(tasks):
        await asyncio.sleep(0)
    return tasks


async def test_a_caller_that_floods_leaves_threads_to_others() -> None:
    queue, work = GrammarQueue(4, 64), Work()
    flood = await start(queue, work, *["alice"] * 16)
    await work.until(2)
    assert work.began == ["alice", "alice"]
    assert await queue.run("bob", lambda: "at once") == "at once"
    work.gate.set()
    assert await asyncio.gather(*flood) == ["alice"] * 16
    assert len(queue) == 0


async def test_callers_take_turns() -> None:
    queue, work = GrammarQueue(1, 64), Work()
    tasks = await start(queue, work, "alice", "alice", "alice", "bob", "carol", "bob")
    work.gate.set()
    await asyncio.gather(*tasks)
    assert work.began == ["alice", "bob", "carol", "alice", "bob", "alice"]


async def test_a_caller_that_fills_its_part_is_refused_and_others_are_not() -> None:
    queue, work = GrammarQueue(1, 8), Work()
    flood = await start(queue, work, *["alice"] * (8 // SHARE))
    with pytest.raises(ApiError, match="of this API key wait") as refused:
        await queue.run("alice", lambda: None)
    assert refused.value.code.status == 429
    other = await start(queue, work, "bob")
    work.gate.set()
    assert await asyncio.gather(*flood, *other) == ["alice", "alice", "bob"]


async def test_a_budget_is_used_up_by_what_trials_take_and_refills() -> None:
    now = 0.0
    queue = GrammarQueue(2, 8, lambda: now)
    await queue.run("alice", partial(took, TRIAL_SECONDS_PER_MINUTE + 1.0))
    with pytest.raises(ApiError, match="more than 30 seconds a minute") as refused:
        await queue.run("alice", lambda: None)
    assert refused.value.retry_after == 4.0
    await queue.run("bob", lambda: None)
    now = 4.0
    await queue.run("alice", lambda: None)


async def test_callers_without_a_key_have_no_budget_and_all_threads() -> None:
    queue, work = GrammarQueue(2, 8), Work()
    await queue.run("", partial(took, 1000.0))
    tasks = await start(queue, work, "", "")
    await work.until(2)
    work.gate.set()
    assert await asyncio.gather(*tasks) == ["", ""]


async def test_what_failed_or_was_given_up_gives_its_place_back() -> None:
    queue, work = GrammarQueue(1, 8), Work()
    running, waiting = await start(queue, work, "alice", "alice")
    await work.until(1)
    for task in (waiting, running):
        task.cancel()
    await asyncio.wait({running, waiting})
    assert len(queue) == 1, "what runs keeps its place"
    work.gate.set()
    with pytest.raises(ZeroDivisionError):
        await queue.run("bob", lambda: 1 // 0)
    assert len(queue) == 0 and work.began == ["alice"]


async def test_one_that_is_given_up_when_its_turn_has_just_come_hands_it_on() -> None:
    queue, work = GrammarQueue(1, 8), Work()
    first, second = await start(queue, work, "alice", "bob")
    await work.until(1)
    work.gate.set()
    await first
    second.cancel()
    await asyncio.wait({second})
    assert await queue.run("carol", lambda: "hers") == "hers"
    async with asyncio.timeout(PATIENCE):
        while len(queue):
            await asyncio.sleep(0)
