"""A session that breaks the model's numbers is refused, and those beside it and after it write what they write alone.

All keys and values lie in one store, and attention reads across slots that are not its own, giving them no weight. But
nothing times NaN is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import NoReturn

import pytest
import torch

from engine.cache.kv_cache import KVCache
from engine.parallel.group import RankError
from engine.step import Engine
from speculation import digest as digests
from speculation.messages import (
    ANCHOR,
    SUPPORT_TOTAL,
    Limits,
    Open,
    Proposal,
    Refused,
    RequestOptions,
    Rule,
    Sampling,
    SessionId,
    Source,
    Speculation,
    Support,
    Token,
    Verification,
    Welcome,
)
from target_service.scheduler import Budget
from target_service.verify_loop import TargetLimits, VerifyLoop
from tests.thorough import mostly_thorough
from tests.unit.engine.engine_models import TINY, load_tiny

POISON = 200
"""A token whose embedding is no number."""
CACHE_TOKENS = 512
NEW = 24
GREEDY = Sampling(temperature=0.0)
LIMITS = TargetLimits(budget=Budget(tokens=16))
"""Prompts of more than 16 tokens are computed in parts."""


@pytest.fixture(scope="module", params=["bf16", "fp32"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    model = load_tiny("llama", tmp_path_factory.mktemp("model"), dtype=request.param, head_dim=32)
    model.module.get_input_embeddings().weight.data[POISON] = float("nan")  # type: ignore[operator]
    return Engine(model, KVCache(model.layers, CACHE_TOKENS, dtype=model.dtype, device=model.device))


Hint = Callable[[int, Sequence[Token]], tuple[tuple[Token, ...], tuple[int, ...], tuple[Support, ...]]]
"""Draft tokens, their parents, and what they were drawn from."""


def prompts(count: int, seed: int) -> list[tuple[Token, ...]]:
    rng = Random(seed)
    return [tuple(rng.randrange(3, POISON) for _ in range(rng.choice((3, 15, 30, 50)))) for _ in range(count)]


def serve(
    engine: Engine,
    asked: Sequence[Sequence[Token]],
    hint: Hint | None = None,
    sampling: Sampling = GREEDY,
    speculation: Speculation = Speculation(enabled=False),
) -> tuple[dict[int, list[Token]], dict[int, str]]:
    """What is said to each prompt, and why some are refused. Every prompt of 15 tokens is to be told about.

    ``hint``: what is proposed before each step, for a prompt by its number, and what was said to it so far.
    """
    welcome = Welcome("target", "tiny", TINY["vocab_size"], TINY["max_position_embeddings"])
    loop = VerifyLoop(engine, welcome, LIMITS if hint is None else replace(LIMITS, adaptive=False))
    texts: dict[int, list[Token]] = {number: [] for number in range(len(asked))}
    told: dict[int, list[float]] = {number: [] for number in range(len(asked))}
    refused: dict[int, str] = {}
    for number, prompt in enumerate(asked):
        limits, request_options = (
            Limits(len(prompt) + NEW),
            RequestOptions(prompt_logprobs=0 if len(prompt) == 15 else None),
        )
        opened = Open(
            SessionId(number), 1, tuple(prompt), sampling, limits, speculation, request_options=request_options
        )
        assert loop.receive("router", opened) == []

    def propose() -> None:
        for number, text in texts.items():
            tokens, parents, q = hint(number, text) if hint else ((), (), ())
            known = (*asked[number], *text)
            loop.receive(
                "router",
                Proposal(SessionId(number), 1, len(known), digests.of(known), tokens, parents, q=q),
            )

    propose()
    while (sent := loop.step()) is not None:
        for _, message in sent:
            if isinstance(message, Refused):
                refused[message.session] = message.message
            elif isinstance(message, Verification):
                texts[message.session] += message.tokens
                told[message.session] += [one.logprob for one in message.prompt_logprobs]
        propose()
    for number, logprobs in told.items():
        assert len(logprobs) == (14 if len(asked[number]) == 15 and number not in refused else 0)
        assert all(math.isfinite(logprob) for logprob in logprobs)
    engine.cache.validate()
    assert engine.cache.free_tokens == engine.cache.capacity
    return texts, refused


@pytest.mark.parametrize("seed", mostly_thorough(range(2), quick=[0]))
@pytest.mark.parametrize(
    "poisoned",
    [(10, POISON), (10, POISON, *range(20, 60)), (*range(20, 60), POISON), (POISON,) * 45],
    ids=["short", "first part", "last part", "all"],
)
def test_nobody_notices(engine: Engine, poisoned: tuple[Token, ...], seed: int) -> None:
    others = prompts(5, seed)
    alone = [serve(engine, [prompt])[0][0] for prompt in others]
    where = Random(seed).randrange(6)
    for _ in range(2):  # the second time in slots that the first left
        texts, refused = serve(engine, [*others[:where], poisoned, *others[where:]])
        assert list(refused) == [where]
        assert "not finite" in refused[where]
        assert texts.pop(where) == []
        assert list(texts.values()) == alone, f"seed {seed}"
    assert [serve(engine, [prompt])[0][0] for prompt in others] == alone, f"seed {seed}"


def test_a_part_of_a_prompt_that_is_no_number_is_found_at_once(engine: Engine) -> None:
    """And so never becomes known to others that begin with the same tokens."""
    _, refused = serve(engine, [(10, POISON, *range(20, 90))])
    assert list(refused) == [0]
    sequence = engine.cache.sequence([10, POISON, *range(20, 90)])
    assert sequence.reuse() == 0
    sequence.free()


DRAFTED = Speculation(sources=frozenset({Source.DRAFT}))


@pytest.mark.parametrize("hinted", [{0}, {0, 1, 2, 3, 4, 5}], ids=["one", "all"])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0.8, seed=4, banned=((POISON,),))])
def test_no_draft_ends_what_plain_decoding_serves(engine: Engine, sampling: Sampling, hinted: set[int]) -> None:
    """Neither its own session nor those beside it, whether it hangs from the text or from drafts that are right."""
    asked = prompts(6, seed=5)
    alone = [serve(engine, [prompt], sampling=sampling)[0][0] for prompt in asked]
    for count in range(1, len(asked) + 1, 5):

        def hint(number: int, text: Sequence[Token]) -> tuple[tuple[Token, ...], tuple[int, ...], tuple[Support, ...]]:
            right = tuple(alone[number][len(text) : len(text) + 2])
            if number not in hinted:
                return right, tuple(range(ANCHOR, len(right) - 1)), ()
            return (POISON, *right, POISON), (ANCHOR, ANCHOR, *range(1, len(right) + 1)), ()

        texts, refused = serve(engine, asked[:count], hint, sampling, DRAFTED)
        assert refused == {}
        assert list(texts.values()) == alone[:count]


@pytest.mark.parametrize("poisoned", [(POISON,), (7, POISON)], ids=["first", "second"])
def test_no_draft_ends_a_session_under_the_rejection_rule(engine: Engine, poisoned: tuple[Token, ...]) -> None:
    q = Support((POISON, 7), (SUPPORT_TOTAL // 2, SUPPORT_TOTAL // 2))
    drafts = poisoned, tuple(range(ANCHOR, len(poisoned) - 1)), (q,) * len(poisoned)
    sampling = Sampling(temperature=0.8, seed=4, banned=((POISON,),))
    texts, refused = serve(
        engine, prompts(3, seed=6), lambda *_: drafts, sampling, replace(DRAFTED, rule=Rule.REJECTION)
    )
    assert refused == {}
    assert [len(text) for text in texts.values()] == [NEW] * 3


def test_a_text_that_breaks_the_model_ends_there_with_drafts_as_without(engine: Engine) -> None:
    """It says what breaks it, whatever is drafted."""
    asked, wanted = prompts(3, seed=7), replace(GREEDY, allowed=(POISON, 3))
    for hint in (None, lambda *_: ((POISON, 5), (ANCHOR, 0), ())):
        texts, refused = serve(engine, asked, hint, replace(wanted, bias=((POISON, 100.0),)), DRAFTED)
        assert list(texts.values()) == [[POISON]] * 3
        assert set(refused) == {0, 1, 2}
        assert all("not finite" in why for why in refused.values())


@pytest.mark.parametrize("error", [torch.AcceleratorError, RankError], ids=["device", "rank"])
def test_a_worker_that_can_compute_nothing_any_more_ends(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """It would refuse every request; whoever started it starts another one."""
    model = engine.model
    failing = Engine(model, KVCache(model.layers, CACHE_TOKENS, dtype=model.dtype, device=model.device))

    def fail(_: object) -> NoReturn:
        raise error("planted")

    monkeypatch.setattr(failing, "run", fail)
    with pytest.raises(error, match="planted"):
        serve(failing, prompts(2, seed=1))
