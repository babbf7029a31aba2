import random

import pytest

from speculation.trie import Node
from speculation.verifying.budget import (
    CHEAP_PLACES,
    StepCost,
    best_places,
    best_prefix,
    choose,
    kept_if_drafted_again,
    room_for_drafts,
    worth_waiting,
)


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


def test_the_likeliest_of_all_get_the_room_there_is():
    assert choose([[0.9, 0.2], [0.8, 0.7]], 2, FLAT, max_drafts=3) == [1, 2]
    assert choose([[0.9, 0.2], [0.8, 0.7]], 2, FLAT, max_drafts=0) == [0, 0]


def test_steps_whose_drafts_branch_are_measured_apart():
    cost = learned(1.0, 1.1, 1.2)
    assert cost(3, branched=True) == cost(3) and not cost.knows_branched
    cost.observe(3, 2.4, branched=True)
    assert cost.knows_branched
    assert (cost(3), cost(3, branched=True)) == (1.2, 2.4)
    cost.observe(2, 0.5, branched=True)
    assert cost(2, branched=True) == 1.1, "branching makes nothing cheaper"
    for _ in range(StepCost.MEMORY + 1):
        cost.observe(1, 1.0)
    assert not cost.knows_branched, "to be tried again"


def test_where_only_branched_steps_are_known_they_stand_for_all():
    cost = StepCost()
    cost.observe(8, 2.0, branched=True)
    assert cost.known and cost(8) == 2.0
    assert not cost.measured_up_to(8)


def test_in_classes_of_rows_a_tree_costs_what_a_chain_does():
    cost = StepCost((16, 32))
    cost.observe(8, 2.0, branched=True)
    assert not cost.knows_branched
    assert cost(9) == pytest.approx(2.0, rel=0.01)


def test_without_drafts_there_is_nothing_to_choose():
    assert choose([[], []], 2, FLAT) == [0, 0]
    assert choose([], 0, FLAT) == []


def staircase(*costs: float) -> StepCost:
    """A step cost over classes of 16, 32, 64, ... rows that take so many seconds."""
    cost = StepCost([16 << i for i in range(6)])
    for i, seconds in enumerate(costs):
        cost.observe((16 << i) - 3, seconds)
    return cost


def test_a_class_of_rows_is_measured_as_one():
    cost = staircase(1.0, 1.5)
    assert cost(1) == pytest.approx(cost(16), rel=0.01)
    assert cost(16) < 1.05 < 1.4 < cost(17)
    assert cost(17) == pytest.approx(cost(32), rel=0.01)
    assert cost(33) < 1.25 * cost(32), "a class that was never tried is tried"


def test_the_class_that_is_paid_for_is_filled_but_not_with_hopeless_tokens():
    cost = staircase(1.0, 1.5, 3.0)
    assert choose([[0.05] * 40], 1, cost) == [15]
    assert choose([[0.0001] * 40], 1, cost) == [0]
    assert choose([[0.9] * 40], 1, cost) == [31], "more tokens make up for another class"
    assert choose([[0.05] * 40, [0.04] * 40], 2, cost) == [14, 0]


def test_room_for_drafts_follows_the_class_of_rows():
    assert room_for_drafts(1, 12, 63) == (12, 12)
    assert room_for_drafts(4, 12, 60) == (12, 48)
    assert room_for_drafts(1, 12, 63, [16, 32, 64]) == (31, 31), "13 rows take a class of 16; the next one has 32"
    assert room_for_drafts(1, 16, 63, [16, 32, 64]) == (63, 63)
    assert room_for_drafts(1, 40, 63, [16, 32, 64]) == (63, 63), "there is no class after the last"
    assert room_for_drafts(4, 12, 60, [16, 32, 64]) == (31, 60)
    assert room_for_drafts(3, 5, 125, [8, 16, 64, 128]) == (15 + 16, 61), "and what a class of 64 leaves empty"
    assert room_for_drafts(40, 12, 24, [16, 32, 64]) == (24, 24)
    assert room_for_drafts(1, 64, 100, [16, 32, 64]) == (64, 64), "larger steps than the last class are not padded"
    assert room_for_drafts(1, 0, 63, [16, 32, 64]) == (0, 0), "no drafts are wanted"


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


