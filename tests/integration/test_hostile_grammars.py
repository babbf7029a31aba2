"""Grammars that take long to try: whoever sends them waits, and nobody else does."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.http import request_reader
from router.http.api import ApiSettings, build_app
from router.http.auth import ApiKeys
from router.schema import structured
from router.text.grammar_checker import GrammarChecker
from tests.fakes import FakeTokenizers
from tests.integration.test_connections import PATIENCE, connected
from tests.integration.test_http_api import fake, in_memory, shared

LONG = {"prompt": "hi", "max_tokens": 200, "user": "é", "metadata": {str(n): "a" * 500 for n in range(16)}}


class Slow(GrammarChecker):
    """Tries nothing before it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.tried: list[str] = []

    def _ask(self, question: str) -> tuple[str, str]:
        self.tried.append(json.loads(question)[1])
        assert self.gate.wait(PATIENCE)
        return 'start: "a"', ""


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    checker = Slow()
    monkeypatch.setattr(structured, "_checker", checker)
    yield checker
    checker.gate.set()


async def ask(client: httpx.AsyncClient, number: int, **headers: str) -> tuple[int, Any]:
    asked = {"prompt": "hi", "max_tokens": 200, "guided_regex": f"a{number}"}
    answer = await client.post("/v1/completions", json=asked, headers=headers)
    return answer.status_code, answer.json().get("error", {}).get("code")


async def until_tried(slow: Slow) -> None:
    async with asyncio.timeout(PATIENCE):
        while not slow.tried:
            await asyncio.sleep(0.001)


async def test_requests_without_grammars_do_not_wait(slow: Slow) -> None:
    async with in_memory(fake(), ApiSettings(max_body_bytes=1 << 20)) as client, asyncio.timeout(PATIENCE):
        waiting = [asyncio.create_task(ask(client, number)) for number in range(100)]
        await until_tried(slow)
        body = json.dumps(LONG, indent=2).encode() + b" " * request_reader.PARSED_INLINE_BYTES
        assert (await client.post("/v1/completions", content=body)).status_code == 200
        tools = {"tools": [], "tool_choice": "auto", "messages": [{"role": "user", "content": "strict é"}]}
        assert (await client.post("/v1/chat/completions", json=tools | {"max_tokens": 200})).status_code == 200
        slow.gate.set()
        assert set(await asyncio.gather(*waiting)) == {(200, None)}


async def test_more_than_may_wait_are_told_to_come_again(slow: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_reader, "MAX_WAITING", 2)
    async with in_memory(fake()) as client, asyncio.timeout(PATIENCE):
        waiting = [asyncio.create_task(ask(client, number)) for number in range(2)]
        await until_tried(slow)
        assert await ask(client, 2) == (429, "overloaded")
        slow.gate.set()
        assert await asyncio.gather(*waiting) == [(200, None)] * 2
        assert await ask(client, 2) == (200, None)


async def test_the_time_of_a_request_runs_while_its_grammar_is_tried(slow: Slow) -> None:
    async with in_memory(fake()) as client, asyncio.timeout(PATIENCE):
        assert await ask(client, 1, **{"x-request-timeout": "0.05"}) == (504, "timeout")


async def test_what_a_client_asked_that_has_gone_is_not_tried(slow: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_reader, "GRAMMAR_THREADS", 1)
    app = build_app(fake(), FakeTokenizers(shared()))
    (reader,) = {route.endpoint.__self__._reader for route in app.routes if getattr(route, "path", "") == "/ready"}
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://paceline") as client:
        first = asyncio.create_task(ask(client, 1))
        await until_tried(slow)
        async with connected(app) as (_, writer):
            body = json.dumps({"prompt": "hi", "guided_regex": "a2"}).encode()
            head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
            writer.write(head + body)
            while len(reader._grammars) < 2:
                await asyncio.sleep(0.001)
        while len(reader._grammars) > 1:
            await asyncio.sleep(0.001)
        slow.gate.set()
        assert await first == (200, None)
    assert slow.tried == ["a1"]


async def test_a_key_that_floods_keeps_no_other_key_out(
    slow: Slow, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its own requests beyond its part are refused; another key's grammar, known already, passes it."""
    monkeypatch.setattr(request_reader, "MAX_WAITING", 16)
    keys = {"alice": "a" * 16, "bob": "b" * 16}
    (tmp_path / "keys").write_text("".join(f"{name}: {key}\n" for name, key in keys.items()))
    alice, bob = ({"authorization": f"Bearer {key}"} for key in keys.values())
    settings = ApiSettings(api_keys=ApiKeys(tmp_path / "keys"))
    async with in_memory(fake(), settings) as client, asyncio.timeout(PATIENCE):
        slow.gate.set()
        assert await ask(client, 0, **bob) == (200, None)
        slow.gate.clear()
        slow.tried.clear()
        flood = [asyncio.create_task(ask(client, number, **alice)) for number in range(1, 17)]
        await until_tried(slow)
        assert await ask(client, 0, **bob) == (200, None)
        slow.gate.set()
        assert sorted(await asyncio.gather(*flood)) == [(200, None)] * 4 + [(429, "overloaded")] * 12
