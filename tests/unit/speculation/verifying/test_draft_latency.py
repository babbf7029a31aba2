"""What is learned of the time drafts take after a commit."""

import pytest

from speculation.verifying.payoff import DEEPEST, TIMES, Answered, DraftLatencyEstimator


def answered(*reached: float) -> Answered:
    """A commit at time 0 whose path of 1, 2, ... tokens was there after so many seconds."""
    return Answered(0.0, 3, list(reached))


def learned(*commits: Answered, rounds: int = 100) -> DraftLatencyEstimator:
    """What is known after the commits have come in turn, many times."""
    draft_latency = DraftLatencyEstimator()
    for _ in range(rounds):
        for commit in commits:
            draft_latency.observe(commit)
    return draft_latency


def expected(draft_latency: DraftLatencyEstimator, age: float, come: int = 0) -> list[tuple[float, float, float]]:
    """Later moments as (seconds after the commit, chance of one token that is of use, chance of two)."""
    moments = draft_latency.moments(age, come)
    return [(age + moment[0], moment[1][come], moment[1][come + 1]) for moment in moments]


def test_a_commit_notes_when_each_length_was_reached_first():
    commit = Answered(5.0, 3)
    commit.arrived(2, 5.002)
    commit.arrived(1, 5.003)  # shorter than what is there
    commit.arrived(-4, 5.004)  # about a place before the commit
    commit.arrived(DEEPEST + 20, 5.010)
    assert commit.reached == pytest.approx([0.002] * 2 + [0.010] * (DEEPEST - 2))


def test_nothing_is_expected_before_anything_was_seen():
    moments = DraftLatencyEstimator().moments(0.0)
    assert [moment[0] for moment in moments] == list(TIMES)
    assert all(share == 0.0 for moment in moments for share in moment[1])


def test_early_and_late_answers_are_told_apart():
    draft_latency = learned(answered(*[0.002] * DEEPEST), answered(*[0.030] * DEEPEST))
    for time, one, two in expected(draft_latency, age=0.0):
        assert one == two == pytest.approx(0.0 if time < 0.002 else 0.5 if time < 0.030 else 1.0, abs=0.06)


def test_who_has_nothing_after_the_early_answers_waits_for_a_late_one():
    draft_latency = learned(answered(*[0.002] * DEEPEST), answered(*[0.030] * DEEPEST))
    moments = expected(draft_latency, age=0.005)
    assert 0.005 < moments[0][0] < 0.008  # of the moments on the list, the next one
    for time, one, two in moments:
        assert one == two == pytest.approx(0.0 if time < 0.030 else 1.0, abs=0.01)


def test_after_the_last_answer_that_was_ever_seen_nothing_more_is_expected():
    draft_latency = learned(answered(*[0.002] * DEEPEST), answered(*[0.030] * DEEPEST))
    assert all(one < 0.01 for _, one, _ in expected(draft_latency, age=0.043))
    assert draft_latency.moments(1.0) == []


def test_a_long_path_that_follows_a_short_one_is_not_expected_where_the_short_one_did_not_come():
    """What is there already is more than nothing: the rest of it says little about a commit without an answer."""
    draft_latency = learned(answered(0.002, *[0.030] * (DEEPEST - 1)))
    assert all(one < 0.01 and two < 0.01 for _, one, two in expected(draft_latency, age=0.005))


def test_where_a_short_path_has_come_only_what_reaches_further_counts():
    draft_latency = learned(answered(0.002, *[0.030] * (DEEPEST - 1)))
    for time, one, two in expected(draft_latency, age=0.005, come=1):
        assert one == two == pytest.approx(0.0 if time < 0.030 else 1.0, abs=0.01)
    assert all(moment[1][0] == 1.0 for moment in draft_latency.moments(0.005, come=1))
    assert draft_latency.moments(0.005, come=DEEPEST) == []


def test_a_drafter_that_is_silent_is_forgotten_soon():
    draft_latency = learned(answered(*[0.002] * DEEPEST))
    assert expected(draft_latency, age=0.0)[-1][1] == pytest.approx(1.0, abs=0.01)
    for _ in range(20):
        draft_latency.observe(answered())
    assert expected(draft_latency, age=0.0)[-1][1] < 0.15


def test_a_session_starts_from_what_all_have_seen_and_they_learn_from_it():
    worker = learned(answered(0.002))
    session = DraftLatencyEstimator(worker)
    assert session.moments(0.001) == worker.moments(0.001)
    before = expected(worker, age=0.0)
    session.observe(answered())
    assert expected(worker, age=0.0)[-1][1] < before[-1][1]
    other = DraftLatencyEstimator(worker)
    worker.observe(answered(0.002))
    assert other.moments(0.0) != worker.moments(0.0)  # it goes its own way from where it started
