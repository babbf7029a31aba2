"""Log-probabilities from a real model through the verify loop: drafts, batches and chunks of prompts change nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from engine.cache.kv_cache import KVCache
from engine.step import Engine
from speculation import digest as digests
from speculation.messages import (
    ANCHOR,
    SUPPORT_TOTAL,
    Limits,
    Open,
    Proposal,
    RefusalCode,
    Refused,
    RequestOptions,
    Rule,
    Sampling,
    SessionId,
    Speculation,
    Support,
    Token,
    TokenLogprobs,
    Verification,
    Welcome,
)
from target_service import sequence
from target_service.scheduler import Budget
from target_service.verify_loop import TargetLimits, VerifyLoop
from tests.unit.engine.engine_models import Stock, load_tiny, save_model

VOCABULARY = 96
LINK = "router"
WELCOME = Welcome("target", "tiny", VOCABULARY, 256)
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
TOKENS = 12
CLOSE = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def stock(folder: Path) -> Stock:
    return Stock(save_model("llama", folder, vocab_size=VOCABULARY, **SMALL))


@pytest.fixture(scope="module")
def engine(stock: Stock, folder: Path) -> Engine:
    model = load_tiny("llama", folder, vocab_size=VOCABULARY, **SMALL)
    return Engine(model, KVCache(model.layers, 1024, block=model.block, dtype=model.dtype, device=model.device))


@pytest.fixture
def loop(engine: Engine):
    yield VerifyLoop(engine, WELCOME, TargetLimits(budget=Budget(tokens=48, drafts_per_session=8), adaptive=False))
    engine.cache.validate()
    assert engine.cache.free_tokens == engine.cache.capacity


def thought(stock: Stock, tokens: Sequence[Token], start: int) -> torch.Tensor:
    """The stock model's log-probabilities of what stands at ``start`` and after, ``[T, V]``."""
    return stock(tokens)[start - 1 : -1].double().log_softmax(-1)


def check(told: Sequence[TokenLogprobs], expected_TV: torch.Tensor, tokens: Sequence[Token], top_logprobs: int) -> None:
    assert len(told) == len(expected_TV) == len(tokens)
    for one, expected_V, token in zip(told, expected_TV, tokens, strict=True):
        assert one.logprob == pytest.approx(float(expected_V[token]), abs=CLOSE)
        assert len(one.tokens) == top_logprobs
        assert list(one.logprobs) == sorted(one.logprobs, reverse=True)
        assert one.logprobs == pytest.approx(expected_V.topk(top_logprobs).values.tolist(), abs=CLOSE)
        assert one.logprobs == pytest.approx(expected_V[list(one.tokens)].tolist(), abs=CLOSE)


def opening(number: int, prompt: Sequence[Token], sampling: Sampling, **kwargs: Any) -> Open:
    request_options = kwargs.pop("request_options", RequestOptions(logprobs=number % 4))
    return Open(
        SessionId(number),
        1,
        tuple(prompt),
        sampling,
        Limits(len(prompt) + TOKENS),
        request_options=request_options,
        **kwargs,
    )


def tree(opened: Open, text: Sequence[Token], hoped: Sequence[Token], rng: Random) -> Proposal:
    """The next tokens of the text hoped for, each with wrong siblings; under the rejection rule, a chain."""
    tokens: list[Token] = []
    parents: list[int] = []
    above = ANCHOR
    for token in hoped[len(text) : len(text) + rng.randint(0, 4)]:
        others = [] if opened.speculation.chains else rng.sample(range(VOCABULARY), rng.randrange(3))
        level = list(dict.fromkeys([*others, token]))
        level = [rng.randrange(VOCABULARY)] if opened.speculation.chains and rng.random() < 0.3 else level
        parents += [above] * len(level)
        tokens += level
        above = len(tokens) - 1
    whole = (*opened.tokens, *text)
    q = tuple(Support((token,), (SUPPORT_TOTAL,)) for token in tokens) if opened.speculation.chains else ()
    return Proposal(opened.session, 1, len(whole), digests.of(whole), tuple(tokens), tuple(parents), q=q)


def serve(
    loop: VerifyLoop, openings: Sequence[Open], hoped: dict[int, list[Token]], seed: int = 0
) -> dict[int, list[Verification]]:
    """Serve all at once, with drafts of the texts hoped for."""
    rng = Random(seed)
    said: dict[int, list[Verification]] = {opened.session: [] for opened in openings}
    for opened in openings:
        assert loop.receive(LINK, opened) == []
    while True:
        for opened in openings:
            text = [token for each in said[opened.session] for token in each.tokens]
            if opened.session in hoped:
                loop.receive(LINK, tree(opened, text, hoped[opened.session], rng))
        sent = loop.step()
        if sent is None:
            return said
        for _, message in sent:
            assert isinstance(message, Verification), message
            said[message.session].append(message)


def text_of(said: Sequence[Verification]) -> list[Token]:
    return [token for each in said for token in each.tokens]


def some_openings(rng: Random) -> list[Open]:
    """Shaped and filtered in every way: none of it is the model's opinion."""
    return [
        opening(number, rng.choices(range(3, VOCABULARY), k=rng.randint(2, 40)), sampling)
        for number, sampling in enumerate(
            (
                Sampling(temperature=0.0),
                Sampling(temperature=0.0, repetition_penalty=1.5, bias=((5, 9.0),)),
                Sampling(temperature=0.7, top_k=5, seed=1),
                Sampling(temperature=1.3, presence_penalty=1.0, banned=((7,), (8,)), seed=2),
                Sampling(temperature=1.0, allowed=tuple(range(20, 60)), seed=3),
            )
        )
    ]


