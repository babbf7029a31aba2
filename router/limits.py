"""How much one caller may ask for: requests and tokens a minute, requests, sessions and tokens at once.

Pure accounts over a clock that is passed in. Who the callers are, and what they are told, :mod:`router.http.admission`
decides. Rates are buckets: full at first, refilled evenly, so a minute's worth may come at once, and never twice.

Tokens are counted as they are used, so nobody knows beforehand how many a request will take: one that was let in is
never cut short, and what it takes too much keeps later ones out until the bucket has refilled.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields

from router.errors import ApiError

REQUESTS, TOKENS, CONCURRENT, SESSIONS, HELD = "requests", "tokens", "concurrent", "sessions", "concurrent_tokens"
"""What there are limits on."""
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


class LimitReached(ApiError):
    """A request that goes beyond a limit. ``wait``: seconds after which it can be let in."""

    def __init__(self, limit: str, message: str, wait: float) -> None:
        super().__init__("rate_limit_exceeded", message, retry_after=wait)
        self.limit, self.wait = limit, wait


@dataclass(slots=True)
class Bucket:
    """What is left of a rate. May be overdrawn."""

    limit: int
    """A minute."""
    _level: float
    _at: float

    @classmethod
    def full(cls, limit: int, now: float) -> Bucket:
        """One that nobody has taken from."""
        return cls(limit, limit, now)

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
        mean = MIN_WAIT if self.mean is None else self.mean / max(places, 1)
        return min(max(mean, MIN_WAIT), MAX_WAIT)


class RetryTurns:
    """When those for whom there is no place are to come back.

    Places become free one by one, as fast as requests have lately ended; whoever waits inside gets them first. Of those
    who are sent away each is told the turn after the one before, so that they do not all come back for the same place.
    """

    def __init__(self) -> None:
        self._durations = Durations()
        self._next = 0.0

    def ended(self, seconds: float) -> None:
        """A request has ended, after so long."""
        self._durations.add(seconds)

    def take(self, now: float, places: int, waiting: int, oldest: float) -> float:
        """Seconds until the next turn, which is taken with it.

        ``places`` are all taken, and ``waiting`` others wait inside; ``oldest``: how long the oldest of all has been
        here, which is what is known of how long they take while none has ended.
        """
        mean = oldest if self._durations.mean is None else self._durations.mean
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
    """By the limit."""
    buckets: dict[str, Bucket] = field(default_factory=dict)
    """By what they limit; none where there is no limit."""
    _durations: Durations = field(default_factory=Durations)

    def allow(self, allowance: Allowance, now: float) -> None:
        """These limits count from now on."""
        self.allowance = allowance
        for name, limit in ((REQUESTS, allowance.requests_per_minute), (TOKENS, allowance.tokens_per_minute)):
            if not limit:
                self.buckets.pop(name, None)
            elif name not in self.buckets:
                self.buckets[name] = Bucket.full(limit, now)
            elif self.buckets[name].limit != limit:
                self.buckets[name].change(limit, now)

    def enter(self, now: float) -> None:
        """A request begins. Raises :class:`LimitReached`."""
        max_running = self.allowance.concurrent_requests
        if max_running and self.running >= max_running:
            why = f"{max_running} requests at once are allowed and under way"
            self._refuse(CONCURRENT, why, self._durations.wait(max_running))
        if bucket := self.buckets.get(REQUESTS):
            self._check(REQUESTS, 1, now)
            bucket.take(1, now)
        self.running += 1
        self.requests += 1

    def take_sessions(self, sessions: int) -> None:
        """A request that has entered brings so many; one alone may bring any number. Raises :class:`LimitReached`."""
        allowed = self.allowance.concurrent_sessions
        if allowed and self.sessions and self.sessions + sessions > allowed:
            why = f"{allowed} choices at once are allowed, {self.sessions} under way, {sessions} needed"
            self._refuse(SESSIONS, why, self._durations.wait(self.running))
        self.sessions += sessions

    def take_prompt(self, tokens: int, now: float) -> None:
        """A request that has entered brings so many tokens; alone it may hold any number. Raises LimitReached."""
        allowed = self.allowance.concurrent_tokens
        if allowed and self.tokens and self.tokens + tokens > allowed:
            why = f"{allowed} tokens at once are allowed, requests under way have {self.tokens}, {tokens} needed"
            self._refuse(HELD, why, self._durations.wait(self.running))
        if TOKENS in self.buckets:
            self._check(TOKENS, tokens, now)
        self.prompt_tokens += tokens
        self.tokens += tokens
        self._take(tokens, now)

    def take_completion(self, tokens: int, now: float) -> None:
        """So many were generated."""
        self.completion_tokens += tokens
        self.tokens += tokens
        self._take(tokens, now)

    def leave(self, seconds: float, sessions: int = 0, tokens: int = 0) -> None:
        """A request has ended, after so long, and with it so many sessions, and tokens that it took."""
        self.running -= 1
        self.sessions -= sessions
        self.tokens -= tokens
        self._durations.add(seconds)

    def _take(self, tokens: int, now: float) -> None:
        if bucket := self.buckets.get(TOKENS):
            bucket.take(tokens, now)

    def _check(self, name: str, amount: int, now: float) -> None:
        """Whether so much can be taken; of what is larger than the bucket, whether that is full."""
        bucket = self.buckets[name]
        if wait := bucket.wait(amount, now):
            left = max(int(bucket.level(now)), 0)
            self._refuse(name, f"{bucket.limit} {name} a minute are allowed, {left} left, {amount} needed", wait)

    def _refuse(self, name: str, why: str, wait: float) -> None:
        self.refused[name] += 1
        raise LimitReached(name, f"a limit is reached: {why}; try again in {wait:.3g} s", wait)
