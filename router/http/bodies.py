"""Bodies of requests: bounded each and all together, in time, and taken a little further where they are refused.

Knows nothing of what they say.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.errors import ApiError

BODY_SECONDS = 60.0
"""In which a body must have come."""
MAX_DRAINED_BYTES = 16 << 20
DRAIN_SECONDS = 10.0
"""What is still taken, and dropped, of a body that was refused: a connection that is closed before is reset, and a
client that sends first and reads then never sees why."""


class BodyBudget:
    """Room for the bodies that are being read or parsed, of all requests together."""

    def __init__(self, max_bytes: int) -> None:
        """All of it is free."""
        self._max_bytes, self.held = max_bytes, 0

    @contextmanager
    def share(self) -> Iterator[Callable[[int], None]]:
        """What takes so many bytes more; they are given back at the end of the block.

        Raises :class:`ApiError` at once where nothing is left, and later in place of what goes beyond.
        """
        taken = 0

        def take(more: int) -> None:
            nonlocal taken
            if self.held + more > self._max_bytes:
                raise ApiError("overloaded", f"{self._max_bytes} bytes of requests are being read; try again later")
            self.held += more
            taken += more

        try:
            take(1)
            yield take
        finally:
            self.held -= taken


async def read_body(request: Request, max_bytes: int, take: Callable[[int], None]) -> bytes:
    """The body, if it has at most ``max_bytes`` bytes and comes in time; a longer one is not read to its end.

    ``take``: see :class:`BodyBudget`. Raises :class:`ApiError`, or ``ClientDisconnect`` when the client leaves
    meanwhile.
    """
    refusal = ApiError("body_too_large", f"the body is larger than {max_bytes} bytes")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > max_bytes:
        raise refusal
    parts = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                if len(parts) + len(part) > max_bytes:
                    raise refusal
                take(len(part))
                parts += part
    except TimeoutError:
        raise ApiError("request_timeout", f"the body did not come within {BODY_SECONDS:g} s") from None
    return bytes(parts)


class DrainRefused:
    """Middleware: what is refused before its body has come is answered at once, and ends with the body."""

    def __init__(self, app: ASGIApp) -> None:
        """Wraps ``app``."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass it on; see :data:`MAX_DRAINED_BYTES`."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
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
            elif refused and more and not message.get("more_body"):
                await send({**message, "more_body": True})
                await drain()
                message = {"type": "http.response.body"}
            await send(message)

        await self._app(scope, listen, answer)
