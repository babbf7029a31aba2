"""Several levels of an EAGLE-3 head's drafts in one launch are those of single steps; packed, it says what it said."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch

from draft_service.eagle import HeadLookahead
from draft_service.head_engine import HeadEngine
from draft_service.lookahead import LookaheadLimits
from draft_service.service import DraftSettings, load_head
from engine.cache.kv_store import CLEAR
from engine.cpu.library import find_library
from engine.eagle.cached import CachedHead, HeadChunk, packed
from engine.eagle.cpu_head import CpuHead
from engine.eagle.loading import save
from engine.interface import Chunk
from engine.settings import EngineSettings
from speculation.drafting.draft_session import MORE, WIDER
from speculation.messages import ANCHOR, FeatureFormat, Features, Sampling, SessionId, Token
from speculation.verifying.budget import StepCost
from tests.eagle_heads import HIDDEN, LAYERS, VOCABULARY, recorded_head, tiny_head
from tests.property.test_draft_levels import (
    GREEDY,
    LIMITS,
    ROUTER,
    WARM,
    Counted,
    Drafter,
    Fixed,
    assert_same,
    some_commit,
)
from tests.unit.engine.engine_models import random_tokens, save_model

NARROW = replace(LIMITS, width=LIMITS.width // WIDER, children=LIMITS.children - MORE, bytes_a_token=0.0)
"""Of these a head may do more. Nothing is sent, so that nothing stays when it drafts anew: a launch goes by what it
says itself of a draft that was there before."""
FAR = 1e-4
"""Angles that differ in the last place come back in every state that follows."""
SHAPE: dict[str, Any] = {"draft_vocab_size": VOCABULARY, "head_dim": 32}
KINDS: dict[str, dict[str, Any]] = {
    "one layer": {},
    "normed": {"norm_before_residual": True, "norm_output": True},
    "two layers and few tokens": {"num_hidden_layers": 2, "draft_vocab_size": VOCABULARY // 2},
}


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    if find_library() is None:
        pytest.skip("no C++ compiler, or a processor without AVX2")


@pytest.fixture(autouse=True)
def _rows_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes the same time whatever is in it, and a launch knows of all leaves that single steps know of."""
    monkeypatch.setattr(StepCost, "__call__", lambda self, tokens: 1.0)
    monkeypatch.setattr("engine.levels.levels.LEAVES", 60)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model("llama", tmp_path_factory.mktemp("tiny") / "model", num_hidden_layers=LAYERS)


class HeadDrafter(Drafter):
    """A draft worker with a head, which hears of every committed token what a target might say."""

    def __init__(self, settings: DraftSettings, levels: int) -> None:
        engine, self.told = load_head(settings)
        self.engine: Any = engine
        self.launches = Counted()
        self.worker = HeadLookahead(engine, self.told, LookaheadLimits(draft=NARROW))
        if levels > 1:
            self.launches._levels = self.worker._levels._levels
            assert self.launches._levels is not None
        self.launches._times = defaultdict(partial(Fixed, levels))
        self.worker._levels = self.worker._account._launches = self.launches
        self.texts: dict[int, list[Token]] = {}

    def open(self, number: int, prompt: Sequence[Token], sampling: Sampling, **how: Any) -> None:
        super().open(number, prompt, sampling, **how)
        self.feed(number, 1 + number, len(prompt))

    def feed(self, number: int, start: int, end: int) -> None:
        """States of the tokens from ``start`` on, as they follow from the text."""
        seeded = [torch.Generator().manual_seed(hash(tuple(self.texts[number][: at + 1]))) for at in range(start, end)]
        states_ND = torch.stack([torch.randn(HIDDEN, generator=generator) for generator in seeded])
        values, scales = packed(states_ND, FeatureFormat.BF16)
        sent = Features(SessionId(number), 1, start, self.told.head, HIDDEN, values, FeatureFormat.BF16, scales)
        assert self.worker.receive(ROUTER, sent) == []
        assert not self.worker.counters.features_refused


