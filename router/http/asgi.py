"""What the framework leaves to us: bounded heads and bodies, clients that vanish, errors, event streams, request ids.

Decides that work stops when its client has gone. Knows nothing of what requests say.
"""

from __future__ import annotations

import asyncio
import math
import re
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping
from contextlib import aclosing, contextmanager, suppress
from typing import Any, TypeVar

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from router.answers import responses
from router.errors import ApiError

T = TypeVar("T")

REQUEST_ID_HEADER = "x-request-id"
MAX_HEAD_BYTES = 64 << 10
"""Of the request line and the headers."""
MAX_AHEAD = 8
"""Requests that a client sends before the one under way is answered, while its connection is read."""
HEAD_SECONDS = 60.0
"""In which they must have come, from the connection's or the head's first byte on."""
STALL_SECONDS = 60.0
"""After which a client that has taken nothing of what is sent to it is gone."""
LAST_WORD_SECONDS = 5.0
"""For a client to take each of the last events once its time is over."""
MAX_DRAINED_BYTES = 16 << 20
DRAIN_SECONDS = 10.0
"""What is still taken, and dropped, of a body that was refused: a connection that is closed before is reset, and a
client that sends first and reads then never sees why."""
DIRECT = "direct"
"""The name, in a request's state, of what sends past all middleware, which looks at how an answer begins alone."""
CUT = "cut"
"""The name, in a request's state, of what ends its connection at once."""
TOLD = "headers"
"""Of what gives the headers that every response to it has besides."""
_UPGRADE = b"upgrade:"
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run ``work``, or cancel it and raise ``ClientDisconnect`` when the client, whose body was read, goes first."""
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def refusal(
    error: ApiError, headers: Mapping[str, str] | None = None, wait: float | None = None, *, closing: bool = False
) -> Response:
    """An answer that is an error. ``wait``: seconds after which to try again, where the error does not say.

    ``closing``: the body was not read to its end, so nothing else can come over this connection.
    """
    code, wait = error.code, error.retry_after or wait
    told = {**(headers or {}), "x-should-retry": "true" if code.retryable else "false"}
    if code.retryable and wait is not None:
        told["retry-after"] = str(math.ceil(wait))
    if closing:
        told["connection"] = "close"
    return JSONResponse(responses.error_body(error), code.status, told)


class EventStream(StreamingResponse):
    """Server-sent events. When the client goes, the generator is closed before anything else happens.

    Starlette's own response cancels the task that iterates, which leaves a generator that was waiting to be
    asked to the garbage collector. A client that does not read is cut off when its time is over.
    """

    def __init__(self, events: AsyncGenerator[bytes], source: AsyncGenerator[Any], end: float | None = None) -> None:
        """Takes over ``events``, and what they are made from: a generator that was never asked closes nothing.

        ``end``: when the request's time is over, on the event loop's clock.
        """
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._events, self._source = events, source
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events, or as many as the client waits for."""
        direct = scope["state"].pop(DIRECT, send)
        try:
            async with aclosing(self._source), aclosing(self._events):
                await while_connected(receive, self._stream(self._bounded(send), self._bounded(direct)))
        except ClientDisconnect:
            pass
        except TimeoutError:
            if cut := scope["state"].get(CUT):
                cut()
                await _disconnected(receive)

    async def _stream(self, begin: Send, send: Send) -> None:
        await begin({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for data in self._events:
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body"})

    def _bounded(self, send: Send) -> Send:
        """The same, but for no longer than the request has, and a last word takes."""
        end = self._end
        if end is None:
            return send

        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout_at(max(end, asyncio.get_running_loop().time() + LAST_WORD_SECONDS)):
                await send(message)

        return send_in_time


class BoundedHttp(HttpToolsProtocol):
    """A connection whose request line and headers are not read beyond :data:`MAX_HEAD_BYTES`; uvicorn sets no bound.

    The same bound holds for what a chunked body has beside its data: extensions of chunks, and trailers, which are
    dropped.

    It never upgrades: an offer to, which some clients make with every request (``Upgrade: h2c``), is read under another
    name, or the parser would take the body for the other protocol's. What comes in one read with the end of another
    request's body is neither counted nor renamed, nor taken up either; a read has at most 256 KiB.
    """

    _running: RequestResponseCycle | None = None
    """What is being answered; uvicorn itself knows the last of the requests that have come, and tells that one alone
    when the client leaves."""
    _head: int | None = 0
    """Bytes of the head so far; None while a body is read."""
    _beside = 0
    _headless: asyncio.TimerHandle | None = None
    """Runs while a head is waited for; between two requests, once something has come."""
    _stalled: asyncio.TimerHandle | None = None
    _line_begins = True
    """Whether the next byte of a head is the first one of a line."""
    _held = b""
    """What a line began with that may become an upgrade's name."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """A client has come."""
        super().connection_made(transport)
        self._await_head()

    def _await_head(self) -> None:
        self._headless = self._headless or self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def data_received(self, data: bytes) -> None:
        """Bytes from the client."""
        if self.cycle is None or self.cycle.response_complete:
            self._await_head()
        data, self._held = self._held + data, b""
        at = 0
        while at < len(data) and self._head is not None and not self.transport.is_closing():
            end = data.find(b"\n", at) + 1 or len(data)
            line, at = data[at:end], end
            if self._line_begins and len(line) < len(_UPGRADE) and _UPGRADE.startswith(line.lower()):
                self._held = line
                return
            if self._line_begins and line[: len(_UPGRADE)].lower() == _UPGRADE:
                line = b"x-" + line
            self._head += len(line)
            if self._head > MAX_HEAD_BYTES:
                self.send_400_response(f"The request line and the headers are larger than {MAX_HEAD_BYTES} bytes.")
                return
            super().data_received(line)
            self._line_begins = line.endswith(b"\n")
        if at < len(data) and not self.transport.is_closing():
            self._body_received(data[at:])

    def _unsupported_upgrade_warning(self) -> None:
        """Say nothing: it would be two lines of log for every offer that is not renamed."""

    def _body_received(self, data: bytes) -> None:
        self._beside += len(data)
        super().data_received(data)
        self._line_begins = self._line_begins or data.endswith(b"\n")
        if self._beside <= MAX_HEAD_BYTES or self.transport.is_closing():
            return
        if self.cycle.response_started:
            self.transport.close()
        else:
            self.send_400_response(f"What a chunked body has beside its data is larger than {MAX_HEAD_BYTES} bytes.")

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._head = self._head or 0
        self._line_begins = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """One of its headers, or a trailer."""
        if self._head is not None:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Its headers are all there."""
        if self._headless is not None:
            self._headless.cancel()
            self._headless = None
        self.scope["state"][CUT] = self.transport.abort
        super().on_headers_complete()
        if 0 < len(self.pipeline) <= MAX_AHEAD:
            self.flow.resume_reading()  # or nobody would notice that the client leaves
        self._head, self._beside = None, 0

    def on_body(self, body: bytes) -> None:
        """Some of its data."""
        super().on_body(body)
        self._beside = 0

    def on_message_complete(self) -> None:
        """It has come completely."""
        super().on_message_complete()
        self._head, self._beside = 0, 0
        self._line_begins = True

    def pause_writing(self) -> None:
        """The client has more to take than it should."""
        super().pause_writing()
        self._watch_writing()

    def _watch_writing(self) -> None:
        left = self.transport.get_write_buffer_size()
        self._stalled = self.loop.call_later(STALL_SECONDS, self._check_writing, left)

    def _check_writing(self, before: int) -> None:
        if self.transport.get_write_buffer_size() < before:
            self._watch_writing()
        else:
            self.transport.abort()

    def resume_writing(self) -> None:
        """It has taken enough."""
        super().resume_writing()
        self._stop_watching()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        super().connection_lost(exc)
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        self._stop_watching()
        if self._headless is not None:
            self._headless.cancel()

    def _stop_watching(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None


class HttpEdge:
    """Middleware around all others.

    Every request has an id, the client's own if it is sane, and every response names it, and what :data:`TOLD` of
    ``request.state`` gives. What is refused before its body has come is answered at once, and ends with the body.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Put the id into ``request.state.request_id``. See :data:`MAX_DRAINED_BYTES`."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Request(scope).headers.get(REQUEST_ID_HEADER, "")
        state = scope.setdefault("state", {})
        state[DIRECT] = send
        request_id = state["request_id"] = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        # Who asks before it sends a body sends none once it is refused.
        more, refused = all(name != b"expect" for name, _ in scope["headers"]), False

        async def listen() -> Message:
            nonlocal more
            message = await receive()
            more = bool(message.get("more_body"))
            return message

        async def drain() -> None:
            drained = 0
            with suppress(TimeoutError):
                async with asyncio.timeout(DRAIN_SECONDS):
                    while more and drained < MAX_DRAINED_BYTES:
                        drained += len((await listen()).get("body", b""))

        async def answer(message: Message) -> None:
            nonlocal refused
            if message["type"] == "http.response.start":
                refused = message["status"] >= 400
                told = state[TOLD]() if TOLD in state else {}
                MutableHeaders(scope=message).update({REQUEST_ID_HEADER: request_id, **told})
            elif refused and more and not message.get("more_body"):
                await send({**message, "more_body": True})
                await drain()
                message = {"type": "http.response.body"}
            await send(message)

        await self._app(scope, listen, answer)


BODY_SECONDS = 60.0
"""In which a body must have come."""


class BodyBudget:
    """Room for the bodies that are being read or parsed, of all requests together; a key has at most half of it."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self.held = max_bytes, 0
        self._held_by: Counter[str] = Counter()

    @contextmanager
    def share(self, caller: str = "") -> Iterator[Callable[[int], None]]:
        """What takes so many bytes more; they are given back at the end of the block. ``caller``: name of the key.

        Raises :class:`ApiError` at once where nothing is left, and later in place of what goes beyond.
        """
        taken = 0

        def take(more: int) -> None:
            nonlocal taken
            if self.held + more > self._max_bytes:
                raise ApiError("overloaded", f"{self._max_bytes} bytes of requests are being read; try again later")
            if caller and self._held_by[caller] + more > self._max_bytes // 2:
                most = f"{self._max_bytes // 2} bytes of requests of this API key are being read"
                raise ApiError("overloaded", f"{most}; try again later")
            self.held += more
            self._held_by[caller] += more
            taken += more

        try:
            take(1)
            yield take
        finally:
            self.held -= taken
            self._held_by[caller] -= taken


async def read_body(request: Request, max_bytes: int, take: Callable[[int], None]) -> bytes:
    """The body, if it has at most ``max_bytes`` bytes and comes in time; a longer one is not read to its end.

    ``take``: see :class:`BodyBudget`. Raises :class:`ApiError`, or ``ClientDisconnect`` when the client leaves.
    """
    too_large = ApiError("body_too_large", f"the body is larger than {max_bytes} bytes")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > max_bytes:
        raise too_large
    parts = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                if len(parts) + len(part) > max_bytes:
                    raise too_large
                take(len(part))
                parts += part
    except TimeoutError:
        raise ApiError("request_timeout", f"the body did not come within {BODY_SECONDS:g} s") from None
    return bytes(parts)
