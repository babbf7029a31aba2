"""Single decisions of the scheduler; what they come to over time is in tests/sim/test_scheduling.py."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from target_service.scheduler import (
    HEAD_START,
    HEADROOM,
    MIN_PREFILL,
    Budget,
    Demand,
    Rank,
    Scheduler,
    Share,
    fit,
    prefill,
    rank,
    share,
)
from target_service.step_account import StepTime

BUDGET = Budget(tokens=200, drafts_per_session=8, verify=16)
DECODES = Demand(1)
BLOCK = 16


def unbounded(_decoding: int) -> int:
    return 10**6


def shares(demands: list[Demand], budget: Budget = BUDGET, prefill_budget=unbounded) -> list[Share]:
    return share(demands, budget, prefill_budget)[0]


# -- sharing a step ----------------------------------------------------------------------------------------------------


def test_a_lone_session_gets_all_the_drafts_it_may_have():
    assert shares([DECODES]) == [Share(1, 8)]
    assert share([DECODES], BUDGET, unbounded)[1] == 8


def test_drafts_have_the_room_that_decoding_leaves_and_vanish_in_large_batches():
    for sessions, room in ((4, 12), (12, 4), (16, 0), (40, 0)):
        assert share([DECODES] * sessions, BUDGET, unbounded) == ([Share(1, min(room, 8))] * sessions, room)


def test_what_a_class_of_rows_leaves_empty_may_be_drafts():
    padded = replace(BUDGET, verify=64, row_classes=(16, 32, 64))
    assert share([DECODES], padded, unbounded)[0] == [Share(1, 31)]
    assert share([DECODES] * 3, padded, unbounded) == ([Share(1, 31)] * 3, 61)


def test_without_running_text_prompts_get_the_whole_budget():
    assert shares([Demand(150), Demand(150)], prefill_budget=lambda _: 0) == [Share(150), Share(50)]


def test_beside_running_text_prompts_get_what_time_allows_and_at_least_a_little():
    asked = []

    def prefill_budget(decoding: int) -> int:
        asked.append(decoding)
        return 30

    assert shares([DECODES, Demand(300), DECODES], prefill_budget=prefill_budget) == [
        Share(1, 8),
        Share(30),
        Share(1, 8),
    ]
    assert asked == [2]
    assert shares([DECODES, Demand(300)], prefill_budget=lambda _: 0)[1] == Share(MIN_PREFILL)


def test_all_together_keep_to_the_budget():
    for decoding in (0, 1, 5, 50, 150, 300):
        for prompts in ([], [9], [500, 3, 500]):
            divided, drafts = share([DECODES] * decoding + [Demand(n) for n in prompts], BUDGET, unbounded)
            total = sum(one.num_scheduled_tokens for one in divided) + drafts
            assert total <= BUDGET.tokens
            assert total == BUDGET.tokens or decoding + sum(prompts) < 200


def test_prompts_have_a_budget_of_their_own_where_nothing_decodes():
    budget = replace(BUDGET, alone=700)
    prompts = [Demand(300), Demand(300), Demand(300)]
    assert sum(one.num_scheduled_tokens for one in shares(prompts, budget)) == 700
    beside_text, drafts = share([DECODES, *prompts], budget, unbounded)
    assert sum(one.num_scheduled_tokens for one in beside_text) + drafts == BUDGET.tokens
    assert sum(one.num_scheduled_tokens for one in shares(prompts, replace(BUDGET, alone=50))) == BUDGET.tokens


def test_more_sessions_than_tokens_take_turns():
    demands = [Demand(1, turn=turn) for turn in (9, 2, 8, 3)]
    assert shares(demands, Budget(tokens=2)) == [Share(), Share(1), Share(), Share(1)]
    with_prompt = shares([*demands, Demand(9)], Budget(tokens=2))
    assert with_prompt == [Share(), Share(1), Share(), Share(), Share(1)]


def test_a_budget_that_cannot_serve_text_and_a_prompt_is_refused():
    with pytest.raises(ValueError, match="at least 2 tokens, got 1"):
        Budget(tokens=1)


@pytest.mark.parametrize(
    ("prompts", "tokens", "feeds"),
    [
        ([1000, 50, 20], 100, [50, 30, 20]),  # half for the first, the rest for the shortest
        ([30, 1000, 20], 100, [30, 50, 20]),  # what the short leave goes on in order
        ([1000, 1000], 100, [100, 0]),  # of equals the first
        ([20, 30], 100, [20, 30]),
        ([1000, 50], 1, [1, 0]),
        ([], 100, []),
    ],
)
def test_half_goes_by_rank_and_half_to_the_shortest(prompts, tokens, feeds):
    assert prefill([Demand(n) for n in prompts], tokens) == feeds


def test_the_half_for_short_prompts_heeds_priority_first():
    assert prefill([Demand(1000), Demand(50, priority=1), Demand(80)], 100) == [50, 0, 50]


# -- the cache ---------------------------------------------------------------------------------------------------------


def needs(spare: int):
    """Blocks for so many tokens more, when ``spare`` fit in those a session has."""
    return lambda count: max(0, -(-(count - spare) // BLOCK))


@pytest.mark.parametrize(
    ("wanted", "spare", "free", "cut"),
    [
        ([Share(1, 8)], [16], 0, [Share(1, 8)]),
        ([Share(1, 8)], [4], 0, [Share(1, 3)]),  # drafts give way
        ([Share(1, 8)], [0], 1, [Share(1, 8)]),
        ([Share(100), Share(1, 8)], [0, 1], 2, [Share(32), Share(1, 0)]),  # prompts come before drafts
        ([Share(100), Share(1)], [0, 0], 2, [Share(16), Share(1)]),  # and a token for each before prompts
        ([Share(100), Share(1)], [0, 0], 1, None),
        ([Share(), Share(1)], [0, 0], 1, [Share(), Share(1)]),  # who has no part needs no room
        ([], [], 0, []),
    ],
)
def test_shares_are_cut_down_to_the_free_blocks(wanted, spare, free, cut):
    assert fit(wanted, [needs(n) for n in spare], free) == cut


# -- who runs ----------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Job:
    """A session with a cache of its own making: blocks come from ``blocks``."""

    name: str
    tokens: int
    blocks: list[int]
    arrived: float = 0.0
    priority: int = 0
    cached: int = 0
    started: list[str] = field(default_factory=list)

    @property
    def rank(self) -> Rank:
        return rank(self.arrived, 0, self.priority)

    @property
    def num_uncomputed_tokens(self) -> int:
        return self.tokens - self.cached

    def blocks_needed(self, count: int) -> int:
        return -(-(self.cached + count) // BLOCK) - -(-self.cached // BLOCK)

    def feed(self, count: int) -> None:
        self.blocks[0] -= self.blocks_needed(count)
        self.cached += count

    def reuse(self) -> int:
        if self.name not in self.started:
            self.started.append(self.name)
        return 0

    def preempt(self) -> None:
        self.blocks[0] += -(-self.cached // BLOCK)
        self.cached = 0


def scheduler(blocks: list[int], max_running: int = 8) -> Scheduler[Job]:
    return Scheduler(max_running, Budget(), lambda: blocks[0])


def names(jobs: list[Job]) -> str:
    return "".join(job.name for job in jobs)


def test_who_comes_first_starts_first_and_priority_is_worth_a_head_start():
    blocks = [100]
    made = scheduler(blocks, max_running=3)
    level = HEAD_START
    for name, arrived, priority in (("a", 0.0, 0), ("b", 1.0, 1), ("c", level - 1, 0), ("d", level + 2, 0)):
        made.add(Job(name, 10, blocks, arrived, priority))
    made.step(unbounded)
    assert (names(made.running), names(made.waiting)) == ("acb", "d")  # b has waited longer than its level is worth
    made.add(Job("e", 10, blocks, level + 3, -1))
    assert names(made.waiting) == "ed"
    made.remove(made.running[0])
    made.step(unbounded)
    assert (names(made.running), names(made.waiting)) == ("ecb", "d")


def test_none_starts_before_there_is_room_for_it_nor_ahead_of_one_that_waits():
    blocks = [10]
    made = scheduler(blocks)
    made.add(Job("a", 100, blocks, 0.0))
    made.add(Job("b", 100, blocks, 1.0))
    made.add(Job("c", 1, blocks, 2.0))
    step = made.step(unbounded)
    assert names([job for job, _ in step[0]]) == "a"
    assert names(made.waiting) == "bc"
    made.remove(made.running[0])
    for room, running in ((10, "b"), (-(-(100 + HEADROOM) // BLOCK) + -(-(1 + HEADROOM) // BLOCK), "bc")):
        blocks[0] = room
        made.step(unbounded)
        assert names(made.running) == running


def test_none_starts_without_room_for_those_that_run_to_grow():
    blocks = [100]
    made = scheduler(blocks)
    made.add(Job("a", 16, blocks))
    for job, one in made.step(unbounded)[0]:
        job.feed(one.num_scheduled_tokens)
        job.tokens += 1
    made.add(Job("b", 15, blocks, 1.0))
    growth = [job.blocks_needed(job.num_uncomputed_tokens + HEADROOM) for job in (*made.running, *made.waiting)]
    for room, running in ((sum(growth) - 1, "a"), (sum(growth), "ab")):
        blocks[0] = room
        made.step(unbounded)
        assert names(made.running) == running


def test_whatever_its_rank_nobody_has_more_turns_than_others():
    blocks = [100]
    made = Scheduler[Job](8, Budget(tokens=2), lambda: blocks[0])
    for arrived, name in enumerate("abc"):
        made.add(Job(name, 2, blocks, arrived, cached=1))
    took_part = [names([job for job, _ in made.step(unbounded)[0]]) for _ in range(6)]
    assert sorted("".join(took_part)) == sorted("abc" * 4)


def test_the_last_in_rank_is_preempted_and_keeps_its_place():
    blocks = [100]
    made = scheduler(blocks)
    jobs = [Job("a", 17, blocks, 0.0), Job("b", 17, blocks, 1.0, priority=1), Job("c", 17, blocks, 2.0)]
    for job in jobs:
        made.add(job)
    for job, one in made.step(unbounded)[0]:
        job.feed(one.num_scheduled_tokens)
    for job in jobs:  # all blocks are full, and all want to go on
        job.tokens, job.cached = 33, 32
    blocks[0] = 1
    step = made.step(unbounded)
    assert names(made.running) == "ac"
    assert names(made.waiting) == "b"
    assert made.preempted == 1
    assert [one.num_scheduled_tokens for _, one in step[0]] == [1, 1]
    made.add(Job("d", 17, blocks, 3.0))
    assert names(made.waiting) == "db"  # a level of priority, not a place lost
    made.remove(jobs[1])
    assert names(made.waiting) == "d"


def test_a_lone_session_is_never_preempted():
    blocks = [0]
    made = scheduler(blocks)
    made.add(Job("a", 50, blocks))
    step = made.step(unbounded)
    assert [one.num_scheduled_tokens for _, one in step[0]] == [1]
    assert made.preempted == 0


def test_starting_and_going_leave_nothing_behind():
    blocks = [100]
    made = scheduler(blocks, max_running=1)
    running, waiting = Job("a", 10, blocks), Job("b", 10, blocks, 1.0)
    made.add(running)
    made.add(waiting)
    made.step(unbounded)
    assert running.started == ["a"]
    assert waiting.started == []
    made.remove(waiting)
    made.remove(running)
    assert made.step(unbounded)[0] == []
    assert not made.running and not made.waiting and not made._turns


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda made: made.running.reverse(), "out of order"),
        (lambda made: made.waiting.append(made.running[0]), "listed twice"),
        (lambda made: made._turns.clear(), "turns are kept for others"),
        (lambda made: setattr(made, "_max_running", 1), "2 sessions run, 1 may"),
        (lambda made: setattr(made.running[0], "cached", 10), "has nothing to compute"),
        (lambda made: setattr(made, "_free", lambda: -1), "-1 blocks are free"),
    ],
)
def test_books_that_contradict_each_other_are_found(spoil, words):
    blocks = [100]
    made = scheduler(blocks, max_running=2)
    for name, arrived in (("a", 0.0), ("b", 1.0), ("c", 2.0)):
        made.add(Job(name, 10, blocks, arrived))
    made.step(unbounded)
    made.validate()
    spoil(made)
    with pytest.raises(AssertionError, match=words):
        made.validate()


# -- prompts beside running text ---------------------------------------------------------------------------------------


def measured(fixed: float, each: float, sizes: list[int]) -> StepTime:
    """After many steps of these sizes."""
    time = StepTime()
    for _ in range(200):
        for tokens in sizes:
            time.observe(tokens, fixed + each * tokens)
    return time


def prefill_budget(time: StepTime, decoding: int, seconds: float = 0.0) -> int:
    return time.prefill_budget(decoding, Budget(tokens=1000, seconds=seconds))


def test_prompt_tokens_beside_running_text_are_bounded_by_measured_time():
    time = measured(0.010, 0.001, [1, 200])
    assert time(50) == pytest.approx(0.060)
    assert prefill_budget(time, 1) == 11
    assert prefill_budget(time, 1, seconds=0.0611) == 50
    assert prefill_budget(time, 40) == 50


def test_drafts_belong_to_running_text():
    """A step of ten sessions takes as long as what they verify: prompts may take as much again."""
    time = measured(0.010, 0.001, [1, 200])
    for _ in range(50):
        time.verified(8, 32)
    assert prefill_budget(time, 10) == 50
    for _ in range(50):
        time.verified(8, 8)
    assert prefill_budget(time, 10) == 20


def test_prompt_tokens_that_cost_nothing_are_bounded_by_the_budget_only():
    assert prefill_budget(measured(0.010, 0.0, [1, 200]), 1) == 1000
    assert prefill_budget(StepTime(), 1) == 1000  # nor do we know yet that they cost something


def test_steps_of_one_size_leave_the_rest_as_it_was():
    time = measured(0.010, 0.001, [1, 200])
    for _ in range(1000):
        time.observe(1, 0.011)
    assert time(200) == pytest.approx(0.210, rel=0.05)


def test_a_slow_step_is_taken_for_an_outlier_and_a_slow_machine_is_not():
    time = measured(0.010, 0.001, [1, 200])
    time.observe(100, 50.0)
    assert time(100) < 2 * 0.110
    for _ in range(50):
        time.observe(100, 0.220)
    assert time(100) == pytest.approx(0.220)
