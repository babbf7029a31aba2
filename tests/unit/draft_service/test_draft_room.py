"""What a draft worker keeps room for, and what becomes of it where there is none or guesses fail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from draft_service.sequence import Text
from draft_service.staged_drafting import Assistant
from engine.model import Model
from engine.step import Engine
from speculation.messages import RefusalCode, Refused, Token
from tests.unit.draft_service.test_draft_faults import (
    CONTEXT,
    ROUTER,
    close,
    drafter,
    drafts,
    model,
    opened,
    settle,
    verified,
)
from tests.unit.engine.engine_models import random_tokens

__all__ = ["model"]  # a fixture


def test_a_translated_text_that_can_never_fit_is_refused_for_good(model: Model) -> None:
    class Longer(Text):
        def __init__(self, tokens: Sequence[Token]) -> None:
            super().__init__([5] * 3 * len(tokens))

    worker = drafter(model)
    worker._reader.text = Longer
    codes = {300: None, 342: RefusalCode.INVALID}
    for number, (length, code) in enumerate(codes.items(), 1):
        answers = worker.receive(ROUTER, opened(number, [5] * length))
        assert [message.code for _, message in answers if isinstance(message, Refused)] == [code] * (code is not None)
    close(worker)


def test_a_text_that_outgrows_the_draft_model_makes_room_for_others(model: Model) -> None:
    worker, text = drafter(model), tuple(random_tokens(CONTEXT - 4, seed=1))
    cache = worker._engine.cache
    worker.receive(ROUTER, opened(1, text))
    settle(worker)
    assert cache.free_tokens < cache.capacity
    worker.receive(ROUTER, verified(1, text, *range(40, 46)))
    worker.validate()
    assert cache.free_tokens == cache.capacity
    assert worker.step() is None
    demand = worker.demand()
    assert 0 < demand.asked <= 5, "no more than there was room for"
    worker.receive(ROUTER, verified(1, (*text, *range(40, 46)), 46))
    assert worker.demand() == demand, "nobody can draft for this text: more drafters would not help"
    close(worker)


def test_an_assistant_keeps_no_room_for_texts_that_it_cannot_guess_on(model: Model) -> None:
    small = Engine(model, model.new_cache(1024), invariant=False)
    assistant = Assistant(small)
    short = replace(model, context=24)
    worker = drafter(model, guessers=[assistant])
    worker.receive(ROUTER, opened(1, random_tokens(20, seed=1)))
    small.model = short
    settle(worker)
    assert list(assistant._read.values()) == [None]
    assert small.cache.free_tokens == small.cache.capacity
    close(worker)


def test_a_step_whose_guesses_fail_goes_on_without_them(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    small = Engine(model, model.new_cache(1024), invariant=False)
    texts = {number: random_tokens(20, seed=number) for number in (1, 2)}
    plain, guessed = drafter(model), drafter(model, guessers=[Assistant(small)])

    def fail(_: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(small, "run", fail)
    for worker in (plain, guessed):
        for number, text in texts.items():
            worker.receive(ROUTER, opened(number, text))
        settle(worker)
    for number in texts:
        assert drafts(guessed, number) == drafts(plain, number)
    for worker in (plain, guessed):
        close(worker)
