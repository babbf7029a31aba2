"""No text and no session ends a draft worker: each fault costs one session its drafts, and the others none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from draft_service import lookahead
from draft_service.in_turn import InTurn
from draft_service.lookahead import Lookahead, LookaheadLimits
from draft_service.sequence import DraftSequence
from draft_service.staged_drafting import Ask, Guesser, Lookup, StagedDrafting
from engine.interface import Chunk
from engine.model import Model
from engine.parallel.group import RankError
from engine.step import Engine
from speculation import digest as digests
from speculation.drafting.draft_session import DraftLimits
from speculation.drafting.guesses import Forward
from speculation.messages import (
    Close,
    FinishReason,
    Limits,
    Open,
    RefusalCode,
    Refused,
    Rule,
    Sampling,
    SessionId,
    Source,
    Speculation,
    Token,
    Verification,
    Welcome,
)
from speculation.verifying.payoff import DraftTurn
from tests.thorough import mostly_thorough
from tests.unit.engine.engine_models import TINY, load_tiny, random_tokens
from transport.worker import Outgoing

ROUTER = "router"
GREEDY = Sampling(temperature=0.0)
VOCABULARY: int = TINY["vocab_size"]
CONTEXT = 64
"""Of the draft model. That of the target is longer."""
LIMITS = LookaheadLimits(prefill=16, draft=DraftLimits(children=1, width=1, min_weight=0.0))
"""However unlikely, all is drafted that may be. Prompts of more than 16 tokens are read in parts."""
POISON = 255
"""A token that is never drafted here."""
REPEATING = (11, 12, 13, 14, 15, 16, 17, 18) * 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("model")
    return load_tiny("llama", folder, num_hidden_layers=1, head_dim=32, max_position_embeddings=CONTEXT)


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The same, but for one token's embedding, which is no number."""
    folder = tmp_path_factory.mktemp("broken")
    model = load_tiny("llama", folder, num_hidden_layers=1, head_dim=32, max_position_embeddings=CONTEXT)
    model.module.get_input_embeddings().weight.data[POISON] = float("nan")  # type: ignore[operator]
    return model


def drafter(model: Model, *, guessers: Sequence[Guesser] = ()) -> Lookahead:
    engine = Engine(model, model.new_cache(1024), invariant=False)
    second = StagedDrafting(VOCABULARY, guessers)
    return Lookahead(engine, Welcome("draft", "tiny", VOCABULARY, CONTEXT), LIMITS, staged=second)


def opened(
    number: int, tokens: Sequence[Token], sampling: Sampling = GREEDY, speculation: Speculation = Speculation()
) -> Open:
    return Open(SessionId(number), 1, tuple(tokens), sampling, Limits(200), speculation)


def settle(worker: Lookahead) -> Outgoing:
    """Draft until there is nothing left to draft; returns what was sent."""
    sent: Outgoing = []
    while (answers := worker.step()) is not None:
        sent += answers
    return sent


def drafts(worker: Lookahead, number: int) -> set[tuple[Token, ...]]:
    """What is drafted behind the text of a session."""
    trie = worker._sequences[ROUTER, SessionId(number)].session.trie
    return {tuple(above.token for above in node.path_from(trie.root)) for node in trie}


def close(worker: Lookahead) -> None:
    worker.forget(ROUTER)
    worker._engine.cache.validate()
    assert worker._engine.cache.free_tokens == worker._engine.cache.capacity


@pytest.mark.parametrize("length", range(CONTEXT - 12, CONTEXT + 2))
def test_guesses_end_with_the_draft_models_context(model: Model, length: int) -> None:
    """A text that repeats itself is guessed far ahead. What is drafted is what is drafted without guesses."""
    plain, guessing = drafter(model), drafter(model, guessers=[Lookup()])
    for worker in (plain, guessing):
        assert worker.receive(ROUTER, opened(1, REPEATING[:length])) == []
        settle(worker)
    assert drafts(guessing, 1) == drafts(plain, 1)
    assert len(drafts(plain, 1)) == max(CONTEXT + 1 - length, 0)
    assert bool(guessing.counters.guessed) is (length < CONTEXT)
    close(plain)
    close(guessing)


