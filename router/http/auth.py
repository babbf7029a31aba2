"""API keys: who may use the HTTP API, read from a file and again when it changes.

The file has one key a line, bare or as ``NAME: KEY``, and behind it the key's own limits, as in
``alice: KEY requests_per_minute=60 tokens_per_minute=0`` (0: none); empty lines and lines that begin with ``#`` say
nothing. Logs, metrics and limits know a key by its name, or the number of its line; the key itself is never shown, and
only its hash is kept. Keys of one name share their limits, so that one can replace the other.

What the router tells of itself (:data:`OPERATORS_PATHS`) names all callers and how much they use. It wants a key; once
the file marks some as an operator's, with ``operator=1`` among its limits, only theirs.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from router import page
from router.errors import ApiError, ErrorCode
from router.http.asgi import refusal
from router.limits import LIMIT_NAMES
from transport.files import stamp

log = logging.getLogger(__name__)

PICKER_PATH = "/metrics/picker"
"""What the endpoint picker of an inference gateway reads, which presents no key: how full all targets are together."""
OPEN_PATHS = frozenset({"/health", "/ready", PICKER_PATH}) | page.PATHS
"""Answered without a key: for probes, pickers, and browsers, which then ask for it; they say nothing of any request or
holder."""
OPERATORS_PATHS = frozenset({"/metrics", "/cluster"})
"""Not for every key, where there are operators'."""
OPERATOR = "operator"
LOOK_SECONDS = 1.0
"""How often the file is looked at, at most; only when a request comes."""
FILE_BYTES = 1 << 20
MAX_KEYS = 1000
"""Every one is compared with what a request brings."""
SCOPE_CHARACTERS = 32
SHORTEST_KEY = 16
"""Characters; less can be guessed."""
_WANTED = "give an API key in a header: 'Authorization: Bearer KEY'"

_SECRET = secrets.token_bytes(32)
_LINE = re.compile(r"(?:(?P<name>[\w.@ -]{1,64}):\s*)?(?P<key>[A-Za-z0-9._~+/=-]+)(?P<limits>(?:\s+\w+=\S*)*)")
MAX_LIMIT = 1 << 40
"""That can be given to a key."""


class KeyFileError(Exception):
    """A key file that cannot be used. One line that names the file, and no key."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Whom a key belongs to."""

    name: str
    limits: Mapping[str, int] = field(default_factory=dict)
    """Its own, by the names of :class:`router.limits.Allowance`."""
    scope: str = ""
    """What stands for it at workers: a digest of the name. Without one the key is digested, with a secret of this
    process, since the number of a line may come to mean another key."""
    operator: bool = False
    """Whether it may see what others do."""


class ApiKeys:
    """The keys of a file. Used from one thread."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Reads the file; raises :class:`KeyFileError`."""
        self._path, self._clock = path, clock
        self._seen = self._told = stamp(path)
        """Of the file that was last read, and of the one that was last told of as of no use."""
        self._keys = self._read()
        self._looked = clock()

    def may_operate(self, holder: Holder) -> bool:
        """Whether it is for this holder what the router tells of itself."""
        return holder.operator or not any(known.operator for known in self._keys.values())

    def holder_of(self, key: str) -> Holder | None:
        """Whose key this is; None if nobody's. Takes the same time for every key of a length."""
        self._look()
        digest, found = _digest(key), None
        for known, holder in self._keys.items():
            if hmac.compare_digest(known, digest):
                found = holder
        return found

    def _read(self) -> dict[bytes, Holder]:
        return {_digest(key): holder for key, holder in read_keys(self._path).items()}

    def _look(self) -> None:
        """Read the file again if it changed; what cannot be used is told once, changes nothing, and is tried again."""
        now = self._clock()
        if now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        seen = stamp(self._path)
        if seen == self._seen:
            return
        try:
            self._keys, self._seen = self._read(), seen
            log.info("read %d API keys from %s", len(self._keys), self._path)
        except KeyFileError as error:
            if seen != self._told:
                log.error("API keys %s; the earlier keys stay valid", error)
            self._told = seen


