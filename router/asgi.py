"""What the framework leaves to us: bounded bodies, clients that vanish, event streams, request ids.

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

from router.errors import ApiError

T = TypeVar("T")

REQUEST_ID_HEADER = "x-request-id"
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


async def read_body(request: Request, most: int) -> bytes:
    """The body, if it has at most ``most`` bytes; a longer one is not read to its end.

    Raises :class:`ApiError`, or ``ClientDisconnect`` when the client leaves meanwhile.
    """
    refusal = ApiError("body_too_large", f"the body is larger than {most} bytes")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > most:
        raise refusal
    parts = bytearray()
    async for part in request.stream():
        parts += part
        if len(parts) > most:
            raise refusal
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

    def __init__(self, events: AsyncGenerator[bytes]) -> None:
        """Takes over ``events``."""
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._events = events

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events, or as many as the client waits for."""
        async with aclosing(self._events):
            with suppress(ClientDisconnect):
                await while_connected(receive, self.stream_response(send))


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
