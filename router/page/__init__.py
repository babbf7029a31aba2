"""The page at ``/``: a playground, a timeline and a view of the cluster, as static files beside this module.

Decides under which paths they are found, and that a browser takes nothing from elsewhere for them. Knows nothing of the
API that the page talks to.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FOLDER = Path(__file__).parent
PREFIX = "/page/"
MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""What is served, by suffix, and as what."""
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


@dataclass(frozen=True, slots=True)
class Asset:
    """One file, as it is sent."""

    content: bytes
    media_type: str
    tag: str
    """Its ETag: a digest of the content, in quotes."""

    def answer(self, request: Request) -> Response:
        """The file, or status 304 where the browser has it."""
        headers = {**HEADERS, "etag": self.tag}
        known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
        if self.tag in known or known == ["*"]:
            return Response(status_code=304, headers=headers)
        return Response(self.content, headers={**headers, "content-type": self.media_type})


def _read() -> dict[str, Asset]:
    """All files by path; they are few and small, so they stay in memory."""
    assets = {}
    for file in sorted(FOLDER.iterdir()):
        if file.suffix in MEDIA_TYPES:
            content = file.read_bytes()
            tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            path = "/" if file.name == "index.html" else PREFIX + file.name
            assets[path] = Asset(content, MEDIA_TYPES[file.suffix], tag)
    return assets


ASSETS = _read()
PATHS = frozenset(ASSETS)
"""They hold no secrets, so they are answered without an API key: the page asks for one."""


def routes() -> list[Route]:
    """One for each file."""
    return [Route(path, _endpoint(asset), methods=["GET"]) for path, asset in ASSETS.items()]


def _endpoint(asset: Asset) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        return asset.answer(request)

    return answer
