"""How much one caller may ask for: requests and tokens a minute, requests, sessions and tokens at once.

Every caller has an account. A request enters before its body is read, pays for its prompt once that is known and for
every token as it is generated, and leaves when its answer has ended, however that was. Who the callers are, and what
they are told, :mod:`router.http.admission` decides. Rates are buckets: full at first, refilled evenly, so a minute's
worth may come at once, and never twice.

Tokens are counted as they are used, so nobody knows beforehand how many a request will take: one that was let in is
never cut short, and what it takes too much keeps later ones out until the bucket has refilled.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from dataclasses import dataclass, field, fields
from time import monotonic
from typing import NoReturn, TypeVar

from router.answers.choice_reader import TextChunk
from router.errors import ApiError
from router.generation import GenerationError
from router.sessions.tally import RequestTally

T = TypeVar("T")

REQUESTS, TOKENS, CONCURRENT, SESSIONS, HELD = "requests", "tokens", "concurrent", "sessions", "concurrent_tokens"
MIN_WAIT, MAX_WAIT = 1.0, 60.0
"""Seconds that a refused client is told to wait, where they are estimated."""
REMEMBERED = 0.1
"""Weight of the newest duration in their mean."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """The limits of one caller; 0: none."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    """Of prompts and of what is generated."""
    concurrent_requests: int = 0
    concurrent_sessions: int = 0
    """Choices of all its requests: what takes a place of the router each."""
    concurrent_tokens: int = 0
    """Of prompts and of what has been generated for requests under way: what a router keeps to move them elsewhere."""


LIMIT_NAMES = tuple(entry.name for entry in fields(Allowance))


class Bucket:
    """What is left of a rate, full at first. May be overdrawn."""

    def __init__(self, limit: int, now: float) -> None:
        """``limit``: a minute."""
        self.limit, self._level, self._at = limit, float(limit), now

    def level(self, now: float) -> float:
        """What can be taken."""
        return min(self._level + (now - self._at) * self.limit / 60, self.limit)

    def take(self, amount: float, now: float) -> None:
        """Take so much, whether it is there or not."""
        self._level, self._at = self.level(now) - amount, now

    def wait(self, level: float, now: float) -> float:
        """Seconds until so much is there."""
        return max(min(level, self.limit) - self.level(now), 0.0) * 60 / self.limit

    def change(self, limit: int, now: float) -> None:
        """Another limit from now on. What was taken stays taken."""
        taken = self.limit - self.level(now)
        self.limit, self._level, self._at = limit, limit - taken, now


class Durations:
    """How long requests take, the recent ones counting most: when a place will be free."""

    def __init__(self) -> None:
        self.mean: float | None = None

    def add(self, seconds: float) -> None:
        """One has ended."""
        self.mean = seconds if self.mean is None else self.mean + REMEMBERED * (seconds - self.mean)

    def wait(self, places: int) -> float:
        """Seconds until one of so many places, all taken, is free."""
        return min(max((self.mean or 0.0) / max(places, 1), MIN_WAIT), MAX_WAIT)


class RetryTurns:
    """When those for whom there is no place are to come back.

    Places become free one by one, as fast as requests have lately ended; whoever waits inside gets them first. Of those
    who are sent away each is told the turn after the one before, so that they do not all come back for the same place.
    """

    def __init__(self) -> None:
        self.durations = Durations()
        self._next = 0.0

    def take(self, now: float, places: int, waiting: int, oldest: float) -> float:
        """Seconds until the next turn, which is taken with it.

        ``places`` are all taken, and ``waiting`` others wait inside; ``oldest``: how long the oldest of all has been
        here, which is what is known of how long they take while none has ended.
        """
        mean = oldest if self.durations.mean is None else self.durations.mean
        pause = mean / max(places, 1)
        self._next = min(max(self._next, now + waiting * pause) + pause, now + MAX_WAIT)
        return max(self._next - now, MIN_WAIT)


@dataclass(slots=True)
class Account:
    """What one caller has asked for, and what it may."""

    allowance: Allowance = Allowance()
    running: int = 0
    sessions: int = 0
    """Under way."""
    tokens: int = 0
    """Of requests under way."""
    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    refused: Counter[str] = field(
        default_factory=lambda: Counter(dict.fromkeys((REQUESTS, TOKENS, CONCURRENT, SESSIONS, HELD), 0))
    )
    buckets: dict[str, Bucket] = field(default_factory=dict)
    """By what they limit; none where there is no limit."""
    durations: Durations = field(default_factory=Durations)

    def allow(self, allowance: Allowance, now: float) -> None:
        """These limits count from now on."""
        self.allowance = allowance
        for name, limit in ((REQUESTS, allowance.requests_per_minute), (TOKENS, allowance.tokens_per_minute)):
            if not limit:
                self.buckets.pop(name, None)
            elif name not in self.buckets:
                self.buckets[name] = Bucket(limit, now)
            elif self.buckets[name].limit != limit:
                self.buckets[name].change(limit, now)

    def enter(self, now: float) -> QuotaLease:
        """A request begins. Raises :class:`ApiError`."""
        max_running = self.allowance.concurrent_requests
        if max_running and self.running >= max_running:
            self.refuse(CONCURRENT, f"{max_running} requests at once are allowed and under way", max_running)
        self.take(REQUESTS, 1, now)
        self.running += 1
        self.requests += 1
        return QuotaLease(self, now)

    def take(self, name: str, amount: int, now: float, *, anyway: bool = False) -> None:
        """Take so much of a rate; of what is larger than its bucket it is enough that that is full.

        Raises :class:`ApiError` where there is not so much, unless it is to be taken ``anyway``.
        """
        bucket = self.buckets.get(name)
        if bucket is None:
            return
        if not anyway and (wait := bucket.wait(amount, now)):
            left = max(int(bucket.level(now)), 0)
            why = f"{bucket.limit} {name} a minute are allowed, {left} left, {amount} needed"
            self.refuse(name, why, wait=wait)
        bucket.take(amount, now)

    def refuse(self, name: str, why: str, places: int = 0, wait: float | None = None) -> NoReturn:
        """Count and raise it. ``wait``: seconds; None: until one of so many ``places`` is free."""
        self.refused[name] += 1
        wait = self.durations.wait(places) if wait is None else wait
        raise ApiError("rate_limit_exceeded", f"a limit is reached: {why}; try again in {wait:.3g} s", retry_after=wait)

    def rates(self, now: float) -> dict[str, str]:
        """OpenAI's headers: what is left of each rate that is limited, and when it will be whole again."""
        headers = {}
        for name in (REQUESTS, TOKENS):
            if bucket := self.buckets.get(name):
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


