"""The two machines, driven step by step: no threads, no sockets, real bundled models."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from draft_service.lookahead import Lookahead, LookaheadLimits
from engine.build import build, welcome
from engine.step import Engine
from speculation import digest as digests
from speculation.drafting.draft_session import DraftLimits
from speculation.messages import (
    Close,
    FinishReason,
    Limits,
    Open,
    Proposal,
    RefusalCode,
    Refused,
    RequestOptions,
    Sampling,
    SessionId,
    Source,
    Speculation,
    Verification,
)
from speculation.trie import InsertResult, SpeculationTrie
from target_service.scheduler import Budget
from target_service.verify_loop import TargetLimits, VerifyLoop
from tests.stack import forget_prefixes, held_out_prompts, settings

LINK = "router"
CHAIN = LookaheadLimits(draft=DraftLimits(children=1, width=1, hold=1))


@pytest.fixture(scope="module")
def engines() -> dict[str, Engine]:
    return {name: build(settings(name, cache_tokens=8192)) for name in ("target", "draft")}


def target_loop(engines, limits: TargetLimits = TargetLimits(adaptive=False)) -> VerifyLoop:
    engine = engines["target"]
    return VerifyLoop(engine, welcome(settings("target"), engine.model, "target"), limits)


def lookahead(engines, model: str = "draft", limits: LookaheadLimits = LookaheadLimits()) -> Lookahead:
    return Lookahead(engines[model], welcome(settings(model), engines[model].model, "draft"), limits)


def opened(number: int = 1, epoch: int = 1, new: int = 24, prompt: int = 0, **kwargs) -> Open:
    tokens = held_out_prompts()[prompt]
    sampling = kwargs.pop("sampling", Sampling(temperature=0.0))
    return Open(SessionId(number), epoch, tokens, sampling, Limits(len(tokens) + new), **kwargs)


@dataclass
class Outcome:
    """What a target said about its sessions."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    verifications: list[Verification] = field(default_factory=list)
    refusals: list[Refused] = field(default_factory=list)
    finished: set[int] = field(default_factory=set)


def run(target: VerifyLoop, drafter: Lookahead | None = None, draft_steps: int = 3, until: int = 400) -> Outcome:
    """Step both in turn, relaying between them, until the target has nothing to do."""
    outcome = Outcome()
    for _ in range(until):
        for _ in range(draft_steps if drafter else 0):
            for _, message in drafter.step() or []:
                if isinstance(message, Proposal):
                    target.receive(LINK, message)
        sent = target.step()
        if sent is None:
            return outcome
        for _, message in sent:
            if isinstance(message, Refused):
                outcome.refusals.append(message)
                continue
            assert isinstance(message, Verification)
            outcome.verifications.append(message)
            outcome.tokens.setdefault(message.session, []).extend(message.tokens)
            if message.finish:
                outcome.finished.add(message.session)
            if drafter:
                assert drafter.receive(LINK, message) == []
    raise AssertionError("the target never ran out of work")


@pytest.fixture(autouse=True)
def nothing_left(engines):
    for engine in engines.values():
        forget_prefixes(engine.cache)
    yield
    for engine in engines.values():
        engine.cache.validate()
        assert engine.cache.free_tokens == engine.cache.capacity


@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.5])
def test_a_drafter_with_the_targets_weights_is_always_right(engines, temperature):
    opening = opened(new=33, sampling=Sampling(temperature=temperature, seed=5))
    alone = target_loop(engines)
    alone.receive(LINK, replace(opening, speculation=Speculation(enabled=False)))
    plain = run(alone)
    opening = replace(opening, speculation=Speculation(sources=frozenset({Source.DRAFT})))
    target, drafter = target_loop(engines), lookahead(engines, "target", CHAIN)
    target.receive(LINK, opening)
    drafter.receive(LINK, opening)
    drafted = run(target, drafter)
    assert drafted.tokens == plain.tokens
    assert all(message.accepted == message.offered for message in drafted.verifications)
    # Three draft steps a target step: four tokens a verification once under way.
    assert len(drafted.verifications) <= 33 / 4 + 3
    assert len(plain.verifications) == 33


