"""What a router counts while requests run.

Increments only, in plain integers: a commit costs two or three microseconds, and whatever takes longer is computed when
somebody asks (:mod:`router.telemetry.metrics`). Knows neither Prometheus nor HTTP. All calls come from the router's
event loop. prometheus_client's own counters and histograms lock for every increment, and its histograms take no weight:
counting a commit of four tokens took 5.9 us with them and 0.45 us so (timeit, best of 7, 2026-11-23, 2 cores AMD EPYC).

Latencies of a request are counted for each of its choices, from the arrival of the request; those between tokens at
the moment of the commit, so that a client that reads slowly does not make the model look slow.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from math import inf
from time import monotonic
from typing import TYPE_CHECKING

from router.errors import CODES, ErrorCode
from speculation.messages import FinishReason

WINDOW_SECONDS = 5.0
SAMPLE_SECONDS = 0.25
FIRST_SECONDS = 0.5
"""Sooner after the start no rate is told."""


class Recent:
    """How fast totals that never fall grow: what they are now against what they were a few seconds ago.

    Times are seconds of any one clock. A sample is kept at most four times a second; those before the window go.
    """

    __slots__ = ("_due", "_samples", "_since", "totals")

    def __init__(self, now: float, *totals: int) -> None:
        self.totals, self._since = totals, now
        self._samples = deque([(now, totals)])
        self._due = now + SAMPLE_SECONDS

    def add(self, now: float, *more: int) -> None:
        """Each grows by so much."""
        self.set(now, *(total + grown for total, grown in zip(self.totals, more, strict=True)))

    def set(self, now: float, *totals: int) -> None:
        """They are so much now."""
        if now >= self._due:
            self._due = now + SAMPLE_SECONDS
            self._samples.append((self._since, self.totals))
            while len(self._samples) > 1 and self._samples[1][0] <= now - WINDOW_SECONDS:
                self._samples.popleft()
        self.totals, self._since = totals, now

    def growth(self, now: float) -> tuple[int, ...]:
        """By how much each grew within the window."""
        return tuple(total - before for total, before in zip(self.totals, self._base(now)[1], strict=True))

    def rates(self, now: float) -> tuple[float, ...] | None:
        """By how much each grows in a second; None where that cannot be said yet."""
        # After a pause the last sample is older than the window, but nothing grew since.
        seconds = min(now - self._base(now)[0], WINDOW_SECONDS + SAMPLE_SECONDS)
        if seconds < FIRST_SECONDS:
            return None
        return tuple(grown / seconds for grown in self.growth(now))

    def _base(self, now: float) -> tuple[float, tuple[int, ...]]:
        """What they were, and since when, as the window began; the first sample if that is later."""
        if self._since <= now - WINDOW_SECONDS:
            return self._since, self.totals
        before = [sample for sample in self._samples if sample[0] <= now - WINDOW_SECONDS]
        return before[-1] if before else self._samples[0]


if TYPE_CHECKING:
    from router.answers.choice_reader import TextChunk

TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
FIRST_TOKEN_SECONDS = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 30.0, 60.0)
REQUEST_SECONDS = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
LEAD_TOKENS = (0.0, 1.0, 2.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0)
LONGEST_PATH = 64
"""Draft tokens that one verification can keep, at most; as many positions are told apart."""
FAILURE = 500
"""HTTP status from which on an error is ours rather than the client's."""
ABORTED = "abort"
"""What is said of a choice that its client gave up, after vLLM."""