def verified(
    number: int, text: tuple[Token, ...], *tokens: Token, epoch: int = 1, finish: FinishReason | None = None
) -> Verification:
    """``tokens`` were committed behind ``text``."""
    digest = digests.of((*text, *tokens))
    return Verification(SessionId(number), epoch, len(text), tokens, digest, finish=finish)


def test_a_token_that_only_the_target_has_ends_its_session_alone(model: Model) -> None:
    worker, alone, text = drafter(model), drafter(model), (5, 6, 7)
    assert worker.receive(ROUTER, opened(1, text)) == []
    for one in (worker, alone):
        assert one.receive(ROUTER, opened(2, (8, 9))) == []
        settle(one)
    assert worker.receive(ROUTER, verified(1, text, 3, VOCABULARY, epoch=0)) == [], "of an epoch that is over"
    ((link, refused),) = worker.receive(ROUTER, verified(1, text, 3, VOCABULARY))
    why = f"token {VOCABULARY} is outside the vocabulary of {VOCABULARY}"
    assert (link, refused) == (ROUTER, Refused(SessionId(1), 1, RefusalCode.INVALID, why))
    assert worker.load().sessions == 1
    settle(worker)
    assert drafts(worker, 2) == drafts(alone, 2) != set()
    close(worker)


def test_a_token_that_only_the_target_has_may_be_the_last(model: Model) -> None:
    worker, text = drafter(model), (5, 6, 7)
    assert worker.receive(ROUTER, opened(1, text)) == []
    settle(worker)
    assert worker.receive(ROUTER, verified(1, text, VOCABULARY, finish=FinishReason.STOP)) == []
    close(worker)


def plant(
    monkeypatch: pytest.MonkeyPatch,
    worker: Lookahead,
    error: Exception,
    fails: Callable[[Chunk], bool],
    where: str = "computed",
) -> None:
    """Have every step with a chunk that ``fails`` do so, ``where`` it is computed or drawn from."""
    compute, draw = worker._engine.run, lookahead.candidates_of
    poisoned = False

    def run(chunks: Sequence[Chunk]) -> torch.Tensor:
        nonlocal poisoned
        poisoned = any(map(fails, chunks))
        if poisoned and where == "computed":
            raise error
        return compute(chunks)

    def candidates(*args: Any) -> Any:
        if poisoned:
            raise error
        return draw(*args)

    monkeypatch.setattr(worker._engine, "run", run)
    monkeypatch.setattr(lookahead, "candidates_of", candidates)


