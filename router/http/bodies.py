"""Bodies of requests: bounded each and all together, and in time.

Knows nothing of what they say.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.requests import Request

from router.errors import ApiError

BODY_SECONDS = 60.0
"""In which a body must have come."""


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
