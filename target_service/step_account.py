"""What the steps of a target took: counted, told to the recorder, and learned from.

Decides which step tells what. A few are computed at load for their time alone. Each one tells how long steps are
(:class:`StepTime`), and so how many prompt tokens fit beside running text and when one must be stuck; only those in
which every session decodes tell the planner what drafts cost, since beside a prompt their part of the time is unknown.
The time for which all sessions waited for drafts is no step: it is counted apart.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

from engine.cache.kv_cache import KVCache
from engine.interface import Chunk, StepEngine
from engine.recorder import Recorder
from speculation.demand import TargetDemand
from speculation.messages import Source, SourceName
from speculation.sources.registry import registered
from speculation.sources.suffix import SuffixCounters
from speculation.trie import InsertResult, VerificationTree
from speculation.verifying.planner import Planner
from speculation.verifying.target_session import Commit
from target_service.scheduler import Budget, Scheduler
from target_service.sequence import BatchEntry, TargetSequence

SMOOTHING = 0.3
"""Part of the error that a step makes up for."""
OUTLIER = 3.0
"""A step that took this many times longer than expected counts as that long only."""
ROWS_SMOOTHING = 0.2
"""Weight of a new number of tokens that a session's part of a step had."""
EVEN = 32
"""Tokens of a step that tells as much of the fixed part as about that of each token."""
STUCK_TIMES, STUCK_BEYOND, STUCK_SECONDS = 20.0, 30.0, 10.0
"""A step is stuck that takes so many times the longest that its like lately took, or so many seconds beyond it, and at
least so many."""
FORGETTING = 0.99
"""What is left of the longest time at the next step."""
TIMED_TOKENS, TIMED_TIMES, TIMED_SECONDS = (1, 4, 16, 64), 3, 1.0
"""Steps that are timed at load: their tokens, how often each, and after how many seconds larger ones are left out."""


def _by_source() -> dict[SourceName, int]:
    return dict.fromkeys((*Source, *registered()), 0)


@dataclass(slots=True)
class TargetCounters:
    """What a target worker counts: monotone totals since its start, told with every heartbeat."""

    steps: int = 0
    step_microseconds: int = 0
    forward_microseconds: int = 0
    waits: int = 0
    """Steps put off because drafts were expected."""
    wait_microseconds: int = 0
    prefilled: int = 0
    reused: int = 0
    """Tokens taken over from the cache instead of being computed."""
    committed: int = 0
    offered: int = 0
    accepted: int = 0
    preempted: int = 0
    grammar_waits: int = 0
    """Steps that sessions sat out since their callers' grammars had taken too long."""
    refused: int = 0
    proposals: dict[InsertResult, int] = field(default_factory=lambda: dict.fromkeys(InsertResult, 0))
    source_faults: int = 0
    """Sessions in which a registered draft source failed."""
    draft_microseconds: int = 0
    """What a draft model in this process took to draft, as part of the steps."""
    draft_left_out: int = 0
    """Times a session found no room in its cache, or has text that it cannot read, ..."""
    draft_faults: int = 0
    """... and sessions that go on without it since it failed."""
    suffix: SuffixCounters = field(default_factory=SuffixCounters)
    features: int = 0
    """Tokens of which features were sent to drafters, ..."""
    features_refused: int = 0
    """... and times they were wanted for another head, or of no session here."""
    offered_from: dict[SourceName, int] = field(default_factory=_by_source)
    accepted_from: dict[SourceName, int] = field(default_factory=_by_source)

    def count(self, tree: VerificationTree, commit: Commit) -> None:
        """Add what a session's step came to; each draft source gets its own credit."""
        self.committed += len(commit.verification.tokens)
        if not tree.nodes:
            return
        self.offered += len(tree.nodes)
        self.accepted += len(commit.kept)
        for node in tree.nodes:
            self.offered_from[node.source] += 1
        for i in commit.kept:
            self.accepted_from[tree.nodes[i].source] += 1

    def flat(self) -> dict[str, int]:
        """By name."""
        totals: dict[str, int] = {}
        for name, value in asdict(self).items():
            totals |= {name: value} if isinstance(value, int) else {f"{name}_{key}": n for key, n in value.items()}
        return totals


def time_steps(engine: StepEngine) -> Mapping[int, float]:
    """Seconds of a step by its tokens, as far as the first requests would have to find out: none where it is padded.

    Leaves nothing in the cache.
    """
    found: dict[int, float] = {}
    began = time.perf_counter()
    for tokens in TIMED_TOKENS if engine.speculates and not engine.row_classes else ():
        if tokens > min(engine.model.context, engine.cache.free_tokens) or time.perf_counter() > began + TIMED_SECONDS:
            break
        taken = []
        for _ in range(TIMED_TIMES):
            sequence, started = engine.cache.sequence(), time.perf_counter()
            engine.run([Chunk(sequence, [0] * tokens, rows=range(tokens))])
            taken.append(time.perf_counter() - started)
            sequence.free()
        found[tokens] = min(taken)
    return found


