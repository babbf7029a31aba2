"""What guesses at the second level are believed to be worth, and when they are made."""

import pytest

from speculation.drafting.guesses import MAX_GUESSES, MAX_TOGETHER, Forward, Guesses
from speculation.messages import Source

FLAT, LINEAR = (lambda tokens: 1.0), float


def guesses_of(*tokens: int, sure: float = 0.5, known: Guesses | None = None) -> Guesses:
    guesses = known or Guesses(vocabulary=100)
    guesses.clear()
    for token in tokens:
        assert guesses.add(token, sure, Source.LOOKUP)
    return guesses


def test_kept_is_what_the_draft_model_draws_itself():
    guesses = guesses_of(5, 6, 7)
    assert guesses.tree.tokens == (5, 6, 7)
    assert [node.end for node in guesses.tree.nodes] == [1, 2, 3]
    assert guesses.settle(3, [5, 6, 9, 9]) == 2
    assert guesses.settle(3, [8, 6, 7, 9]) == 0
    assert guesses.settle(3, [5, 6, 7, 9]) == 3


def test_a_chain_has_an_end():
    guesses = guesses_of(*range(MAX_GUESSES))
    assert not guesses.add(50, 0.9, Source.LOOKUP)
    assert len(guesses.tree.nodes) == MAX_GUESSES
    guesses.clear()
    assert (guesses.tree.tokens, guesses.odds, guesses.first_odds) == ((), 1.0, 0.0)


def test_guesses_that_are_not_computed_are_put_to_the_test_too():
    wrong = guesses_of(5, sure=0.9)
    for _ in range(40):
        assert wrong.settle(0, [6]) == 0
        guesses_of(5, sure=0.9, known=wrong)
    assert wrong.first_odds < 0.1
    for _ in range(200):
        assert wrong.settle(0, [5]) == 0
        guesses_of(5, sure=0.9, known=wrong)
    assert wrong.first_odds > 0.5


def test_what_follows_a_wrong_guess_says_nothing_of_those_below_it():
    fresh, told = guesses_of(5, 6), guesses_of(5, 6)
    fresh.settle(0, [7])
    told.settle(2, [7, 6, 6])
    for guesses in (fresh, told):
        guesses_of(5, 6, known=guesses)
    assert fresh.tree.odds == told.tree.odds


def test_guesses_join_a_forward_where_a_row_is_cheap():
    chances = [[0.8, 0.6], [0.1]]
    assert Forward(2, 1.5, FLAT).worth(chances) == [2, 1]
    assert Forward(2, 1.5, LINEAR).worth(chances) == [1, 0]  # a row costs half a forward, which is good for 1.5
    assert Forward(2, 2.0, LINEAR).worth(chances) == [0, 0]
    assert sum(Forward(2, 1.0, FLAT).worth([[0.9] * MAX_GUESSES] * 20)) == MAX_TOGETHER


@pytest.mark.parametrize(
    ("seconds", "gain", "cost", "pays"),
    [(0.0, 0.1, FLAT, True), (0.5, 0.4, FLAT, False), (0.5, 0.6, FLAT, True), (0.5, 0.6, LINEAR, False)],
)
def test_a_guess_must_bring_more_than_finding_and_computing_it_costs(seconds, gain, cost, pays):
    assert Forward(1, 1.0, cost).pays(0.0, 0.0, 0, gain, 1, seconds) is pays


def test_what_guesses_have_cost_so_far_makes_time_cheaper():
    """Tokens a second have fallen to 1.2 / 1.5, so that half a second may bring as little as 0.4."""
    assert Forward(1, 1.0, FLAT).pays(0.2, 0.5, 1, 0.41, 1, 0.5)
    assert not Forward(1, 1.0, FLAT).pays(0.2, 0.5, 1, 0.39, 1, 0.5)
