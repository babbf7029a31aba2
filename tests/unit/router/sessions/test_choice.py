"""Which worker takes a session, from what is known of the workers: no sockets, no clock."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from router.sessions.choice import (
    BLOCK,
    REMEMBERED_BLOCKS,
    SESSIONS,
    Prefixes,
    WantedWorker,
    WorkerCandidate,
    blocks_of,
    choose_drafter,
    choose_target,
)
from router.sessions.tally import PRIOR, AcceptanceRecord
from speculation.events import PeerId
from speculation.messages import Load, Welcome

RNG = Random(1)
BASE = WantedWorker("m", tokenizer=5, tokens=100)


def target(
    name: str,
    *,
    model: str = "m",
    tokenizer: int = 5,
    revision: int = 1,
    started: float = 1.0,
    context: int = 1000,
    **known: object,
):
    welcome = Welcome("target", model, 100, context, tokenizer, revision=revision, started=started)
    return WorkerCandidate(PeerId(name), welcome, **known)  # type: ignore[arg-type]


def chosen(*candidates: WorkerCandidate, wanted: WantedWorker = BASE, choose=choose_target) -> set[str]:
    """All that are picked in many tries."""
    return {str(choose(candidates, wanted, RNG)) for _ in range(60)}


def busy(sessions: int, free: int = 1000, waiting: int = 0) -> Load:
    return Load(sessions=sessions, waiting=waiting, free_tokens=free, capacity_tokens=1000)


@pytest.mark.parametrize(
    "unfit",
    [
        target("x", model="other"),
        target("x", tokenizer=6),
        target("x", load=Load(draining=True)),
    ],
)
def test_a_target_that_does_not_fit_is_not_chosen_even_if_it_is_the_only_one(unfit):
    assert chosen(unfit) == {"None"}
    assert chosen(unfit, target("a", load=busy(50))) == {"a"}


def test_equals_are_chosen_at_random_and_alike_often():
    candidates = [target(name) for name in "abc"]
    counts = Counter(choose_target(candidates, BASE, Random(seed)) for seed in range(300))
    assert set(counts) == {"a", "b", "c"}
    assert min(counts.values()) > 60


def test_the_least_busy_target_is_chosen_whoever_knows_of_its_sessions():
    assert chosen(target("a", load=busy(2)), target("b", load=busy(1))) == {"b"}
    assert chosen(target("a", load=busy(0, waiting=2)), target("b", load=busy(1))) == {"b"}
    assert chosen(target("a", sessions=2), target("b", load=busy(1))) == {"b"}


def test_tokens_count_against_capacity_those_just_sent_too():
    assert chosen(target("a", load=busy(1, free=300)), target("b", load=busy(1, free=600))) == {"b"}
    loaded = target("a", load=busy(1, free=900), opening_tokens=500)
    assert chosen(loaded, target("b", load=busy(1, free=600))) == {"b"}
    queued = target("a", load=busy(1, free=500, waiting=1))  # the one that waits is taken to be like those that run
    assert queued.held_tokens == 1000
    assert chosen(queued, target("b", load=busy(2, free=500))) == {"b"}


def test_a_known_prefix_decides_among_similar_targets_but_never_overloads_one():
    wanted = WantedWorker("m", 5, tokens=2000)
    knowing = [target("a", known_tokens=1900, sessions=count) for count in range(40)]
    other = target("b", sessions=3)
    assert chosen(knowing[5], other, wanted=wanted) == {"a"}
    assert chosen(knowing[20], other, wanted=wanted) == {"b"}
    crowd = [target(str(number), sessions=20) for number in range(4)]
    for sessions, expected in ((26, {"a"}), (32, {"0", "1", "2", "3"})):
        long = WantedWorker("m", 5, tokens=40_000)
        assert chosen(target("a", known_tokens=39_000, sessions=sessions), *crowd, wanted=long) == expected


def test_of_equally_busy_workers_the_nearer_one_is_chosen():
    assert chosen(target("a", round_trip=0.1), target("b", round_trip=0.001)) == {"b"}
    assert chosen(target("a", round_trip=0.1), target("b", round_trip=0.001), choose=choose_drafter) == {"b"}
    assert chosen(target("a", round_trip=0.1), target("b", round_trip=0.001, sessions=SESSIONS)) == {"a"}


def test_new_sessions_go_to_the_newest_revision_that_has_room():
    old = [target("old1", revision=7, started=10.0), target("old2", revision=7, started=90.0)]
    new = target("new", revision=3, started=50.0, load=busy(9, free=500))
    assert chosen(*old, new) == {"new"}
    full = target("new", revision=3, started=50.0, load=busy(9, free=50))
    assert chosen(*old, full) == {"old1", "old2"}
    assert chosen(full) == {"new"}


def test_a_target_that_stands_by_is_taken_where_no_other_can_be():
    idle = target("idle", idle=True)
    assert chosen(target("a", load=busy(50, free=0)), idle) == {"a"}
    assert chosen(target("a", load=Load(draining=True)), idle) == {"idle"}
    assert chosen(target("a", revision=7), idle, wanted=WantedWorker("m", 5, revision=1)) == {"idle"}
    assert chosen(target("a", revision=7), target("idle", revision=3, started=50.0, idle=True)) == {"a"}


def test_a_cache_that_cannot_hold_all_of_a_session_is_left_to_others():
    small = target("small", load=Load(free_tokens=300, capacity_tokens=300))
    large = target("large", load=Load(sessions=9, free_tokens=600, capacity_tokens=2000))
    assert chosen(small, large) == {"small"}
    assert chosen(small, large, wanted=WantedWorker("m", 5, tokens=100, end=301)) == {"large"}
    assert chosen(small, wanted=WantedWorker("m", 5, tokens=100, end=301)) == {"small"}  # which says what is wrong
    unknown = target("unknown", sessions=20)
    assert chosen(small, unknown, wanted=WantedWorker("m", 5, tokens=100, end=301)) == {"unknown"}


def test_a_target_is_asked_for_no_longer_texts_than_it_says_it_takes_though_its_load_is_not_known_yet():
    small, large = target("small", context=300), target("large", load=busy(9))
    long = WantedWorker("m", 5, tokens=100, end=301)
    assert chosen(small, large) == {"small"}
    assert chosen(small, large, wanted=long) == {"large"}
    assert chosen(small, target("idle", idle=True), wanted=long) == {"idle"}


def test_a_text_too_long_for_all_targets_that_are_up_waits_for_one_that_takes_it():
    small, long = target("small", context=300), WantedWorker("m", 5, revision=1, tokens=100, end=301)
    away = target("away").welcome
    assert choose_target([small], long, RNG, [away]) is None
    assert choose_target([small], replace(long, end=300), RNG, [away]) == "small"
    useless = (replace(away, model="other"), replace(away, revision=2), replace(away, context=300))
    assert choose_target([small], long, RNG, useless) == "small"  # which says what is wrong


def test_a_text_stays_on_its_revision():
    candidates = [target("old", revision=7, load=busy(30)), target("new", revision=3, started=50.0)]
    assert chosen(*candidates, wanted=WantedWorker("m", 5, revision=7)) == {"old"}
    assert chosen(candidates[1], wanted=WantedWorker("m", 5, revision=7)) == {"None"}


def test_a_drafter_serves_every_model_with_its_tokenizer_and_the_one_that_agrees_most_is_chosen():
    good, bad = target("good", model="d1", acceptance=0.8), target("bad", model="d2", acceptance=0.5)
    assert chosen(good, bad, target("foreign", tokenizer=9, acceptance=1.0), choose=choose_drafter) == {"good"}
    crowded = target("good", model="d1", acceptance=0.8, sessions=3 * SESSIONS)
    assert chosen(crowded, bad, choose=choose_drafter) == {"bad"}
    assert chosen(target("drain", load=Load(draining=True)), choose=choose_drafter) == {"None"}


def test_prompts_that_begin_alike_share_their_first_blocks():
    prompt = tuple(range(3 * BLOCK + 7))
    known = Prefixes()
    known.note(blocks_of(prompt))
    assert len(blocks_of(prompt)) == 3
    assert known.known_tokens(blocks_of(prompt)) == 3 * BLOCK
    assert known.known_tokens(blocks_of((*prompt[: BLOCK + 5], 9999, *prompt))) == BLOCK
    assert known.known_tokens(blocks_of((1, *prompt))) == known.known_tokens(()) == 0
    assert known.known_tokens(blocks_of(prompt, "alice")) == 0, "a target shares nothing between scopes either"
    known.note(blocks_of(prompt, "alice"))
    assert known.known_tokens(blocks_of(prompt, "alice")) == 3 * BLOCK


def test_beginnings_are_remembered_longest_and_no_more_than_so_many():
    known = Prefixes()
    for start in range(0, REMEMBERED_BLOCKS, 4):
        known.note(range(start, start + 4))
    assert known.known_tokens(range(4)) == 4 * BLOCK
    known.note((-1, -2))
    assert known.known_tokens(range(4)) == 2 * BLOCK


def test_acceptance_is_learnt_for_the_pair_and_then_for_the_drafter():
    record, target, one, other = AcceptanceRecord(), PeerId("target"), PeerId("one"), PeerId("other")
    assert record.expected("t", "d", one) == pytest.approx(PRIOR)
    for _ in range(200):
        record.add(target, "t", one, "d", kept=9, offered=10)
    assert record.expected("t", "d", one) == pytest.approx(0.9, abs=0.02)
    assert record.expected("t", "d", other) == pytest.approx(0.9, abs=0.02)
    assert record.expected("u", "d", one) == pytest.approx(PRIOR)
    for _ in range(200):
        record.add(target, "t", other, "d", kept=1, offered=10)
    assert record.expected("t", "d", one) - record.expected("t", "d", other) > 0.4
    for _ in range(2000):
        record.add(target, "t", one, "d", kept=2, offered=10)
    assert record.expected("t", "d", one) == pytest.approx(0.2, abs=0.03)
    record.forget(one)
    assert record.expected("t", "d", one) == pytest.approx(record.expected("t", "d", PeerId("third")))


def test_a_pair_has_one_acceptance_and_the_target_of_several_drafters_that_of_all():
    record, target, one, other = AcceptanceRecord(), PeerId("target"), PeerId("one"), PeerId("other")
    assert record.measured() == {}
    for kept, offered in ((3, 4), (0, 0), (1, 6), (2000, 4000), (9, 10)):
        record.add(target, "t", one, "d", kept=kept, offered=offered)
    pair = record.measured()
    assert pair[target] == pair[one] == pytest.approx(0.5, abs=0.02)
    assert record.measured() == pair, "asking changes nothing"
    record.add(target, "t", other, "d", kept=0, offered=4000)
    several = record.measured()
    assert several[other] == 0.0 < several[target] < several[one] == pair[one]
    record.forget(one)
    record.forget(target)
    assert record.measured() == {other: 0.0}
