"""What a connection to the router may cost: clients that send without end, that send nothing, that read nothing."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.server import ServerState

from router.generation import Committed
from router.http import asgi
from router.http.api import build_app
from router.http.asgi import MAX_HEAD_BYTES, BoundedHttp
from router.service import server_config
from tests.fakes import FakeGenerator, FakeTokenizers
from tests.integration.test_http_api import model, shared

PATIENCE = 60.0
"""Seconds that a test waits for what must come."""
CHUNKED = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
WEBSOCKET = b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-key: eA==\r\nsec-websocket-version: 13\r\n"
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def repeat(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers what it heard: the names of the headers, and the body."""
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body, more = body + message.get("body", b""), message["more_body"]
    heard = b" ".join([*(name for name, _ in scope["headers"]), body])
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(heard))]})
    await send({"type": "http.response.body", "body": heard})


async def at_once(_scope: Scope, _receive: Receive, send: Send) -> None:
    """Answers before the body has come."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@asynccontextmanager
async def connected(app: ASGIApp) -> AsyncIterator[Connection]:
    """A connection to a server as the router runs it, over a real socket."""
    config, state = server_config(app, "127.0.0.1", 0), ServerState()
    loop, listener, client = asyncio.get_running_loop(), socket.socket(), socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    listener.bind(("127.0.0.1", 0))
    server = await loop.create_server(lambda: BoundedHttp(config, state, {}), sock=listener)
    client.setblocking(False)
    async with server, asyncio.timeout(PATIENCE):
        await loop.sock_connect(client, listener.getsockname())
        reader, writer = await asyncio.open_connection(sock=client, limit=1 << 10)
        yield reader, writer
        writer.transport.abort()
        while state.connections:
            await asyncio.sleep(0.001)


async def heard(reader: asyncio.StreamReader) -> bytes:
    """The next answer's body."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    return await reader.readexactly(int(length.partition(b":")[2]))


async def everything(connection: Connection, part: bytes, times: int) -> bytes:
    """What comes while so much is sent, up to the end of the connection."""
    reader, writer = connection

    async def send() -> None:
        for _ in range(times):
            writer.write(part)
            await writer.drain()

    sending, answer = asyncio.create_task(send()), b""
    try:
        while data := await reader.read(1 << 16):
            answer += data
    except ConnectionError:  # closed while we were still sending
        pass
    await asyncio.gather(sending, return_exceptions=True)
    return answer


# Bodies in chunks


@pytest.mark.parametrize("app", [repeat, at_once])
@pytest.mark.parametrize(
    ("begun", "part"),
    [
        (b"0\r\n", b"x-a: bbbbbbbbbbbbbbbbbbbbbbbb\r\n" * 1000),
        (b"0\r\nx-a: ", b"b" * 30_000),
        (b"2\r\nab\r\n3;", b"e" * 30_000),
    ],
)
async def test_what_stands_beside_the_data_of_a_body_has_an_end(app: ASGIApp, begun: bytes, part: bytes) -> None:
    async with connected(app) as connection:
        connection[1].write(CHUNKED + begun)
        answer = await everything(connection, part, 100)
    assert answer.count(b"HTTP/1.1 ") <= 1
    if app is repeat:
        assert answer == b"" or (answer.startswith(b"HTTP/1.1 400 ") and b"chunked body" in answer)


