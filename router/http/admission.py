"""The door of the API: what a caller may still ask for, and how long a request may take.

Every caller has an account: an API key by its name or, where there are no keys, all callers together. A request enters
before its body is read, pays for its prompt once that is known and for every token as it is generated, and leaves when
its answer has ended, however that was. Accounts are this router's own: several routers each have theirs.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from time import monotonic
from typing import TYPE_CHECKING, TypeVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.errors import ApiError, ErrorCode
from router.generation import GenerationError
from router.http.asgi import refusal
from router.limits import REQUESTS, TOKENS, Account, Allowance, LimitReached
from router.schema.request_schema import MAX_TIMEOUT, MIN_TIMEOUT

if TYPE_CHECKING:
    from router.answers.choice_reader import TextChunk

T = TypeVar("T")

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


class QuotaLease:
    """One request, from the door until it leaves."""

    def __init__(self, account: Account, arrived: float) -> None:
        self._account, self._arrived = account, arrived
        self._sessions = self._tokens = 0

    def take_sessions(self, sessions: int) -> None:
        """Take places for all choices. Raises :class:`LimitReached`."""
        self._account.take_sessions(sessions)
        self._sessions = sessions

    def take_prompt(self, tokens: int) -> None:
        """Pay for all prompts. Raises :class:`LimitReached`."""
        self._account.take_prompt(tokens, monotonic())
        self._tokens += tokens

    def take_completion(self, tokens: int) -> None:
        """Pay for what was generated."""
        self._account.take_completion(tokens, monotonic())
        self._tokens += tokens

    def leave(self) -> None:
        """The answer has ended."""
        self._account.leave(monotonic() - self._arrived, self._sessions, self._tokens)

    def end(self, seconds: float | None) -> float | None:
        """When so many seconds since it came are over, on the event loop's clock; None: never."""
        if seconds is None:
            return None
        return asyncio.get_running_loop().time() + seconds - (monotonic() - self._arrived)

    def headers(self) -> dict[str, str]:
        """OpenAI's headers: what is left of each rate that is limited, and when it will be whole again."""
        return _rates(self._account, monotonic())


class Admit:
    """Middleware: what is posted to the API is counted, and refused beyond the caller's limits."""

    def __init__(
        self, app: ASGIApp, allowance: Allowance, accounts: dict[str, Account], refused: Callable[[ErrorCode], None]
    ) -> None:
        """``accounts``: by the name of the API key, as many as were ever used; the name is empty where there are none.

        ``refused`` hears of every answer given here.
        """
        self._app, self._allowance, self._accounts, self._refused = app, allowance, accounts, refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Put the lease into ``request.state.lease``, or answer with status 429."""
        if scope["type"] != "http" or scope["method"] != "POST" or not scope["path"].startswith(ADMITTED):
            await self._app(scope, receive, send)
            return
        state, now = scope.setdefault("state", {}), monotonic()
        account = self._accounts.setdefault(state.get("api_key_name", ""), Account())
        account.allow(replace(self._allowance, **state.get("api_key_limits", {})), now)
        try:
            account.enter(now)
        except LimitReached as error:
            self._refused(error.code)
            rates = _rates(account, now)
            answer = refusal(error.code, error.message, headers=rates, wait=error.wait, closing=True)
            await answer(scope, receive, send)
            return
        lease = state["lease"] = QuotaLease(account, now)

        async def send_with_rates(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(lease.headers())
            await send(message)

        try:
            await self._app(scope, receive, send_with_rates)
        finally:
            lease.leave()


def seconds_allowed(field: float | None, headers: Headers, settings: AdmissionSettings) -> float | None:
    """How long a request may take: what its field ``timeout`` and its header ask for, within what is allowed.

    None: as long as it takes. Raises :class:`ApiError`.
    """
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


async def admitted(
    chunks: AsyncGenerator[TextChunk], lease: QuotaLease, seconds: float | None
) -> AsyncGenerator[TextChunk]:
    """The same chunks, paid for, and no longer than so many seconds after the request came.

    Raises :class:`GenerationError` then, also where the client is late; the sessions are closed before.
    """
    end = lease.end(seconds)
    async with aclosing(chunks):
        while True:
            if end is not None and asyncio.get_running_loop().time() >= end:
                raise _over(seconds)
            try:
                chunk = await in_time(anext(chunks), seconds, end)
            except StopAsyncIteration:
                return
            lease.take_completion(chunk.tokens)
            yield chunk


async def in_time(work: Awaitable[T], seconds: float | None, end: float | None) -> T:
    """What the work gives, if it does by then; raises :class:`GenerationError`. See :meth:`QuotaLease.end`."""
    if end is None:
        return await work
    try:
        async with asyncio.timeout_at(end) as deadline:
            return await work
    except TimeoutError:
        if not deadline.expired():
            raise
        raise _over(seconds) from None


def _over(seconds: float | None) -> GenerationError:
    return GenerationError("timeout", f"the {seconds:g} seconds of this request are over")


def _rates(account: Account, now: float) -> dict[str, str]:
    headers = {}
    for name in (REQUESTS, TOKENS):
        if bucket := account.buckets.get(name):
            headers[f"x-ratelimit-limit-{name}"] = str(bucket.limit)
            headers[f"x-ratelimit-remaining-{name}"] = str(max(int(bucket.level(now)), 0))
            headers[f"x-ratelimit-reset-{name}"] = _duration(bucket.wait(bucket.limit, now))
    return headers


def _duration(seconds: float) -> str:
    """As OpenAI writes it: ``120ms``, ``1.5s``, ``6m0s``."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(seconds, 60)
    return f"{int(minutes)}m{int(rest)}s" if minutes else f"{round(rest, 1):g}s"