def test_both_sides_keep_their_caches_through_acceptance_and_rejection(engines):
    """Each committed token is fed to either model about once, not again and again."""
    opening = opened(new=40)
    target, drafter = target_loop(engines), lookahead(engines)
    target.receive(LINK, opening)
    drafter.receive(LINK, opening)
    outcome = run(target, drafter)
    rejected = sum(message.offered - message.accepted for message in outcome.verifications)
    assert rejected > 0 < sum(message.accepted for message in outcome.verifications)
    prompt = len(opening.tokens)
    assert target.counters.prefilled == prompt - 1
    assert drafter.counters.steps <= 3 * target.counters.steps
    assert drafter.counters.lost == 0


def test_a_text_whose_digest_comes_with_it_is_digested_at_neither_side(engines, monkeypatch):
    """It takes most of what opening a session takes, on the thread that all sessions there wait for."""
    opening = opened()
    named = replace(opening, session=SessionId(2), digest=digests.of(opening.tokens))
    target, drafter, count, extend = target_loop(engines), lookahead(engines), 0, digests.extend

    def counting(digest: int, token: int) -> int:
        nonlocal count
        count += 1
        return extend(digest, token)

    for loop in (target, drafter):
        for one, expected in ((opening, len(opening.tokens)), (named, 0)):
            with monkeypatch.context() as patch:
                patch.setattr(digests, "extend", counting)
                assert loop.receive(LINK, one) == []
            assert count == expected
            count = 0
    outcome = run(target, drafter)
    assert outcome.tokens[1] == outcome.tokens[2] and outcome.finished == {1, 2}
    assert drafter.counters.lost == 0 < sum(message.accepted for message in outcome.verifications)


def test_a_wrong_digest_of_a_text_changes_none_and_is_in_every_answer(engines):
    """So that its router, which knows better, opens it elsewhere, as all that does not connect."""
    target, drafter, opening = target_loop(engines), lookahead(engines), opened()
    target.receive(LINK, opening)
    plain = run(target).tokens[1]
    wrong = replace(opening, digest=digests.of(opening.tokens) ^ 1)
    target.receive(LINK, wrong)
    drafter.receive(LINK, wrong)
    outcome, text = run(target, drafter), list(opening.tokens)
    assert outcome.tokens[1] == plain
    for message in outcome.verifications:
        text += message.tokens
        assert message.digest != digests.of(text)


@pytest.mark.parametrize(("nodes", "depth", "total"), [(400, 4, 3 + 9 + 27 + 81), (20, 3, 20)])
def test_lead_and_size_of_a_draft_tree_are_bounded(engines, nodes, depth, total):
    drafter = lookahead(
        engines, limits=LookaheadLimits(draft=DraftLimits(lead=4, nodes=nodes, min_weight=0.0, bytes_a_token=1e6))
    )
    drafter.receive(LINK, opened())
    seen = SpeculationTrie(opened().tokens, vocabulary=10**6, odds=lambda node: node.claim)
    while (sent := drafter.step()) is not None:
        for _, message in sent:
            assert isinstance(message, Proposal)
            assert seen.insert(message) is InsertResult.PLACED
    assert seen.lead == depth
    assert len(seen) == total
    drafter.receive(LINK, Close(SessionId(1), 1))


def test_a_stop_token_ends_a_session(engines):
    target = target_loop(engines)
    target.receive(LINK, opened(1))
    first = run(target).tokens[1]
    stopping = replace(opened(2), limits=Limits(opened().limits.end, frozenset({first[5]})))
    target.receive(LINK, stopping)
    outcome = run(target)
    at = first.index(first[5]) + 1
    assert outcome.tokens[2] == first[:at]
    assert outcome.verifications[-1].finish is FinishReason.STOP


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda o: replace(o, tokens=(*o.tokens, 10**6)), "token 1000000 is outside the vocabulary of"),
        (lambda o: replace(o, limits=Limits(10**6)), "1000000 tokens exceed the context of"),
    ],
)
def test_what_can_never_be_served_is_refused_by_name(engines, change, what):
    target = target_loop(engines)
    ((_, refused),) = target.receive(LINK, change(opened()))
    assert isinstance(refused, Refused)
    assert refused.code is RefusalCode.INVALID
    assert what in refused.message
    assert target.step() is None