def test_a_step_that_took_no_time_says_nothing():
    cost = learned(1.0)
    for seconds in (0.0, 0.0, 1.0):
        cost.observe(3, seconds)
    assert cost(3) == pytest.approx(1.0)


def test_cost_follows_a_machine_that_slows_down():
    cost = learned(1.0)
    for _ in range(60):
        cost.observe(1, 2.0)
    assert cost(1) == pytest.approx(2.0, rel=0.01)


def test_a_size_that_was_measured_long_ago_or_once_is_soon_known_anew():
    cost = StepCost()
    cost.observe(9, 3.0)
    cost.observe(9, 1.0)
    assert cost(9) == pytest.approx(2.0), "the first few count alike"
    for _ in range(20):
        cost.observe(9, 1.0)
    for _ in range(StepCost.FADES):
        cost.observe(1, 1.0)
    before = cost(9)
    cost.observe(9, 2.0)
    assert cost(9) == pytest.approx((before + 2.0) / 2, rel=0.01), "as much as one new measurement"


def test_a_size_that_no_longer_occurs_is_forgotten_and_so_tried_again():
    cost = learned(1.0, 1.0)
    cost.observe(9, 100.0)  # a hiccup the first time it was tried
    assert choose([[0.9] * 8], 1, cost) != [8]
    for _ in range(StepCost.MEMORY + 1):
        cost.observe(2, 1.0)
    assert choose([[0.9] * 8], 1, cost) == [8]


def test_a_size_that_was_measured_once_is_soon_tried_again_and_then_believed():
    cost = learned(0.02)
    for dear in (False, True):
        cost.observe(9, 1.0)
        for _ in range(StepCost.DOUBTED + 1):
            cost.observe(1, 0.02)
        assert (cost(9) > 0.5) is dear
    for _ in range(StepCost.MEMORY):
        cost.observe(1, 0.02)
    assert cost(9) < 0.05


def test_the_smallest_size_is_not_doubted():
    cost = learned(0.02)
    for _ in range(2 * StepCost.DOUBTED):
        cost.observe(9, 0.08)
    assert cost(1) < 0.03 and cost.measured_up_to(1)
    for _ in range(StepCost.MEMORY):
        cost.observe(9, 0.08)
    assert not cost.measured_up_to(1)


def test_a_single_step_whose_drafts_branched_is_not_believed_for_long():
    cost = learned(0.02)
    cost.observe(9, 1.0, branched=True)
    for _ in range(StepCost.DOUBTED + 1):
        assert cost(9, branched=True) == 1.0
        cost.observe(9, 0.03)
    assert not cost.knows_branched
    cost.observe(9, 1.0, branched=True)
    for _ in range(StepCost.MEMORY):
        cost.observe(9, 0.03)
        assert cost.knows_branched, "measured again, it is believed"
    cost.observe(9, 0.03)
    assert not cost.knows_branched


def test_something_is_always_worth_doing_when_nothing_is_certain():
    assert best_prefix([0.5, 0.1], 0.0, 0, FLAT) == 2
    assert best_prefix([0.5, 0.1], 0.0, 0, LINEAR) == 1
    assert best_prefix([], 0.0, 0, LINEAR) == 0


def test_a_draft_step_expands_a_few_places_always_and_more_where_they_make_more_of_it():

    def expanded(weights: list[float], scheduled: int, certain: int, cost: StepCost) -> int:
        nodes = [Node(token=1, end=1, digest=0, weight=weight) for weight in weights]
        return len(best_places({"a": nodes}, 64, scheduled, certain, cost).get("a", []))

    assert expanded([0.9, 0.01], 0, 0, LINEAR) == 2
    many = [0.5] * 20
    assert expanded(many, 0, 0, learned(*range(1, 30))) == CHEAP_PLACES
    assert expanded(many, 0, 0, learned(*[1.0] * 30)) == 20
    assert expanded([], 3, 3, FLAT) == 0


def wait(*moments: tuple[float, list[float]], rate: float = 0.1, agreement: float = 0.8) -> float | None:
    """How long to wait where a step takes ten seconds; moments as (seconds from now, chance of 1, 2, ... tokens)."""
    later = [(seconds, *kept_if_drafted_again(shares, agreement, 0, ())) for seconds, shares in moments]
    return worth_waiting(rate, (0.0, 0), later, lambda tokens: 10.0)


