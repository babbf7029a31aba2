"""A client that notes when events come and does nothing else, so that it is not what is measured.

One connection, one request after another, chunked answers of an event or more a read.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from dataclasses import dataclass, field

from router.asgi import REQUEST_ID_HEADER

EVENT, LAST = b"data: ", b"data: [DONE]\n\n"
SECONDS = 120.0
"""In which an answer must be complete."""


class BadAnswer(Exception):
    """The server did not stream. One line."""


@dataclass(slots=True)
class Heard:
    """One request as its client saw it. Times of the clock that all processes of a machine share."""

    request_id: str
    sent: float
    events: list[float] = field(default_factory=list)
    """When each event came, the last (which only says that it is the last) left out."""


class Connection:
    """A connection that is kept."""

    def __init__(self, port: int, body: dict[str, object]) -> None:
        """``body``: of every request."""
        self._port = port
        self._body = json.dumps(body).encode()

    async def __aenter__(self) -> Connection:
        """Connect."""
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Disconnect."""
        self._writer.close()
        await self._writer.wait_closed()

    async def ask(self) -> Heard:
        """One request, to its end. Raises :class:`BadAnswer`, TimeoutError."""
        heard = Heard(uuid.uuid4().hex, time.monotonic())
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: paceline\r\ncontent-type: application/json\r\n"
            f"content-length: {len(self._body)}\r\n{REQUEST_ID_HEADER}: {heard.request_id}\r\n\r\n"
        )
        self._writer.write(head.encode() + self._body)
        async with asyncio.timeout(SECONDS):
            status = await self._reader.readuntil(b"\r\n\r\n")
            if b" 200 " not in status.split(b"\r\n", 1)[0]:
                raise BadAnswer(status.split(b"\r\n", 1)[0].decode(errors="replace"))
            while True:
                length = int(await self._reader.readuntil(b"\r\n"), 16)
                chunk = await self._reader.readexactly(length + 2)
                if not length:
                    return heard
                now = time.monotonic()
                heard.events += [now] * (chunk.count(EVENT) - chunk.count(LAST))