def test_what_could_not_be_moved_is_moved_by_the_next_step(monkeypatch):
    head = CachedHead(tiny_head(**SHAPE), 64)
    head.cache.moves.note([(CLEAR, 20)])
    moved = []
    with monkeypatch.context() as short:
        short.setattr(head.cache.store, "move", Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            head.run([], 9)
    monkeypatch.setattr(head.cache.store, "move", moved.append)
    head._move()
    assert moved == [[(CLEAR, 20)]]


def test_rows_that_cannot_be_put_in_order_are_in_no_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two waves, since one row has to wait for the other; then there is no memory for what both say."""
    engine = HeadEngine(CachedHead(tiny_head(**SHAPE), 64), cast(Any, SimpleNamespace(vocabulary=VOCABULARY)))
    sequence = engine.cache.sequence()
    engine.begin(sequence, 1)
    chunk = Chunk(sequence, [5, 6], rows=[0, 1])
    with monkeypatch.context() as short:
        short.setattr("draft_service.head_engine.upload", Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            engine.run([chunk])
    assert sequence.pending == 0
    assert len(engine.run([chunk])) == sequence.pending == 2


@pytest.mark.parametrize("kind", KINDS)
def test_recorded_it_says_what_it_says_otherwise(kind: str) -> None:
    """Rows of several sequences that begin anywhere: prompts longer than what is computed at once, chains and trees."""
    head, rng = tiny_head(**SHAPE | KINDS[kind]), Random(5)
    both = [each(copy.deepcopy(head), 2048, 512) for each in (CachedHead, recorded_head)]
    assert both[1]._steps is not None and both[1]._steps.record is not None, "nothing is recorded"
    model = SimpleNamespace(vocabulary=VOCABULARY - 6)  # the head knows padding
    engines = [HeadEngine(each, cast(Any, model)) for each in both]
    assert all(engine.levels(4, 3) is not None for engine in engines)
    sequences = [[engine.cache.sequence() for _ in range(3)] for engine in engines]
    texts = [random_tokens(count, seed=count) for count in (300, 5, 40)]
    for engine, mine in zip(engines, sequences, strict=True):
        generator = torch.Generator().manual_seed(9)
        for sequence, text, first in zip(mine, texts, (1, 4, 7), strict=True):
            engine.begin(sequence, first)
            for row in range(len(text)):
                engine.feed(sequence, row, torch.randn(HIDDEN, generator=generator))
    for _ in range(3):
        chunks: list[list[Chunk]] = [[], []]
        for number, text in enumerate(texts):
            count, cached = len(text), sequences[0][number]
            parents = list(range(-1, count - 1)) if not cached.length else [rng.randint(-1, at - 1) for at in range(9)]
            tokens = text if not cached.length else random_tokens(9, seed=rng.randrange(1000))
            wanted = sorted(rng.sample(range(len(tokens)), 4))
            for some, own in zip(chunks, sequences, strict=True):
                some.append(Chunk(own[number], tokens, parents, wanted))
        ours, theirs = (engine.run(some) for engine, some in zip(engines, chunks, strict=True))
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
        for own in sequences:
            for sequence, text in zip(own, texts, strict=True):
                if not sequence.length:
                    sequence.advance(range(len(text)))
                else:
                    sequence.rollback()


@pytest.mark.parametrize("kind", KINDS)
def test_in_one_call_it_says_what_its_modules_say(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tree behind a chain: all layers, next states and logits."""
    found = []
    for library in (find_library(), None):
        monkeypatch.setattr("engine.eagle.cpu_head.find_library", lambda library=library: library)
        head = CachedHead(tiny_head(**SHAPE | KINDS[kind]), 64)
        assert (head._packed is None) is (library is None)
        sequence, generator = head.cache.sequence(), torch.Generator().manual_seed(4)
        states_ND = torch.randn(9, HIDDEN, generator=generator)
        sequence.first, parents = 4, [ANCHOR, 0, 1, 2, 3, 3, 4, 4, 6]
        states = dict(enumerate(states_ND)) | {5: states_ND[4], 7: states_ND[6]}  # of one place there is one
        logits_NV = head.run([HeadChunk(sequence, random_tokens(9, seed=2), states, parents, range(9))], VOCABULARY)
        found.append((head.next_SD[sequence.pending_slots], logits_NV))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("how", "dtype"), [("in C++", "fp32"), ("in C++", "bf16"), ("recorded", "fp32")])
@pytest.mark.parametrize("kind", KINDS)
def test_the_trees_are_those_of_single_steps(
    target: str, kind: str, how: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy and not; features that come at once, late, or never; commits that follow the drafts, in part or not."""
    if how == "recorded":
        monkeypatch.setattr("draft_service.service.CachedHead", recorded_head)
    head = tiny_head(**SHAPE | KINDS[kind])
    save(head, tmp_path / "head", dtype=torch.float32)
    engine = EngineSettings(target, dtype=dtype, device="cpu", cache_tokens=2048, eagle=str(tmp_path / "head"))
    one, other = (HeadDrafter(DraftSettings(engine), levels) for levels in (1, 5))
    assert isinstance(one.engine._head._packed, CpuHead) is (how == "in C++")
    rng = Random(3)
    for number in range(3):
        prompt = random_tokens(rng.choice([7, 8, 30, 40]), seed=number)
        for each in (one, other):
            each.open(number, prompt, WARM if number % 2 else GREEDY)
    heard = {number: len(one.texts[number]) for number in range(3)}
    for _ in range(5):
        for _ in range(rng.choice([1, 2])):
            for _ in range(other.step()):
                one.step()
            assert_same(one, other, FAR)
        for number in range(3):
            tokens, told = some_commit(rng, one, number), rng.random() < 0.7
            for each in (one, other):
                each.commit(number, tokens)
                if told:
                    each.feed(number, heard[number], len(each.texts[number]))
            heard[number] = len(one.texts[number]) if told else heard[number]
        assert_same(one, other, FAR)
    assert other.launches.launched > 8, "nothing was launched"
    one.close()
    other.close()