@pytest.mark.parametrize(
    ("moments", "seconds"),
    [
        ([(0.5, [1.0, 1.0, 1.0])], 0.5),
        ([(30.0, [1.0, 1.0, 1.0])], None),  # three steps' worth of tokens are lost meanwhile
        ([(1.0, [1.0, 1.0, 0.0]), (60.0, [1.0, 1.0, 1.0])], 1.0),  # the rest comes too late
        ([(1.0, [0.3]), (3.0, [0.9])], 3.0),
        ([(1.0, [0.8]), (3.0, [0.9])], 1.0),  # a little more is not worth two seconds
        ([(3.9, [0.5])], 3.9),  # 0.5 * 0.8 tokens against 0.39
        ([(4.1, [0.5])], None),
        ([], None),
    ],
)
def test_a_wait_must_gain_more_tokens_than_its_time_is_worth(moments, seconds):
    assert wait(*moments) == seconds


def test_time_without_a_price_is_waited_for_at_any_length():
    assert wait((1e9, [0.1]), rate=0.0) == 1e9


def test_one_does_not_wait_for_drafts_that_are_always_wrong():
    assert wait((0.2, [1.0] * 8), agreement=0.01) is None


def test_verifying_what_one_waited_for_is_paid_for_too():
    later = [(0.0, 0.8, 1.0)]
    assert worth_waiting(0.1, (0.0, 0), later, lambda tokens: 7.0 + tokens) == 0.0
    assert worth_waiting(0.1, (0.0, 0), later, lambda tokens: 9.0 * tokens) is None


def test_drafts_at_hand_are_weighed_against_those_to_come():
    later = [(1.0, 2.0, 3.0)]
    assert worth_waiting(0.1, (1.8, 3), later, lambda tokens: 10.0) == 1.0
    assert worth_waiting(0.1, (1.95, 3), later, lambda tokens: 10.0) is None


def test_what_a_place_is_drafted_for_again_stands_in_for_what_is_there():
    kept, drafts = kept_if_drafted_again([0.75, 0.5], 0.8, 0, [0.5, 0.25])
    assert kept == pytest.approx(0.75 * 0.8 + 0.5 * 0.64 + 0.25 * 0.75)
    assert drafts == pytest.approx(1.25 + 0.25 * 2)
    assert kept_if_drafted_again([1.0, 0.5], 0.8, 1, [0.4]) == (pytest.approx(0.4 + 0.4 * 0.5 * 0.8), 1.5)


def test_what_was_measured_on_a_busy_machine_is_not_believed_for_long():
    """Nothing but small steps would be tried again, which are known to be fast by then."""
    cost = StepCost()
    for _ in range(4):
        for tokens, seconds in ((1, 0.04), (2, 0.042), (9, 0.08)):
            cost.observe(tokens, seconds)
    for _ in range(100):
        for tokens, seconds in ((1, 0.01), (2, 0.0105)):
            cost.observe(tokens, seconds)
    assert cost(1) == pytest.approx(0.01, rel=0.02)
    assert cost(9) < 0.03


def test_noise_moves_nothing_that_is_not_measured():
    cost, noise = StepCost(), random.Random(5)
    for tokens in (1, 2, 3, 9):
        for _ in range(10):
            cost.observe(tokens, 0.01 + 0.001 * tokens)
    for _ in range(600):
        tokens = noise.choice((1, 2, 3))
        cost.observe(tokens, (0.01 + 0.001 * tokens) * noise.uniform(0.7, 1.3))
    assert cost(9) == pytest.approx(0.019, rel=0.1)


def test_what_is_believed_of_steps_holds_until_they_are_measured():
    cost = StepCost(believed={1: 0.01, 16: 0.02, 64: 0.08})
    assert not cost.known and not cost.measured_up_to(64)
    assert [cost(tokens) for tokens in (1, 16, 40, 64)] == pytest.approx([0.01, 0.02, 0.05, 0.08])
    cost.observe(16, 0.03)  # the others are then taken to be as much slower
    assert cost.known and cost.measured_up_to(16) and not cost.measured_up_to(15)
    assert [cost(tokens) for tokens in (1, 16, 64)] == pytest.approx([0.015, 0.03, 0.12])
    for _ in range(50):
        cost.observe(16, 0.03)
        cost.observe(64, 0.05)
    assert cost(64) == pytest.approx(0.05, rel=0.05)
