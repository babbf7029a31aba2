"""What was computed once is not computed again, the request is told so, and its text is the same."""

from dataclasses import replace

import pytest

from draft_service.lookahead import Lookahead
from engine.build import build, welcome
from speculation.messages import (
    Close,
    Limits,
    Open,
    Refused,
    RequestOptions,
    Sampling,
    SessionId,
    Speculation,
    Verification,
)
from target_service import scheduler
from target_service.scheduler import Budget
from target_service.verify_loop import TargetLimits, VerifyLoop
from tests.stack import (
    decode,
    dispatcher,
    draft_worker,
    forget_prefixes,
    held_out_prompts,
    needs_exact_bf16,
    settings,
    target_worker,
)

NEW_TOKENS = 40
SAMPLING = Sampling(temperature=0.8, seed=3)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=needs_exact_bf16)])
@pytest.mark.parametrize("drafted", [False, True], ids=["plain", "drafted"])
async def test_a_repeated_prompt_is_found_in_the_cache_and_continued_the_same(dtype: str, drafted: bool):
    prompt = held_out_prompts()[0]
    async with target_worker(dtype=dtype) as target, draft_worker() as draft:
        drafts = [draft.worker.address] if drafted else []
        async with dispatcher([target.worker.address], drafts) as serving:
            cold = await decode(serving, prompt, NEW_TOKENS, SAMPLING)
            warm = await decode(serving, prompt, NEW_TOKENS, SAMPLING)
            # The next turn of a conversation: the answer is in the cache as well.
            longer = (*prompt, *cold.tokens, *held_out_prompts()[1][:20])
            turn = await decode(serving, longer, NEW_TOKENS, SAMPLING)
        async with target_worker(dtype=dtype) as fresh, dispatcher([fresh.worker.address], drafts) as serving:
            again = await decode(serving, longer, NEW_TOKENS, SAMPLING)
    assert (cold.cached, warm.cached, again.cached) == (0, len(prompt) - 1, 0)
    assert len(prompt) + NEW_TOKENS - 17 < turn.cached < len(prompt) + NEW_TOKENS
    assert warm.tokens == cold.tokens
    assert turn.tokens == again.tokens


LINK = "router"


@pytest.fixture(scope="module")
def engine():
    """Room for little more than one of the sessions below."""
    return build(settings("target", cache_tokens=128))


def run(
    loop: VerifyLoop, *openings: Open, drafter: Lookahead | None = None
) -> tuple[dict[int, list[int]], dict[int, int]]:
    """The texts of all sessions and how much of each was cached. A drafter makes three steps for each of the loop."""
    texts: dict[int, list[int]] = {opening.session: [] for opening in openings}
    cached: dict[int, int] = {}
    for opening in openings:
        assert loop.receive(LINK, opening) == []
        assert drafter is None or drafter.receive(LINK, opening) == []
    while (sent := loop.step()) is not None:
        for _, message in sent:
            assert isinstance(message, Verification)
            for _, proposal in drafter.receive(LINK, message) if drafter else ():
                loop.receive(LINK, proposal)
            texts[message.session] += message.tokens
            cached.setdefault(message.session, message.cached)
            assert message.position == 48 or not message.cached
        for _ in range(3 if drafter else 0):
            for _, proposal in drafter.step() or []:
                loop.receive(LINK, proposal)
    return texts, cached


PLAIN = Speculation(enabled=False)


def opening(number: int, prompt: int = 0, new: int = NEW_TOKENS, speculation: Speculation = PLAIN) -> Open:
    tokens = held_out_prompts()[prompt][:48]
    return Open(SessionId(number), 1, tokens, replace(SAMPLING, seed=number), Limits(len(tokens) + new), speculation)


def loop_over(engine, **limits) -> VerifyLoop:
    return VerifyLoop(engine, welcome(settings("target"), engine.model, "target"), TargetLimits(**limits))


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=needs_exact_bf16)])
def test_drafts_are_kept_as_before_after_a_prefix_was_taken_over(dtype: str):
    """Target and drafter both find the prompt, and branches are verified behind blocks that are shared."""
    target, draft = (build(settings(name, 2048, dtype)) for name in ("target", "draft"))
    texts, accepted = [], []
    for warm in (False, True):
        loop = loop_over(target)
        drafter = Lookahead(draft, welcome(settings("draft"), draft.model, "draft"))
        drafted, cached = run(loop, opening(1, speculation=Speculation()), drafter=drafter)
        texts.append(drafted)
        accepted.append(loop.counters.accepted)
        assert cached == {1: 47 * warm}
        assert drafter.counters.reused >= 47 if warm else drafter.counters.reused == 0
    plain, _ = run(loop_over(target), opening(1))
    assert texts == [plain, plain]
    assert min(accepted) > 0


