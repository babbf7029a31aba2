"""What a draft worker keeps room for, and what becomes of it where there is none or guesses fail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from draft_service.in_turn import InTurn
from draft_service.lookahead import Lookahead
from draft_service.sequence import Text
from draft_service.staged_drafting import Assistant
from engine.cache.kv_cache import CacheFull
from engine.interface import Chunk
from engine.model import Model
from engine.step import Engine
from speculation.messages import RefusalCode, Refused, SessionId, Token, Welcome
from speculation.verifying.payoff import DraftTurn
from tests.unit.draft_service.test_draft_faults import (
    CONTEXT,
    LIMITS,
    ROUTER,
    VOCABULARY,
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


@pytest.mark.parametrize("in_turn", [False, True], ids=["ahead", "in turn"])
def test_long_prompts_that_find_no_room_cost_no_session_that_drafts_its_drafter(model: Model, *, in_turn: bool) -> None:
    """Each finds room when it is opened; together they have none. What gives way has most to read yet.

    In turn, that is so even while drafts are what finds none: prompts are read before.
    """
    engine = Engine(model, model.new_cache(160), invariant=False)
    limits = replace(LIMITS, prefill_from=8, draft=replace(LIMITS.draft, lead=4))
    worker = (InTurn if in_turn else Lookahead)(engine, Welcome("draft", "tiny", VOCABULARY, CONTEXT), limits)
    texts = {number: tuple(random_tokens(4 + 3 * number, seed=number)) for number in (1, 2, 3)}
    refused: list[Refused] = []

    def step() -> None:
        keys = list(worker._sequences)
        if isinstance(worker, InTurn):
            answers = worker.draft(keys, dict.fromkeys(keys, 0.5), DraftTurn(5, 1.0, 0.0), probe=True)
        else:
            answers = worker.step() or []
        refused.extend(message for _, message in answers if isinstance(message, Refused))

    for number, text in texts.items():
        assert worker.receive(ROUTER, opened(number, text)) == []
    step()
    step()
    for number in (11, 12, 13):
        assert worker.receive(ROUTER, opened(number, random_tokens(CONTEXT - 4, seed=number))) == []
    for turn in range(14):
        for number in texts if turn % 2 == 0 else ():
            worker.receive(ROUTER, verified(number, texts[number], turn))
            texts[number] += (turn,)
        step()
    assert {message.code for message in refused} == {RefusalCode.OVERLOADED}
    assert sorted(message.session for message in refused) == [12, 13]
    assert all(drafts(worker, number) for number in (1, 2, 3, 11))
    close(worker)


def test_who_gave_way_to_another_is_not_computed_in_its_own_turn(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that fails is computed one by one; the first to be finds no room, at the cost of the one behind."""
    worker = drafter(model)
    errors, compute = [CacheFull("planted"), RuntimeError("planted")], worker._engine.run

    def run(chunks: Sequence[Chunk]) -> torch.Tensor:
        if errors:
            raise errors.pop()
        return compute(chunks)

    worker.receive(ROUTER, opened(1, (5, 6, 7)))
    worker.receive(ROUTER, opened(2, random_tokens(60, seed=2)))
    worker.step()
    worker.receive(ROUTER, verified(1, (5, 6, 7), 8, 9))
    monkeypatch.setattr(worker._engine, "run", run)
    refused = [message for _, message in settle(worker) if isinstance(message, Refused)]
    assert refused == [Refused(SessionId(2), 1, RefusalCode.OVERLOADED, "no room in the draft cache")]
    assert drafts(worker, 1)
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
