"""Who is gone, who is deaf and who is only slow: by ticks, without a clock."""

from __future__ import annotations

import pytest

from transport.client import DOUBTFUL_TICK, MAX_PATIENCE, TICKS, Liveness, Patience

SILENT = "nothing heard for 2 s"
DEAF = "it talks, but has not answered for 2 s"
SLOWLY = round(TICKS / DOUBTFUL_TICK)
"""Ticks to the same verdict where each is in doubt."""


def stream(patience: Patience | None = None, slack: float = 0.0) -> Liveness:
    return Liveness(2.0, patience or Patience(), slack)


def ticks(watched: Liveness, *, late: bool = False, talks: bool = False, slack: float = 0.0) -> tuple[int, str]:
    """How many ticks it is left alone for, and why no longer."""
    for count in range(1, 1000):
        if talks:
            watched.heard()
        if why := watched.tick(late=late, slack=slack):
            return count, why
    return 1000, ""


def test_a_worker_that_says_nothing_is_given_up_after_its_time():
    watched = stream()
    assert ticks(watched) == (TICKS, SILENT)
    watched.heard()
    assert ticks(watched) == (TICKS, SILENT)
    assert ticks(stream(slack=7.0)) == (TICKS + 7, SILENT)


def test_ticks_that_come_late_are_no_proof_but_do_not_excuse_for_ever():
    assert ticks(stream(), late=True) == (SLOWLY, SILENT)


def test_a_worker_that_talks_and_stops_answering_is_given_up_as_soon():
    watched = stream()
    watched.pinged()
    watched.written()
    watched.answered()
    assert ticks(watched, talks=True) == (1000, "")
    watched.pinged()
    watched.written()
    assert ticks(watched, talks=True) == (TICKS, DEAF)


def test_what_is_asked_counts_from_when_it_was_first_asked():
    watched = stream()
    watched.answered()
    watched.pinged()
    watched.written()
    for _ in range(TICKS - 1):
        watched.heard()
        assert watched.tick(late=False) is None
    watched.pinged()  # the one before is believed lost
    watched.written()
    assert ticks(watched, talks=True) == (1, DEAF)


def test_a_ping_that_has_yet_to_be_written_counts_little():
    watched = stream()
    watched.answered()
    watched.pinged()
    assert ticks(watched, talks=True) == (SLOWLY, DEAF)


def test_an_answer_may_come_as_late_as_messages_are_made_to():
    watched = stream()
    watched.answered()
    watched.pinged()
    watched.written()
    assert ticks(watched, talks=True, slack=30.0) == (TICKS + 30, DEAF)


def test_a_worker_that_never_answers_is_one_that_knows_no_pings():
    watched = stream()
    watched.pinged()
    watched.written()
    assert ticks(watched, talks=True) == (1000, "")


def test_what_the_router_does_not_read_is_held_against_nobody():
    watched = stream()
    watched.answered()
    watched.pinged()
    watched.written()
    for _ in range(10 * TICKS):
        watched.held_back()
        assert watched.tick(late=False) is None


@pytest.mark.parametrize(("longest", "factors"), [(MAX_PATIENCE, [2, 4, 5, 5]), (1.0, [1, 1, 1, 1])])
def test_a_worker_that_was_given_up_and_not_gone_gets_more_time(longest, factors):
    patience = Patience(longest)
    patience.came("one")
    assert ticks(stream(patience))[0] == TICKS
    for factor in factors:
        patience.given_up("one")
        patience.came("one")
        assert ticks(stream(patience)) == (factor * TICKS, f"nothing heard for {2 * factor} s")
    patience.came("one")  # after the stream broke: that says nothing
    assert patience.factor == 1.0


@pytest.mark.parametrize("instance", ["two", ""])
def test_one_that_was_started_again_gets_no_more_time_than_any(instance):
    patience = Patience()
    patience.given_up("one" if instance else "")
    patience.came(instance)
    assert patience.factor == 1.0
