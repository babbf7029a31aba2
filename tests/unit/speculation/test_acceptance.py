"""The law on single cases. That it is lossless is proven in ``tests/property/test_exact_acceptance.py``."""

from fractions import Fraction

import pytest

from speculation.acceptance import Chosen, Sampled, finish_at, keep, keep_chain, residual, walk
from speculation.messages import ANCHOR, SUPPORT_TOTAL, FinishReason, Limits, Support
from speculation.noise import uniform

QUARTER = SUPPORT_TOTAL // 4
EVEN = Support((0, 1), (2 * QUARTER, 2 * QUARTER))


def test_a_chain_is_kept_up_to_the_first_difference():
    outcome = walk([4, 5, 6], [ANCHOR, 0, 1], [4, 5, 9, 1])
    assert outcome.kept == (0, 1)
    assert outcome.own == 9  # recovered


def test_a_chain_kept_whole_is_followed_by_a_bonus_token():
    assert walk([4, 5], [ANCHOR, 0], [4, 5, 6]).own == 6
    assert walk([], [], [3]).kept == ()


def test_a_branch_is_found_after_its_sibling_fails():
    outcome = walk([4, 5, 6], [ANCHOR, ANCHOR, 1], [5, 0, 6, 7])
    assert outcome.kept == (1, 2)
    assert outcome.own == 7


def test_a_draft_is_kept_below_the_ratio_and_not_at_it():
    half = 2 * QUARTER
    assert keep(Fraction(1, 4), half, Fraction(499, 1000))
    assert not keep(Fraction(1, 4), half, Fraction(1, 2))
    assert keep(Fraction(1, 2), half, Fraction(999, 1000))


def test_extreme_coins_neither_keep_an_excluded_token_nor_refuse_one_as_likely_as_drafted():
    lowest, highest = uniform(0), uniform(2**32 - 1)
    for weight in (1, QUARTER, SUPPORT_TOTAL):
        assert not keep(0.0, weight, lowest)
        assert not keep(Fraction(0), weight, Fraction(0))
        assert keep(weight / SUPPORT_TOTAL, weight, highest)


def test_floats_decide_as_fractions_do_next_to_the_ratio():
    for word in (0, 1, 12345, 2**31, 2**32 - 2):
        for weight in (1, 3, 40_001, SUPPORT_TOTAL - 1, SUPPORT_TOTAL):
            exact = Fraction(2 * word + 1, 2**33) * Fraction(weight, SUPPORT_TOTAL)
            assert not keep(float(exact), weight, uniform(word))
            assert keep(float(exact) * (1 + 2**-52), weight, uniform(word))
            assert not keep(exact, weight, Fraction(2 * word + 1, 2**33))


def test_what_a_refused_token_is_replaced_from():
    third = Fraction(1, 3)
    assert residual([third] * 3, EVEN) == [0, 0, 1]
    assert residual([Fraction(3, 4), Fraction(0), Fraction(1, 4)], EVEN) == [Fraction(1, 2), 0, Fraction(1, 2)]
    assert residual([third] * 3, Chosen(1).q) == [Fraction(1, 2), 0, Fraction(1, 2)]
    assert residual([0.75, 0.0, 0.25], EVEN) == [0.5, 0.0, 0.5]


def test_nothing_is_left_where_the_drafter_is_right():
    assert residual([0.5, 0.5, 0.0], EVEN) == [0.5, 0.5, 0.0]


def test_a_drafter_with_a_larger_vocabulary():
    q = Support((0, 7), (QUARTER, 3 * QUARTER))
    assert residual([0.5, 0.5], q) == [pytest.approx(1 / 3), pytest.approx(2 / 3)]


def test_a_chain_of_sampled_and_chosen_tokens_ends_at_the_first_refusal():
    chain = [Sampled(0, EVEN), Chosen(4), Sampled(1, EVEN)]
    assert keep_chain(chain, [0.25, 0.5, 0.25], [0.4, 0.4, 0.4]) == 3
    assert keep_chain(chain, [0.25, 0.5, 0.25], [0.4, 0.4, 0.6]) == 2
    assert keep_chain(chain, [0.25, 0.5, 0.25], [0.4, 0.6, 0.4]) == 1
    assert keep_chain(chain, [0.25, 0.5, 0.25], [0.6, 0.4, 0.4]) == 0
    assert keep_chain([], [], []) == 0


def test_coins_after_a_refusal_are_not_asked_for():
    def coins():
        yield 0.9
        raise AssertionError("nothing behind a refused token is looked at")

    assert keep_chain([Chosen(4), Chosen(5)], [0.5, 0.5], coins()) == 0


def test_confidence_is_the_same_for_every_token_that_q_may_give():
    q = Support((3, 8, 5), (QUARTER, 2 * QUARTER, QUARTER))
    assert [Sampled(token, q).confidence for token in q.tokens] == [0.5] * 3


def test_a_token_cannot_be_drawn_from_a_q_without_it():
    with pytest.raises(AssertionError, match="token 2 cannot"):
        Sampled(2, EVEN)


def test_a_session_ends_at_its_limit_or_after_a_stop_token():
    limits = Limits(end=10, stop_tokens=frozenset({0}))
    assert finish_at(7, [5, 6], limits) == (2, None)
    assert finish_at(7, [5, 6, 7, 8], limits) == (3, FinishReason.LENGTH)
    assert finish_at(7, [5, 0, 7], limits) == (2, FinishReason.STOP)
    assert finish_at(8, [5, 0], limits) == (2, FinishReason.STOP)