def test_more_than_the_queue_holds_is_refused_as_overload(engines):
    target = target_loop(engines, TargetLimits(running=1, waiting=2))
    for number in (1, 2, 3):
        assert target.receive(LINK, opened(number, new=3)) == []
    ((_, refused),) = target.receive(LINK, opened(4))
    assert refused.code is RefusalCode.OVERLOADED
    assert refused.message == "all places are taken: 1 running and 2 waiting sessions"
    assert target.receive(LINK, opened(3, epoch=2, new=3)) == []  # it has a place
    assert run(target).finished == {1, 2, 3}


def test_a_fault_in_one_session_spares_the_others(engines, monkeypatch):
    target = target_loop(engines)
    alone = target_loop(engines)
    alone.receive(LINK, opened(1))
    expected = run(alone).tokens[1]
    poison = opened(2, prompt=1)
    engine_run = engines["target"].run

    def faulty(chunks):
        if any(chunk.sequence.length == 0 and tuple(chunk.tokens) == poison.tokens for chunk in chunks):
            raise RuntimeError("planted")
        return engine_run(chunks)

    monkeypatch.setattr(engines["target"], "run", faulty)
    target.receive(LINK, opened(1))
    target.receive(LINK, poison)
    outcome = run(target)
    assert outcome.tokens == {1: expected}
    assert [(refused.session, refused.code) for refused in outcome.refusals] == [(2, RefusalCode.INTERNAL)]
    assert "planted" in outcome.refusals[0].message


def test_a_draft_that_cannot_be_computed_ends_no_session(engines, monkeypatch):
    alone = target_loop(engines)
    for number in (1, 2):
        alone.receive(LINK, opened(number, prompt=number))
    expected = run(alone).tokens
    failed: list[int] = []
    engine_run = engines["target"].run

    def faulty(chunks):
        if any(len(chunk.rows) > 1 for chunk in chunks):
            failed.append(len(chunks))
            raise RuntimeError("planted")
        return engine_run(chunks)

    monkeypatch.setattr(engines["target"], "run", faulty)
    target = target_loop(engines)
    for number in (1, 2):
        target.receive(
            LINK, opened(number, prompt=number, request_options=RequestOptions(prediction=tuple(expected[number])))
        )
    outcome = run(target)
    assert set(failed) == {1, 2}
    assert (outcome.tokens, outcome.refusals) == (expected, [])
    assert {message.offered for message in outcome.verifications} == {0}, "what was not verified counts as offered"


def test_a_newer_epoch_replaces_a_session_and_an_older_one_does_nothing(engines):
    target = target_loop(engines)
    target.receive(LINK, opened(1, epoch=3))
    target.step()
    assert target.receive(LINK, opened(1, epoch=2)) == []
    assert target.receive(LINK, Close(SessionId(1), 2)) == []
    target.receive(LINK, opened(1, epoch=5, new=4))
    outcome = run(target)
    assert {message.epoch for message in outcome.verifications} == {5}
    assert len(outcome.tokens[1]) == 4


def test_sessions_of_different_routers_do_not_meet(engines):
    target = target_loop(engines)
    target.receive("one", opened(1, new=3))
    target.receive("two", opened(1, new=5, prompt=1))
    target.forget("one")
    messages = []
    while (sent := target.step()) is not None:
        messages += sent
    assert {link for link, _ in messages} == {"two"}
    assert sum(len(message.tokens) for _, message in messages) == 5


def test_a_long_prompt_does_not_stop_sessions_that_decode(engines):
    target = target_loop(engines, TargetLimits(budget=Budget(tokens=4)))
    target.receive(LINK, opened(1, new=30))
    while not target.step():  # until its prompt is through
        pass
    target.receive(LINK, opened(2, prompt=1))
    for _ in range(4):
        sent = target.step()
        assert [message.session for _, message in sent or []] == [1]
    run(target)


def test_a_drafter_asks_for_a_new_opening_when_it_lost_the_thread(engines):
    drafter = lookahead(engines)
    drafter.receive(LINK, opened())
    gap = Verification(SessionId(1), 1, 10_000, (1,), 0)
    ((_, refused),) = drafter.receive(LINK, gap)
    assert refused.code is RefusalCode.UNKNOWN_SESSION
    ((_, refused),) = drafter.receive(LINK, gap)
    assert refused.code is RefusalCode.UNKNOWN_SESSION
