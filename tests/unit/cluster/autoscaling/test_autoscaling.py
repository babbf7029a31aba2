"""Policies and steering, case by case; for their behaviour over time see tests/sim/test_autoscaling.py."""

import json
from dataclasses import asdict

import pytest

from cluster.autoscaling.hysteresis import HoldReason, ScaledPool, State, steer
from cluster.autoscaling.policy import DesiredReplicas, Why, drafters, routers, targets
from cluster.config.config import AutoscalingConfig
from speculation.demand import DraftDemand, RouterDemand, TargetDemand

SETTINGS = AutoscalingConfig(up_s=2, down_s=60, pause_s=10, rest_s=100)
IDLE = TargetDemand(capacity_tokens=10_000, places=10, speed=1000)


@pytest.mark.parametrize(
    ("report", "replicas", "why", "words"),
    [
        ({}, 0.0, Why.IDLE, "no sessions"),
        ({"sessions": 1, "computed": 350}, 0.5, Why.WORK, "350 tokens a second = 35% of what 1 target can compute"),
        ({"sessions": 1, "queued_tokens": 1000}, 0.143, Why.SESSIONS, "1 of 10 places taken on 1 target = 10%"),
        (
            {"sessions": 1, "queued_tokens": 2400},
            1.047,
            Why.QUEUE,
            "queued 2,400 tokens = 2.4 s of work for 1 target; ",
        ),
        ({"sessions": 14}, 2.0, Why.SESSIONS, "14 of 10 places taken on 1 target = 140%; goal 70%"),
        ({"sessions": 1, "running_tokens": 7000}, 1.0, Why.CACHE, "7,000 of 10,000 tokens of cache taken"),
        ({"sessions": 5, "speed": 0}, 0.714, Why.SESSIONS, "5 of 10"),
        ({"capacity_tokens": 0, "places": 0, "speed": 0}, 0.0, Why.UNKNOWN, "no target has reported"),
    ],
)
def test_targets_follow_what_is_scarcest(report, replicas, why, words):
    wanted = targets([TargetDemand(**{**asdict(IDLE), **report})], SETTINGS)
    assert (wanted.why, round(wanted.replicas, 3)) == (why, replicas)
    assert words in wanted.says


def test_the_work_of_several_targets_is_that_of_one_times_their_number():
    one = TargetDemand(0, 0, 10_000, 5, 10, 1000, 900)
    assert targets([one] * 3, SETTINGS).replicas == pytest.approx(3 * targets([one], SETTINGS).replicas)
    assert "3 targets" in targets([one] * 3, SETTINGS).says


@pytest.mark.parametrize(
    ("reports", "router", "replicas", "why", "words"),
    [
        ([], {}, 0.0, Why.IDLE, "no session wants drafts"),
        ([], {"undrafted": 3}, 1.0, Why.DEMAND, "3 sessions want drafts and have no drafter"),
        ([(100, 25, 1.0)], {}, 2.0, Why.LEAD, "busy 100% of the time, delivered 25% of the lead asked for; goal 50%"),
        ([(100, 25, 1.0)] * 3, {"streams": 9, "undrafted": 3}, 6.0, Why.LEAD, "3 drafters"),
        ([(100, 100, 1.0)] * 2, {"streams": 80, "undrafted": 16}, 2.5, Why.DEMAND, "16 sessions want drafts and have"),
        ([(0, 0, 0.0)] * 2, {"streams": 8, "undrafted": 8}, 18.0, Why.DEMAND, "8 sessions want drafts and have no"),
        ([(100, 100, 0.01)], {"streams": 9, "undrafted": 0.4, "resting": 4}, 0.0, Why.RESTING, "no use for drafts"),
        ([(100, 100, 0.4)], {}, 0.2, Why.LEAD, "delivered 100%"),
        ([(100, 100, 0.01)], {"resting": 4}, 0.0, Why.RESTING, "no use for drafts in 4 sessions"),
        ([(0, 0, 0.0)], {"resting": 4}, 0.0, Why.RESTING, "no use for drafts in 4 sessions"),
        ([(0, 0, 0.0)], {}, 0.0, Why.IDLE, "no session wants drafts"),
        ([(100, 0, 1.0)], {}, 50.5, Why.LEAD, "delivered 1%"),
    ],
)
def test_drafters_follow_the_lead_asked_for(reports, router, replicas, why, words):
    wanted = drafters([DraftDemand(*one) for one in reports], [RouterDemand(**router)], SETTINGS)
    assert (wanted.why, round(wanted.replicas, 3)) == (why, replicas)
    assert words in wanted.says


def test_routers_follow_open_streams():
    assert routers([], SETTINGS).why is Why.UNKNOWN
    assert routers([RouterDemand()] * 2, SETTINGS).why is Why.IDLE
    wanted = routers([RouterDemand(300), RouterDemand(212)], SETTINGS)
    assert (wanted.replicas, wanted.why) == (2.0, Why.STREAMS)
    assert wanted.says == "512 streams on 2 routers; 256 are enough for one"


# -- steering ----------------------------------------------------------------------------------------------------------


