"""What the HTTP door lets in: limits of callers, deadlines, sizes, pages of other origins."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from router.http import asgi, auth
from router.http.admission import AdmissionSettings
from router.http.api import ApiSettings
from router.http.asgi import MAX_HEAD_BYTES, BoundedHttp
from router.http.auth import ApiKeys
from router.limits import Allowance
from router.schema.prompts import ALWAYS_READ
from router.schema.request_schema import MAX_MESSAGES
from router.service import server_config
from router.text.tokenizer import Tokenizer
from tests.fakes import FakeGenerator, commits
from tests.http_server import serve
from tests.integration.test_http_api import CONTEXT, TEXT, events, fake, in_memory, length, model, shared
from tests.integration.test_http_api import no_task_left as no_task_left
from tests.integration.test_metrics import values

KEY, OTHER = "sk-paceline-0123456789", "sk-paceline-9876543210"
ASKED = {"prompt": "hi", "max_tokens": 200}


def limited(**limits: int) -> ApiSettings:
    return ApiSettings(admission=AdmissionSettings(Allowance(**limits)))


async def ask(client: httpx.AsyncClient, key: str = "", **fields: object) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return await client.post("/v1/completions", json=ASKED | fields, headers=headers)


# Limits


async def test_requests_beyond_the_limit_are_told_when_to_come_again() -> None:
    generator = fake()
    async with in_memory(generator, limited(requests_per_minute=2)) as client:
        first, second, third = [await ask(client) for _ in range(3)]
        assert (first.status_code, second.status_code, third.status_code) == (200, 200, 429)
        assert [r.headers["x-ratelimit-remaining-requests"] for r in (first, second, third)] == ["1", "0", "0"]
        assert first.headers["x-ratelimit-limit-requests"] == "2"
        assert 20 < float(first.headers["x-ratelimit-reset-requests"].removesuffix("s")) <= 30
        assert "x-ratelimit-limit-tokens" not in first.headers
        error = third.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert "2 requests a minute are allowed" in error["message"]
        assert 20 <= int(third.headers["retry-after"]) <= 30
        assert third.headers["x-should-retry"] == "true"
        assert third.headers["x-request-id"]
        assert (await client.get("/v1/models")).status_code == 200
        told = (await client.get("/metrics")).text
    assert len(generator.generations) == 2
    assert 'paceline_requests_refused_total{code="rate_limit_exceeded"} 1.0' in told


async def test_tokens_of_prompts_and_answers_count() -> None:
    used = len(shared().encode("hi", special=True)) + length(TEXT) + 1
    async with in_memory(fake(), limited(tokens_per_minute=used + 3)) as client:
        first = await ask(client)
        assert first.json()["usage"]["total_tokens"] == used
        assert first.headers["x-ratelimit-remaining-tokens"] == "3"
        streamed = await ask(client, stream=True)
        assert events(streamed)[-1] == "[DONE]"  # let in with what was left, and not cut short
        refused = await ask(client)
        assert refused.status_code == 429
        assert "tokens a minute" in refused.json()["error"]["message"]
        found = values((await client.get("/metrics")).text)
    assert found["paceline_api_key_tokens_total"] == 2 * used


async def test_each_key_has_its_own_limits_and_its_name_is_in_the_metrics(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(auth, "LOOK_SECONDS", 0.0)
    path = tmp_path / "keys"
    path.write_text(f"alice: {KEY} requests_per_minute=1\n{OTHER}\n")
    settings = ApiSettings(api_keys=ApiKeys(path), admission=AdmissionSettings(Allowance(requests_per_minute=2)))
    async with in_memory(fake(), settings) as client:
        assert [(await ask(client, KEY)).status_code for _ in range(2)] == [200, 429]
        assert [(await ask(client, OTHER)).status_code for _ in range(3)] == [200, 200, 429]
        for wrong in ({}, {"authorization": "Bearer sk-paceline-nobody-has-it"}):
            kept_out = await client.get("/metrics", headers=wrong)
            assert kept_out.status_code == 401
            assert "paceline_" not in kept_out.text
            assert "alice" not in kept_out.text
        told = (await client.get("/metrics", headers={"authorization": f"Bearer {OTHER}"})).text
        assert 'paceline_api_key_requests_total{api_key="alice"} 1.0' in told
        assert 'paceline_api_key_refusals_total{api_key="line 2",limit="requests"} 1.0' in told
        assert 'paceline_api_key_requests_running{api_key="alice"} 0.0' in told
        assert KEY not in told
        path.write_text(f"alice: {KEY} requests_per_minute=0\n")
        assert {(await ask(client, KEY)).status_code for _ in range(5)} == {200}


@pytest.mark.parametrize("stream", [False, True])
async def test_places_are_free_again_however_a_request_ends(stream: bool) -> None:
    script = commits(shared().encode("hello", special=False), (1,))
    generator = FakeGenerator(lambda _: script, model=model(), hang=True)
    settings = ApiSettings(admission=AdmissionSettings(Allowance(concurrent_requests=1), timeout=3.0))
    async with in_memory(generator, settings) as client:
        for fields in ({"prompt": 5}, {"prompt": ""}, {}):
            running = asyncio.create_task(ask(client, stream=stream, **fields))
            if not fields:
                await asyncio.wait_for(generator.started.wait(), 60)
                refused = await ask(client)
                assert refused.status_code == 429
                assert "1 requests at once" in refused.json()["error"]["message"]
            await running
        for turns in range(40):  # cancelled at each of its first steps, whatever it does then
            left = asyncio.create_task(ask(client, stream=stream))
            for _ in range(turns):
                await asyncio.sleep(0)
            left.cancel()
            await asyncio.gather(left, return_exceptions=True)
            assert generator.running == 0, turns
        assert (await ask(client, prompt=5)).status_code == 400
    assert generator.running == 0


async def test_choices_at_once_are_counted_over_all_requests_of_a_caller() -> None:
    generator = FakeGenerator(lambda _: (), model=model(), hang=True)

    async def under_way(generations: int, **fields: object) -> asyncio.Task[httpx.Response]:
        asking = asyncio.create_task(ask(client, **fields))
        while len(generator.generations) < generations:
            assert not asking.done()
            await asyncio.sleep(0)
        return asking

    async with in_memory(generator, limited(concurrent_sessions=3)) as client:
        first = await under_way(2, n=2)
        refused = await ask(client, prompt=["a", "b"])
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert "3 choices at once are allowed, 2 under way, 2 needed" in refused.json()["error"]["message"]
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        alone = await under_way(6, n=4)
        assert (await ask(client)).status_code == 429
        alone.cancel()
        await asyncio.gather(alone, return_exceptions=True)
        last = await under_way(7)
        last.cancel()
        await asyncio.gather(last, return_exceptions=True)


async def test_tokens_at_once_are_counted_over_all_requests_of_a_caller() -> None:
    """A prompt counts as long as its request is under way, and no longer."""
    generator = FakeGenerator(lambda _: (), model=model(), hang=True)
    async with in_memory(generator, limited(concurrent_tokens=6)) as client:
        first = asyncio.create_task(ask(client, prompt=[1, 2, 3, 4]))
        while not generator.generations:
            await asyncio.sleep(0)
        refused = await ask(client, prompt=[1, 2, 3])
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert "6 tokens at once are allowed, requests under way have 4, 3 needed" in refused.json()["error"]["message"]
        assert (refused.headers["retry-after"], refused.headers["x-should-retry"]) == ("1", "true")
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        alone = asyncio.create_task(ask(client, prompt=[1] * 20))
        while len(generator.generations) < 2:
            assert not alone.done()
            await asyncio.sleep(0)
        alone.cancel()
        await asyncio.gather(alone, return_exceptions=True)


# Deadlines


@pytest.mark.parametrize(
    ("settings", "fields", "headers", "said"),
    [
        (AdmissionSettings(), {"timeout": 0.05}, {}, "0.05"),
        (AdmissionSettings(), {}, {"x-request-timeout": "0.05"}, "0.05"),
        (AdmissionSettings(), {"timeout": 60}, {"x-request-timeout": "0.05"}, "0.05"),
        (AdmissionSettings(timeout=0.05), {}, {}, "0.05"),
        (AdmissionSettings(timeout=60, max_timeout=0.05), {}, {}, "0.05"),
        (AdmissionSettings(max_timeout=0.05), {}, {"x-request-timeout": "60"}, "0.05"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_before_the_first_token_the_end_of_its_time_is_a_504(settings, fields, headers, said, stream) -> None:
    generator = FakeGenerator(lambda _: [], model=model(), hang=True)
    async with in_memory(generator, ApiSettings(admission=settings)) as client:
        answer = await client.post("/v1/completions", json=ASKED | fields | {"stream": stream}, headers=headers)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (504, "timeout", "server_error")
    assert error["message"] == f"the {said} seconds of this request are over"
    assert answer.headers["x-should-retry"] == "false"
    assert generator.running == 0


@pytest.mark.parametrize(
    ("settings", "fields", "seconds"),
    [
        (AdmissionSettings(), {}, None),
        (AdmissionSettings(), {"timeout": 600}, 600),
        (AdmissionSettings(timeout=300), {}, 300),
        (AdmissionSettings(max_timeout=60, timeout=300), {}, 60),
        (AdmissionSettings(timeout=300, target_timeout=45), {}, 45),
    ],
)
async def test_a_request_waits_for_a_target_as_long_as_it_has_or_as_is_set(settings, fields, seconds) -> None:
    generator = fake()
    async with in_memory(generator, ApiSettings(admission=settings)) as client:
        assert (await client.post("/v1/completions", json=ASKED | fields)).status_code == 200
    assert [generation.timeout for generation in generator.generations] == [seconds]


async def test_in_a_stream_the_end_of_its_time_is_an_event() -> None:
    script = commits(shared().encode("hello", special=False), (1,))
    generator = FakeGenerator(lambda _: script, model=model(), hang=True)
    async with in_memory(generator) as client:
        *chunks, last = events(await ask(client, stream=True, timeout=2.0, n=2))
    assert {chunk["choices"][0]["text"] for chunk in chunks}
    assert last["error"]["code"] == "timeout"
    assert generator.running == 0


async def test_a_request_in_time_is_not_disturbed() -> None:
    async with in_memory(fake(), ApiSettings(admission=AdmissionSettings(timeout=30, max_timeout=60))) as client:
        assert (await ask(client, timeout=60)).json()["choices"][0]["text"] == TEXT


@pytest.mark.parametrize(
    ("fields", "headers", "param", "words"),
    [
        ({"timeout": 0}, {}, "timeout", "timeout must be a number from 0.001 to 86400, got 0"),
        ({"timeout": -1}, {}, "timeout", "timeout must be a number from 0.001"),
        ({"timeout": "5"}, {}, "timeout", 'timeout must be a number from 0.001 to 86400, got "5"'),
        ({"timeout": 61}, {}, "timeout", "timeout must be at most 60 seconds here, got 61"),
        ({}, {"x-request-timeout": "soon"}, "x-request-timeout", "must be seconds from 0.001 to 86400, got 'soon'"),
        ({}, {"x-request-timeout": "nan"}, "x-request-timeout", "must be seconds"),
        ({}, {"x-request-timeout": "9" * 999}, "x-request-timeout", "must be seconds"),
    ],
)
async def test_a_time_that_makes_no_sense_is_refused(fields, headers, param, words) -> None:
    generator = fake()
    async with in_memory(generator, ApiSettings(admission=AdmissionSettings(max_timeout=60))) as client:
        answer = await client.post("/v1/completions", json=ASKED | fields, headers=headers)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert words in error["message"]
    assert not generator.generations


# Sizes


async def test_megabytes_are_refused_without_being_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "a" * (4 << 20)
    encode = Tokenizer.encode

    def only_short_ones(self: Tokenizer, text: str, **how: bool) -> tuple[int, ...]:
        assert len(text) < 1 << 16
        return encode(self, text, **how)

    monkeypatch.setattr(Tokenizer, "encode", only_short_ones)
    many = [{"role": "user", "content": [{"type": "text", "text": "b" * 40_000}] * 3}] * 2

    async with in_memory(fake(), ApiSettings(max_body_bytes=8 << 20)) as client:
        for path, body, param in (
            ("/v1/completions", {"prompt": text}, "prompt"),
            ("/v1/completions", {"prompt": ["hi", text]}, "prompt"),
            ("/v1/chat/completions", {"messages": many}, "messages"),
        ):
            answer = await client.post(path, json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", param)
            assert "characters" in error["message"]


async def test_what_may_fit_is_tokenised() -> None:
    assert CONTEXT * shared().longest < ALWAYS_READ
    async with in_memory(fake()) as client:
        error = (await ask(client, prompt="a" * ALWAYS_READ)).json()["error"]
        assert f"{ALWAYS_READ + 1} tokens" in error["message"]
        messages = [{"role": "user", "content": "x"}] * (MAX_MESSAGES + 1)
        error = (await client.post("/v1/chat/completions", json={"messages": messages})).json()["error"]
        assert (error["code"], error["param"]) == ("invalid_value", "messages")
        assert f"messages has {MAX_MESSAGES + 1} entries" in error["message"]


@pytest.mark.parametrize("drips", [False, True])
async def test_a_body_that_does_not_come_is_not_waited_for(drips, monkeypatch) -> None:
    """Nor one of which a little comes again and again."""
    monkeypatch.setattr(asgi, "BODY_SECONDS", 0.05)

    async def never():
        yield b'{"prompt": '
        while drips:
            await asyncio.sleep(asgi.BODY_SECONDS / 10)
            yield b" "
        await asyncio.get_running_loop().create_future()

    async with in_memory(fake()) as client, asyncio.timeout(60):
        answer = await client.post("/v1/completions", content=never())
    assert (answer.status_code, answer.json()["error"]["code"]) == (408, "request_timeout")
    assert answer.headers["connection"] == "close"


@pytest.fixture
def bounded() -> Iterator[tuple[str, int]]:
    """Host and port of a server as the router runs it."""
    with serve(fake(), shared(), http=BoundedHttp) as url:
        host, port = url.removeprefix("http://").split(":")
        yield host, int(port)


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\nhost: x\r\nx-long: " + b"a" * 4 * MAX_HEAD_BYTES,
        b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"x-many: aaaaaaaaaa\r\n" * (MAX_HEAD_BYTES // 5),
        b"GET /" + b"a" * 4 * MAX_HEAD_BYTES,
    ],
)
def test_a_head_without_end_is_refused(bounded: tuple[str, int], head: bytes) -> None:
    with socket.create_connection(bounded, timeout=10) as connection:
        answer = b""
        try:
            for start in range(0, len(head), 16 << 10):
                connection.sendall(head[start : start + (16 << 10)])
            while data := connection.recv(4096):
                answer += data
        except ConnectionError:  # refused while we were still sending
            pass
    assert answer == b"" or answer.startswith(b"HTTP/1.1 400 ")
    with socket.create_connection(bounded, timeout=10) as connection:
        for _ in range(3):  # several requests over one connection, each with a long head and a body
            connection.sendall(
                b"POST /nowhere HTTP/1.1\r\nhost: x\r\nx-long: "
                + b"a" * (MAX_HEAD_BYTES // 2)
                + b"\r\ncontent-length: 4\r\n\r\nbody"
            )
            answered = http.client.HTTPResponse(connection)
            answered.begin()
            assert answered.status == 404 and answered.read()


UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nuPGRADE: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABk\r\n"
SAID = b"a\r\nUpgrade: x\r\n\r\nupgrade: y"


def offering(body: bytes, *, chunked: bool) -> bytes:
    """A request that offers to go on in another protocol."""
    head = b"POST /upgrade: HTTP/1.1\r\nhost: x\r\nx-other:\tUpgrade: z\r\n" + UPGRADE
    if chunked:
        first, rest = body[:2], body[2:]
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (first, rest, b""))
        return head + b"transfer-encoding: chunked\r\n\r\n" + chunks
    return head + b"content-length: %d\r\n\r\n%b" % (len(body), body)


async def repeat(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers what it heard: a header, the path and the body."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message["more_body"]
    heard = b"%b %b %b" % (dict(scope["headers"])[b"x-other"], scope["raw_path"], body)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(heard))]})
    await send({"type": "http.response.body", "body": heard})


@pytest.fixture
async def repeating() -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to a server that repeats bodies, over a real socket."""
    config, state = server_config(repeat, "127.0.0.1", 0), ServerState()
    server = await asyncio.get_running_loop().create_server(lambda: BoundedHttp(config, state, {}), "127.0.0.1", 0)
    async with server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
        yield reader, writer
        writer.close()