def test_they_are_the_models_own_with_drafts_and_without(loop: VerifyLoop, stock: Stock) -> None:
    openings = some_openings(Random(1))
    silent = replace(openings[0], session=SessionId(9), request_options=RequestOptions())
    plain = serve(loop, [*openings, silent], {})
    assert all(each.logprobs == () for each in plain[9])
    hoped = {number: text_of(said) for number, said in plain.items()}
    drafted = serve(loop, [*openings, silent], hoped, seed=2)
    for opened in openings:
        for said in (plain[opened.session], drafted[opened.session]):
            text = text_of(said)
            assert text == hoped[opened.session]
            assert all(len(each.logprobs) == len(each.tokens) for each in said)
            told = [one for each in said for one in each.logprobs]
            expected_TV = thought(stock, [*opened.tokens, *text], len(opened.tokens))
            check(told, expected_TV, text, opened.request_options.logprobs or 0)
    assert sum(each.accepted for said in drafted.values() for each in said) > 20
    assert sum(each.offered - each.accepted for said in drafted.values() for each in said) > 20


def test_they_are_right_under_the_rejection_rule_and_at_a_stop_token(loop: VerifyLoop, stock: Stock) -> None:
    prompt = Random(3).choices(range(3, VOCABULARY), k=9)
    sampling = Sampling(temperature=0.25, seed=5)
    asked = RequestOptions(logprobs=2)
    speculation = Speculation(rule=Rule.REJECTION)
    plain = text_of(serve(loop, [opening(1, prompt, sampling, request_options=asked)], {})[1])
    said = serve(loop, [opening(1, prompt, sampling, request_options=asked, speculation=speculation)], {1: plain})[1]
    text = text_of(said)
    assert sum(each.accepted for each in said) > 0
    check([one for each in said for one in each.logprobs], thought(stock, [*prompt, *text], 9), text, 2)
    stopping = opening(1, prompt, sampling, request_options=asked)
    stopping = replace(stopping, limits=replace(stopping.limits, stop_tokens=frozenset({plain[6]})))
    for seed in range(8):
        said = serve(loop, [stopping], {1: plain}, seed)[1]
        text = text_of(said)
        assert text == plain[: plain.index(plain[6]) + 1], f"seed {seed}"
        check([one for each in said for one in each.logprobs], thought(stock, [*prompt, *text], 9), text, 2)


def test_prompts_are_told_of_wholly_once_and_before_anything_else(loop: VerifyLoop, stock: Stock) -> None:
    """Also where the cache holds most of them, where they are fed in parts, and where they are a single token."""
    long = Random(4).choices(range(3, VOCABULARY), k=150)
    prompts = {1: long, 2: long[:100], 3: [5], 4: [6, 7]}
    request_options = {number: RequestOptions(logprobs=1, prompt_logprobs=number - 1) for number in prompts}
    serve(loop, [opening(8, long, Sampling(temperature=0.0))], {})
    openings = [
        opening(number, prompt, Sampling(seed=number), request_options=request_options[number])
        for number, prompt in prompts.items()
    ]
    reused = loop.counters.reused
    said = serve(loop, openings, {})
    assert loop.counters.reused == reused
    for number, prompt in prompts.items():
        first, *others = said[number]
        assert first.cached == 0
        assert all(each.prompt_logprobs == () for each in others)
        check(first.prompt_logprobs, thought(stock, prompt, 1) if len(prompt) > 1 else [], prompt[1:], number - 1)
        text = text_of(said[number])
        told = [one for each in said[number] for one in each.logprobs]
        check(told, thought(stock, [*prompt, *text], len(prompt)), text, 1)
    again = replace(openings[0], tokens=(*long, *text_of(said[1])[:3]), prompt=len(long), epoch=2)
    (first, *_) = serve(loop, [again], {})[1]
    assert first.prompt_logprobs == ()
    assert first.cached > 0


def test_a_preempted_prompt_is_told_of_once(engine: Engine, stock: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows come in many chunks, some of them computed twice; a step that fails takes nothing back or twice."""
    prompt = Random(5).choices(range(3, VOCABULARY), k=60)
    loop = VerifyLoop(engine, WELCOME, TargetLimits(budget=Budget(tokens=16), adaptive=False))
    loop.receive(LINK, opening(1, prompt, Sampling(temperature=0.0), request_options=RequestOptions(prompt_logprobs=1)))
    loop.receive(LINK, opening(2, prompt[:9], Sampling(temperature=0.0)))
    said: list[Verification] = []
    run, steps = engine.run, 0

    def failing(chunks):
        if len(chunks) == 2:
            raise RuntimeError("planted")
        return run(chunks)

    monkeypatch.setattr(engine, "run", failing)
    while (sent := loop.step()) is not None:
        said += [message for _, message in sent if message.session == 1]
        steps += 1
        if steps == 3:
            sequence = loop._sequences[LINK, SessionId(1)]
            assert 0 < sequence.cached.length < len(prompt)
            sequence.preempt()
    check(said[0].prompt_logprobs, thought(stock, prompt, 1), prompt[1:], 1)


def test_more_than_fits_into_a_message_is_refused(loop: VerifyLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence, "MAX_PROMPT_LOGPROBS", 99)
    refused = loop.receive(LINK, opening(1, range(20), Sampling(), request_options=RequestOptions(prompt_logprobs=4)))
    ((_, message),) = refused
    assert isinstance(message, Refused)
    assert message.code is RefusalCode.INVALID
    assert message.message == "prompt_logprobs 4 for 20 tokens exceed the 99 log-probabilities told of one prompt"
    assert (
        loop.receive(LINK, opening(1, range(20), Sampling(), request_options=RequestOptions(prompt_logprobs=3))) == []
    )
    loop.forget(LINK)
