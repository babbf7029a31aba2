"""The door of the API: what a caller may still ask for, and how long a request may take.

Every caller has an account (:mod:`router.limits`): an API key by its name or, where there are no keys, all callers
together. Accounts are this router's own: several routers each have theirs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from time import monotonic

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from router.errors import ApiError, ErrorCode
from router.http.asgi import TOLD, refusal
from router.limits import REQUESTS, TOKENS, Account, Allowance
from router.schema.request_schema import MAX_TIMEOUT, MIN_TIMEOUT

PAGE_HEADER, OWN_PAGES = "sec-fetch-site", frozenset({"same-origin", "none"})
"""Where browsers say which page posts, and what they say of ours and of no page. To other machines over plain HTTP they
do not; then the origin is compared."""
UNASKED = frozenset({"", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"})
"""Types of bodies that a browser posts to other origins without asking them first (CORS: simple requests)."""
TIMEOUT_HEADER = "x-request-timeout"
"""Seconds that a request has, for gateways; what holds is the shorter of this and the field ``timeout``."""
ADMITTED = "/v1/"
"""Where requests that are posted count."""
RATE_HEADERS = tuple(
    f"x-ratelimit-{what}-{name}" for what in ("limit", "remaining", "reset") for name in (REQUESTS, TOKENS)
)
"""As OpenAI's API names them."""


@dataclass(frozen=True, slots=True)
class AdmissionSettings:
    """What is let in."""

    allowance: Allowance = Allowance()
    """Of every API key that has no limits of its own; without keys, of all callers together."""
    timeout: float = 0.0
    """Seconds of a request that asks for none; 0: as many as it takes."""
    max_timeout: float = 0.0
    """Seconds that no request goes beyond; 0: as many as it asks for."""
    target_timeout: float = 0.0
    """Seconds that a request waits while there is no target; 0: as many as it has, or the session's own limits."""
    cors_origins: tuple[str, ...] = ()
    """Pages of these origins may use the API from a browser; ``*``: any. None: CORS is off."""


class Admit:
    """Middleware: what is posted to the API is counted, and refused beyond the caller's limits."""

    def __init__(
        self,
        app: ASGIApp,
        allowance: Allowance,
        accounts: dict[str, Account],
        refused: Callable[[ErrorCode], None],
        origins: Collection[str] | None = None,
    ) -> None:
        """``accounts``: by name of the API key, empty where there are none; ``refused`` hears of every refusal here.

        ``origins``: of pages that may post besides our own, ``*`` of all; None: any may, as with a key, which no
        browser sends unasked.
        """
        self._app, self._allowance, self._accounts, self._refused = app, allowance, accounts, refused
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Put the lease into ``request.state.lease``, or answer with status 429."""
        if scope["type"] != "http" or scope["method"] != "POST" or not scope["path"].startswith(ADMITTED):
            await self._app(scope, receive, send)
            return
        state, now = scope.setdefault("state", {}), monotonic()
        if self._comes_unasked(Headers(scope=scope)):
            message = "a page of another origin asks; admission.cors_origins (--cors-origin) can name it"
            await self._refuse(ApiError("permission_denied", message), scope, receive, send)
            return
        account = self._accounts.setdefault(state.get("api_key_name", ""), Account())
        account.allow(replace(self._allowance, **state.get("api_key_limits", {})), now)
        state[TOLD] = lambda: account.rates(monotonic())
        try:
            lease = state["lease"] = account.enter(now)
        except ApiError as error:
            await self._refuse(error, scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        finally:
            lease.leave(monotonic())

    async def _refuse(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        self._refused(error.code)
        await refusal(error, closing=True)(scope, receive, send)

    def _comes_unasked(self, headers: Headers) -> bool:
        """Whether a page of another origin posts what its browser asked nobody about; the page sees no answer."""
        if self._origins is None or "*" in self._origins:
            return False
        origin, site = headers.get("origin"), headers.get(PAGE_HEADER)
        if site in OWN_PAGES or origin in self._origins:
            return False
        if site is None and (origin is None or origin.partition("://")[2] == headers.get("host")):
            return False
        return headers.get("content-type", "").partition(";")[0].strip().lower() in UNASKED


def seconds_allowed(field: float | None, headers: Headers, settings: AdmissionSettings) -> float | None:
    """Seconds that field and header ask for, within what is allowed; None: as many as it takes. Raises ApiError."""
    asked = [seconds for seconds in (field, _of_header(headers)) if seconds is not None]
    if settings.max_timeout and field is not None and field > settings.max_timeout:
        message = f"timeout must be at most {settings.max_timeout:g} seconds here, got {field:g}"
        raise ApiError("invalid_value", message, "timeout")
    bounds = [*(asked or [settings.timeout]), settings.max_timeout]
    return min((seconds for seconds in bounds if seconds), default=None)


def _of_header(headers: Headers) -> float | None:
    text = headers.get(TIMEOUT_HEADER)
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not MIN_TIMEOUT <= seconds <= MAX_TIMEOUT:
        shown = text if len(text) <= 32 else text[:32] + "..."
        wanted = f"seconds from {MIN_TIMEOUT:g} to {MAX_TIMEOUT:g}"
        raise ApiError("invalid_value", f"the header {TIMEOUT_HEADER} must be {wanted}, got {shown!r}", TIMEOUT_HEADER)
    return seconds