async def heard(reader: asyncio.StreamReader) -> bytes:
    """The next answer's body."""
    async with asyncio.timeout(10):
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        return await reader.readexactly(int(length.partition(b":")[2]))


WHOLE = b"Upgrade: z /upgrade: " + SAID


@pytest.mark.parametrize("chunked", [False, True])
async def test_an_offer_to_upgrade_is_passed_over_and_bodies_are_as_they_came(repeating: Any, chunked: bool) -> None:
    reader, writer = repeating
    request = offering(SAID, chunked=chunked)
    for at in range(len(request)):
        writer.write(request[:at])
        await asyncio.sleep(0)  # read for itself, most of the times
        await asyncio.sleep(0)
        writer.write(request[at:])
        assert await heard(reader) == WHOLE, request[:at]
    for at in range(len(request)):
        writer.write(request[at : at + 1])
        await asyncio.sleep(0.001)
    assert await heard(reader) == WHOLE
    writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nx-other: 1\r\n" + UPGRADE + b"\r\n" + request)
    assert [await heard(reader) for _ in range(2)] == [b"1 / ", WHOLE]


async def test_a_head_too_large_is_refused_also_where_it_offers_to_upgrade(repeating: Any) -> None:
    reader, writer = repeating
    writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n" + b"Upgrade: h2c\r\n" * (MAX_HEAD_BYTES // 14 + 1))
    assert b"headers are larger than" in await heard(reader)


