from random import Random

import pytest

from speculation.budget import Calibration, StepCost, choose


def learned(*costs: float) -> StepCost:
    """A step cost measured at 1, 2, ... tokens."""
    cost = StepCost()
    for tokens, seconds in enumerate(costs, start=1):
        cost.observe(tokens, seconds)
    return cost


FLAT = learned(*[1.0] * 16)
LINEAR = learned(*range(1, 17))


def test_free_tokens_are_all_verified_and_dear_ones_are_not():
    odds = [0.9, 0.8, 0.7, 0.1]
    assert choose([odds], 1, FLAT) == [4]
    assert choose([odds], 1, LINEAR) == [0]  # a token costs a step and brings less than one


def test_a_token_is_worth_its_odds_against_its_cost():
    # One token: 1 / 1.0. Two: 1.9 / 1.5. Three: 2.7 / 2.0. Four: 3.0 / 2.5.
    cost = learned(1.0, 1.5, 2.0, 2.5)
    assert choose([[0.9, 0.8, 0.3]], 1, cost) == [2]


def test_a_plateau_behind_a_step_in_cost_is_found():
    # The second token costs as much as the next six: worth it only together.
    cost = learned(1.0, 1.6, 1.6, 1.6, 1.6, 1.6, 1.6, 1.6)
    assert choose([[0.5]], 1, cost) == [0]
    assert choose([[0.5, 0.45, 0.4]], 1, cost) == [3]


def test_the_likeliest_drafts_of_all_sessions_share_a_step():
    cost = learned(*[1.0] * 4, *[50.0] * 4)
    assert choose([[0.9, 0.2], [0.3], []], 3, cost) == [1, 0, 0]


def test_without_drafts_there_is_nothing_to_choose():
    assert choose([[], []], 2, FLAT) == [0, 0]
    assert choose([], 0, FLAT) == []


def test_cost_is_interpolated_rises_and_ignores_outliers():
    cost = StepCost()
    assert cost(3) > cost(1) > 0  # before anything was measured
    cost.observe(1, 1.0)
    cost.observe(5, 2.0)
    assert cost(3) == pytest.approx(1.5)
    assert cost(0) == 1.0
    assert 2.0 < cost(9) < 2.5
    cost.observe(3, 0.5)  # cheaper than one token: noise
    assert cost(1) == cost(3) == pytest.approx(0.75)
    cost.observe(1, 1000.0)
    assert cost(1) < 2.0
    cost.observe(10_000, 5.0)
    assert cost(600) < 30.0


def test_cost_follows_a_machine_that_slows_down():
    cost = learned(1.0)
    for _ in range(60):
        cost.observe(1, 2.0)
    assert cost(1) == pytest.approx(2.0, rel=0.01)


def test_confidence_is_calibrated_by_what_was_kept_and_fades_back():
    calibration = Calibration()
    assert calibration(0.85) == pytest.approx(0.85)
    rng = Random(1)
    for _ in range(300):
        calibration.observe(0.85, rng.random() < 0.3)
        calibration.fade()
    assert calibration(0.85) == pytest.approx(0.3, abs=0.1)
    assert calibration(0.25) == pytest.approx(0.25)
    for _ in range(2000):
        calibration.fade()
    assert calibration(0.85) == pytest.approx(0.85, abs=0.01)
