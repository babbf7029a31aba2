"""Several levels in one launch draft the same trees, out of the same cache, as one level after the other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from draft_service.levels import DraftLevels, LaunchTime
from draft_service.lookahead import Lookahead, LookaheadLimits
from draft_service.sequence import DraftSequence
from engine.attention.triton_rows import TritonRows
from engine.build import welcome
from engine.cache.kv_cache import KVCache
from engine.cpu.library import find_library
from engine.cpu.rows import CpuRows
from engine.cuda.recorded_levels import RecordedLevels
from engine.exactness import warm_up
from engine.model import Model
from engine.settings import EngineSettings
from engine.step import Engine
from speculation import digest as digests
from speculation.drafting.draft_session import DraftLimits
from speculation.messages import (
    Close,
    Limits,
    Open,
    Rule,
    Sampling,
    Schedule,
    SessionId,
    Speculation,
    Token,
    Verification,
)
from speculation.trie import Node
from speculation.verifying.budget import StepCost
from tests.by_rows import PlainRows, by_rows
from tests.unit.engine.engine_models import load_tiny, random_tokens

ROUTER = "router"
LIMITS = DraftLimits(lead=12, nodes=400, children=3, width=4, hungry_width=4, min_weight=0.001)
GREEDY, WARM = Sampling(temperature=0.0), Sampling(temperature=0.8, seed=5)
FILTERED, PENALISED = replace(WARM, top_k=9), replace(GREEDY, frequency_penalty=0.4)


IN_CPP: dict[str, Any] = {"by_rows": True, "head_dim": 32}
"""What has a model computed in C++, as long as it may choose."""


def tiny(family: str, folder: Path, **how: Any) -> Model:
    if "by_rows" in how and find_library() is None:
        pytest.skip("no C++ compiler, or a processor without AVX2")
    return load_tiny(family, folder, **how)


@pytest.fixture(
    scope="module",
    params=[("llama", {}), ("gemma2", {}), ("qwen3", IN_CPP), ("mistral", IN_CPP)],
    ids=["llama", "gemma2", "qwen3 in C++", "mistral in C++"],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Gemma slides and caps scores, Qwen has norms of its own, Mistral slides."""
    family, how = request.param
    return tiny(family, tmp_path_factory.mktemp(family), num_hidden_layers=2, **how)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return tiny("llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=1)


@pytest.fixture(scope="module", params=[{}, IN_CPP], ids=["by rows", "in C++"])
def either(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return tiny("llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=1, **request.param)


@pytest.fixture(autouse=True)
def _rows_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes the same time whatever is in it, so that whole frontiers are expanded."""
    monkeypatch.setattr(StepCost, "__call__", lambda self, tokens: 1.0)


@pytest.fixture
def _all_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch knows of all leaves that it could expand, as single steps do."""
    monkeypatch.setattr("engine.levels.levels.LEAVES", 28)


@dataclass
class Recorder:
    """Records by calling again, into one place as a graph does; counts."""

    replayed: int = 0
    places: list[Tensor] = field(default_factory=list)

    def __call__(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        place = compute().clone()
        self.places.append(place)

        def replay() -> Tensor:
            self.replayed += 1
            return place.copy_(compute())

        return replay


class FewRows(PlainRows):
    """Of 16 at a time, so that not much has to be computed."""

    spare = 16


class Counted(DraftLevels):
    """Says how many levels the last step had."""

    expanded = 1
    launched = 0
    """All that were more than one, together."""

    def fetch(self) -> None:
        self.expanded = max((entry.levels for entry in self._launched), default=1)
        self.launched += self.expanded if self.expanded > 1 else 0
        super().fetch()


class Drafter:
    """A draft worker without a wire; ``levels``: how many a launch has, 1 for none."""

    def __init__(
        self, model: Model, levels: int, *, capacity: int = 1200, limits: DraftLimits = LIMITS, **how: Any
    ) -> None:
        self.recorder = Recorder()
        if isinstance(model.attention, CpuRows):
            cache = KVCache(model.layers, capacity, block=model.block, dtype=model.dtype, device=model.device)
            self.engine = Engine(model, cache)
        else:
            attention = how.pop("attention", None) or FewRows(2)
            self.engine = by_rows(model, capacity, attention, **{"record": self.recorder, **how})
        self.launches = Counted(self.engine.levels(limits.width, limits.children) if levels > 1 else None)
        self.launches._times = defaultdict(partial(Fixed, levels))
        introduction = welcome(EngineSettings("draft"), model, "draft")
        self.worker = Lookahead(self.engine, introduction, LookaheadLimits(draft=limits), levels=self.launches)
        self.texts: dict[int, list[Token]] = {}

    def open(self, number: int, prompt: Sequence[Token], sampling: Sampling, **how: Any) -> None:
        self.texts[number] = list(prompt)
        seeded = replace(sampling, seed=sampling.seed + number)
        limits = how.pop("limits", Limits(len(prompt) + 200, stop_tokens=frozenset({0, 17})))
        assert self.worker.receive(ROUTER, Open(SessionId(number), 1, tuple(prompt), seeded, limits, **how)) == []

    def sequence(self, number: int) -> DraftSequence:
        return self.worker._sequences[ROUTER, SessionId(number)]

    def step(self) -> int:
        """How many levels it expanded."""
        self.worker.step()
        self.engine.cache.validate()
        for sequence in self.worker._sequences.values():
            assert sequence.cached.pending == len(sequence.pending), "a row of what was no draft is left"
            assert sorted(sequence.pending.values()) == list(range(sequence.cached.pending))
        return self.launches.expanded

    def commit(self, number: int, tokens: Sequence[Token]) -> None:
        text = self.texts[number]
        position = len(text)
        text += tokens
        said = Verification(SessionId(number), 1, position, tuple(tokens), digests.of(tuple(text)), offered=1)
        self.worker.receive(ROUTER, said)
        self.engine.cache.validate()

    def tree(self, number: int) -> dict[tuple[Token, ...], Node]:
        trie = self.sequence(number).session.trie
        return {tuple(each.token for each in node.path_from(trie.root)): node for node in trie}

    def close(self) -> None:
        self.worker.forget(ROUTER)
        self.engine.cache.validate()
        assert self.engine.cache.free_tokens == self.engine.cache.capacity


class Fixed(LaunchTime):
    """Every launch has so many levels."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def levels(self, interval: float | None) -> int:
        return self.count


def assert_same(one: Drafter, other: Drafter, rel: float = 1e-5) -> None:
    """The same trees, with confidences that differ by ``rel`` at most, and the same parts of them computed."""
    for number in one.texts:
        ours, theirs = one.tree(number), other.tree(number)
        assert ours.keys() == theirs.keys()
        for path, node in ours.items():
            assert node.confidence == pytest.approx(theirs[path].confidence, rel=rel, abs=1e-6)
            assert node.weight == pytest.approx(theirs[path].weight, rel=10 * rel)
            assert (node in one.sequence(number).pending) == (theirs[path] in other.sequence(number).pending)
        assert one.sequence(number).cached.length == other.sequence(number).cached.length


def assert_same_cache(one: Drafter, other: Drafter) -> None:
    """What stands in the cache for every token of every session is the same."""
    for number in one.texts:
        for layer in range(one.engine.model.layers):
            stored = []
            for each in (one, other):
                sequence, store = each.sequence(number), each.engine.cache.store
                in_order = sorted(
                    sequence.pending, key=lambda node: [a.token for a in node.path_from(sequence.session.trie.root)]
                )
                slots = sequence.cached.committed_slots(0)
                slots += [sequence.cached.pending_slots[sequence.pending[node]] for node in in_order]
                keys_SHD, values_SHE = store._keys[layer], store._values[layer]
                assert keys_SHD is not None and values_SHE is not None
                stored.append(torch.cat((keys_SHD[slots].flatten(1), values_SHE[slots].flatten(1)), 1))
            torch.testing.assert_close(*stored, atol=1e-4, rtol=1e-4)


def some_commit(rng: Random, drafter: Drafter, number: int) -> list[Token]:
    """Drafts of a session, as far as they are right, and perhaps another token."""
    follows = rng.choice([[], *(list(path) for path in drafter.tree(number))])
    return [*follows, rng.randrange(3, 250)] if rng.random() < 0.7 or not follows else follows


@pytest.mark.usefixtures("_all_leaves")
@pytest.mark.parametrize("levels", [2, 5])
@pytest.mark.parametrize("seed", [1, 2])  # without two tokens that are as likely but for how sums are rounded
def test_the_trees_are_those_of_single_steps(model: Model, levels: int, seed: int) -> None:
    """Sessions of several lengths, greedy and not; commits that follow the drafts, part of them, or none."""
    rng = Random(seed)
    one, other = Drafter(model, 1), Drafter(model, levels)
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
            tokens = some_commit(rng, one, number)
            for each in (one, other):
                each.commit(number, tokens)
        assert_same(one, other)
    assert other.launches.launched > 8, "nothing was launched"
    one.close()
    other.close()


def test_more_sessions_than_a_class_holds_and_chains(either: Model) -> None:
    """Five sessions are padded to eight; those of the baselines draft chains."""
    one, other = (Drafter(either, levels, attention=PlainRows(2)) for levels in (1, 4))
    for number in range(5):
        how = {"speculation": Speculation(max_depth=7, schedule=Schedule.SEQUENTIAL)} if number == 2 else {}
        for each in (one, other):
            each.open(number, random_tokens(5 + number, seed=number), WARM if number % 2 else GREEDY, **how)
    for _ in range(other.step()):
        one.step()
    assert_same(one, other)
    assert_same_cache(one, other)
    assert [max(len(path) for path in other.tree(2))] == [4]
    assert len(other.tree(2)) == 4, "a chain"
    one.close()
    other.close()


def test_too_many_sessions_draft_level_by_level(llama: Model) -> None:
    other = Drafter(llama, 4)
    for number in range(5):
        other.open(number, random_tokens(3, seed=number), GREEDY)
    assert other.step() == 1
    assert all(len(path) == 1 for number in range(5) for path in other.tree(number))
    other.worker.receive(ROUTER, Close(SessionId(3), 1))
    del other.texts[3]
    assert other.step() == 4
    other.close()


@pytest.mark.usefixtures("_all_leaves")
def test_other_sessions_of_a_step_are_drafted_one_level_further(either: Model) -> None:
    """Filters, penalties, the rejection rule, many stop tokens; they share steps with one that is launched."""
    stops = Limits(200, stop_tokens=frozenset(range(20, 40)))
    others: list[tuple[Sampling, dict[str, Any]]] = [
        (FILTERED, {}),
        (PENALISED, {}),
        (WARM, {"speculation": Speculation(rule=Rule.REJECTION)}),
        (GREEDY, {"limits": stops}),
    ]
    launched, single, mixed = Drafter(either, 1), Drafter(either, 1), Drafter(either, 3)
    for each in (launched, mixed):
        each.open(9, random_tokens(11, seed=9), WARM)
    for number, (sampling, how) in enumerate(others):
        for each in (single, mixed):
            each.open(number, random_tokens(6 + number, seed=number), sampling, **how)
    for _ in range(2):
        for _ in range(mixed.step()):
            launched.step()
        single.step()
        for reference in (launched, single):
            assert_same(reference, mixed)
            assert_same_cache(reference, mixed)
    assert max(len(path) for path in mixed.tree(9)) > 3
    for each in (launched, single, mixed):
        each.close()


def test_a_cache_without_room_for_levels_drafts_one(either: Model) -> None:
    """Two sessions of 20 tokens in 64 slots: a level of each has room, eight have not."""
    one, other = Drafter(either, 1, capacity=64), Drafter(either, 8, capacity=64)
    for number in range(2):
        for each in (one, other):
            each.open(number, random_tokens(20, seed=number), GREEDY)
    assert other.step() == 1
    one.step()
    assert_same(one, other)
    assert not other.worker.counters.lost and len(other.worker._sequences) == 2
    one.close()
    other.close()


def test_a_text_near_the_end_of_the_context_is_drafted_level_by_level(either: Model) -> None:
    one, other = Drafter(either, 1), Drafter(either, 8)
    for each in (one, other):
        each.open(0, random_tokens(either.context - 5, seed=3), GREEDY)
    for _ in range(6):
        assert other.step() == 1
        one.step()
        assert_same(one, other)
    other.close()


def test_a_launch_goes_on_from_no_draft_beyond_the_context(either: Model) -> None:
    """The last one that a step can be fed has drafts behind it: with one of those in the cache, no step could be."""
    other = Drafter(either, 8, limits=replace(LIMITS, min_weight=0.0))
    other.open(0, random_tokens(either.context - 9, seed=3), replace(WARM, temperature=0.01))
    for _ in range(6):
        other.step()
    assert max(node.end for node in other.tree(0).values()) == either.context + 1
    assert other.launches.launched > 16
    other.close()


def test_a_full_tree_takes_no_more(either: Model) -> None:
    """What a launch expanded beyond it is in neither the tree nor the cache."""
    limits = replace(LIMITS, nodes=20, min_weight=0.0)
    other = Drafter(either, 8, limits=limits)
    other.open(0, random_tokens(9, seed=1), WARM)
    for _ in range(3):
        other.step()
    assert len(other.tree(0)) == 20
    assert all(node.children or node.end for node in other.sequence(0).pending)
    other.close()


def test_what_comes_between_two_launches(either: Model) -> None:
    """A session is closed, opened anew, or verified against all drafts: the others go on as before."""
    rng = Random(4)
    one, other = Drafter(either, 1), Drafter(either, 4)
    for number in range(3):
        for each in (one, other):
            each.open(number, random_tokens(9 + number, seed=number), GREEDY)
    for turn in range(4):
        for _ in range(other.step()):
            one.step()
        tokens = [250 + turn % 3] if turn % 2 else some_commit(rng, one, 0)
        for each in (one, other):
            each.commit(0, tokens)
            if turn == 1:
                each.worker.receive(ROUTER, Close(SessionId(1), 1))
                del each.texts[1]
            if turn == 2:
                each.open(1, random_tokens(30, seed=8), WARM)
        assert_same_cache(one, other)
    one.close()
    other.close()


class Failing(Counted):
    """Launches fail once they are under way."""

    def fetch(self) -> None:
        super().fetch()
        if self.expanded > 1:
            raise RuntimeError("the device is out of everything")


def test_a_launch_that_fails_is_made_up_for_by_single_levels(either: Model) -> None:
    one, other = Drafter(either, 1), Drafter(either, 5)
    failing = Failing(other.worker._levels._levels)
    failing.time = Fixed(5)
    other.worker._levels = failing
    for number in range(2):
        for each in (one, other):
            each.open(number, random_tokens(9 + number, seed=number), WARM)
    for _ in range(2):
        other.step()
        one.step()
        assert_same(one, other)
    assert len(other.worker._sequences) == 2
    one.close()
    other.close()


@pytest.mark.parametrize("how", [{}, IN_CPP], ids=["by rows", "in C++"])
def test_what_is_no_number_deep_below_ends_its_own_session_only(tmp_path: Path, how: dict[str, Any]) -> None:
    """The likeliest draft of one session has an embedding that is none: what hangs below it is dropped and cleared."""
    model = tiny("llama", tmp_path / "model", num_hidden_layers=1, **how)
    sound = Drafter(model, 1)
    for number in range(2):
        sound.open(number, random_tokens(9 + number, seed=number), GREEDY)
    for _ in range(4):
        sound.step()
    mine, others = ({token for path in sound.tree(number) for token in path} for number in range(2))
    others |= {*sound.texts[0], *sound.texts[1]}
    second = [path for path in sound.tree(0) if len(path) == 2 and path[-1] not in others]
    poison = max(second, key=lambda path: sound.tree(0)[path].weight)[-1]
    assert poison in mine
    other = Drafter(model, 4)
    warm_up(other.engine)
    model.module.get_input_embeddings().weight.data[poison] = float("nan")  # type: ignore[operator]
    for number in range(2):
        other.open(number, random_tokens(9 + number, seed=number), GREEDY)
    for _ in range(4):
        other.step()
    assert list(other.worker._sequences) == [(ROUTER, SessionId(1))], "the other one was given up"
    del sound.texts[0], other.texts[0]
    theirs, ours = sound.tree(1), other.tree(1)
    assert theirs.keys() <= ours.keys()
    for path, node in theirs.items():
        assert node.confidence == pytest.approx(ours[path].confidence, rel=1e-5)
    (keys_SHD,) = other.engine.cache.store._keys
    other.close()
    with torch.inference_mode():
        other.engine.cache.store.move(other.engine.cache.take_moves())
    assert keys_SHD is not None and keys_SHD[: other.engine.cache.store.slots].isfinite().all()


@pytest.mark.thorough
def test_the_kernels_draft_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In Triton's interpreter, not recorded: in groups of rows that read common keys, across the ends of pages."""
    pytest.importorskip("triton")
    from engine.cuda.level_kernels import TritonLevelOps

    for name, value in {"BLOCK": 32, "SPLITS": ((16, 2),), "LONGER_SPLITS": 1}.items():
        monkeypatch.setattr(f"engine.attention.triton_rows.{name}", value)
    monkeypatch.setattr(TritonRows, "spare", 16)
    model = load_tiny("llama", tmp_path / "model", num_hidden_layers=1, max_position_embeddings=64)

    def drafter(levels: int) -> Drafter:
        attention = TritonRows(model.context, 2, torch.device("cpu"), page=8)
        found = Drafter(model, 1, attention=attention, record=None)
        if levels > 1:
            steps: Any = found.engine._rows
            found.launches._levels = RecordedLevels(
                steps,
                model.vocabulary,
                torch.float32,
                width=LIMITS.width,
                children=3,
                ops=TritonLevelOps(steps.store.device),
            )
            found.launches._times = defaultdict(partial(Fixed, levels))
        return found

    one, other = drafter(1), drafter(2)
    for each in (one, other):
        each.open(0, random_tokens(15, seed=1), WARM)
    for _ in range(other.step()):
        one.step()
    assert other.launches.expanded == 2
    assert_same(one, other)
    assert_same_cache(one, other)
    one.close()
    other.close()


def test_a_launch_whose_recordings_differ_is_not_used(llama: Model, caplog: pytest.LogCaptureFixture) -> None:
    class Wrong(Recorder):
        def __call__(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
            replay = super().__call__(compute)
            return lambda: replay() + (1.0 if len(self.places) > 5 else 0.0)

    engine = by_rows(llama, record=Wrong())
    assert engine.levels(4, 3) is None
    assert "draft levels are computed one by one: replayed ones are off by 1" in caplog.text
    assert by_rows(llama).levels(4, 3) is None, "nothing is recorded"


def test_nothing_is_launched_where_other_ranks_compute_every_step(either: Model) -> None:
    leader = Mock(all_agree=bool)
    engine = by_rows(either, record=Recorder(), leader=leader)
    assert engine.levels(4, 3) is None
    assert not leader.step.called