# Pages of other origins

ORIGIN = "https://app.example.org"
PREFLIGHT = {
    "origin": ORIGIN,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-lang",
}


def open_to(tmp_path, *origins: str) -> ApiSettings:
    path = tmp_path / "keys"
    path.write_text(f"alice: {KEY}\n")
    return ApiSettings(api_keys=ApiKeys(path), admission=AdmissionSettings(cors_origins=origins))


async def test_a_page_may_ask_from_its_origin_with_a_key(tmp_path) -> None:
    async with in_memory(fake(), open_to(tmp_path, "http://localhost:3000", ORIGIN)) as client:
        preflight = await client.options("/v1/chat/completions", headers=PREFLIGHT)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == ORIGIN
        assert "authorization" in preflight.headers["access-control-allow-headers"]
        for key, status in ((KEY, 200), (OTHER, 401)):
            headers = {"origin": ORIGIN, "authorization": f"Bearer {key}"}
            answer = await client.post("/v1/completions", json=ASKED, headers=headers)
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == ORIGIN
            assert "x-request-id" in answer.headers["access-control-expose-headers"]
            assert "access-control-allow-credentials" not in answer.headers


async def test_pages_of_other_origins_may_not(tmp_path) -> None:
    async with in_memory(fake(), open_to(tmp_path, ORIGIN)) as client:
        preflight = await client.options("/v1/completions", headers=PREFLIGHT | {"origin": "https://evil.example"})
        assert preflight.status_code == 400
        assert "access-control-allow-origin" not in preflight.headers


