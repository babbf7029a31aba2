"""How cores are divided: the rule alone, on machines made up or measured."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.local.cores import (
    DRAFTS,
    MARGIN,
    StepTimes,
    decoded,
    divide,
    encoded,
    fastest,
    in_turn,
    thread_counts,
    tokens,
)


def steps(one: float, nine: float, draft: float) -> StepTimes:
    """A target that takes ``one`` ms for a token and ``nine`` for nine of them, and what lies on the line between."""
    return StepTimes({k: one + (nine - one) * k / 8 for k in DRAFTS}, draft)


MEASURED = {1: steps(32.7, 45, 2.5), 2: steps(27.9, 33, 2.5)}
"""The bundled pair on two cores, the target stretched to 287M parameters."""


def test_two_cores_that_gain_little_together_are_split():
    chosen = divide(2, MEASURED)
    assert (chosen.target, chosen.draft) == (1, 1)
    assert chosen.speed == pytest.approx(tokens(8) / 45)
    assert str(chosen) == "1 for the target, 1 for the drafter"


def test_two_cores_that_gain_much_together_are_shared():
    chosen = divide(2, {1: steps(30, 40, 0.5), 2: steps(15, 20, 0.5)})
    assert (chosen.target, chosen.draft) == (2, 2)
    assert chosen.speed == pytest.approx(tokens(8) / (20 + 8 * 0.5))
    assert str(chosen) == "2 for the target, 2 for the drafter, which both share"


def test_in_turn_as_many_cores_as_clearly_pay():
    assert in_turn(2, {1: steps(32, 45, 2), 2: steps(30, 40, 2)}).target == 1
    assert in_turn(2, {1: steps(30, 40, 0.5), 2: steps(15, 20, 0.5)}).target == 2
    assert in_turn(4, {1: steps(30, 40, 1), 3: steps(11, 14, 1), 4: steps(10, 13, 1)}).target == 3
    assert str(in_turn(2, MEASURED)) == "2 for the target and its draft model, which take turns"


def test_the_fastest_of_three():
    """A cheap draft model takes turns; one that takes as long as the target does that beside it."""
    cheap = fastest(2, {1: steps(30, 40, 0.5), 2: steps(15, 20, 0.5)})
    assert (cheap.target, cheap.draft, cheap.speed) == (2, 0, pytest.approx(tokens(8) / (20 + 8 * 0.5)))
    dear = fastest(2, {1: steps(30, 40, 5), 2: steps(28, 38, 4)})
    assert (dear.target, dear.draft, dear.speed) == (1, 1, pytest.approx(tokens(8) / 40))


def test_sharing_has_to_promise_clearly_more():
    """The bundled pair on two idle cores, the target stretched to 190M: in truth a core each is as fast, or faster."""
    one = {0: 15.8, 2: 17.0, 4: 18.2, 8: 21.6}
    two = {0: 13.9, 2: 14.0, 4: 14.1, 8: 15.7}
    measured = {1: StepTimes(one, 0.59), 2: StepTimes(two, 0.57)}
    chosen = divide(2, measured)
    shared = max(tokens(k) / (two[k] + k * 0.57) for k in DRAFTS)
    assert chosen.speed < shared < MARGIN * chosen.speed
    assert chosen.draft == 1


def test_of_many_cores_the_drafter_gets_one():
    measured = {1: steps(80, 120, 3), 7: steps(14, 20, 1), 8: steps(13, 19, 1)}
    chosen = divide(8, measured)
    assert (chosen.target, chosen.draft) == (7, 1)


def test_many_cores_are_shared_where_one_is_too_slow_for_the_drafter():
    chosen = divide(8, {1: steps(80, 120, 16), 7: steps(14, 20, 2.2), 8: steps(13, 19, 2)})
    assert (chosen.target, chosen.draft) == (8, 8)


def test_a_drafter_that_is_slower_than_the_target_is_not_waited_for():
    chosen = divide(2, {1: steps(10, 12, 50), 2: steps(10, 12, 50)})
    assert (chosen.speed, chosen.draft) == (1 / 10, 1)  # plain decoding


@pytest.mark.parametrize(("cores", "counts"), [(1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (64, (1, 63, 64))])
def test_what_has_to_be_measured(cores, counts):
    assert thread_counts(cores) == counts


def test_tokens_of_a_step_are_a_geometric_series():
    for drafts in DRAFTS:
        assert tokens(drafts) == pytest.approx(sum(0.8**k for k in range(drafts + 1)))


times = st.floats(0.1, 1000)


@given(times, st.floats(1, 3), times, st.floats(0.1, 1))
def test_a_target_that_does_not_gain_from_a_second_core_never_shares(one, growth, draft, gain):
    """Whatever the drafter gains, as long as one core lets it draft eight tokens within a step of the target."""
    alone = steps(one, one * growth, min(draft, one / 8))
    assert divide(2, {1: alone, 2: StepTimes(alone.target, alone.draft * gain)}).draft == 1


@given(times, st.floats(1, 3), times)
def test_a_pair_that_does_not_gain_from_a_second_core_never_shares(one, growth, draft):
    alone = steps(one, one * growth, draft)
    assert divide(2, {1: alone, 2: alone}).draft == 1


@given(times, st.floats(1, 3), times, st.floats(0.3, 1), st.floats(0.3, 1))
def test_who_shares_would_share_with_a_greater_gain_too(one, growth, draft, gain, more):
    alone = steps(one, one * growth, draft)
    some = StepTimes({k: time * gain for k, time in alone.target.items()}, draft)
    much = StepTimes({k: time * more for k, time in some.target.items()}, draft)
    assert divide(2, {1: alone, 2: much}).draft >= divide(2, {1: alone, 2: some}).draft


def test_a_single_core_cannot_be_divided():
    with pytest.raises(AssertionError, match="1 cores"):
        divide(1, {1: MEASURED[1]})


def test_step_times_survive_json():
    assert decoded(json.loads(json.dumps(encoded(MEASURED))), 2) == MEASURED


@pytest.mark.parametrize(
    "value",
    [
        None,
        7,
        [],
        {},
        {"1": None},
        {"one": encoded(MEASURED)["1"]},
        {"1": encoded(MEASURED)["1"]},  # two threads are missing
        encoded(MEASURED) | {"2": {"target": {"0": 3.0}, "draft": 1.0}},
        encoded(MEASURED) | {"2": encoded(MEASURED)["2"] | {"draft": 0}},
        encoded(MEASURED) | {"2": encoded(MEASURED)["2"] | {"draft": -1.0}},
        encoded(MEASURED) | {"2": encoded(MEASURED)["2"] | {"draft": math.nan}},
        encoded(MEASURED) | {"2": encoded(MEASURED)["2"] | {"draft": "soon"}},
        encoded(MEASURED) | {"2": encoded(MEASURED)["2"] | {"target": [1, 2]}},
    ],
)
def test_anything_else_is_not_step_times(value):
    with pytest.raises(ValueError, match=r"."):
        decoded(value, 2)
