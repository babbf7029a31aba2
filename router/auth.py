"""API keys: who may use the HTTP API, read from a file and again when it changes.

The file has one key a line, bare or as ``NAME: KEY``; empty lines and lines that begin with ``#`` say nothing. Logs
and limits know a key by its name, or the number of its line; the key itself is never shown, and only its hash is kept.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from router import responses
from router.errors import CODES, ErrorCode

log = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})
"""Answered without a key: for probes and scrapers, which say nothing of any request."""
LOOK_SECONDS = 1.0
"""How often the file is looked at, at most; only when a request comes."""
FILE_BYTES = 1 << 20
MOST_KEYS = 1000
"""Every one is compared with what a request brings."""
REFUSAL = CODES["invalid_api_key"]
SHORTEST_KEY = 16
"""Characters; less can be guessed."""

_LINE = re.compile(r"(?:(?P<name>[\w.@ -]{1,64}):\s*)?(?P<key>[A-Za-z0-9._~+/=-]+)")


class KeyFileError(Exception):
    """A key file that cannot be used. One line that names the file, and no key."""


class ApiKeys:
    """The keys of a file. Used from one thread."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Reads the file; raises :class:`KeyFileError`."""
        self._path, self._clock = path, clock
        self._seen = _version(path)
        self._keys = _digests(path)
        self._looked = clock()

    def name_of(self, key: str) -> str | None:
        """Whose key this is; None if nobody's. Takes the same time for every key of a length."""
        self._look()
        digest, found = _digest(key), None
        for known, name in self._keys.items():
            if hmac.compare_digest(known, digest):
                found = name
        return found

    def _look(self) -> None:
        """Read the file again if it changed; what cannot be used is reported once, and changes nothing."""
        now = self._clock()
        if now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        version = _version(self._path)
        if version == self._seen:
            return
        self._seen = version
        try:
            self._keys = _digests(self._path)
            log.info("read %d API keys from %s", len(self._keys), self._path)
        except KeyFileError as error:
            log.error("API keys %s; the earlier keys stay valid", error)


class RequireKey:
    """Middleware: no request passes without a known key, except to :data:`OPEN_PATHS`."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, refused: Callable[[ErrorCode], None]) -> None:
        """Wraps ``app``. ``refused`` hears of every answer given here."""
        self._app, self._keys, self._refused = app, keys, refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Put the key's name into ``request.state.api_key_name``, or answer with status 401."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        scheme, _, key = Request(scope).headers.get("authorization", "").partition(" ")
        given = key.strip() if scheme.lower() == "bearer" else ""
        name = self._keys.name_of(given) if given else None
        if name is None:
            self._refused(REFUSAL)
            await _refusal(given=bool(given))(scope, receive, send)
            return
        scope.setdefault("state", {})["api_key_name"] = name
        await self._app(scope, receive, send)


def _refusal(*, given: bool) -> Response:
    message = "this API key is not known here" if given else "give an API key in a header: 'Authorization: Bearer KEY'"
    headers = {
        "www-authenticate": 'Bearer error="invalid_token"' if given else "Bearer",
        "x-should-retry": "false",
        # The body was not read, so nothing else can come over this connection.
        "connection": "close",
    }
    body = responses.encode(responses.error_body(REFUSAL, message))
    return Response(body, REFUSAL.status, headers, media_type="application/json")


def _version(path: Path) -> tuple[int, ...] | None:
    """Differs when the file was written or replaced; None if there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def read_keys(path: Path) -> dict[str, str]:
    """The names of all keys in a file, by key. Raises :class:`KeyFileError`."""
    try:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES + 1)
    except OSError as error:
        raise KeyFileError(f"{path}: cannot be read: {error.strerror}") from error
    if len(content) > FILE_BYTES:
        raise KeyFileError(f"{path}: is larger than {FILE_BYTES} bytes")
    try:
        text = content.decode("ascii")
    except UnicodeDecodeError as error:
        raise KeyFileError(f"{path}: is not ASCII text") from error
    keys = _parsed(path, text)
    if not keys:
        raise KeyFileError(f"{path}: has no keys; write one on each line, such as `openssl rand -hex 32` prints")
    if len(keys) > MOST_KEYS:
        raise KeyFileError(f"{path}: has {len(keys)} keys, more than {MOST_KEYS}")
    return keys


def _parsed(path: Path, text: str) -> dict[str, str]:
    lines: dict[str, int] = {}
    keys: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise KeyFileError(f"{path}: line {number} is neither KEY nor NAME: KEY, of letters, digits and ._~+/=-")
        key = match["key"]
        if len(key) < SHORTEST_KEY:
            raise KeyFileError(f"{path}: the key in line {number} is shorter than {SHORTEST_KEY} characters")
        if key in lines:
            raise KeyFileError(f"{path}: line {number} has the same key as line {lines[key]}")
        lines[key] = number
        keys[key] = match["name"] or f"line {number}"
    return keys


def _digests(path: Path) -> dict[bytes, str]:
    return {_digest(key): name for key, name in read_keys(path).items()}


def _digest(key: str) -> bytes:
    """Of one length, so that comparing takes the same time for every key."""
    return hashlib.sha256(key.encode()).digest()