async def test_without_origins_there_is_no_cors(tmp_path) -> None:
    async with in_memory(fake(), open_to(tmp_path)) as client:
        assert (await client.options("/v1/completions", headers=PREFLIGHT)).status_code == 401
        headers = {"origin": ORIGIN, "authorization": f"Bearer {KEY}"}
        answer = await client.post("/v1/completions", json=ASKED, headers=headers)
    assert answer.status_code == 200
    assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize("site", [{"sec-fetch-site": "cross-site"}, {"sec-fetch-site": "same-site"}, {}])
async def test_without_keys_a_browser_posts_for_no_page_of_another_origin(site: dict[str, str]) -> None:
    """It asks nobody before it sends a plain text, which may be JSON; over HTTP to another machine it names no site."""
    generator = fake()
    headers = {"content-type": "text/plain", "origin": "https://evil.example", **site}
    async with in_memory(generator, ApiSettings(admission=AdmissionSettings(cors_origins=(ORIGIN,)))) as client:
        refused = await client.post("/v1/completions", content=json.dumps(ASKED), headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "permission_denied")
        assert not generator.generations
        for other in ({"origin": ORIGIN}, {"sec-fetch-site": "same-origin"}, {"content-type": "application/json"}):
            answer = await client.post("/v1/completions", content=json.dumps(ASKED), headers={**headers, **other})
            assert answer.status_code == 200
        assert (await client.get("/v1/models", headers=headers)).status_code == 200  # links lead there
        for own in ({"origin": f"http://{client.base_url.netloc.decode()}"}, {}):
            plain = {"content-type": "text/plain", **own}
            answer = await client.post("/v1/completions", content=json.dumps(ASKED), headers=plain)
            assert answer.status_code == 200


async def test_a_key_or_any_origin_lets_every_page_post(tmp_path: Path) -> None:
    headers = {"sec-fetch-site": "cross-site", "origin": "https://any.example", "authorization": f"Bearer {KEY}"}
    for settings in (open_to(tmp_path), ApiSettings(admission=AdmissionSettings(cors_origins=("*",)))):
        async with in_memory(fake(), settings) as client:
            assert (await client.post("/v1/completions", json=ASKED, headers=headers)).status_code == 200
