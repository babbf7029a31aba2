"""The page at ``/``: a playground, a timeline and a view of the cluster, as static files beside this module.

Decides under which paths they are found, and that a browser takes nothing from elsewhere for them. Knows nothing of the
API that the page talks to.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

PREFIX = "/page/"
MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    # Kept by the browser, but asked for again: the tag tells in one round trip that nothing has changed.
    "cache-control": "no-cache",
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def _endpoint(content: bytes, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    """Answers with the file, or status 304 where the browser has it."""
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {**HEADERS, "etag": tag}

    async def answer(request: Request) -> Response:
        known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
        if tag in known or known == ["*"]:
            return Response(status_code=304, headers=headers)
        return Response(content, headers={**headers, "content-type": media_type})

    return answer


ROUTES = [
    Route(
        "/" if file.name == "index.html" else PREFIX + file.name,
        _endpoint(file.read_bytes(), MEDIA_TYPES[file.suffix]),  # they are few and small, so they stay in memory
        methods=["GET"],
    )
    for file in sorted(Path(__file__).parent.iterdir())
    if file.suffix in MEDIA_TYPES
]
PATHS = frozenset(route.path for route in ROUTES)
"""They hold no secrets, so they are answered without an API key: the page asks for one."""