class Buckets:
    """A histogram: ``counts[i]`` values were at most ``bounds[i]`` and above the bound before it; the last, any."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def quantile(self, share: float) -> float | None:
        """The value that this share of all (0 to 1) stays below, as if spread evenly within each bucket.

        None before the first value; at most the last bound.
        """
        wanted = share * sum(self.counts)
        below, seen = 0.0, 0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            if count and seen + count >= wanted:
                return below + (bound - below) * (wanted - seen) / count
            below, seen = bound, seen + count
        return below if any(self.counts) else None


@dataclass(slots=True)
class ModelCounts:
    """Everything counted for one model since the start."""

    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generated_tokens: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    kept: list[int] = field(default_factory=lambda: [0] * (LONGEST_PATH + 1))
    """``kept[n]``: verifications that kept a path of n draft tokens."""
    finished: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys((*FinishReason, ABORTED), 0)))
    """Choices by why they ended well, or :data:`ABORTED`."""
    first_token: Buckets = field(default_factory=lambda: Buckets(FIRST_TOKEN_SECONDS))
    inter_token: Buckets = field(default_factory=lambda: Buckets(TOKEN_SECONDS))
    commit_interval: Buckets = field(default_factory=lambda: Buckets(TOKEN_SECONDS))
    latency: Buckets = field(default_factory=lambda: Buckets(REQUEST_SECONDS))
    lead: Buckets = field(default_factory=lambda: Buckets(LEAD_TOKENS))

    @property
    def accepted_tokens(self) -> int:
        """Draft tokens kept."""
        return sum(n * times for n, times in enumerate(self.kept))

    def accepted_by_position(self) -> list[int]:
        """How often the draft token at each place of the path was kept, up to the longest path seen."""
        sums: list[int] = []
        running = 0
        for times in reversed(self.kept[1:]):
            running += times
            if running:
                sums.append(running)
        return sums[::-1]


class SessionTally:
    """What is counted of one session as it commits."""

    __slots__ = ("_counts", "_last", "_recent")

    def __init__(self, counts: ModelCounts, recent: Recent) -> None:
        self._counts, self._recent = counts, recent
        self._last: float | None = None

    def committed(self, now: float, tokens: int, accepted: int, offered: int, cached: int) -> None:
        """``tokens`` were committed at ``now`` (seconds), ``accepted`` of them drafted."""
        counts = self._counts
        counts.generated_tokens += tokens
        self._recent.add(now, 0, tokens, accepted, offered)
        if offered:
            counts.drafts += 1
            counts.draft_tokens += offered
            counts.kept[min(accepted, LONGEST_PATH)] += 1
        if self._last is None:
            counts.cached_prompt_tokens += cached
        else:
            waited = now - self._last
            counts.commit_interval.add(waited)
            counts.inter_token.add(waited / tokens, tokens)
        self._last = now

    def leads(self, tokens: int) -> None:
        """The target said how far ahead drafting is worth its while."""
        self._counts.lead.add(tokens)


class RouterCounters:
    """All counts of one router."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self.clock = clock
        self.models: dict[str, ModelCounts] = {}
        self.refused = Counter({row.name: 0 for row in CODES.values() if row.status < FAILURE})
        """Requests refused before anything was started, by the code of the error."""
        self.failed = Counter({row.name: 0 for row in CODES.values() if row.status >= FAILURE})
        """Requests that failed on our side, likewise."""
        self.recent = Recent(-inf, 0, 0, 0, 0)
        """Of all models: requests begun, tokens committed, draft tokens accepted and offered."""

    @property
    def committed(self) -> int:
        """Tokens, of all models."""
        return self.recent.totals[1]

    def model(self, name: str) -> ModelCounts:
        """The counts of a model. Only names of models that are served may be given."""
        return self.models.setdefault(name, ModelCounts())

    def session(self, model: str, prompt: int) -> SessionTally:
        """A session begins, with a prompt of so many tokens."""
        counts = self.model(model)
        counts.prompt_tokens += prompt
        return SessionTally(counts, self.recent)

    def answered(self, code: ErrorCode) -> None:
        """A client was told an error."""
        (self.failed if code.status >= FAILURE else self.refused)[code.name] += 1

    async def observed(
        self, chunks: AsyncGenerator[TextChunk], model: str, choices: int, arrived: float
    ) -> AsyncGenerator[TextChunk]:
        """The same chunks; counts when each choice begins and how it ends. ``arrived`` is of our own clock."""
        counts = self.model(model)
        self.recent.add(arrived, 1, 0, 0, 0)
        waiting, running = set(range(choices)), set(range(choices))
        failed = False
        try:
            async with aclosing(chunks):
                async for chunk in chunks:
                    if chunk.index in waiting:
                        waiting.remove(chunk.index)
                        counts.first_token.add(self.clock() - arrived)
                    if chunk.finish is not None:
                        running.discard(chunk.index)
                        counts.finished[chunk.finish.value] += 1
                        counts.latency.add(self.clock() - arrived)
                    yield chunk
        except Exception:
            failed = True
            raise
        finally:
            if running and not failed:
                counts.finished[ABORTED] += len(running)
