"""The scheduler over time: random sessions through the real decisions, with a cost model for a clock.

A step takes what a model takes that reads its weights once and then pays for every session and every token. Nothing
else is modelled: no text, no drafts' odds. Every run is made of a seed, which a failing test names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import fmean

import pytest

from target_service.scheduler import HEAD_START, MIN_PREFILL, Budget, Rank, Scheduler, Share, rank
from target_service.step_account import StepTime

BLOCK = 16


@dataclass(frozen=True)
class Cost:
    """Seconds of a step."""

    step: float = 0.010
    session: float = 0.0005
    token: float = 0.0003

    def __call__(self, decoding: int, prompts: int, drafts: int = 0) -> float:
        return self.step + self.session * decoding + self.token * (decoding + prompts + drafts)

    def of_prompt(self, tokens: int, budget: Budget) -> float:
        """A prompt all by itself."""
        return self.step * math.ceil(tokens / budget.tokens) + self.token * tokens


@dataclass(eq=False)
class Session:
    """A request as the scheduler sees it: ``prompt`` tokens, then ``wanted`` more, one or several a step."""

    number: int
    arrived: float
    prompt: int
    wanted: int
    priority: int = 0
    made: int = 0
    cached: int = 0
    first: float | None = None
    ended: float | None = None
    steps: list[int] = field(default_factory=list)
    """The steps it decoded in."""
    evicted: bool = False
    """Whether it gave way in the step that is being planned."""

    @property
    def rank(self) -> Rank:
        return rank(self.arrived, self.number, self.priority)

    @property
    def num_uncomputed_tokens(self) -> int:
        return self.prompt + self.made - self.cached

    @property
    def blocks(self) -> int:
        return -(-self.cached // BLOCK)

    @property
    def to_first(self) -> float:
        """Seconds until the first token."""
        assert self.first is not None
        return self.first - self.arrived

    def blocks_needed(self, count: int) -> int:
        return -(-(self.cached + count) // BLOCK) - self.blocks

    def reuse(self) -> int:
        return 0  # nothing is shared here

    def preempt(self) -> None:
        self.cached, self.evicted = 0, True


@dataclass(frozen=True)
class Past:
    """A step that was."""

    decoding: int
    prompts: int
    drafts: int
    seconds: float


class World:
    """A target worker of which only the decisions are real."""

    def __init__(
        self,
        arrivals: Sequence[Session],
        blocks: int = 10**6,
        running: int = 64,
        budget: Budget = Budget(),
        cost: Cost = Cost(),
        seed: int = 0,
        drafts: bool = False,
    ) -> None:
        self.now = 0.0
        self.past: list[Past] = []
        self.computed = 0
        self.budget, self.cost = budget, cost
        self._capacity, self._drafts, self._rng = blocks, drafts, Random(seed)
        self._to_come = sorted(arrivals, key=lambda session: session.arrived)[::-1]
        self._time = StepTime()
        self.scheduler: Scheduler[Session] = Scheduler(running, budget, lambda: self.free)

    @property
    def free(self) -> int:
        return self._capacity - sum(session.blocks for session in self.scheduler.running)

    def run(self, until: Callable[[], bool] = lambda: False, max_steps: int = 100_000) -> None:
        """Until all have ended, or ``until`` holds."""
        while not until() and (self._to_come or self.scheduler.running or self.scheduler.waiting):
            assert len(self.past) < max_steps, f"not at an end after {max_steps} steps"
            self._arrive()
            step = self.scheduler.step(self._beside)
            self.scheduler.validate()
            assert step[0], "a step that computes nothing"
            self._check(step)
            self._pass(step)

    def _arrive(self) -> None:
        if not self.scheduler.running and not self.scheduler.waiting:
            self.now = max(self.now, self._to_come[-1].arrived)
        while self._to_come and self._to_come[-1].arrived <= self.now:
            self.scheduler.add(self._to_come.pop())

    def _beside(self, decoding: int) -> int:
        return self._time.prefill_budget(decoding, self.budget)

    def _check(self, step: tuple[list[tuple[Session, Share]], int]) -> None:
        """What must hold of every step."""
        running = self.scheduler.running
        for jobs in (running, self.scheduler.waiting):
            assert [job.rank for job in jobs] == sorted(job.rank for job in jobs)
        for session in self.scheduler.waiting:
            assert not session.cached
            assert not session.evicted or running[-1].rank < session.rank, "gave way to a session that ranks behind"
            session.evicted = False
        assert sum(one.num_scheduled_tokens for _, one in step[0]) + step[1] <= self.budget.tokens
        needed = sum(session.blocks_needed(one.num_scheduled_tokens + one.drafts) for session, one in step[0])
        assert 0 <= needed <= self.free
        turns = sum(session.num_uncomputed_tokens == 1 for session in running) > self.budget.tokens // 2
        assert turns or running[0] is step[0][0][0], "the first of all does not proceed"

    def _pass(self, step: tuple[list[tuple[Session, Share]], int]) -> None:
        """Compute it, in no time but the clock's."""
        decoding = [(session, one) for session, one in step[0] if session.num_uncomputed_tokens == 1]
        prompts = sum(one.num_scheduled_tokens for session, one in step[0] if session.num_uncomputed_tokens > 1)
        offered = self._offers(decoding, step[1])
        seconds = self.cost(len(decoding), prompts, sum(offered.values()))
        self.now += seconds
        self.past.append(Past(len(decoding), prompts, sum(offered.values()), seconds))
        tokens = len(decoding) + prompts + sum(offered.values())
        self.computed += tokens
        self._time.observe(tokens, seconds)
        for session, one in step[0]:
            self._commit(session, one, offered.get(session, 0))

    def _offers(self, decoding: Sequence[tuple[Session, Share]], room: int) -> dict[Session, int]:
        offered: dict[Session, int] = {}
        for session, one in decoding if self._drafts else ():
            offered[session] = self._rng.randint(0, min(one.drafts, room))
            room -= offered[session]
        return offered

    def _commit(self, session: Session, one: Share, offered: int) -> None:
        complete = one.num_scheduled_tokens == session.num_uncomputed_tokens
        if complete and one.num_scheduled_tokens == 1:
            session.steps.append(len(self.past))
        session.cached += one.num_scheduled_tokens
        if not complete:
            return
        accepted = min(self._rng.randint(0, offered), session.wanted - session.made - 1)
        session.cached += accepted
        session.made += accepted + 1
        session.first = session.first or self.now
        if session.made == session.wanted:
            session.ended = self.now
            session.cached = 0
            self.scheduler.remove(session)


