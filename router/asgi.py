"""What the framework leaves to us: bounded heads and bodies, clients that vanish, event streams, request ids.

Decides when a body is cut off and that work stops when its client has gone. Knows nothing of the API's
requests.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from router.errors import ApiError

T = TypeVar("T")

REQUEST_ID_HEADER = "x-request-id"
MOST_HEAD_BYTES = 64 << 10
"""Of the request line and the headers."""
BODY_SECONDS = 60.0
"""In which a body must have come."""
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


async def read_body(request: Request, most: int) -> bytes:
    """The body, if it has at most ``most`` bytes and comes in time; a longer one is not read to its end.

    Raises :class:`ApiError`, or ``ClientDisconnect`` when the client leaves meanwhile.
    """
    refusal = ApiError("body_too_large", f"the body is larger than {most} bytes")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > most:
        raise refusal
    parts = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                parts += part
                if len(parts) > most:
                    raise refusal
    except TimeoutError:
        raise ApiError("request_timeout", f"the body did not come within {BODY_SECONDS:g} s") from None
    return bytes(parts)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run ``work``, or cancel it and raise ``ClientDisconnect`` when the client goes first.

    The body must have been read.
    """
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


class EventStream(StreamingResponse):
    """Server-sent events. When the client goes, the generator is closed before anything else happens.

    Starlette's own response cancels the task that iterates, which leaves a generator that was waiting to be
    asked to the garbage collector.
    """

    def __init__(self, events: AsyncGenerator[bytes], source: AsyncGenerator[Any]) -> None:
        """Takes over ``events``, and what they are made from: a generator that was never asked closes nothing."""
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._events, self._source = events, source

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events, or as many as the client waits for."""
        async with aclosing(self._source), aclosing(self._events):
            with suppress(ClientDisconnect):
                await while_connected(receive, self.stream_response(send))


class BoundedHttp(HttpToolsProtocol):
    """A connection whose request line and headers are not read beyond :data:`MOST_HEAD_BYTES`; uvicorn sets no bound.

    What comes in one read with the end of another request is not counted; a read has at most 256 KiB.
    """

    _head: int | None = 0
    """Bytes of the head so far; None while a body is read."""

    def data_received(self, data: bytes) -> None:
        """Bytes from the client."""
        if self._head is not None:
            self._head += len(data)
        super().data_received(data)
        if self._head is not None and self._head > MOST_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The request line and the headers are larger than {MOST_HEAD_BYTES} bytes.")

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._head = self._head or 0

    def on_headers_complete(self) -> None:
        """Its headers are all there."""
        super().on_headers_complete()
        self._head = None

    def on_message_complete(self) -> None:
        """It has come completely."""
        super().on_message_complete()
        self._head = 0


class RequestIds:
    """Middleware: every request has an id, the client's own if it is sane, and every response names it."""

    def __init__(self, app: ASGIApp) -> None:
        """Wraps ``app``."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Put the id into ``request.state.request_id`` and the response's header."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Request(scope).headers.get(REQUEST_ID_HEADER, "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)
