"""The textbook's closed forms, against the enumeration of all that can happen to a draft."""

from fractions import Fraction
from itertools import product
from random import Random

import pytest

from simulation import costs

ACCEPTANCES = [Fraction(0), Fraction(1, 3), Fraction(4, 5), Fraction(1)]


def enumerated(acceptance: Fraction, length: int) -> Fraction:
    """Tokens a verification commits: over all ways in which each draft token may be right or wrong."""
    total = Fraction(0)
    for rights in product((True, False), repeat=length):
        chance = Fraction(1)
        for right in rights:
            chance *= acceptance if right else 1 - acceptance
        kept = next((i for i, right in enumerate(rights) if not right), length)
        total += chance * (kept + 1)
    return total


@pytest.mark.parametrize("acceptance", ACCEPTANCES)
@pytest.mark.parametrize("length", [0, 1, 2, 7])
def test_committed_tokens_are_those_of_the_enumeration(acceptance, length):
    assert costs.expected_tokens(float(acceptance), length) == pytest.approx(float(enumerated(acceptance, length)))


def test_the_speed_up_is_tokens_over_the_time_of_a_turn():
    acceptance, length, cost = Fraction(4, 5), 5, Fraction(1, 10)
    turn = 1 + length * cost
    assert costs.expected_speedup(0.8, 5, 0.1) == pytest.approx(float(enumerated(acceptance, length) / turn))


def test_the_best_length_is_the_best_of_all_and_the_shortest_of_equals():
    for acceptance, cost in ((0.8, 0.05), (0.5, 0.2), (0.95, 0.01)):
        best = costs.best_length(acceptance, cost, 16)
        assert all(
            costs.expected_speedup(acceptance, k, cost) <= costs.expected_speedup(acceptance, best, cost)
            for k in range(17)
        )
    assert costs.best_length(0.8, 0.0, 16) == 16, "a draft that costs nothing is never too long"
    assert costs.best_length(0.0, 0.0, 16) == 1


def test_counted_along_a_text_of_even_odds_it_is_the_closed_form():
    seed = 3
    rng = Random(seed)
    rights = [rng.random() < 0.7 for _ in range(40_000)]
    runs, run = [], 0
    for right in reversed(rights):
        run = run + 1 if right else 0
        runs.append(run)
    for length in (1, 4, 9):
        expected = costs.expected_tokens(0.7, length)
        assert costs.committed_along(runs, length) == pytest.approx(expected, rel=0.02), f"seed {seed}"