def at_random(
    rng: Random, count: int, rate: float, longest: int, priorities: Sequence[int] = (0,), burst: int = 1
) -> list[Session]:
    """Poisson arrivals of ``burst`` sessions each; prompts of all magnitudes."""
    sessions: list[Session] = []
    at = 0.0
    while len(sessions) < count:
        at += rng.expovariate(rate / burst)
        for _ in range(burst):
            prompt = round(math.exp(rng.uniform(0.0, math.log(longest))))
            sessions.append(Session(len(sessions), at, prompt, rng.randint(1, 80), rng.choice(priorities)))
    return sessions


SEEDS = range(8)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("burst", [1, 20])
def test_everything_ends_in_a_cache_that_is_too_small_and_no_block_is_lost(seed, burst):
    rng = Random(seed)
    sessions = at_random(rng, 60, rate=20.0, longest=20_000, priorities=(-2, 0, 0, 3), burst=burst)
    largest = max(session.prompt + session.wanted for session in sessions)
    world = World(sessions, blocks=-(-largest // BLOCK), seed=seed, drafts=True)
    world.run()
    assert all(session.ended is not None for session in sessions)
    assert world.free == -(-largest // BLOCK)
    assert not world.scheduler.running and not world.scheduler.waiting


@pytest.mark.parametrize("seed", SEEDS)
def test_preemption_costs_little_work(seed):
    """Sessions outgrow the cache together. What is computed twice is less than what accepted drafts save."""
    sessions = [Session(n, 0.001 * n, 100, 300) for n in range(12)]
    world = World(sessions, blocks=6 * 400 // BLOCK, seed=seed, drafts=True)
    world.run()
    assert world.scheduler.preempted > 0
    drafts = sum(past.drafts for past in world.past)
    assert world.computed - drafts < sum(session.prompt + session.wanted for session in sessions)


@pytest.mark.parametrize("seed", SEEDS)
def test_prompts_stretch_a_step_of_running_text_no_further_than_allowed(seed):
    rng = Random(seed)
    cost = Cost(step=rng.uniform(0.005, 0.1), session=rng.uniform(0, 0.002), token=10 ** rng.uniform(-5.0, -2.5))
    world = World(at_random(rng, 80, rate=5.0, longest=20_000), seed=seed, cost=cost)
    world.run()
    budget = world.budget
    over = []
    for past in world.past:
        if past.decoding and past.prompts:
            alone = cost(past.decoding, 0)
            allowed = max(budget.slowdown * alone, budget.seconds, cost(past.decoding, MIN_PREFILL))
            over.append(past.seconds / allowed)
    assert len(over) > 100
    assert sum(excess > 1.1 for excess in over) < 0.05 * len(over)
    assert max(over) < 1.3


def test_prompts_beside_running_text_use_the_time_they_are_allowed():
    text = Session(0, 0.0, 10, 2000)
    world = World([text, Session(1, 1.0, 20_000, 1)])
    world.run()
    mixed = [past for past in world.past if past.decoding and past.prompts]
    assert fmean(past.seconds for past in mixed[20:-1]) > 0.9 * world.budget.seconds


@pytest.mark.parametrize("prompt", [5, 50, 300])
def test_a_short_prompt_does_not_wait_behind_a_long_one(prompt):
    long, short = Session(0, 0.0, 100_000, 1), Session(1, 1.0, prompt, 1)
    world = World([long, short])
    world.run()
    one_step = world.cost(0, world.budget.tokens)
    assert short.to_first <= (2 + math.ceil(2 * prompt / world.budget.tokens)) * one_step
    assert long.to_first < world.cost.of_prompt(100_000 + 2 * prompt, world.budget) + one_step


def endless(after: int, prompt: int, wanted: int, every: float, priority: int = 0) -> Iterator[Session]:
    for n in range(2000):
        yield Session(after + n, n * every, prompt, wanted, priority)


@pytest.mark.parametrize("priority", [0, 1])
def test_a_long_prompt_is_not_starved_by_short_ones_that_never_end(priority):
    """More work comes in than can be done; all of it shorter, and of better priority in one case."""
    long = Session(0, 0.5, 20_000, 1, priority)
    world = World([long, *endless(1, 300, 1, every=0.08)], running=8)
    world.run(until=lambda: long.first is not None)
    came_first = math.ceil((0.5 + HEAD_START * priority) / 0.08)
    backlog = came_first * world.cost.of_prompt(300, world.budget)
    # Half of every step once it is the first, and all that ranks ahead before that.
    assert long.to_first < HEAD_START * priority + backlog + 2.5 * world.cost.of_prompt(20_000, world.budget)


def test_of_more_sessions_than_a_step_has_tokens_for_all_go_on_alike():
    sessions = [Session(n, 0.0, 1, 40) for n in range(20)]
    world = World(sessions, budget=Budget(tokens=8, drafts_per_session=0))
    world.run(until=lambda: any(session.ended for session in sessions))
    assert {session.made for session in sessions} <= {39, 40}
    for session in sessions:
        gaps = [later - earlier for earlier, later in zip(session.steps, session.steps[1:], strict=False)]
        assert set(gaps) <= {2, 3}


def test_within_the_budget_every_session_that_decodes_is_in_every_step():
    sessions = at_random(Random(1), 60, rate=20.0, longest=2000, priorities=(-1, 0, 5))
    World(sessions).run()
    for session in sessions:
        assert (
            session.steps == list(range(session.steps[0], session.steps[0] + len(session.steps))) or not session.steps
        )


@pytest.mark.parametrize("seed", SEEDS)
def test_a_better_priority_is_served_sooner_under_load(seed):
    sessions = at_random(Random(seed), 150, rate=40.0, longest=2000, priorities=(-1, 0, 1))
    world = World(sessions, running=8, seed=seed)
    world.run()
    to_first = {p: fmean(s.to_first for s in sessions if s.priority == p) for p in (-1, 0, 1)}
    assert to_first[-1] < 0.8 * to_first[0]
    assert to_first[0] < 0.8 * to_first[1]