class RequireKey:
    """Middleware: no request passes without a known key, except to :data:`OPEN_PATHS`."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, refused: Callable[[ErrorCode], None]) -> None:
        self._app, self._keys, self._refused = app, keys, refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, with the key's name and limits in ``request.state``, as ``api_key_...``, or refuse."""
        refused = self._refusal(scope) if scope["type"] == "http" else None
        await (refused or self._app)(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        scheme, _, key = Request(scope).headers.get("authorization", "").partition(" ")
        given = key.strip() if scheme.lower() == "bearer" else ""
        holder = self._keys.holder_of(given) if given else None
        if holder is None:
            if scope["path"] in OPEN_PATHS:
                return None
            message = "this API key is not known here" if given else _WANTED
            challenge = {"www-authenticate": 'Bearer error="invalid_token"' if given else "Bearer"}
            return self._refuse(ApiError("invalid_api_key", message), challenge)
        if scope["path"] in OPERATORS_PATHS and not self._keys.may_operate(holder):
            message = f"{scope['path']} is for operators' keys; this is another one"
            return self._refuse(ApiError("permission_denied", message))
        scope.setdefault("state", {}).update(
            api_key_name=holder.name, api_key_limits=holder.limits, api_key_scope=holder.scope
        )
        return None

    def _refuse(self, error: ApiError, headers: Mapping[str, str] | None = None) -> Response:
        self._refused(error.code)
        return refusal(error, headers, closing=True)


def read_keys(path: Path) -> dict[str, Holder]:
    """All keys in a file, and whose they are. Raises :class:`KeyFileError`."""
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
    if len(keys) > MAX_KEYS:
        raise KeyFileError(f"{path}: has {len(keys)} keys, more than {MAX_KEYS}")
    return keys


def _parsed(path: Path, text: str) -> dict[str, Holder]:
    lines: dict[str, int] = {}
    keys: dict[str, Holder] = {}
    named: dict[str, tuple[int, Holder]] = {}
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
        limits = _limits(f"{path}: line {number}", match["limits"])
        operator = bool(limits.pop(OPERATOR, 0))
        holder = Holder(match["name"] or f"line {number}", limits, _scope(match["name"], key), operator)
        first, twin = named.setdefault(holder.name, (number, holder))
        if (twin.limits, twin.operator) != (holder.limits, holder.operator):
            raise KeyFileError(f"{path}: line {number} gives {holder.name} other limits than line {first}")
        lines[key] = number
        keys[key] = holder
    return keys


def _limits(where: str, text: str) -> dict[str, int]:
    limits: dict[str, int] = {}
    for entry in text.split():
        name, _, value = entry.partition("=")
        if name not in (*LIMIT_NAMES, OPERATOR):
            # Not shown: it may be part of a key that was put there by mistake.
            raise KeyFileError(f"{where} has an unknown limit; there are {', '.join((*LIMIT_NAMES, OPERATOR))}")
        if name in limits:
            raise KeyFileError(f"{where} says {name} twice")
        if not value.isdecimal() or int(value[:20]) > MAX_LIMIT:
            raise KeyFileError(f"{where}: {name} must be a whole number from 0 (none) to {MAX_LIMIT}")
        limits[name] = int(value)
    return limits


def _scope(name: str | None, key: str) -> str:
    if name:
        return hashlib.sha256(f"scope of {name}".encode()).hexdigest()[:SCOPE_CHARACTERS]
    return hmac.new(_SECRET, key.encode(), hashlib.sha256).hexdigest()[:SCOPE_CHARACTERS]


def _digest(key: str) -> bytes:
    """Of one length, so that comparing takes the same time for every key."""
    return hashlib.sha256(key.encode()).digest()