@dataclass(slots=True)
class QuotaLease:
    """One request, from the door until it leaves. A request alone may hold any number of sessions and of tokens."""

    account: Account
    arrived: float
    sessions: int = 0
    tokens: int = 0
    prompt: int = 0
    """Tokens of prompts of which nobody knows yet whether they are computed."""

    def take_sessions(self, sessions: int) -> None:
        """Take places for all choices. Raises :class:`ApiError`."""
        account, allowed = self.account, self.account.allowance.concurrent_sessions
        if allowed and account.sessions and account.sessions + sessions > allowed:
            why = f"{allowed} choices at once are allowed, {account.sessions} under way, {sessions} needed"
            account.refuse(SESSIONS, why, account.running)
        account.sessions += sessions
        self.sessions += sessions

    def take_prompt(self, tokens: int, now: float) -> None:
        """Pay for all prompts. Raises :class:`ApiError`."""
        account, allowed = self.account, self.account.allowance.concurrent_tokens
        if allowed and account.tokens and account.tokens + tokens > allowed:
            why = f"{allowed} tokens at once are allowed, requests under way have {account.tokens}, {tokens} needed"
            account.refuse(HELD, why, account.running)
        account.take(TOKENS, tokens, now)
        account.tokens += tokens
        self.tokens += tokens
        self.prompt += tokens

    def return_prompt(self, now: float) -> None:
        """Nothing was started: all prompts are paid back."""
        self.account.take(TOKENS, -self.prompt, now, anyway=True)
        self.account.tokens -= self.prompt
        self.tokens -= self.prompt
        self.prompt = 0

    def _count_prompt(self) -> None:
        self.account.prompt_tokens += self.prompt
        self.prompt = 0

    def take_completion(self, tokens: int, now: float) -> None:
        """Pay for what was generated."""
        self._count_prompt()
        account = self.account
        account.completion_tokens += tokens
        account.tokens += tokens
        self.tokens += tokens
        account.take(TOKENS, tokens, now, anyway=True)

    def leave(self, now: float) -> None:
        """The answer has ended."""
        self._count_prompt()
        account = self.account
        account.running -= 1
        account.sessions -= self.sessions
        account.tokens -= self.tokens
        account.durations.add(now - self.arrived)

    def end(self, seconds: float | None) -> float | None:
        """When so many seconds since it came are over, on the event loop's clock; None: never."""
        if seconds is None:
            return None
        return asyncio.get_running_loop().time() + seconds - (monotonic() - self.arrived)


async def admitted(
    chunks: AsyncGenerator[TextChunk], lease: QuotaLease, seconds: float | None, tally: RequestTally
) -> AsyncGenerator[TextChunk]:
    """The same chunks, paid for and counted, and no longer than so many seconds after the request came.

    Raises :class:`GenerationError` then, also where the client is late; the sessions are closed before.
    """
    end = lease.end(seconds)
    try:
        async with aclosing(chunks):
            while True:
                if end is not None and asyncio.get_running_loop().time() >= end:
                    raise _over(seconds)
                try:
                    chunk = await in_time(anext(chunks), seconds, end)
                except StopAsyncIteration:
                    return
                lease.take_completion(chunk.tokens, monotonic())
                tally.add(chunk)
                yield chunk
    except (GeneratorExit, asyncio.CancelledError):
        tally.given_up()
        raise
    except GenerationError as error:
        if error.code.retryable:
            lease.return_prompt(monotonic())  # nothing, once anything was generated
        raise


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
