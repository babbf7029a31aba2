from random import Random

from speculation.verifying.payoff import FIRST_SESSION_REST, LONGEST_SESSION_REST, MAX_LOOKAHEAD, LookaheadPolicy


def lead_at(agreement: float, rounds: int = 400) -> int:
    """The lead after many verifications of a target that agrees this often, every draft in time."""
    policy, rng = LookaheadPolicy(), Random(1)
    for _ in range(rounds):
        matched = 0
        while matched < 8 and rng.random() < agreement:
            matched += 1
        policy.observe(matched, matched < 8, max(matched, 1))
    return policy.lead


def test_the_lead_follows_the_agreement():
    leads = [lead_at(agreement) for agreement in (0.0, 0.3, 0.6, 0.8, 0.97)]
    assert leads == sorted(leads)
    assert leads[0] <= 2
    assert 8 <= leads[2] <= 18
    assert leads[-1] == MAX_LOOKAHEAD


def rests(policy: LookaheadPolicy, accepted: int, rounds: int) -> list[int]:
    """Lengths of the rests while every verification accepts this many."""
    lengths, resting = [], 0
    for _ in range(rounds):
        policy.observe(accepted, not accepted, accepted)
        if policy.lead == 0:
            resting += 1
        elif resting:
            lengths.append(resting)
            resting = 0
    return lengths


def test_drafts_that_are_never_in_time_make_it_rest_longer_and_longer():
    lengths = rests(LookaheadPolicy(), accepted=0, rounds=4000)
    assert lengths[:3] == [FIRST_SESSION_REST, 2 * FIRST_SESSION_REST, 4 * FIRST_SESSION_REST]
    assert max(lengths) == LONGEST_SESSION_REST


def test_drafts_that_do_not_make_up_for_what_drafting_takes_are_not_worth_it():
    for break_even, pays in ((0.1, True), (0.4, False)):
        policy = LookaheadPolicy()
        for round_ in range(400):
            policy.observe(round_ % 4 == 0, False, round_ % 4 == 0, break_even)  # one in four is kept
        assert (policy.lead > 0) is pays


def test_it_comes_back_for_good_when_drafting_pays_again():
    policy = LookaheadPolicy()
    rests(policy, accepted=0, rounds=300)
    assert rests(policy, accepted=2, rounds=1000)[1:] == []
    assert policy.lead > 0


def test_a_session_starts_with_credit_for_what_drafting_takes_now():
    worker = LookaheadPolicy()
    rests(worker, accepted=0, rounds=300)
    policy = LookaheadPolicy(worker, break_even := 0.4)
    for _ in range(8):  # the drafts of a new session come after a few steps
        policy.observe(0, False, 0, break_even)
        assert policy.lead > 0
