"""Several levels in one launch draft the same trees, out of the same cache, as one level after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from draft_service.drafted import Drafted
from draft_service.levels import DraftLevels, LaunchTime
from draft_service.lookahead import Lookahead, LookaheadLimits
from engine.build import EngineSettings, welcome
from engine.model import Model
from speculation import digest as digests
from speculation.budget import StepCost
from speculation.draft_session import DraftLimits
from speculation.messages import (
    Limits,
    Open,
    Sampling,
    SessionId,
    Token,
    Verification,
)
from speculation.trie import Node
from tests.by_rows import by_rows
from tests.unit.engine_models import load_tiny, random_tokens

ROUTER = "router"
LIMITS = DraftLimits(lead=12, nodes=400, children=3, width=4, least=0.001)
GREEDY, WARM = Sampling(temperature=0.0), Sampling(temperature=0.8, seed=5)
FILTERED, PENALISED = replace(WARM, top_k=9), replace(GREEDY, frequency_penalty=0.4)


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Gemma slides and caps scores."""
    return load_tiny(request.param, tmp_path_factory.mktemp(request.param), num_hidden_layers=2)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_tiny("llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=1)


@pytest.fixture(autouse=True)
def _rows_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes the same time whatever is in it, so that whole frontiers are expanded."""
    monkeypatch.setattr(StepCost, "__call__", lambda self, tokens: 1.0)


@pytest.fixture
def _all_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch knows of all leaves that it could expand, as single steps do."""
    monkeypatch.setattr("engine.cuda.levels.LEAVES", 28)


@dataclass
class Recorder:
    """Records by calling again, into one place as a graph does; counts."""

    replayed: int = 0
    broken: Callable[[Tensor], None] | None = None
    places: list[Tensor] = field(default_factory=list)

    def __call__(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        place = compute().clone()
        self.places.append(place)

        def replay() -> Tensor:
            self.replayed += 1
            return place.copy_(compute())

        return replay


class Drafter:
    """A draft worker without a wire; ``levels``: how many a launch has, 1 for none."""

    def __init__(
        self, model: Model, levels: int, *, capacity: int = 1200, limits: DraftLimits = LIMITS, **how: Any
    ) -> None:
        self.recorder = Recorder()
        self.engine = by_rows(model, capacity, record=self.recorder, **how)
        self.levels = levels
        launches = DraftLevels(self.engine.levels(limits.width, limits.children)) if levels > 1 else None
        if launches is not None:
            launches.time = Fixed(levels)
        introduction = welcome(EngineSettings("draft"), model, "draft")
        self.worker = Lookahead(self.engine, introduction, LookaheadLimits(draft=limits), levels=launches)
        self.texts: dict[int, list[Token]] = {}

    def open(self, number: int, prompt: Sequence[Token], sampling: Sampling, **how: Any) -> None:
        self.texts[number] = list(prompt)
        seeded = replace(sampling, seed=sampling.seed + number)
        limits = how.pop("limits", Limits(len(prompt) + 200, stop_tokens=frozenset({0, 17})))
        assert self.worker.receive(ROUTER, Open(SessionId(number), 1, tuple(prompt), seeded, limits, **how)) == []

    def held(self, number: int) -> Drafted:
        return self.worker._held[ROUTER, SessionId(number)]

    def step(self) -> int:
        """How many levels it expanded, by a single forward or several."""
        before = self.recorder.replayed
        self.worker.step()
        self.engine.cache.check()
        for held in self.worker._held.values():
            assert held.cached.pending == len(held.pending), "a row of what was no draft is left"
            assert sorted(held.pending.values()) == list(range(held.cached.pending))
        replays = self.recorder.replayed - before
        return max(1, replays - 1) if self.levels > 1 else 1

    def commit(self, number: int, tokens: Sequence[Token]) -> None:
        text = self.texts[number]
        position = len(text)
        text += tokens
        said = Verification(SessionId(number), 1, position, tuple(tokens), digests.of(tuple(text)), offered=1)
        self.worker.receive(ROUTER, said)
        self.engine.cache.check()

    def tree(self, number: int) -> dict[tuple[Token, ...], Node]:
        trie = self.held(number).session.trie
        return {tuple(each.token for each in node.path_from(trie.root)): node for node in trie}

    def close(self) -> None:
        self.worker.forget(ROUTER)
        self.engine.cache.check()
        assert self.engine.cache.free_tokens == self.engine.cache.capacity


class Fixed(LaunchTime):
    """Every launch has so many levels."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def levels(self, interval: float | None = None) -> int:
        return self.count


def assert_same(one: Drafter, other: Drafter) -> None:
    """The same trees, and the same parts of them computed."""
    for number in one.texts:
        ours, theirs = one.tree(number), other.tree(number)
        assert ours.keys() == theirs.keys()
        for path, node in ours.items():
            assert node.confidence == pytest.approx(theirs[path].confidence, rel=1e-5, abs=1e-6)
            assert node.weight == pytest.approx(theirs[path].weight, rel=1e-5)
            assert (node in one.held(number).pending) == (theirs[path] in other.held(number).pending)
        assert one.held(number).cached.length == other.held(number).cached.length


def assert_same_cache(one: Drafter, other: Drafter) -> None:
    """What stands in the cache for every token of every session is the same."""
    for number in one.texts:
        for layer in range(one.engine.model.layers):
            stored = []
            for each in (one, other):
                held, store = each.held(number), each.engine.cache.store
                in_order = sorted(
                    held.pending, key=lambda node: [a.token for a in node.path_from(held.session.trie.root)]
                )
                slots = held.cached.committed_slots(0)
                slots += [held.cached.pending_slots[held.pending[node]] for node in in_order]
                keys_SHD, values_SHE = store._keys[layer], store._values[layer]
                assert keys_SHD is not None and values_SHE is not None
                stored.append(torch.cat((keys_SHD[slots].flatten(1), values_SHE[slots].flatten(1)), 1))
            torch.testing.assert_close(*stored, atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("_all_leaves")
@pytest.mark.parametrize("levels", [2, 5, 8])
@pytest.mark.parametrize("seed", range(2))
def test_the_trees_are_those_of_single_steps(model: Model, levels: int, seed: int) -> None:
    """Sessions of several lengths, greedy and not; commits that follow the drafts, part of them, or none."""
    rng = Random(seed)
    one, other = Drafter(model, 1), Drafter(model, levels)
    before = other.recorder.replayed
    for number in range(3):
        prompt = random_tokens(rng.choice([1, 7, 8, 30, 40]), seed=10 * seed + number)
        for each in (one, other):
            each.open(number, prompt, WARM if number % 2 else GREEDY)
    for _ in range(4):
        for _ in range(rng.choice([1, 2])):
            for _ in range(other.step()):
                one.step()
            assert_same(one, other)
            assert_same_cache(one, other)
        for number in range(3):
            paths = [[], *(list(path) for path in one.tree(number))]
            follows = rng.choice(paths)
            tokens = [*follows, rng.randrange(3, 250)] if rng.random() < 0.7 or not follows else follows
            for each in (one, other):
                each.commit(number, tokens)
        assert_same(one, other)
    assert other.recorder.replayed - before > 8, "nothing was launched"
    one.close()
    other.close()
