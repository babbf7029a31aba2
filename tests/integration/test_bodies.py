"""Bodies that are refused: the client hears why, and what is taken of them has an end; all together have a bound."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.types import Message

from router.errors import ApiError
from router.http import asgi
from router.http.admission import AdmissionSettings
from router.http.api import ApiSettings
from router.http.asgi import BodyBudget, HttpEdge
from router.limits import Allowance
from tests.fakes import FakeGenerator
from tests.http_server import serve
from tests.integration.test_http_api import error_of, fake, in_memory, model, over_socket, shared

REFUSALS = {
    "body_too_large": ApiSettings(max_body_bytes=1000),
    "rate_limit_exceeded": ApiSettings(admission=AdmissionSettings(Allowance(requests_per_minute=1))),
    "overloaded": ApiSettings(max_body_bytes=64 << 20, max_bodies_bytes=1 << 20),
}


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("code", REFUSALS)
def test_a_client_that_sends_its_whole_body_first_hears_why_it_is_refused(code: str, chunked: bool) -> None:
    body = b" " * (12 << 20)
    with serve(fake(), shared(), REFUSALS[code]) as url, over_socket(url) as http:
        http.post("/v1/completions", content=b"{}")
        for _ in range(3):
            response = http.post("/v1/completions", content=iter([body]) if chunked else body)
            assert error_of(response)["code"] == code


async def refuse(scope: Any, receive: Any, send: Any) -> None:
    """Answers before the body has come."""
    await send({"type": "http.response.start", "status": 413, "headers": []})
    await send({"type": "http.response.body", "body": b"no"})


async def refused(parts: Iterator[bytes], headers: tuple[tuple[bytes, bytes], ...] = ()) -> list[Message]:
    """What is sent to a client that has these parts of a body to send, and then nothing."""
    sent: list[Message] = []

    async def receive() -> Message:
        for part in parts:
            return {"type": "http.request", "body": part, "more_body": True}
        return await asyncio.Event().wait()  # type: ignore[return-value]

    async def send(message: Message) -> None:
        sent.append(message)

    await HttpEdge(refuse)({"type": "http", "headers": list(headers)}, receive, send)
    return sent


async def test_what_is_taken_of_a_refused_body_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asgi, "MAX_DRAINED_BYTES", 10_000)
    parts = iter([b" " * 3000] * 100)
    start, answer, end = await refused(parts)
    assert start["status"] == 413
    assert (answer["body"], answer["more_body"]) == (b"no", True)
    assert not end.get("more_body")
    assert len(list(parts)) == 96


async def test_a_refused_body_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asgi, "DRAIN_SECONDS", 0.01)
    assert len(await refused(iter([b"{"]))) == 3


async def test_a_body_that_the_client_asks_for_leave_to_send_is_not_waited_for() -> None:
    start, answer = await refused(iter(()), ((b"expect", b"100-continue"),))
    assert (start["status"], answer["body"]) == (413, b"no")


def test_all_bodies_together_have_a_bound_and_give_back_what_they_took() -> None:
    budget = BodyBudget(100)
    with budget.share() as take:
        take(60)
        with pytest.raises(ApiError, match="100 bytes of requests are being read"), budget.share() as other:
            other(39)
        assert budget.held == 61
        take(39)
        with pytest.raises(ApiError), budget.share():
            pytest.fail("nothing is left")
    assert budget.held == 0


def test_one_key_leaves_half_of_the_room_to_others() -> None:
    budget = BodyBudget(100)
    with budget.share("alice") as take:
        take(49)
        with pytest.raises(ApiError, match="50 bytes of requests of this API key are being read"):
            take(1)
        with budget.share("bob") as other:
            other(49)
            assert budget.held == 100
    with budget.share("alice") as take:
        take(49)
    assert budget.held == 0


async def test_a_request_holds_no_room_for_its_body_once_it_is_parsed() -> None:
    """Nor does one that is refused or malformed."""
    body = {"prompt": "hi " * 20, "max_tokens": 9}
    room = ApiSettings(max_bodies_bytes=len(json.dumps(body)) + 1)
    generator = FakeGenerator(lambda _: (), model=model(), hang=True)
    async with in_memory(generator, room) as client:
        waiting = []
        for under_way in (1, 2):
            waiting.append(asyncio.create_task(client.post("/v1/completions", json=body)))
            while len(generator.generations) < under_way:
                assert not waiting[-1].done()
                await asyncio.sleep(0)
        assert (await client.post("/v1/completions", json=[])).json()["error"]["code"] == "invalid_json"
        assert (await client.post("/v1/completions", json={**body, "user": "me"})).status_code == 429
        assert (await client.post("/v1/completions", json=[])).json()["error"]["code"] == "invalid_json"
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    assert generator.running == 0
