"""Where bodies are parsed and tokenised."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from router.http import request_reader
from router.http.api import ApiSettings
from router.http.auth import ApiKeys
from router.http.request_reader import LONG_BYTES, LONG_THREADS, PARSED_INLINE_BYTES, SHORT_BYTES, SHORT_THREADS
from router.schema.request_schema import Body, Kind
from router.schema.requests import read_body, request_of
from tests.integration.test_http_api import fake, in_memory

PATIENCE = 30.0


def body_of(size: int) -> bytes:
    return json.dumps({"prompt": "hi", "max_tokens": 2}).encode().ljust(size)


async def test_only_short_bodies_are_read_on_the_event_loop_and_none_waits_for_megabytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    elsewhere: dict[int, bool] = {}
    busy, gate, loop = threading.Semaphore(0), threading.Event(), threading.current_thread()

    def noting(body: bytes, kind: Kind) -> Body:
        elsewhere[len(body)] = threading.current_thread() is not loop
        if len(body) > SHORT_BYTES:
            busy.release()
            assert gate.wait(PATIENCE)
        return read_body(body, kind)

    monkeypatch.setattr(request_reader, "read_body", noting)
    async with in_memory(fake()) as client, asyncio.timeout(PATIENCE):

        async def asked(size: int) -> int:
            return (await client.post("/v1/completions", content=body_of(size))).status_code

        long = [asyncio.create_task(asked(SHORT_BYTES + 1)) for _ in range(LONG_THREADS + 1)]
        for _ in range(LONG_THREADS):
            await asyncio.to_thread(busy.acquire)
        for size in (PARSED_INLINE_BYTES, PARSED_INLINE_BYTES + 1, SHORT_BYTES):
            assert await asked(size) == 200
        assert not any(one.done() for one in long)
        gate.set()
        assert await asyncio.gather(*long) == [200] * len(long)
    assert elsewhere == {
        PARSED_INLINE_BYTES: False,
        PARSED_INLINE_BYTES + 1: True,
        SHORT_BYTES: True,
        SHORT_BYTES + 1: True,
    }


@pytest.mark.parametrize(("size", "threads"), [(SHORT_BYTES + 1, LONG_THREADS), (SHORT_BYTES, SHORT_THREADS)])
async def test_a_key_that_floods_leaves_a_thread_to_other_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, threads: int
) -> None:
    keys = {name: name * 16 for name in ("a", "b")}
    path = tmp_path / "keys"
    path.write_text("".join(f"{name}: {key}\n" for name, key in keys.items()))
    busy, gate = threading.Semaphore(0), threading.Event()

    def slow_for_one(body: bytes, kind: Kind) -> Body:
        if b"slow" in body:
            busy.release()
            assert gate.wait(PATIENCE)
        return read_body(body, kind)

    monkeypatch.setattr(request_reader, "read_body", slow_for_one)
    async with in_memory(fake(), ApiSettings(api_keys=ApiKeys(path))) as client, asyncio.timeout(PATIENCE):

        async def asked(name: str, prompt: str) -> int:
            content = json.dumps({"prompt": prompt, "max_tokens": 2}).encode().ljust(size)
            headers = {"authorization": f"Bearer {keys[name]}"}
            return (await client.post("/v1/completions", content=content, headers=headers)).status_code

        flood = [asyncio.create_task(asked("a", "slow")) for _ in range(2 * threads)]
        for _ in range(threads - 1):
            await asyncio.to_thread(busy.acquire)
        gone = flood.pop()
        gone.cancel()
        try:
            assert await asked("b", "quick") == 200
            assert not any(one.done() for one in flood)
        finally:
            gate.set()
        assert await asyncio.gather(*flood) == [200] * len(flood)
        assert await asked("a", "quick") == 200
        await asyncio.gather(gone, return_exceptions=True)


@pytest.mark.parametrize("more", [{}, {"response_format": {"type": "json_object"}}], ids=["plain", "grammar"])
async def test_megabytes_become_tokens_one_body_at_a_time_and_keys_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    keys = {name: name * 16 for name in ("a", "b")}
    path = tmp_path / "keys"
    path.write_text("".join(f"{name}: {key}\n" for name, key in keys.items()))
    order: list[str] = []
    come: list[str] = []
    at_once, most, gate = 0, 0, threading.Event()
    reader = request_reader.GrammarQueue if more else request_reader.BodyThreads
    run = reader.run

    async def noted(threads: Any, caller: str, work: Callable[[], Any], **how: bool) -> Any:
        come.append(caller)
        return await run(threads, caller, work, **how)

    def watched(read: Body, *arguments: Any) -> Any:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        order.append(str(read.user))
        assert gate.wait(PATIENCE)
        at_once -= 1
        return request_of(read, *arguments)

    monkeypatch.setattr(request_reader, "request_of", watched)
    monkeypatch.setattr(reader, "run", noted)
    async with in_memory(fake(), ApiSettings(api_keys=ApiKeys(path))) as client, asyncio.timeout(PATIENCE):

        async def asked(name: str) -> int:
            content = json.dumps({"prompt": "hi", "max_tokens": 2, "user": name, **more}).encode().ljust(LONG_BYTES + 1)
            headers = {"authorization": f"Bearer {keys[name]}"}
            return (await client.post("/v1/completions", content=content, headers=headers)).status_code

        flood = [asyncio.create_task(asked("a")) for _ in range(4)]
        while not order or come.count("a") < len(flood):
            await asyncio.sleep(0.01)
        other = asyncio.create_task(asked("b"))
        while "b" not in come:
            await asyncio.sleep(0.01)
        gate.set()
        assert await asyncio.gather(*flood, other) == [200] * 5
    assert most == 1
    if more:  # else bodies that were read before may come first
        assert order[1] == "b"