class Steered:
    """A pool that is steered, its replicas there at once unless they are told to be slow."""

    def __init__(self, replicas: int, min_replicas: int = 0, max_replicas: int = 8):
        self.replicas, self.min_replicas, self.max_replicas, self.slow = replicas, min_replicas, max_replicas, 0
        self.state = State()

    def at(self, now: float, wanted: float, why: Why = Why.WORK) -> tuple[int, HoldReason]:
        self.state = State(**json.loads(json.dumps(asdict(self.state))))  # as a controller may keep it
        pool = ScaledPool(self.replicas, self.replicas - self.slow, self.min_replicas, self.max_replicas)
        wanted = DesiredReplicas(wanted, why, "because")
        self.replicas, held, self.state = steer(now, pool, wanted, self.state, SETTINGS)
        return self.replicas, held


def test_a_pool_grows_once_it_has_been_too_small_for_a_while_to_twice_its_size_at_most():
    pool = Steered(1)
    assert [pool.at(t, 5.0) for t in (0, 1, 2)] == [
        (1, HoldReason.DELAY),
        (1, HoldReason.DELAY),
        (2, HoldReason.NOTHING),
    ]
    assert [pool.at(t, 5.0) for t in (3, 11.9)] == [(2, HoldReason.PAUSE)] * 2
    assert [pool.at(t, 5.0) for t in (12, 14)] == [(2, HoldReason.DELAY), (4, HoldReason.NOTHING)]


def test_a_moment_is_not_enough_and_the_least_that_was_wanted_counts():
    pool = Steered(1)
    pool.at(0, 4.0)
    assert pool.at(1, 1.0) == (1, HoldReason.NOTHING)
    assert pool.at(2, 4.0) == (1, HoldReason.DELAY)
    pool = Steered(4)
    pool.at(0, 8.0)
    pool.at(1, 5.0)
    assert pool.at(2, 8.0) == (5, HoldReason.NOTHING)


def test_replicas_on_their_way_count_as_if_they_were_there():
    pool = Steered(2)
    pool.at(0, 4.0)
    pool.at(2, 4.0)
    pool.slow = 2
    assert (pool.replicas, pool.at(60, 8.0)) == (4, (4, HoldReason.STARTING))
    assert pool.at(700, 8.0)[1] is HoldReason.DELAY, "but not for ever"


def test_a_pool_shrinks_to_the_most_that_was_wanted_all_along_with_some_to_spare():
    pool = Steered(6)
    assert pool.at(0, 1.0) == (6, HoldReason.DELAY)
    assert pool.at(30, 3.0) == (6, HoldReason.DELAY)
    assert pool.at(60, 1.0) == (4, HoldReason.NOTHING)
    assert pool.at(61, 3.9) == (4, HoldReason.NOTHING), "3.9 is too much for 3 and not too little for 4"
    assert [pool.at(t, 2.5)[1] for t in (62, 130)] == [HoldReason.NOTHING] * 2, (
        "3 replicas would have too little to spare"
    )


def test_a_busy_moment_starts_the_wait_anew():
    pool = Steered(2)
    pool.at(0, 0.5)
    pool.at(59, 1.9)
    assert pool.at(60, 0.5) == (2, HoldReason.DELAY)
    assert pool.at(120, 0.5) == (1, HoldReason.NOTHING)


def test_bounds_hold_and_new_bounds_count_at_once():
    pool = Steered(1, min_replicas=1, max_replicas=1)
    assert [pool.at(t, 9.0) for t in (0, 100)] == [(1, HoldReason.BOUNDS)] * 2
    assert [pool.at(t, 0.0, Why.IDLE) for t in (101, 300)] == [(1, HoldReason.BOUNDS)] * 2
    assert Steered(5, max_replicas=3).at(0, 5.0) == (3, HoldReason.BOUNDS)
    assert Steered(0, min_replicas=2).at(0, 0.0) == (2, HoldReason.BOUNDS)


def test_without_reports_nothing_changes():
    pool = Steered(3)
    pool.at(0, 0.0)
    assert [pool.at(t, 0.0, Why.UNKNOWN) for t in (1, 1000)] == [(3, HoldReason.NOTHING)] * 2
    assert pool.at(1001, 0.0) == (3, HoldReason.DELAY)


def test_a_lost_state_costs_a_fresh_wait_but_never_a_replica():
    pool = Steered(4)
    pool.at(0, 0.0)
    pool.state = State()
    assert [pool.at(t, 0.0) for t in (59, 100)] == [(4, HoldReason.DELAY)] * 2
    assert pool.at(119, 0.0) == (0, HoldReason.NOTHING)


def test_drafters_of_no_use_rest_for_longer_each_time_in_a_row():
    pool, now, rests = Steered(1), 0.0, []
    for _ in range(7):
        while pool.replicas:
            now += 1
            pool.at(now, 0.0, Why.RESTING)
        left = now
        while not pool.replicas:
            now += 1
            pool.at(now, 1.0, Why.DEMAND)
        rests.append(now - left)
    assert rests == [100 + 2, 200 + 2, 400 + 2, 800 + 2, 1600 + 2, 1600 + 2, 1600 + 2]
    while pool.replicas:  # useful for long, then idle: back at once when wanted
        now += 1
        pool.at(now, 0.0, Why.IDLE)
    assert [pool.at(now + t, 1.0, Why.DEMAND) for t in (1, 3)] == [(0, HoldReason.DELAY), (1, HoldReason.NOTHING)]