def test_scopes_find_nothing_of_each_other_at_target_and_drafter():
    """Neither of another key's nor of another salt's; and the text is the same whatever was found."""
    target, draft = (build(settings(name, 2048)) for name in ("target", "draft"))
    texts = []
    of = RequestOptions
    for who, expected in [
        (of(scope="alice"), 0),
        (of(scope="alice"), 47),
        (of(scope="bob"), 0),
        (of(), 0),
        (of(), 47),
        (of(cache_salt="mine"), 0),
        (of(scope="alice", cache_salt="mine"), 0),
        (of(scope="alice", cache_salt="mine"), 47),
        (of(scope="bob"), 47),
    ]:
        loop, drafter = loop_over(target), Lookahead(draft, welcome(settings("draft"), draft.model, "draft"))
        asked = replace(opening(1, new=9, speculation=Speculation()), request_options=who)
        said, cached = run(loop, asked, drafter=drafter)
        texts.append(said[1])
        assert cached == {1: expected}, who
        assert loop.counters.reused == expected, who
        assert (drafter.counters.reused >= 47) is bool(expected), who
    assert texts == [texts[0]] * len(texts)


def test_a_preempted_session_finds_what_is_left_of_it_in_its_scope(engine, monkeypatch):
    monkeypatch.setattr(scheduler, "HEADROOM", 0)
    forget_prefixes(engine.cache)
    loop = loop_over(engine)
    openings = (replace(opening(n, prompt=n), request_options=RequestOptions(scope=f"key {n}")) for n in (1, 2))
    run(loop, *openings)
    assert loop.counters.preempted == 1
    assert loop.counters.reused >= 32
    engine.cache.validate()


def test_requests_that_come_together_share_their_prompt(engine):
    forget_prefixes(engine.cache)
    loop = loop_over(engine, budget=Budget(tokens=40))
    together, cached = run(loop, opening(1, new=9), opening(2, new=9), opening(3, new=9))
    assert loop.counters.prefilled + loop.counters.reused == 3 * 47
    assert loop.counters.reused >= 2 * 32, "whole blocks"
    assert cached[1] == 0 and min(cached[2], cached[3]) >= 32
    for number in (1, 2, 3):
        forget_prefixes(engine.cache)
        alone, _ = run(loop_over(engine), opening(number, new=9))
        assert together[number] == alone[number]


def test_a_preempted_session_takes_over_what_is_left_of_it(engine, monkeypatch):
    monkeypatch.setattr(scheduler, "HEADROOM", 0)
    forget_prefixes(engine.cache)
    expected = {}
    for number in (1, 2):
        texts, _ = run(loop_over(engine), opening(number, prompt=number))
        expected |= texts
        forget_prefixes(engine.cache)
    loop = loop_over(engine)
    texts, cached = run(loop, opening(1, prompt=1), opening(2, prompt=2))
    assert texts == expected
    assert loop.counters.preempted == 1
    assert loop.counters.reused >= 32
    assert cached == {1: 0, 2: 0}
    engine.cache.validate()
    assert engine.cache.free_tokens == engine.cache.capacity


def test_what_a_draft_worker_remembers_makes_room_for_new_sessions():
    small = build(settings("draft", cache_tokens=96))
    drafter = Lookahead(small, welcome(settings("draft"), small.model, "draft"))
    for number in range(1, 6):
        assert drafter.receive(LINK, opening(number, prompt=number % 3)) == []
        for _ in range(5):
            assert not [message for _, message in drafter.step() or [] if isinstance(message, Refused)]
        drafter.receive(LINK, Close(SessionId(number), 1))
        small.cache.validate()
    assert small.cache.free_tokens == 96
    assert len(list(small.cache.ledger.known)) > 2
