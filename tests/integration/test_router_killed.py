"""Two routers over the same workers, one of them killed with ``kill -9`` in mid-stream."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from benchmarks.chaos.settings import body
from benchmarks.chaos.workload import Reply, client, plain_text, stream
from tests.cluster.processes import PATIENCE, Paceline
from tests.ports import free_port
from tests.stack import draft_worker, target_worker

REQUESTS = [body("def merge(left, right):", 240, seed, 0.8) for seed in (1, 2)]


async def router(stack: AsyncExitStack, target: str, draft: str) -> tuple[Paceline, str]:
    port = free_port()
    process = stack.enter_context(Paceline("router", "--target", target, "--draft", draft, "--port", str(port)))
    await asyncio.to_thread(process.expect, "^router ready on")
    return process, f"http://127.0.0.1:{port}"


@pytest.mark.thorough
async def test_a_killed_router_takes_its_own_streams_only(slow_target) -> None:
    for _ in range(3):
        view = await one_killed(slow_target)
        if not any("nothing heard for" in event["text"] for event in view["events"]):
            break  # else the workers, which are in this process, were paused
    assert [event["kind"] for event in view["events"]] == ["worker_up"] * 2, "it noticed nothing"
    assert not view["totals"]["reopened"]


async def one_killed(slow_target: Path) -> dict[str, Any]:
    """Kill one of two routers that stream; what the other shows afterwards."""
    async with AsyncExitStack() as stack:
        target = await stack.enter_async_context(target_worker(model=slow_target))
        draft = await stack.enter_async_context(draft_worker())
        addresses = target.worker.address, draft.worker.address
        (victim, doomed), (_, other) = [await router(stack, *addresses) for _ in range(2)]
        http = await stack.enter_async_context(client())
        http.timeout = PATIENCE
        replies = [Reply(number, 0.0) for number in range(2)]
        streams = [
            asyncio.create_task(stream(http, url, request, reply))
            for url, request, reply in zip((doomed, other), REQUESTS, replies, strict=True)
        ]
        async with asyncio.timeout(PATIENCE):
            while not all(len(reply.times) > 3 for reply in replies):
                await asyncio.sleep(0.01)
        assert target.machine.load().sessions == 2
        victim.process.kill()
        async with asyncio.timeout(PATIENCE):
            await streams[0]
            while target.machine.load().sessions > 1:
                await asyncio.sleep(0.01)
        broken, well = replies
        assert broken.failed
        assert not well.ended, "the other's stream was to go on after the session was freed"
        await streams[1]
        assert not well.failed, well.reason
        texts = await asyncio.gather(*(plain_text(http, other, request) for request in REQUESTS))
        assert well.text == texts[1]
        assert broken.text
        assert texts[0].startswith(broken.text)
        again = Reply(0, 0.0)
        await stream(http, other, REQUESTS[0], again)
        assert (again.failed, again.text) == (False, texts[0])
        view: dict[str, Any] = (await http.get(f"{other}/cluster")).json()
        return view
