import pytest

from target_service.scheduler import Budget, Demand, Share, preempt, shares

BUDGET = Budget(drafts_per_session=8, verify=16, prefill=100)


def test_a_lone_session_gets_all_the_drafts_it_may_have():
    assert shares([Demand(1)], BUDGET) == [Share(1, 8)]


def test_drafts_are_shared_evenly_and_vanish_in_large_batches():
    assert shares([Demand(1)] * 4, BUDGET) == [Share(1, 3)] * 4
    assert shares([Demand(1)] * 16, BUDGET) == [Share(1, 0)] * 16
    assert shares([Demand(1)] * 40, BUDGET) == [Share(1, 0)] * 40


def test_prompts_are_prefilled_first_come_first_served_beside_running_text():
    plan = shares([Demand(1), Demand(80), Demand(70), Demand(9)], BUDGET)
    assert plan == [Share(1, 8), Share(80), Share(20), Share(0)]


@pytest.mark.parametrize(
    ("needs", "free", "victims"), [([], 0, 0), ([1, 1], 2, 0), ([1, 2], 2, 1), ([3, 2, 1], 2, 3), ([0, 0], 0, 0)]
)
def test_the_last_to_come_gives_way(needs, free, victims):
    assert preempt(needs, free) == victims