@pytest.mark.parametrize("where", ["computed", "drawn from"])
def test_a_fault_in_one_session_spares_the_others(model: Model, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    worker, alone = drafter(model), drafter(model)
    texts = {1: (5, 6, 7), 2: (8, POISON), 3: (10, 20, 30, 40)}
    for number in (1, 3):
        assert alone.receive(ROUTER, opened(number, texts[number])) == []
    settle(alone)
    plant(monkeypatch, worker, RuntimeError("planted"), lambda chunk: POISON in chunk.tokens, where)
    assert worker.receive(ROUTER, opened(1, texts[1])) == []
    worker.step()  # there are drafts of it already
    for number in (2, 3):
        assert worker.receive(ROUTER, opened(number, texts[number])) == []
    refused = [message for _, message in settle(worker) if isinstance(message, Refused)]
    assert refused == [Refused(SessionId(2), 1, RefusalCode.INTERNAL, "RuntimeError: planted")]
    assert [drafts(worker, number) for number in (1, 3)] == [drafts(alone, number) for number in (1, 3)]
    close(worker)


def test_a_fault_in_a_guess_costs_no_session_its_drafts(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, plain = drafter(model, guessers=[Lookup()]), drafter(model)
    failed: list[int] = []

    def has_guesses(chunk: Chunk) -> bool:
        guesses = len(chunk.rows) - 1  # these sessions draft one token behind the other
        failed.extend([guesses] * bool(guesses))
        return guesses > 0

    plant(monkeypatch, worker, RuntimeError("planted"), has_guesses)
    for one in (worker, plain):
        assert one.receive(ROUTER, opened(1, REPEATING[:20])) == []
        assert not any(isinstance(message, Refused) for _, message in settle(one))
    assert failed
    assert drafts(worker, 1) == drafts(plain, 1)
    close(worker)


FATAL_ERRORS = [
    RankError("rank 1 of 2: was killed"),
    torch.AcceleratorError("CUDA error: device-side assert triggered"),
]


@pytest.mark.parametrize("error", FATAL_ERRORS, ids=["rank", "device"])
def test_what_no_step_survives_ends_the_worker(model: Model, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    worker = drafter(model)
    plant(monkeypatch, worker, error, lambda chunk: POISON in chunk.tokens)
    assert worker.receive(ROUTER, opened(1, (5, POISON))) == []
    with pytest.raises(type(error)):
        worker.step()


KINDS = {
    "greedy": (GREEDY, Speculation()),
    "coupled": (Sampling(temperature=0.9, seed=3), Speculation()),
    "rejection": (Sampling(temperature=0.9, seed=3), Speculation(rule=Rule.REJECTION)),
}


@pytest.mark.parametrize("kind", mostly_thorough(KINDS, quick=["coupled"]))
@pytest.mark.parametrize(
    "poisoned",
    [(10, POISON), (10, POISON, *range(20, 60)), (*range(20, 60), POISON), (POISON,) * 45],
    ids=["short", "first part", "last part", "all"],
)
def test_numbers_that_are_none_silence_nobody_else(broken: Model, poisoned: tuple[Token, ...], kind: str) -> None:
    """Neither sessions beside them nor those that get their slots; and they are given back, not asked about again."""
    texts = {number: random_tokens(10 * number, seed=number) for number in range(1, 6)}
    alone: dict[int, set[tuple[Token, ...]]] = {}
    for number, text in texts.items():
        worker = drafter(broken)
        worker.receive(ROUTER, opened(number, text, *KINDS[kind]))
        settle(worker)
        alone[number] = drafts(worker, number)
        assert alone[number]
        close(worker)
    worker = drafter(broken)
    for _ in range(2):  # the second time in slots that the first left
        worker.receive(ROUTER, opened(1, texts[1], *KINDS[kind]))
        worker.step()
        for number in (2, 3):
            worker.receive(ROUTER, opened(number, texts[number], *KINDS[kind]))
        worker.receive(ROUTER, opened(9, poisoned, *KINDS[kind]))
        for number in (4, 5):
            worker.receive(ROUTER, opened(number, texts[number], *KINDS[kind]))
        (refused,) = (message for _, message in settle(worker) if isinstance(message, Refused))
        assert (refused.session, refused.code) == (9, RefusalCode.INTERNAL)
        assert f"not finite (NaN or infinite) after {len(poisoned)} tokens" in refused.message
        assert {number: drafts(worker, number) for number in texts} == alone
        close(worker)


class Poisonous:
    """Guesses what breaks the model."""

    def guess(self, asked: Sequence[Ask], _forward: Forward) -> None:
        for ask in asked:
            ask.guesses.add(POISON, 0.99, Source.LOOKUP)

    def drop(self, sequence: DraftSequence) -> None:
        pass


def test_a_guess_that_breaks_the_model_costs_no_session_its_drafts(broken: Model) -> None:
    worker, plain = drafter(broken, guessers=[Poisonous()]), drafter(broken)
    for one in (worker, plain):
        for number in (1, 2):
            one.receive(ROUTER, opened(number, random_tokens(20, seed=number)))
        assert not any(isinstance(message, Refused) for _, message in settle(one))
    for number in (1, 2):
        assert drafts(worker, number) == drafts(plain, number) != set()
    close(worker)


def test_a_worker_that_is_told_to_rest_drafts_nothing_for_a_new_session_until_it_hears_more(model):
    worker = drafter(model)
    prompt = random_tokens(1, 8)
    worker.receive(ROUTER, opened(1, prompt))
    assert settle(worker)
    for lead in (0, 5):
        told = Verification(SessionId(1), 1, len(prompt), (9,), digests.of((*prompt, 9)), 0, 0, lead=lead)
        worker.receive(ROUTER, told)
        other = random_tokens(2 + lead, 8)
        worker.receive(ROUTER, opened(2 + lead, other))
        assert bool([sent for _, sent in settle(worker) if sent.session == 2 + lead]) is bool(lead)
        prompt = (*prompt, 9)


def test_a_text_without_room_is_refused_before_a_session_is_made_of_it(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For good where it can never have room."""
    worker = drafter(model)
    held = worker._engine.cache.sequence()
    held.append([-1] * 600)
    monkeypatch.setattr(lookahead, "DraftSession", None)
    codes = {500: RefusalCode.OVERLOADED, 1024: RefusalCode.OVERLOADED, 1025: RefusalCode.INVALID}
    for length, code in codes.items():
        ((_, refused),) = worker.receive(ROUTER, opened(1, [5] * length))
        assert isinstance(refused, Refused) and refused.code is code
    held.free()
    monkeypatch.undo()
    assert worker.receive(ROUTER, opened(1, [5] * 1024)) == []
    close(worker)


def test_only_who_closes_its_newest_opening_ends_a_session(model: Model) -> None:
    worker = drafter(model)
    opening = opened(1, (5, 6))
    for epoch, close_epoch, sessions in ((3, 2, 1), (3, 3, 0), (5, 6, 0)):
        worker.receive(ROUTER, replace(opening, epoch=epoch))
        worker.receive(ROUTER, Close(SessionId(1), close_epoch))
        assert worker.load().sessions == sessions
    close(worker)


def test_a_step_reads_no_more_prompts_than_it_has_room_for_and_none_starves(model: Model) -> None:
    worker = drafter(model)
    worker._limits = replace(LIMITS, step_prefill=24)
    for number in range(1, 9):
        worker.receive(ROUTER, opened(number, random_tokens(40, seed=number)))
    sizes = []
    while not all(drafts(worker, number) for number in range(1, 9)):
        sizes.append(sum(len(entry.tokens) for entry in worker._plan() if len(entry.tokens) > 1))
        assert worker.step() is not None
    assert max(sizes) <= 24
    close(worker)


def test_no_session_waits_behind_long_prompts(model: Model) -> None:
    """Neither a new one nor one whose target went another way."""
    worker, text = drafter(model), tuple(random_tokens(12, seed=6))
    worker._limits = replace(LIMITS, step_prefill=2 * LIMITS.prefill)
    worker.receive(ROUTER, opened(6, text))
    settle(worker)
    for number in range(1, 5):
        worker.receive(ROUTER, opened(number, random_tokens(CONTEXT - 4, seed=number)))
    worker.receive(ROUTER, opened(5, random_tokens(12, seed=5)))
    other = next(token for token in range(20) if (token,) not in drafts(worker, 6))
    worker.receive(ROUTER, verified(6, text, other, other))
    for _ in range(2):
        worker.step()
    assert drafts(worker, 5)
    assert drafts(worker, 6)
    assert not any(drafts(worker, number) for number in range(1, 5))
    settle(worker)
    assert all(drafts(worker, number) for number in range(1, 5))
    close(worker)


def test_in_turn_no_session_waits_behind_long_prompts(model: Model) -> None:
    cache = model.new_cache(1024)
    limits = replace(LIMITS, prefill_from=8)
    worker = InTurn(Engine(model, cache, invariant=False), Welcome("draft", "tiny", VOCABULARY, CONTEXT), limits)
    for number, length in enumerate([CONTEXT - 4] * 4 + [12], start=1):
        worker.receive(ROUTER, opened(number, random_tokens(length, seed=number)))
    keys = [(ROUTER, SessionId(number)) for number in range(1, 6)]
    for turn in range(20):
        worker.draft(keys, dict.fromkeys(keys, 0.5), DraftTurn(5, 1.0, 0.0), probe=True)
        assert drafts(worker, 5) or turn < 1
    assert all(drafts(worker, number) for number in range(1, 6))
    close(worker)
