"""What a router counts while requests run, and what it has learnt of drafts: which share of them targets keep.

Increments only, in plain integers: a commit costs two or three microseconds, and whatever takes longer is computed when
somebody asks (:mod:`router.telemetry.metrics`). Knows neither Prometheus nor HTTP. All calls come from the router's
event loop. prometheus_client's own counters and histograms lock for every increment, and its histograms take no weight:
counting a commit of four tokens took 5.9 us with them and 0.45 us so (timeit, best of 7, 2026-11-23, 2 cores AMD EPYC).

Latencies of a request are counted for each of its choices, from the arrival of the request; those between tokens at
the moment of the commit, so that a client that reads slowly does not make the model look slow.
"""

from __future__ import annotations

import logging
import operator
from bisect import bisect_left
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from time import monotonic

from router.answers.choice_reader import TextChunk
from router.errors import CODES, ErrorCode
from speculation.events import PeerId
from speculation.messages import FinishReason

log = logging.getLogger(__name__)

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
        self.set(now, *map(operator.add, self.totals, more))

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
        samples = (*self._samples, (self._since, self.totals))
        before = [sample for sample in samples if sample[0] <= now - WINDOW_SECONDS]
        return before[-1] if before else self._samples[0]


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
        """What this share of all (0 to 1) stays below, as if even within each bucket; None without values."""
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


class RequestTally:
    """What is counted of one request as its chunks pass: when each choice begins, and how it ends."""

    __slots__ = ("_arrived", "_clock", "_counts", "_running", "_waiting")

    def __init__(self, counts: ModelCounts, clock: Callable[[], float], choices: int, arrived: float) -> None:
        self._counts, self._clock, self._arrived = counts, clock, arrived
        self._waiting, self._running = set(range(choices)), set(range(choices))

    def add(self, chunk: TextChunk) -> None:
        """It passes."""
        if chunk.index in self._waiting:
            self._waiting.remove(chunk.index)
            echoed = chunk.prompt is not None and chunk.finish is not None and chunk.commit is None
            if not echoed:  # else no token was computed for it
                self._counts.first_token.add(self._clock() - self._arrived)
        if chunk.finish is not None:
            self._running.discard(chunk.index)
            self._counts.finished[chunk.finish.value] += 1
            self._counts.latency.add(self._clock() - self._arrived)

    def given_up(self) -> None:
        """Nobody waits for the rest."""
        self._counts.finished[ABORTED] += len(self._running)


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

    def request(self, model: str, choices: int, arrived: float) -> RequestTally:
        """A request begins, with so many choices. ``arrived`` is of our own clock."""
        self.recent.add(arrived, 1, 0, 0, 0)
        return RequestTally(self.model(model), self.clock, choices, arrived)


BLOCK = 2000
"""Offered draft tokens in a block."""
COLLAPSED_SHARE, FLOOR = 0.4, 0.02
"""Acceptance below this share of the long-run value, or below the floor, has collapsed. Of a tree only one path can be
accepted, so usual values are 0.15 to 0.8."""
RECOVERY = 1.5
"""Times the value below which it would collapse: from there on an episode is over."""
MEMORY = 16
"""Blocks that the long-run value looks back on, roughly."""
MAX_PAIRS = 1024
"""That are watched; the one not heard of for the longest time is forgotten."""
REMEMBERED = 4096.0
"""Drafts that count for a share; each one more pushes the older ones out by as much."""
PRIOR, PRIOR_DRAFTS = 0.6, 64.0
"""What is expected of a pair of which nothing is known, and how many drafts that is worth. Rather much: a drafter that
was never tried should be."""
PAIR_DRAFTS = 256.0
"""How many drafts of its own outweigh what is known of a drafter's model."""


@dataclass(slots=True)
class WatchedPair:
    """What is known of one target worker and one draft worker together."""

    offered: int = 0
    accepted: int = 0
    """Of the block under way."""
    usual: float | None = None
    """Long-run acceptance; None before the first block."""
    latest: float | None = None
    """Acceptance in the last whole block."""
    collapsed: bool = False


@dataclass(slots=True)
class _Share:
    kept: float = 0.0
    offered: float = 0.0

    def add(self, kept: int, offered: int) -> None:
        old = max(1.0 - offered / REMEMBERED, 0.0)
        self.kept, self.offered = self.kept * old + kept, self.offered * old + offered

    def expected(self, prior: float, weight: float) -> float:
        return (self.kept + prior * weight) / (self.offered + weight)


