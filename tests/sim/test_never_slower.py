"""Speculation is never slower than plain decoding, in virtual time: whatever it costs and however wrong drafts are.

On steps that are a staircase of classes of rows, as on a GPU, and on steps that cost by the token, as on a CPU; beside
a drafter that has a device of its own, and beside one that takes its share of the target's. What is measured begins
after a worker's first tokens, when it has found out what its steps cost. The texts are the target's own in every run.
"""

from dataclasses import replace
from random import Random

import pytest

from simulation.agreement import made_up
from simulation.costs import Costs, Curve
from simulation.simulate import Report, SimulationSettings, simulate
from speculation.messages import Schedule
from speculation.verifying.payoff import Payoff
from tests.thorough import mostly_thorough

SEED = 7
MIN_RATIO = 0.97
STAIRS = (16, 32, 64, 128, 256)
STEPS = (0.0062, 0.0064, 0.0068, 0.0085, 0.0122)
GPU = Costs(
    {1: Curve((rows, step, 1.0) for rows, step in zip(STAIRS, STEPS, strict=True))},
    Curve.straight(0.0011, 0.02),
    to_target=0.0016,
    to_draft=0.0021,
    verify_each=0.0001,
    verify_pause=0.0002,
    jitter=0.02,
    row_classes=STAIRS,
)
CPU = Costs(
    {1: Curve.straight(0.024, 0.04)}, Curve.straight(0.002, 0.04), 0.0014, 0.0014, verify_pause=0.0005, jitter=0.05
)
COSTS = {"gpu": GPU, "cpu": CPU}
COSTS |= {
    f"{name} shared": replace(costs, contention=1.25, draft_contention=2.3) for name, costs in list(COSTS.items())
}
"""What two processes on one GPU were measured to take from each other."""
TOKENS = {1: 600, 8: 250, 64: 80}


def run(costs: str, sessions: int, acceptance: float, schedule: Schedule | None, drafters: int = 1) -> Report:
    outcomes = made_up(Random(SEED), acceptance, None if acceptance else 0.0)
    setting = SimulationSettings(schedule, sessions=sessions, drafters=drafters)
    return simulate(setting, COSTS[costs], outcomes, Random(SEED), tokens=TOKENS[sessions])


def over_plain(costs: str, sessions: int, acceptance: float, drafters: int = 1) -> float:
    drafted = run(costs, sessions, acceptance, Schedule.TRIE, drafters)
    return drafted.rate / run(costs, sessions, acceptance, None).rate


@pytest.mark.parametrize("acceptance", mostly_thorough([0.0, 0.3, 0.6], quick=[0.0, 0.3]))
@pytest.mark.parametrize("sessions", mostly_thorough([1, 8, 64], quick=[1, 8]))
@pytest.mark.parametrize("costs", COSTS)
def test_never_slower_than_plain_decoding(costs, sessions, acceptance):
    assert over_plain(costs, sessions, acceptance) >= MIN_RATIO


@pytest.mark.parametrize("sessions", [1, 64])
@pytest.mark.parametrize("costs", ["gpu", "cpu"])
def test_a_drafter_that_never_answers_costs_nothing(costs, sessions):
    assert over_plain(costs, sessions, 0.8, drafters=0) >= MIN_RATIO


def test_it_would_be_slower_if_nothing_weighed_drafting_against_plain_decoding(monkeypatch):
    monkeypatch.setattr(Payoff, "drafted", lambda *_: None)
    assert over_plain("gpu shared", 8, 0.3) < MIN_RATIO


@pytest.mark.parametrize(("sessions", "min_gain"), [(1, 1.5), (8, 1.3)])
def test_where_drafts_are_right_even_a_shared_device_gains(sessions, min_gain):
    assert over_plain("gpu shared", sessions, 0.9) > min_gain


def test_a_class_of_rows_that_has_room_is_filled_beyond_what_a_session_may_have():
    free = replace(GPU, draft=Curve.straight(0.0001, 0.0))
    outcomes = made_up(Random(SEED), 1.0)
    filled = simulate(SimulationSettings(request_tokens=10_000), free, outcomes, Random(SEED), tokens=1000)
    assert filled.tokens_per_verification > 14, "13 with 12 drafts"
