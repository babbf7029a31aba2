"""Limits of callers: buckets, accounts and key files that give them, on a clock of their own."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from dataclasses import replace
from time import monotonic

import pytest

from cluster.config.config import from_mapping
from cluster.config.serving import router_settings
from router import limits
from router.answers.choice_reader import TextChunk
from router.errors import ApiError
from router.generation import GenerationError
from router.http.auth import ApiKeys, KeyFileError
from router.limits import MAX_WAIT, Account, Allowance, Bucket, Durations, RetryTurns, admitted
from router.sessions.tally import RouterCounters
from speculation.messages import FinishReason

ALICE, BOB = "alice-0123456789abcdef", "bob-0123456789abcdef"


def account(**limits: int) -> Account:
    one = Account()
    one.allow(Allowance(**limits), 0.0)
    return one


def refused(call, *arguments) -> ApiError:
    with pytest.raises(ApiError) as caught:
        call(*arguments)
    return caught.value


def test_no_minute_lets_more_through_than_was_saved_up_and_refilled() -> None:
    seed = random.randrange(1 << 32)
    rng = random.Random(seed)
    limit, now, taken, waits = 30, 0.0, [], []
    one = account(requests_per_minute=limit)
    while now < 600:
        now += rng.expovariate(2.0)
        try:
            one.enter(now)
            taken.append(now)
        except ApiError as error:
            waits.append(error.retry_after)
    for start in taken:
        assert sum(start <= at < start + 60 for at in taken) <= 2 * limit, seed
    assert len(taken) <= limit + 600 * limit / 60, seed
    assert len(taken) >= 600 * limit / 60, seed
    assert all(0 < wait <= 60 / limit for wait in waits), seed
    assert one.refused["requests"] == len(waits) > 0, seed


def test_a_client_that_waits_as_told_is_let_in() -> None:
    one = account(requests_per_minute=60)
    for _ in range(60):
        one.enter(0.0)
    error = refused(one.enter, 0.0)
    assert (one.refused["requests"], error.retry_after) == (1, 1.0)
    assert "60 requests a minute" in error.message
    refused(one.enter, error.retry_after - 0.01)
    one.enter(error.retry_after)


def test_tokens_are_counted_as_they_are_used_and_an_overdrawn_bucket_fills_first() -> None:
    one = account(tokens_per_minute=600)
    first = one.enter(0.0)
    first.take_prompt(500, 0.0)
    first.take_completion(700, 0.0)  # a running request is not cut short
    first.leave(1.0)
    second = one.enter(0.0)
    assert refused(second.take_prompt, 1, 0.0).retry_after == pytest.approx(60.1)
    second.take_prompt(1, 60.1)
    second.take_completion(0, 60.1)  # it is being computed
    assert (one.prompt_tokens, one.completion_tokens) == (501, 700)


def test_a_prompt_beyond_the_limit_itself_needs_a_full_bucket() -> None:
    lease = account(tokens_per_minute=100).enter(0.0)
    lease.take_prompt(250, 0.0)
    assert refused(lease.take_prompt, 250, 60.0).retry_after == pytest.approx(90.0)
    lease.take_prompt(250, 150.0)


def test_places_are_given_back() -> None:
    one = account(concurrent_requests=2)
    first = one.enter(0.0)
    one.enter(0.0)
    refused(one.enter, 0.0)
    first.leave(8.0)
    one.enter(0.0)
    assert refused(one.enter, 0.0).retry_after == 4.0  # two places of 8 s each
    assert (one.running, one.requests, one.refused["concurrent"]) == (2, 3, 2)


def test_other_limits_count_at_once_and_what_was_taken_stays_taken() -> None:
    one = account(requests_per_minute=10)
    for _ in range(8):
        one.enter(0.0)
    one.allow(Allowance(requests_per_minute=20), 0.0)
    for _ in range(12):
        one.enter(0.0)
    refused(one.enter, 0.0)
    one.allow(Allowance(), 0.0)
    for _ in range(100):
        one.enter(0.0)


def test_a_bucket_never_holds_more_than_its_limit() -> None:
    bucket = Bucket(60, 0.0)
    bucket.take(10, 0.0)
    assert [bucket.level(at) for at in (0.0, 5.0, 10.0, 99.0)] == [50, 55, 60, 60]


def test_the_wait_for_a_place_follows_how_long_requests_take() -> None:
    durations = Durations()
    assert durations.wait(8) == 1.0
    for _ in range(100):
        durations.add(40.0)
    assert durations.wait(8) == pytest.approx(5.0)
    assert durations.wait(1) == pytest.approx(40.0)


def test_everybody_who_is_sent_away_is_told_a_turn_of_his_own():
    turns = RetryTurns()
    turns.durations.add(40.0)
    assert turns.take(100.0, 8, 3, 0.0) == pytest.approx(20.0), "after the three who wait inside"
    assert [turns.take(100.0, 8, 3, 0.0) for _ in range(3)] == pytest.approx([25.0, 30.0, 35.0])
    assert turns.take(110.0, 8, 0, 0.0) == pytest.approx(30.0), "who comes later waits for those before him"
    assert turns.take(500.0, 8, 0, 0.0) == pytest.approx(5.0), "and not once their turns have passed"
    assert max(turns.take(500.0, 8, 0, 0.0) for _ in range(99)) == MAX_WAIT
    assert turns.take(500.0, 8, 0, 0.0) == MAX_WAIT
    assert turns.take(510.0, 0, 100, 0.0) == MAX_WAIT
    assert turns.take(600.0, 4096, 0, 0.0) == 1.0


def test_while_none_has_ended_a_turn_is_as_long_as_they_have_been_here():
    turns = RetryTurns()
    assert turns.take(50.0, 2, 0, 30.0) == pytest.approx(15.0)
    assert RetryTurns().take(50.0, 2, 0, 0.0) == 1.0


# The file


def holders(tmp_path, text: str):
    path = tmp_path / "keys"
    path.write_text(text)
    keys = ApiKeys(path)
    return [keys.holder_of(key) for key in (ALICE, BOB)]


def test_a_line_may_give_its_key_limits(tmp_path) -> None:
    alice, bob = holders(tmp_path, f"alice: {ALICE}  requests_per_minute=5 concurrent_requests=0\n{BOB}\n")
    assert (alice.name, alice.limits) == ("alice", {"requests_per_minute": 5, "concurrent_requests": 0})
    assert (bob.name, bob.limits) == ("line 2", {})
    default = Allowance(requests_per_minute=9, tokens_per_minute=8, concurrent_requests=7)
    assert replace(default, **alice.limits) == Allowance(5, 8, 0)
    assert replace(default, **bob.limits) == default


def test_two_keys_of_one_name_share_their_limits(tmp_path) -> None:
    alice, other = holders(tmp_path, f"a: {ALICE} tokens_per_minute=5\na: {BOB} tokens_per_minute=5\n")
    assert alice == other


def test_choices_at_once_have_a_limit_but_one_request_alone() -> None:
    one = account(concurrent_sessions=8)
    first, second, third = (one.enter(0.0) for _ in range(3))
    first.take_sessions(16)
    refused(second.take_sessions, 1)
    first.leave(2.0)
    second.take_sessions(5)
    assert refused(third.take_sessions, 4).retry_after == 1.0  # two requests, of 2 s each, are under way
    third.take_sessions(3)
    second.leave(2.0)
    third.leave(2.0)
    assert (one.running, one.sessions, one.refused["sessions"]) == (0, 0, 2)


def test_tokens_under_way_have_a_limit_but_one_request_alone() -> None:
    one = account(concurrent_tokens=1000)
    first, second, third = (one.enter(0.0) for _ in range(3))
    first.take_prompt(4000, 0.0)
    refused(second.take_prompt, 1, 0.0)
    first.leave(2.0)
    second.take_prompt(600, 0.0)
    second.take_completion(300, 0.0)  # what was let in is never cut short
    error = refused(third.take_prompt, 101, 0.0)
    assert "1000 tokens at once are allowed, requests under way have 900, 101 needed; try again in 1 s" in error.message
    third.take_prompt(100, 0.0)
    third.take_completion(300, 0.0)
    second.leave(2.0)
    third.leave(2.0)
    assert (one.running, one.tokens, one.refused["concurrent_tokens"]) == (0, 0, 2)


@pytest.mark.parametrize(
    ("settings", "sessions", "tokens"),
    [
        ({}, 0, 0),
        ({"security": {"api_keys": "KEYS"}}, 32, 32 * 4096),
        ({"security": {"api_keys": "KEYS"}, "admission": {"concurrent_sessions": 0}}, 0, 0),
        ({"security": {"api_keys": "KEYS"}, "admission": {"concurrent_sessions": 2}}, 2, 8192),
        ({"security": {"api_keys": "KEYS"}, "admission": {"concurrent_tokens": 0}}, 32, 0),
        ({"admission": {"concurrent_sessions": 7}}, 7, 0),
        ({"admission": {"concurrent_tokens": 7}}, 0, 7),
    ],
)
def test_one_key_never_takes_all_unless_it_is_let(tmp_path, settings: dict, sessions: int, tokens: int) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{ALICE}\n")
    if "security" in settings:
        settings = {**settings, "security": {"api_keys": str(keys)}}
    made = router_settings(from_mapping({"router": {"max_sessions": 64}, **settings}, "test"))
    allowed = made.api.admission.allowance
    assert (allowed.concurrent_sessions, allowed.concurrent_tokens) == (sessions, tokens)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (f"a: {ALICE} request_per_minute=5", "line 1 has an unknown limit; there are requests_per_minute, "),
        (f"a: {ALICE} tokens_per_minute=-5", "line 1: tokens_per_minute must be a whole number from 0"),
        (f"a: {ALICE} tokens_per_minute=", "line 1: tokens_per_minute must be a whole number from 0"),
        (f"a: {ALICE} tokens_per_minute={'9' * 5000}", "line 1: tokens_per_minute must be a whole number from 0"),
        (f"a: {ALICE} tokens_per_minute=5 tokens_per_minute=5", "line 1 says tokens_per_minute twice"),
        (f"a: {ALICE} 5", "line 1 is neither KEY nor NAME: KEY"),
        (f"a: {ALICE} {BOB}==", "line 1 is neither KEY nor NAME: KEY"),
        (f"a: {ALICE}\na: {BOB} tokens_per_minute=5", "line 2 gives a other limits than line 1"),
    ],
)
def test_limits_that_cannot_be_read_are_refused_without_showing_a_key(tmp_path, line: str, words: str) -> None:
    with pytest.raises(KeyFileError) as caught:
        holders(tmp_path, line)
    assert words in str(caught.value)
    assert ALICE not in str(caught.value)
    assert BOB not in str(caught.value)


async def chunks(*given: TextChunk, error: Exception | None = None, pause: float = 0.0) -> AsyncGenerator[TextChunk]:
    for chunk in given:
        yield chunk
    await asyncio.sleep(pause)
    if error is not None:
        raise error


FIRST, LAST = TextChunk(0, (), tokens=2), TextChunk(0, (), finish=FinishReason.LENGTH)


def let_in(given: AsyncGenerator[TextChunk], tally: RouterCounters, seconds: float | None, now: float = 0.0):
    return admitted(given, account().enter(now), seconds, tally.request("m", 1, now))


async def test_chunks_pass_as_they_are_paid_for_and_counted() -> None:
    tally, payer = RouterCounters(), account()
    lease = payer.enter(0.0)
    passed = admitted(chunks(FIRST, LAST), lease, None, tally.request("m", 1, 0.0))
    assert [chunk async for chunk in passed] == [FIRST, LAST]
    assert (payer.completion_tokens, tally.model("m").finished["length"]) == (2, 1)


async def test_a_prompt_that_nobody_computed_is_paid_back(monkeypatch: pytest.MonkeyPatch) -> None:
    payer, tally, now = Account(), RouterCounters(), 0.0
    monkeypatch.setattr(limits, "monotonic", lambda: now)
    payer.allow(Allowance(tokens_per_minute=1000), now)
    for code, begun, left, counted in (
        ("overloaded", (), 1000, 0),
        ("overloaded", (FIRST,), 698, 300),
        ("faulty", (), 398, 600),
    ):
        lease = payer.enter(now)
        lease.take_prompt(300, now)
        given = chunks(*begun, error=GenerationError(code, "x"))
        with pytest.raises(GenerationError, match="x"):
            _ = [chunk async for chunk in admitted(given, lease, None, tally.request("m", 1, 0.0))]
        lease.leave(now)
        assert (round(payer.buckets["tokens"].level(now)), payer.prompt_tokens) == (left, counted)
    assert payer.tokens == 0


async def test_a_request_that_nobody_waits_for_is_an_abort() -> None:
    tally = RouterCounters()
    left = let_in(chunks(FIRST, LAST), tally, None)
    await anext(left)
    await left.aclose()
    cut = let_in(chunks(pause=60.0), tally, None)
    waiting = asyncio.create_task(anext(cut))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert tally.model("m").finished == {"length": 0, "stop": 0, "abort": 2}


async def test_one_that_failed_or_took_too_long_is_none() -> None:
    tally = RouterCounters()
    with pytest.raises(GenerationError, match="x"):
        _ = [chunk async for chunk in let_in(chunks(error=GenerationError("faulty", "x")), tally, None)]
    with pytest.raises(GenerationError, match=r"the 0\.01 seconds"):
        _ = [chunk async for chunk in let_in(chunks(FIRST, pause=60.0), tally, 0.01, monotonic())]
    assert not any(tally.model("m").finished.values())