async def test_trailers_are_dropped_and_small_chunks_go_on_without_end() -> None:
    async with connected(repeat) as (reader, writer):
        for _ in range(2):
            writer.write(CHUNKED)
            for _ in range(4):
                writer.write(b"1;extension=of-a-chunk\r\nb\r\n" * (MAX_HEAD_BYTES // 24))
                await asyncio.sleep(0.001)
            writer.write(b"0\r\nauthorization: x\r\nx-last: y\r\n\r\n")
            assert await heard(reader) == b"host transfer-encoding " + b"b" * (MAX_HEAD_BYTES // 24) * 4


# Connections without requests


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nhost: x\r\nu", b"\r\n"])
async def test_a_head_that_does_not_come_is_not_waited_for(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asgi, "HEAD_SECONDS", 0.05)
    async with connected(at_once) as (reader, writer):
        writer.write(sent)
        assert await reader.read() == b""
    if sent:
        monkeypatch.setattr(asgi, "HEAD_SECONDS", PATIENCE)
        async with connected(at_once) as (reader, writer):
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            assert await heard(reader) == b"ok"
            monkeypatch.setattr(asgi, "HEAD_SECONDS", 0.05)
            writer.write(sent)
            assert await reader.read() == b""


async def test_a_head_of_which_a_little_comes_again_and_again_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(asgi, "HEAD_SECONDS", 0.1)
    async with connected(at_once) as (reader, writer):

        async def drip() -> None:
            writer.write(b"GET / HTTP/1.1\r\nx-slow: ")
            while True:
                await asyncio.sleep(asgi.HEAD_SECONDS / 10)
                writer.write(b"a")

        dripping = asyncio.create_task(drip())
        with suppress(ConnectionError):
            assert await reader.read() == b""
        assert writer.transport.is_closing() or reader.at_eof()
        dripping.cancel()


async def test_an_answer_under_way_is_not_cut_for_a_head_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, answering = asyncio.Event(), asyncio.Event()

    async def later(scope: Scope, receive: Receive, send: Send) -> None:
        asked.set()
        await answering.wait()
        await at_once(scope, receive, send)

    async with connected(later) as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\nGET / HT")
        await asked.wait()
        monkeypatch.setattr(asgi, "HEAD_SECONDS", 0.01)
        writer.write(b"TP/1.1\r\n")
        await asyncio.sleep(0.05)
        answering.set()
        assert await heard(reader) == b"ok"


# Answers that nobody reads


def talkative() -> FakeGenerator:
    """Has more to say than any buffer takes."""
    served = replace(model(), context=1 << 20)
    return FakeGenerator(lambda _: (Committed((50 + n % 50,), 0, 0) for n in range(1 << 19)), model=served)


async def unread(connection: Connection, generator: FakeGenerator, **fields: object) -> None:
    """Ask for a long answer and read none of it, until it is over and the connection is gone."""
    reader, writer = connection
    asked = {"prompt": "hi", "max_tokens": 1 << 19, "ignore_eos": True, "stream": True, "n": 2, **fields}
    body = json.dumps(asked).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
    answer = await reader.readuntil(b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 "), "it was over before it began"
    while not generator.generations or generator.running:
        await asyncio.sleep(0.001)
    with suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            answer += data
    assert b"data: {" in answer
    assert b"[DONE]" not in answer


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("offer", [b"", WEBSOCKET], ids=["plain", "websocket"])
@pytest.mark.parametrize("requests", [1, 2, 3])
async def test_a_client_that_leaves_is_noticed_whatever_it_has_sent_ahead(
    requests: int, offer: bytes, late: bool, caplog: pytest.LogCaptureFixture
) -> None:
    begun: list[str] = []
    left = asyncio.Event()

    async def waits(scope: Scope, receive: Receive, _send: Send) -> None:
        begun.append(scope["path"])
        while (await receive())["type"] != "http.disconnect":
            pass
        left.set()

    async with connected(waits) as (_, writer):
        ends = [b"content-length: 2\r\n\r\n{}", *[offer + b"\r\n"] * (requests - 1)]  # a body, as all bodies begin
        first, *others = [b"POST /%d HTTP/1.1\r\nhost: x\r\n%b" % (number, end) for number, end in enumerate(ends)]
        writer.write(first if late else b"".join([first, *others]))
        while not begun:
            await asyncio.sleep(0.001)
        if late:
            writer.write(b"".join(others))
            await asyncio.sleep(0.05)
        writer.transport.abort()
        await left.wait()
    assert begun == ["/0"] and not caplog.messages


async def test_a_client_that_does_not_read_has_no_more_time_than_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asgi, "LAST_WORD_SECONDS", 0.05)
    generator = talkative()
    async with connected(build_app(generator, FakeTokenizers(shared()))) as connection:
        await unread(connection, generator, timeout=5.0)


async def test_a_client_that_does_not_read_is_gone_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asgi, "STALL_SECONDS", 0.05)
    generator = talkative()
    async with connected(build_app(generator, FakeTokenizers(shared()))) as connection:
        await unread(connection, generator)


class Watched(asyncio.Transport):
    """A transport of which only the buffer's size is known."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self._sizes = list(sizes)
        self.aborted = False

    def get_write_buffer_size(self) -> int:
        return self._sizes.pop(0)

    def abort(self) -> None:
        self.aborted = True


async def test_a_client_that_reads_slowly_is_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asgi, "STALL_SECONDS", 0.0)
    config = server_config(repeat, "127.0.0.1", 0)
    for sizes in ((90, 80, 70, 70), (90, 80, 70, 60)):
        protocol, transport = BoundedHttp(config, ServerState(), {}), Watched(*sizes)
        protocol.connection_made(transport)
        protocol.pause_writing()
        async with asyncio.timeout(PATIENCE):
            while transport._sizes:
                await asyncio.sleep(0)
        assert transport.aborted == (sizes[-1] == 70)
        protocol.resume_writing()
        await asyncio.sleep(0.001)
