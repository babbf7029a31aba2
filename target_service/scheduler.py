"""What the next step of a target computes: continuous batching of prefill chunks, decodes and verifications.

Pure decisions over counts; knows nothing of models, tokens or streams. Three questions, one order.

**The order.** Every session has a rank for life: when it began, here or at a target it has left, moved by
:data:`HEAD_START` for each level of its priority. Who comes first starts first and is preempted last. Since ranks never
change, waiting makes up for any priority, nobody is overtaken for ever, and whoever was preempted stands again where it
stood.

**Who runs** (:class:`Scheduler`). Sessions start in this order, each once there is room for all it has so far. When the
cache is short, the last one is preempted: it keeps its tokens and is computed again later. Nobody is preempted for a
session that ranks behind, so the first always proceeds, and everything finishes.

**Who gets how much of a step** (:func:`share`), out of one budget of tokens:

* Sessions that decode come first, a token each, plus room for drafts. Are there too many, they take turns.
* Prompts get what is left, or a budget of their own where nothing decodes; but beside running text only as much as a
  step may take longer by (:mod:`target_service.step_account`), and never less than :data:`MIN_PREFILL`.
* Half of that goes to prompts in the order of rank, so that none starves; the other half to those of the best priority
  and, among them, the shortest, so that none waits behind a long one. What one half leaves the other may use.

**What the cache allows of it** (:func:`fit`). A token for each comes first, then the rest of the prompts, then drafts.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Generic, Protocol, TypeVar

from speculation.frozen import frozen
from speculation.verifying.budget import room_for_drafts

HEAD_START = 10.0
"""Seconds that one level of priority is worth: of two sessions a level apart, the better one goes first unless it came
this much later."""
MIN_PREFILL = 16
"""Prompt tokens that a step computes whatever they cost."""
HEADROOM = 32
"""Tokens each session must be able to grow by before another one starts; keeps a full cache from thrashing."""

Rank = tuple[float, int]
"""Where a session stands among all of its worker; the least is first. See :func:`rank`."""


def rank(arrived: float, number: int, priority: int) -> Rank:
    """The rank of a session that began at ``arrived`` (seconds); ``number`` orders those that began at once."""
    return arrived + HEAD_START * priority, number


@dataclass(frozen=True, slots=True)
class Budget:
    """Bounds of one step."""

    tokens: int = 320
    """Most tokens computed, all together; prompts can have half of them, whoever decodes."""
    drafts_per_session: int = 8
    """Most draft tokens verified for one session, but for what else has room in the class of rows."""
    verify: int = 64
    """Most tokens computed for sessions that decode, drafts included (never less than one each)."""
    slowdown: float = 2.0
    """How many times as long as alone a step of sessions that decode may take for the sake of prompts ..."""
    seconds: float = 0.05
    """... or how long, if that is more."""
    alone: int = 0
    """Most tokens of prompts computed where nothing decodes, if that is more than ``tokens``: nobody's text waits for
    it, and prompts that came together begin to decode together."""
    row_classes: Sequence[int] = ()
    """Numbers of rows that steps are padded to (:mod:`engine.interface`)."""

    def __post_init__(self) -> None:
        if self.tokens < 2:
            raise ValueError(f"a step needs a budget of at least 2 tokens, got {self.tokens}")


@frozen
class Demand:
    """One running session."""

    num_uncomputed_tokens: int
    """How many of its committed tokens are not in the cache yet (at least 1)."""
    priority: int = 0
    turn: int = 0
    """Where it stands in the queue of those that take turns: the lower, the longer it has not taken part."""

    @property
    def decodes(self) -> bool:
        """Only the last token is missing: the session is past its prompt."""
        return self.num_uncomputed_tokens == 1


@frozen
class Share:
    """What one session gets in a step.

    ``num_scheduled_tokens`` of its uncomputed tokens and, if that is all of them, room for drafts.
    """

    num_scheduled_tokens: int = 0
    drafts: int = 0


def share(demands: Sequence[Demand], budget: Budget, prefill_budget: Callable[[int], int]) -> tuple[list[Share], int]:
    """Divide one step among ``demands``, best rank first: a share for each, and the most drafts of all together.

    ``prefill_budget(n)``: how many prompt tokens a step may compute beside ``n`` sessions that decode.
    """
    decoding = [i for i, demand in enumerate(demands) if demand.decodes]
    prompts = [i for i, demand in enumerate(demands) if not demand.decodes]
    room = budget.tokens - min(budget.tokens // 2, sum(demands[i].num_uncomputed_tokens for i in prompts))
    served = sorted(decoding, key=lambda i: demands[i].turn)[:room]
    drafts = max(min(budget.verify, room) - len(served), 0)
    each, drafts = room_for_drafts(len(served), budget.drafts_per_session, drafts, budget.row_classes)
    shares = [Share()] * len(demands)
    decoded = Share(1, each)
    for i in served:
        shares[i] = decoded
    if served:
        left = min(budget.tokens - len(served) - drafts, max(prefill_budget(len(served)), MIN_PREFILL))
    else:
        left = max(budget.tokens, budget.alone)
    for i, count in zip(prompts, prefill([demands[i] for i in prompts], left), strict=True):
        shares[i] = Share(count)
    return shares, drafts


def prefill(prompts: Sequence[Demand], tokens: int) -> list[int]:
    """How many of ``tokens`` each prompt gets, best rank first."""
    scheduled = [0] * len(prompts)
    shortest = sorted(range(len(prompts)), key=lambda i: (prompts[i].priority, prompts[i].num_uncomputed_tokens))
    for order, reserved in ((range(len(prompts)), tokens // 2), (shortest, 0)):
        for i in order:
            more = min(prompts[i].num_uncomputed_tokens - scheduled[i], tokens - reserved)
            scheduled[i] += more
            tokens -= more
    return scheduled


def fit(shares: Sequence[Share], needs: Sequence[Callable[[int], int]], free: int) -> list[Share] | None:
    """Cut shares down to the blocks that are ``free``; None if they do not even suffice for a token each.

    ``needs[i](count)``: blocks that session ``i`` must take before ``count`` more tokens fit, ``count + 1`` at most.
    """
    if sum(one.num_scheduled_tokens + one.drafts + 1 for one in shares) <= free:
        return list(shares)
    if sum(need(one.num_scheduled_tokens + one.drafts) for one, need in zip(shares, needs, strict=True)) <= free:
        return list(shares)
    taken = [need(1) if one.num_scheduled_tokens else 0 for one, need in zip(shares, needs, strict=True)]
    left = free - sum(taken)
    if left < 0:
        return None

    def fitting(i: int, tokens: int) -> int:
        """How many of ``tokens`` session ``i`` has room for; takes the blocks."""
        nonlocal left
        count = bisect_right(range(1, tokens + 1), taken[i] + left, key=needs[i])
        left += taken[i]
        taken[i] = needs[i](count)
        left -= taken[i]
        return count

    cut = [
        replace(one, num_scheduled_tokens=fitting(i, one.num_scheduled_tokens)) if one.num_scheduled_tokens else one
        for i, one in enumerate(shares)
    ]
    return [
        replace(one, drafts=fitting(i, one.num_scheduled_tokens + one.drafts) - one.num_scheduled_tokens)
        for i, one in enumerate(cut)
    ]


class Job(Protocol):
    """What the scheduler sees of a session."""

    @property
    def rank(self) -> Rank:
        """Its place in the order; never changes."""

    @property
    def priority(self) -> int:
        """The lower, the sooner."""

    @property
    def num_uncomputed_tokens(self) -> int:
        """How many of its committed tokens are not in the cache: at least the last one."""

    def blocks_needed(self, count: int) -> int:
        """Blocks to be taken before ``count`` more tokens fit: one more than these at most."""

    def reuse(self) -> int:
        """Take over from the cache what others have computed of it; how many tokens."""

    def preempt(self) -> None:
        """It was preempted: all its blocks go back."""


J = TypeVar("J", bound=Job)
BY_RANK = attrgetter("rank")


class Scheduler(Generic[J]):
    """The sessions of a worker: those that run and those that wait, both by rank."""

    def __init__(self, max_running: int, budget: Budget, free: Callable[[], int]) -> None:
        """``max_running``: how many run at once. ``free()``: blocks that can be taken from the cache now."""
        self.running: list[J] = []
        self.waiting: list[J] = []
        self.preempted = 0
        """How often a session was preempted."""
        self.reused = 0
        """Tokens taken over from the cache instead of being computed."""
        self._max_running, self._budget, self._free = max_running, budget, free
        self._turns: dict[J, int] = {}  # of each running session
        self._turn = itertools.count()

    def add(self, job: J) -> None:
        """Let a session wait for its start."""
        insort(self.waiting, job, key=BY_RANK)

    def remove(self, job: J) -> None:
        """Forget a session. Its blocks are the caller's to free."""
        if self._turns.pop(job, None) is None:
            self.waiting.remove(job)
        else:
            self.running.remove(job)

    def step(self, prefill_budget: Callable[[int], int]) -> tuple[list[tuple[J, Share]], int]:
        """Start whoever there is room for, and divide the next step; ``prefill_budget`` as in :func:`share`.

        What comes is who takes part and with what, and the most drafts of all together.
        """
        self._admit()
        for job in self.running:
            self.reused += job.reuse()
        while self.running:
            demands = [Demand(job.num_uncomputed_tokens, job.priority, self._turns[job]) for job in self.running]
            wanted, drafts = share(demands, self._budget, prefill_budget)
            shares = fit(wanted, [job.blocks_needed for job in self.running], self._free())
            if shares is None and len(self.running) == 1:
                # Cannot be, since no session is taken that is larger than the cache. Computing it will say so.
                shares = [Share(1)]
            if shares is not None:
                parts = [(job, one) for job, one in zip(self.running, shares, strict=True) if one.num_scheduled_tokens]
                # One after the other, in the order in which they queued: equal turns would be unfair to whom ranks
                # behind.
                for job in sorted((job for job, _ in parts), key=self._turns.__getitem__):
                    self._turns[job] = next(self._turn)
                return parts, drafts
            job = self.running.pop()
            del self._turns[job]
            job.preempt()
            insort(self.waiting, job, key=BY_RANK)
            self.preempted += 1
        return [], 0

    def validate(self) -> None:
        """Raise AssertionError where the books contradict each other."""
        running, waiting = self.running, self.waiting
        assert len(running) <= self._max_running, f"{len(running)} sessions run, {self._max_running} may"
        assert self._turns.keys() == set(running), "turns are kept for others than those that run"
        assert len({*running, *waiting}) == len(running) + len(waiting), "a session is listed twice"
        for jobs in (running, waiting):
            ranks = [job.rank for job in jobs]
            assert ranks == sorted(ranks), f"sessions are out of order: {ranks}"
        for job in running:
            assert job.num_uncomputed_tokens > 0, f"the session of rank {job.rank} runs and has nothing to compute"
        assert self._free() >= 0, f"{self._free()} blocks are free"

    def _admit(self) -> None:
        """Start waiting sessions while there is room for all they have, and for everyone to grow."""
        if not self.waiting or len(self.running) >= self._max_running:
            return
        needed = sum(map(_blocks_to_grow, self.running))
        while self.waiting and len(self.running) < self._max_running:
            needed += _blocks_to_grow(self.waiting[0])
            if self.running and needed > self._free():
                return
            job = self.waiting.pop(0)
            insort(self.running, job, key=BY_RANK)
            self._turns[job] = next(self._turn)


def _blocks_to_grow(job: Job) -> int:
    """Blocks that a session needs for all it has, and for some text to come."""
    return job.blocks_needed(job.num_uncomputed_tokens + HEADROOM)
