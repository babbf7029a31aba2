"""Whatever is guessed, a drafter drafts the same tree, and its cache holds nothing but what it has expanded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_service.lookahead import Lookahead, LookaheadLimits
from draft_service.sequence import DraftSequence
from draft_service.staged_drafting import Assistant, Lookup, StagedDrafting
from engine.build import build, welcome
from engine.cache.kv_cache import KVCache
from engine.settings import EngineSettings
from engine.step import Engine
from speculation import digest as digests
from speculation.drafting.draft_session import DraftLimits
from speculation.drafting.guesses import MAX_SESSIONS, Forward
from speculation.messages import (
    Limits,
    Open,
    Refused,
    Rule,
    Sampling,
    Schedule,
    SessionId,
    Source,
    Speculation,
    Token,
    Verification,
)
from speculation.verifying.budget import StepCost
from tests.bundled import MODELS, held_out_prompts

ROUTER = "router"
VOCABULARY = 4000
DRAFT = EngineSettings(str(MODELS / "draft"), dtype="float64", cache_tokens=2048)
WIDE = DraftLimits(lead=10, nodes=4000, children=2, min_weight=0.05)
REPEATING = held_out_prompts()[0][:12] * 2
SAMPLINGS = [
    Sampling(temperature=0.0),
    Sampling(temperature=0.8, seed=5),
    Sampling(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.2),
]
CHAINS = [Speculation(), Speculation(max_depth=5, schedule=Schedule.SEQUENTIAL)]
HARDLY = Sampling(temperature=0.02, seed=9)
"""Under which the rejection rule is not that of greedy decoding, and an untrained eye sees no difference."""


@pytest.fixture(scope="module")
def model():
    """One draft model for all; a worker of its own each time."""
    return build(DRAFT, invariant=False).model


def engine_of(model, tokens: int = 2048) -> Engine:
    cache = KVCache(model.layers, tokens, dtype=model.dtype, device=model.device)
    return Engine(model, cache, invariant=False)


@pytest.fixture(autouse=True)
def free_rows(monkeypatch):
    """A forward takes the same time whatever is in it, so that all guesses join it."""
    monkeypatch.setattr(StepCost, "__call__", lambda self, tokens: 1.0)


@dataclass
class Fickle:
    """Guesses at random: now and then what an earlier run drew, at any confidence."""

    rng: Random
    likely: list[Token]

    def guess(self, asked, _forward):
        for ask in asked:
            for token in self.rng.sample(self.likely, self.rng.randint(0, min(6, len(self.likely)))):
                ask.guesses.add(token, self.rng.random(), Source.LOOKUP)

    def drop(self, sequence):
        pass


@dataclass
class Eager:
    """An assistant that is told that guesses always pay."""

    assistant: Assistant

    def guess(self, asked, forward):
        self.assistant.guess(asked, Paying(forward.tokens, forward.gain, forward.cost))

    def drop(self, sequence):
        self.assistant.drop(sequence)


class Paying(Forward):
    def pays(self, *_: float) -> bool:
        return True


class Drafter:
    """A draft worker without a wire, with sessions of all kinds."""

    def __init__(self, engine: Engine, second: StagedDrafting, opened: list[Open], limits: DraftLimits = WIDE) -> None:
        introduction = welcome(DRAFT, engine.model, "draft")
        self.engine, self.texts = engine, [list(one.tokens) for one in opened]
        self.worker = Lookahead(engine, introduction, LookaheadLimits(draft=limits), staged=second)
        for one in opened:
            assert self.worker.receive(ROUTER, one) == []

    @property
    def sequences(self) -> list[DraftSequence]:
        return list(self.worker._sequences.values())

    def settle(self) -> None:
        """Draft until there is nothing left to draft."""
        while any(sequence.session.frontier() for sequence in self.sequences):
            self.worker.step()
            self.engine.cache.validate()
            for sequence in self.sequences:
                assert sequence.cached.pending == len(sequence.pending), "a row of a refused guess is left"

    def trees(self) -> list[dict[tuple[Token, ...], float]]:
        return [
            {
                tuple(above.token for above in node.path_from(sequence.session.trie.root)): node.confidence
                for node in sequence.session.trie
            }
            for sequence in self.sequences
        ]

    def commit(self, number: int, tokens: list[Token]) -> None:
        text = self.texts[number]
        position = len(text)
        text += tokens
        digest = digests.of(tuple(text))
        self.worker.receive(ROUTER, Verification(SessionId(number), 1, position, tuple(tokens), digest, offered=1))

    def close(self) -> None:
        self.worker.forget(ROUTER)
        self.engine.cache.validate()
        assert self.engine.cache.free_tokens == self.engine.cache.capacity


def opened(number: int, sampling: Sampling, speculation: Speculation = Speculation(), more: int = 80) -> Open:
    end = len(REPEATING) + more
    return Open(SessionId(number), 1, REPEATING, sampling, Limits(end, stop_tokens=frozenset({0})), speculation)


def continuation(rng: Random, tree: dict[tuple[Token, ...], float]) -> list[Token]:
    """What a target might commit: part of a drafted path, perhaps with another token behind it."""
    path = list(rng.choice(sorted(tree)) if tree else ())
    path = path[: rng.randint(0, len(path))]
    return path + ([] if path and rng.random() < 0.5 else [rng.randrange(1, VOCABULARY)])


def alike(one: list[dict[tuple[Token, ...], float]], other: list[dict[tuple[Token, ...], float]]) -> bool:
    """The same drafts; their confidence is the same but for rounding."""
    return [tree.keys() for tree in one] == [tree.keys() for tree in other] and all(
        other[i][path] == pytest.approx(sure, rel=1e-6) for i, tree in enumerate(one) for path, sure in tree.items()
    )


@settings(max_examples=6)
@given(st.integers(0, 2**32 - 1), st.sampled_from(CHAINS))
def test_the_same_tree_is_drafted_whatever_is_guessed(model, seed, speculation):
    rng = Random(seed)
    sessions = [opened(number, sampling, speculation) for number, sampling in enumerate(SAMPLINGS)]
    alone = Drafter(engine_of(model), StagedDrafting(VOCABULARY), sessions)
    small = engine_of(model)
    likely = list(REPEATING)
    levels = [StagedDrafting(VOCABULARY, [Lookup()]), StagedDrafting(VOCABULARY, [Fickle(Random(seed), likely)])]
    levels.append(StagedDrafting(VOCABULARY, [Lookup(), Eager(Assistant(small))]))
    guessing = [Drafter(engine_of(model), second, sessions) for second in levels]
    for _ in range(4):
        for drafter in (alone, *guessing):
            drafter.settle()
            assert alike(drafter.trees(), alone.trees()), f"seed {seed}"
        likely += [token for tree in alone.trees() for path in tree for token in path][:20]
        small.cache.validate()
        for number, tree in enumerate(alone.trees()):
            tokens = continuation(rng, tree)
            for drafter in (alone, *guessing):
                drafter.commit(number, tokens)
    for drafter in (alone, *guessing):
        drafter.close()
    assert small.cache.free_tokens == small.cache.capacity, "the assistant keeps what was closed"


@pytest.mark.parametrize("speculation", CHAINS, ids=["trie", "sequential"])
def test_guesses_that_are_right_save_forwards(model, speculation):
    """The draft model as its own assistant draws what it draws itself, with noise, penalties and all."""
    sessions = [opened(number, sampling, speculation) for number, sampling in enumerate(SAMPLINGS)]
    narrow = replace(WIDE, children=1, min_weight=0.0)
    alone = Drafter(engine_of(model), StagedDrafting(VOCABULARY), sessions, narrow)
    twin = Drafter(engine_of(model), StagedDrafting(VOCABULARY, [Eager(Assistant(engine_of(model)))]), sessions, narrow)
    for drafter in (alone, twin):
        drafter.settle()
    counters = twin.worker.counters
    assert counters.followed == counters.guessed > 0
    assert 2 * counters.steps < alone.worker.counters.steps
    assert counters.proposed == alone.worker.counters.proposed
    assert alike(twin.trees(), alone.trees())


def test_a_drafter_that_draws_from_q_is_not_guessed_for(model):
    sessions = [opened(0, HARDLY, Speculation(rule=Rule.REJECTION)), opened(1, HARDLY)]
    drafter = Drafter(engine_of(model), StagedDrafting(VOCABULARY, [Eager(Assistant(engine_of(model)))]), sessions[:1])
    drafter.settle()
    assert drafter.worker.counters.guessed == 0
    drafter.close()
    drafter = Drafter(engine_of(model), StagedDrafting(VOCABULARY, [Eager(Assistant(engine_of(model)))]), sessions[1:])
    drafter.settle()
    assert drafter.worker.counters.guessed > 0


def test_guesses_are_sought_for_those_sessions_that_gain_most(model):
    asked: list[list[tuple[float, int]]] = []

    class Noted(Fickle):
        def guess(self, now, forward):
            asked.append([(ask.place.weight, ask.sequence.session.opened.session) for ask in now])

    sessions = [opened(number, SAMPLINGS[0]) for number in range(MAX_SESSIONS + 2)]
    drafter = Drafter(engine_of(model), StagedDrafting(VOCABULARY, [Noted(Random(0), [])]), sessions)
    drafter.worker.step()
    drafter.commit(MAX_SESSIONS + 1, [7])  # back to its root
    drafter.worker.step()
    assert [len(now) for now in asked] == [MAX_SESSIONS] * 2
    assert asked[1][0] == (1.0, MAX_SESSIONS + 1)
    assert sorted(asked[1], key=lambda pair: -pair[0]) == asked[1]
    drafter.close()


def test_guesses_cost_no_session_its_place_in_a_full_cache(model):
    """Room for the text and the drafts of one level, not for guesses."""
    tight = engine_of(model, tokens=32)
    assert len(REPEATING) == 24
    drafter = Drafter(
        tight, StagedDrafting(VOCABULARY, [Fickle(Random(1), list(REPEATING))]), [opened(0, SAMPLINGS[0])]
    )
    for _ in range(3):
        assert not any(isinstance(message, Refused) for _, message in drafter.worker.step() or [])
        tight.cache.validate()
    assert len(drafter.sequences) == 1
    drafter.close()


def test_an_assistant_without_room_for_a_session_lets_it_be(model):
    small = engine_of(model, tokens=48)
    sessions = [opened(number, sampling) for number, sampling in enumerate(SAMPLINGS)]
    drafter = Drafter(engine_of(model), StagedDrafting(VOCABULARY, [Eager(Assistant(small))]), sessions)
    alone = Drafter(engine_of(model), StagedDrafting(VOCABULARY), sessions)
    drafter.settle()
    alone.settle()
    assert alike(drafter.trees(), alone.trees())
    assert drafter.worker.counters.guessed > 0
    drafter.close()
    small.cache.validate()
    assert small.cache.free_tokens == small.cache.capacity
