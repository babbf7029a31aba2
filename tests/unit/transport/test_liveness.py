"""Who is gone, who is deaf and who is only slow: by ticks, without a clock."""

from __future__ import annotations

import itertools

import pytest

from transport.client import DOUBTFUL_TICK, LOST_SECONDS, MAX_PATIENCE, PING_SECONDS, TICKS, Liveness, Patience

MOMENTS = itertools.count(0.0, 2 * LOST_SECONDS)
SILENT = "nothing heard for 2 s"
DEAF = "it talks, but has not answered for 2 s"
SLOWLY = round(TICKS / DOUBTFUL_TICK)
"""Ticks to the same verdict where each is in doubt."""


def stream(patience: Patience | None = None) -> Liveness:
    return Liveness(patience or Patience())


def ping(watched: Liveness) -> None:
    assert watched.due(next(MOMENTS)) is not None


def ticks(watched: Liveness, *, late: bool = False, talks: bool = False) -> tuple[int, str]:
    """How many ticks it is left alone for, and why no longer."""
    for count in range(1, 1000):
        if talks:
            watched.heard()
        if why := watched.tick(late=late):
            return count, why
    return 1000, ""


def test_a_worker_that_says_nothing_is_given_up_after_its_time():
    watched = stream()
    assert ticks(watched) == (TICKS, SILENT)
    watched.heard()
    assert ticks(watched) == (TICKS, SILENT)


def test_ticks_that_come_late_are_no_proof_but_do_not_excuse_for_ever():
    assert ticks(stream(), late=True) == (SLOWLY, SILENT)


def test_a_worker_that_talks_and_stops_answering_is_given_up_as_soon():
    watched = stream()
    ping(watched)
    watched.written()
    watched.answered(0, 0.0)
    assert ticks(watched, talks=True) == (1000, "")
    ping(watched)
    watched.written()
    assert ticks(watched, talks=True) == (TICKS, DEAF)


def test_what_is_asked_counts_from_when_it_was_first_asked():
    watched = stream()
    watched.answered(0, 0.0)
    ping(watched)
    watched.written()
    for _ in range(TICKS - 1):
        watched.heard()
        assert watched.tick(late=False) is None
    ping(watched)  # the one before is believed lost
    watched.written()
    assert ticks(watched, talks=True) == (1, DEAF)


def test_a_ping_that_has_yet_to_be_written_counts_little():
    watched = stream()
    watched.answered(0, 0.0)
    ping(watched)
    assert ticks(watched, talks=True) == (SLOWLY, DEAF)


def test_a_worker_that_never_answers_is_one_that_knows_no_pings():
    watched = stream()
    ping(watched)
    watched.written()
    assert ticks(watched, talks=True) == (1000, "")


def test_what_the_router_does_not_read_is_held_against_nobody():
    watched = stream()
    watched.answered(0, 0.0)
    ping(watched)
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


def test_a_round_trip_is_measured_by_answers_to_the_last_ping_only_and_smoothed():
    trip = stream()
    assert (trip.round_trip, trip.due(0.0)) == (None, 1)
    assert trip.due(LOST_SECONDS / 2) is None  # not before it is answered, or lost
    trip.answered(99, 0.1)
    assert trip.round_trip is None
    trip.answered(1, 0.1)
    trip.answered(1, 3.0)
    assert trip.round_trip == pytest.approx(0.1)
    assert trip.due(PING_SECONDS / 2) is None
    assert trip.due(PING_SECONDS) == 2
    trip.answered(2, PING_SECONDS + 0.2)
    assert trip.round_trip == pytest.approx(0.12)
    assert trip.due(2 * PING_SECONDS) == 3
    assert trip.due(2 * PING_SECONDS + LOST_SECONDS) == 4