class StepTime:
    """Seconds of a step by its tokens, learned online.

    A step of ``n`` tokens is taken to last ``fixed + each * n``. Every step moves the two by the least that makes up
    for a part of the error (normalised least mean squares): one of few tokens tells about the one, one of many about
    the other. :class:`speculation.verifying.budget.StepCost` knows better what a few draft tokens cost; this line also
    holds for sizes that were never tried.
    """

    def __init__(self) -> None:
        self._fixed = self._each = 0.0
        self._known = False
        self._rows_each = 1.0

    def __call__(self, tokens: int) -> float:
        """Expected seconds; 0 before anything was measured."""
        return self._fixed + self._each * tokens

    def observe(self, tokens: int, seconds: float) -> None:
        """Learn from one step."""
        expected, part = self(tokens), 1.0
        if self._known:
            seconds, part = min(seconds, OUTLIER * expected), SMOOTHING
        self._known = True
        size = tokens / EVEN
        change = part * (seconds - expected) / (1.0 + size * size)
        self._fixed = max(self._fixed + change, 0.0)
        self._each = max(self._each + change * size / EVEN, 0.0)

    def verified(self, sessions: int, tokens: int) -> None:
        """A step computed so many tokens, drafts included, for so many sessions that decode."""
        self._rows_each += ROWS_SMOOTHING * (tokens / sessions - self._rows_each)

    def prefill_budget(self, decoding: int, budget: Budget) -> int:
        """How many prompt tokens a step can take beside ``decoding`` sessions and as many drafts as lately."""
        alone = self(round(decoding * self._rows_each))
        spare = max(budget.slowdown * alone, budget.seconds) - alone
        return budget.tokens if spare >= self._each * budget.tokens else int(spare / self._each)


class LongestStep:
    """The longest that steps lately took, by their tokens in powers of two: what takes far longer is stuck."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def observe(self, tokens: int, seconds: float) -> None:
        """Learn from one step."""
        size = tokens.bit_length()
        self._seconds[size] = max(seconds, FORGETTING * self._seconds.get(size, 0.0))

    def max_seconds(self, tokens: int) -> float | None:
        """What a step of so many tokens may take; None where no step was measured.

        It is taken to last as long as a larger one, or as a smaller one in proportion. May be asked from any thread.
        """
        size = tokens.bit_length()
        known = self._seconds.copy().items()
        longest = min((seconds * 2 ** max(0, size - smaller) for smaller, seconds in known), default=None)
        return None if longest is None else max(min(STUCK_TIMES * longest, longest + STUCK_BEYOND), STUCK_SECONDS)


class StepAccount:
    """The steps of one worker so far. Times are of one monotonic clock, in seconds."""

    def __init__(
        self,
        counters: TargetCounters,
        planner: Planner,
        recorder: Recorder | None,
        believed: Mapping[int, float],
    ) -> None:
        """``believed``: seconds of a step by its tokens, before any was measured."""
        self._counters, self._planner, self._recorder = counters, planner, recorder
        self._waiting_since: float | None = None
        self.time = StepTime()
        self._longest = LongestStep()
        for tokens, seconds in believed.items():
            self._longest.observe(tokens, seconds)
        self._computing = 0
        """Tokens of the forward under way, if it is the step's first: those after it are there to find a fault."""

    @property
    def max_seconds(self) -> float | None:
        """What the forward under way may take before it must be stuck; None: unknown. May be asked from any thread."""
        return self._longest.max_seconds(tokens) if (tokens := self._computing) else None

    def demand(self, scheduler: Scheduler[TargetSequence], cache: KVCache, places: int, budget: Budget) -> TargetDemand:
        """What waits and runs, against what a worker can compute that has places for so many sessions."""
        seconds, running, waiting = self.time(budget.tokens), list(scheduler.running), list(scheduler.waiting)
        return TargetDemand(
            queued_tokens=sum(sequence.num_uncomputed_tokens - 1 for sequence in running)
            + sum(len(sequence.session.tokens) for sequence in waiting),
            running_tokens=cache.capacity - cache.free_tokens,
            capacity_tokens=cache.capacity,
            sessions=len(running) + len(waiting),
            places=places,
            speed=budget.tokens / seconds if seconds else 0.0,
            computed=self._counters.prefilled + self._counters.committed,
        )

    def pause(self, now: float, *, waits: bool) -> None:
        """There is nothing to compute. ``waits``: since all sessions wait for drafts; else none is open."""
        if not waits:
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since = now
        if self._recorder:
            self._recorder.flush()

    def resume(self, now: float, entries: Sequence[BatchEntry]) -> None:
        """A step begins, of these."""
        self._computing = sum(entry.tokens for entry in entries)
        for entry in entries:
            entry.sequence.timings.begins(now)
        if self._waiting_since is None:
            return
        self._counters.waits += 1
        self._counters.wait_microseconds += round((now - self._waiting_since) * 1e6)
        if self._recorder:
            self._recorder.write(role="target", wait=[self._waiting_since, now])
        self._waiting_since = None

    @contextmanager
    def forward(self) -> Iterator[None]:
        """The block waits for a forward and what it makes of it."""
        try:
            yield
        finally:
            self._computing = 0

    def observe(
        self,
        entries: Sequence[BatchEntry],
        started: float,
        ended: float,
        committed: int,
        forward: float,
        drafting: float,
    ) -> None:
        """A step is over, which ``committed`` so many tokens; ``forward`` and ``drafting`` took seconds of it."""
        self._counters.steps += 1
        self._counters.step_microseconds += round((ended - started) * 1e6)
        self._counters.forward_microseconds += round(forward * 1e6)
        tokens = sum(entry.tokens for entry in entries)
        decoding = [entry for entry in entries if entry.decodes]
        computing = ended - started - drafting
        if len(decoding) == len(entries):
            self._planner.observe(len(entries), tokens, computing, committed, drafting)
        self.time.observe(tokens, computing)
        self._longest.observe(tokens, ended - started)
        if decoding:
            decoded = tokens if len(decoding) == len(entries) else sum(entry.tokens for entry in decoding)
            self.time.verified(len(decoding), decoded)
        if self._recorder:
            self._recorder.write(
                role="target",
                start=started,
                end=ended,
                forward=forward,
                tokens=tokens,
                sessions=[entry.outcome for entry in entries if entry.outcome],
            )