class AcceptanceRecord:
    """The share of drafts that targets kept, by pair of models and by drafter, the recent counting most.

    And whether drafts that used to be accepted no longer are. For each pair of a target and a draft worker the draft
    tokens offered are counted in blocks; a block's acceptance is compared with the pair's long-run value. Acceptance
    has collapsed when a block falls below a fraction of that value, or below an absolute floor, and the episode is over
    when a block is clearly above both again; since the long-run value follows, it is also over once the low value has
    become the usual one. One warning is logged per episode. Text is never at stake: a collapse costs speed only.

    What the target finds itself (prompt lookup, a caller's prediction) does not count: no drafter answers for it.
    """

    def __init__(self) -> None:
        self.watched: OrderedDict[tuple[PeerId, PeerId], WatchedPair] = OrderedDict()
        """By target and drafter."""
        self.collapses = 0
        """Episodes so far."""
        self._pairs: defaultdict[tuple[str, str], _Share] = defaultdict(_Share)
        self._drafters: defaultdict[tuple[str, PeerId], _Share] = defaultdict(_Share)
        self._targets: defaultdict[PeerId, _Share] = defaultdict(_Share)

    def add(
        self, target: PeerId, target_model: str, drafter: PeerId, draft_model: str, kept: int, offered: int
    ) -> None:
        """So many drafts of a drafter were offered to a target in a step, and so many of them kept."""
        self._pairs[target_model, draft_model].add(kept, offered)
        self._drafters[target_model, drafter].add(kept, offered)
        self._targets[target].add(kept, offered)
        pair = self.watched.get((target, drafter))
        if pair is None:
            if len(self.watched) >= MAX_PAIRS:
                self.watched.popitem(last=False)
            pair = self.watched[target, drafter] = WatchedPair()
        pair.offered += offered
        pair.accepted += kept
        if pair.offered >= BLOCK:
            self.watched.move_to_end((target, drafter))
            self._close_block(target, drafter, pair)

    def expected(self, target_model: str, draft_model: str, drafter: PeerId) -> float:
        """The share of this drafter's drafts that will be kept: from its own, and for lack of them from its pair's."""
        pair = self._pairs.get((target_model, draft_model), _Share()).expected(PRIOR, PRIOR_DRAFTS)
        return self._drafters.get((target_model, drafter), _Share()).expected(pair, PAIR_DRAFTS)

    def measured(self) -> dict[PeerId, float]:
        """The share of drafters' drafts that were kept, of every worker that some were offered of or to.

        A target and a drafter that have only each other have the same.
        """
        sums: defaultdict[PeerId, _Share] = defaultdict(_Share, self._targets)
        for (_, drafter), share in self._drafters.items():
            sums[drafter].kept += share.kept
            sums[drafter].offered += share.offered
        return {worker: total.kept / total.offered for worker, total in sums.items() if total.offered}

    def forget(self, worker: PeerId) -> None:
        """It has left: nobody has to answer for its pairs any more."""
        for pair in [pair for pair in self.watched if worker in pair]:
            del self.watched[pair]
        self._targets.pop(worker, None)
        for key in [key for key in self._drafters if key[1] == worker]:
            del self._drafters[key]

    def _close_block(self, target: PeerId, draft: PeerId, pair: WatchedPair) -> None:
        pair.latest = rate = pair.accepted / pair.offered
        pair.offered = pair.accepted = 0
        line = max(FLOOR, COLLAPSED_SHARE * (pair.usual or 0.0))
        if not pair.collapsed and rate < line:
            pair.collapsed = True
            self.collapses += 1
            usual = "no value before it" if pair.usual is None else f"{pair.usual:.3f} is usual"
            log.warning("acceptance of drafts from %s at %s collapsed to %.3f (%s)", draft, target, rate, usual)
        elif pair.collapsed and rate >= RECOVERY * line:
            pair.collapsed = False
            log.info("acceptance of drafts from %s at %s is no longer unusual: %.3f", draft, target, rate)
        pair.usual = rate if pair.usual is None else pair.usual + (rate - pair.usual) / MEMORY
