"""An EAGLE-3 head at a target worker: the text is the target's own, and the head reads what it has to."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draft_service.eagle import HeadInTurn
from draft_service.in_turn import MAX_LEVELS
from draft_service.levels import LaunchTime
from engine.build import build, build_target
from engine.cache.kv_cache import KVCache
from engine.eagle.cached import CachedHead
from engine.eagle.head import EagleHead
from engine.eagle.loading import load_beside, save
from engine.interface import Chunk, StepEngine
from engine.model import Model, ModelError
from engine.sampling.sampling import candidates
from engine.settings import EngineSettings
from engine.step import Engine
from speculation.messages import (
    ANCHOR,
    Limits,
    Open,
    Proposal,
    Rule,
    SessionId,
    Source,
    Speculation,
    Token,
    Verification,
)
from target_service import scheduler
from target_service.drafting import eagle
from target_service.drafting.state_reader import StateReader
from target_service.sequence import BatchEntry, TargetSequence
from target_service.verdicts import Verdict
from target_service.verify_loop import TargetLimits, VerifyLoop
from tests.bundled import MODELS, held_out_prompts
from tests.eagle_heads import (
    ALONE,
    AUX,
    GREEDY,
    HIDDEN,
    LAYERS,
    LINK,
    NEW,
    PLAIN,
    VOCABULARY,
    WARM,
    Watched,
    assert_empty,
    drafted,
    engine_of,
    loop_of,
    of_eagle,
    opening,
    plain_texts,
    reference,
    texts,
    tiny_head,
    watched,
)
from tests.ranks import needs_no_gpu, on_ranks
from tests.unit.engine.engine_models import Stock, load_tiny, random_tokens, save_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model("llama", tmp_path_factory.mktemp("tiny") / "model", num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_tiny("llama", tmp_path_factory.mktemp("loaded"), num_hidden_layers=LAYERS)


@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize(
    ("sources", "capacity"),
    [({Source.EAGLE}, 1024), (set(Source) - {Source.DRAFT}, 72)],
    ids=["alone", "among others, preempted"],
)
def test_texts_are_those_without_a_head(
    model: Model, rule: Rule, sources: set[Source], capacity: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy and sampled, many at once; under the rejection rule where nothing is random."""
    monkeypatch.setattr(scheduler, "HEADROOM", 0)
    openings = [opening(n, GREEDY if n % 2 or rule is Rule.REJECTION else WARM) for n in range(6)]
    speculation = Speculation(rule=rule, sources=frozenset(sources))
    loop = loop_of(engine_of(model, tiny_head(), capacity))
    expected = plain_texts(model, openings)
    assert texts(loop, [replace(one, speculation=speculation) for one in openings]) == expected
    assert loop.counters.offered_from[Source.EAGLE] > 30
    assert bool(loop.counters.preempted) is (capacity < 100)
    assert_empty(loop)


@pytest.mark.parametrize("kind", ["whole vocabulary", "two layers", "norms of its own"])
def test_other_shapes_of_heads(model: Model, kind: str) -> None:
    changes: dict[str, dict[str, Any]] = {
        "whole vocabulary": {"draft_vocab_size": VOCABULARY},
        "two layers": {"num_hidden_layers": 2, "num_key_value_heads": 4},
        "norms of its own": {"norm_before_residual": True, "norm_output": True, "fc_norm": True},
    }
    openings = [opening(n, WARM if n % 2 else GREEDY) for n in range(3)]
    loop = loop_of(engine_of(model, tiny_head(**changes[kind])))
    assert texts(loop, openings) == plain_texts(model, openings)
    assert loop.counters.offered_from[Source.EAGLE] > 50


@pytest.mark.parametrize("kept", ["anything", "its own drafts"])
def test_the_head_reads_the_states_of_committed_tokens(folder: str, kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was verified beside them and whatever of it was kept; prompts in parts, too, and told of."""
    monkeypatch.setattr("target_service.drafting.eagle.CachedHead", Watched)
    head = load_head(folder, tiny_head(draft_vocab_size=VOCABULARY))
    stock = copy.deepcopy(head)  # computed by its modules
    engine = build_target(EngineSettings(folder, dtype="fp32", device="cpu", cache_tokens=1024))
    engine = Engine(engine.model, engine.cache, eagle=head)
    limits = replace(TargetLimits(), budget=scheduler.Budget(tokens=6)) if kept == "anything" else TargetLimits()
    loop = loop_of(engine, budget=limits.budget)
    if kept == "its own drafts":
        say_the_truth(loop, folder, monkeypatch)
    one = opening(4, GREEDY)
    one = replace(one, request_options=replace(one.request_options, prompt_logprobs=1))
    truth = [*one.tokens, *texts(loop, [one])[4]]
    expected = reference(folder, stock, truth)
    read = {position for position, _ in watched(loop).read}
    assert read == set(range(len(read))) and len(read) > len(one.tokens), "without gaps, but for the last step"
    for (position, token), normed_D in watched(loop).read.items():
        assert token == truth[position + 1]
        torch.testing.assert_close(normed_D, expected[position], atol=1e-4, rtol=1e-4)
    if kept == "its own drafts":
        assert loop.counters.accepted_from[Source.EAGLE] > NEW // 2


def load_head(folder: str, head: EagleHead) -> EagleHead:
    """Through a checkpoint in the published layout."""
    place = Path(folder).parent / f"head-{head.config.draft_vocab_size}-{head.config.num_hidden_layers}"
    save(head, place, embedding=True, dtype=torch.float32)
    return load_beside(str(place), build_target(EngineSettings(folder, dtype="fp32", device="cpu")).model)


def say_the_truth(loop: VerifyLoop, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the head guess what the target says, among other things; level by level, as a launch draws by itself."""
    stock = Stock(folder)
    monkeypatch.setattr(of_eagle(loop)._levels, "_levels", None)

    def guesses(logits_NV: Tensor, draws: Sequence[Any], k: int) -> Any:
        (sequence,) = of_eagle(loop)._sequences.values()
        found = candidates(logits_NV, draws, k)
        tokens = list(sequence.session.tokens)
        for draw, row in zip(draws, found, strict=True):
            while len(tokens) <= draw.position:
                tokens.append(int(stock(tokens)[-1].argmax()))
            row[0] = replace(row[0], token=tokens[draw.position], confidence=0.9)
        return found

    monkeypatch.setattr("draft_service.sequence.candidates", guesses)


@pytest.mark.parametrize("recomputed", [eagle.RECOMPUTED, 0], ids=["known to the head", "not"])
def test_a_prefix_taken_over_from_the_cache(model: Model, recomputed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head takes it over as well, and what it lacks is computed again; or it begins behind the prefix."""
    monkeypatch.setattr(eagle, "RECOMPUTED", recomputed)
    shared = tuple(random_tokens(40, seed=7))
    tails = [(11, 12, 13), (11, 90, 33, 4), (7,), (11, 12, 13)]
    openings = [
        Open(SessionId(n), 1, (*shared, *tail), GREEDY, Limits(60), speculation=ALONE) for n, tail in enumerate(tails)
    ]
    expected = plain_texts(model, openings)
    loop = loop_of(engine_of(model, tiny_head()))
    for one in openings:
        alone = loop_of(engine_of(model, tiny_head()))
        assert texts(alone, [one])[one.session] == texts(loop, [one])[one.session] == expected[one.session]
    assert loop.counters.reused > 3 * 30


def test_a_head_says_the_same_behind_a_prefix_from_the_cache(model: Model) -> None:
    """What it says first of each place is what it says where nothing was cached."""
    shared = tuple(random_tokens(40, seed=7))
    one = Open(SessionId(1), 1, (*shared, 11, 12, 13), GREEDY, Limits(60), speculation=ALONE)
    other = replace(one, session=SessionId(2), tokens=(*shared, 11, 90, 33, 4))
    found: list[dict[int, tuple[Token, float]]] = []
    for before in ([], [one]):
        loop = loop_of(engine_of(model, tiny_head()))
        texts(loop, before)
        loop.receive(LINK, other)
        found.append({})
        while loop.step() is not None:
            for trie in drafted(loop):
                found[-1] |= {trie[0].end: (trie[0].token, pytest.approx(trie[0].confidence))} if trie else {}
        assert bool(loop.counters.reused) is bool(before) is (of_eagle(loop).counters.reused > 30)
    alone, behind = found
    shared_places = alone.keys() & behind.keys()
    assert len(shared_places) > 5 and all(alone[place] == behind[place] for place in shared_places)


def test_a_head_takes_over_what_others_have_read_of_a_prompt_that_is_computed_in_parts(model: Model) -> None:
    """Of a prompt that comes while another with the same beginning is under way."""
    shared, budget = tuple(random_tokens(150, seed=7)), scheduler.Budget(tokens=32)
    one = Open(SessionId(1), 1, (*shared, *range(11, 18)), GREEDY, Limits(170), speculation=ALONE)
    other = replace(one, session=SessionId(2), tokens=(*shared, *range(90, 98)))
    loop = loop_of(engine_of(model, tiny_head(), 2048), budget=budget)
    loop.receive(LINK, one)
    loop.step()
    loop.receive(LINK, other)
    firsts: set[int] = set()
    while loop.step() is not None:
        firsts |= {sequence.text.first for (_, session), sequence in of_eagle(loop)._sequences.items() if session == 2}
    assert firsts - {0} == {1}
    assert of_eagle(loop).counters.reused > 100


def test_a_head_that_says_no_numbers_costs_speed_only(model: Model) -> None:
    head = tiny_head()
    with torch.no_grad():
        head.get_parameter("layers.0.mlp.down_proj.weight")[3, 4] = float("nan")
    openings = [opening(n, WARM if n % 2 else GREEDY) for n in range(4)]
    loop = loop_of(engine_of(model, head))
    assert texts(loop, openings) == plain_texts(model, openings)
    assert loop.counters.draft_faults == 4 and loop.counters.offered == 0
    assert loop.counters.flat()["draft_faults"] == 4


def test_an_output_layer_of_no_numbers_costs_speed_only(model: Model) -> None:
    head = tiny_head()
    with torch.no_grad():
        head.lm_head.weight[3] = float("nan")
    openings = [opening(n, WARM if n % 2 else GREEDY) for n in range(4)]
    assert texts(loop_of(engine_of(model, head)), openings) == plain_texts(model, openings)


def test_a_head_that_fails_costs_speed_only(
    model: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(CachedHead):
        calls = 0

        def said(self, own_RX: Tensor, vocabulary: int) -> Tensor:
            self.calls += 1
            if self.calls >= 5:
                raise RuntimeError("out of memory")
            return super().said(own_RX, vocabulary)

    monkeypatch.setattr("target_service.drafting.eagle.CachedHead", Failing)
    openings = [opening(n, WARM if n % 2 else GREEDY) for n in range(4)]
    loop = loop_of(engine_of(model, tiny_head()))
    assert texts(loop, openings) == plain_texts(model, openings)
    assert caplog.text.count("goes on without the EAGLE head: RuntimeError: out of memory") == 4
    assert loop.counters.draft_faults == 4


@pytest.mark.parametrize("rows", [16, 48])
def test_a_head_without_room_costs_speed_only(model: Model, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "target_service.drafting.eagle.CachedHead",
        lambda head, _capacity, context: CachedHead(head, rows, context),
    )
    openings = [opening(n, WARM if n % 2 else GREEDY) for n in range(4)]
    loop = loop_of(engine_of(model, tiny_head()))
    assert texts(loop, openings) == plain_texts(model, openings)
    assert loop.counters.draft_left_out > 0


def test_while_a_head_rests_few_states_are_kept(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """And it drafts again behind those."""
    monkeypatch.setattr(eagle, "KEPT", 4)
    monkeypatch.setattr(HeadInTurn, "rests", lambda drafter: resting)
    one = opening(3, GREEDY, new=40)
    loop = loop_of(engine_of(model, tiny_head()))
    (drafter,) = loop._drafters
    drafter._adaptive = resting = True  # type: ignore[attr-defined]
    loop.receive(LINK, one)
    said: list[Token] = []
    while (sent := loop.step()) is not None:
        said += [token for _, message in sent if isinstance(message, Verification) for token in message.tokens]
        for unread in drafter._unread.values():  # type: ignore[attr-defined]
            assert unread.count == sum(map(len, unread.states)) < eagle.KEPT + len(unread.states[0])
        if len(said) == 20:
            assert not loop.counters.offered
            resting = drafter._adaptive = False  # type: ignore[attr-defined]
    assert said == plain_texts(model, [one])[3] and loop.counters.offered_from[Source.EAGLE] > 10


def test_requests_that_allow_no_head_have_none(model: Model) -> None:
    loop = loop_of(engine_of(model, tiny_head()))
    texts(loop, [opening(1, GREEDY, Speculation(sources=frozenset({Source.LOOKUP}))), opening(2, GREEDY, PLAIN)])
    assert loop.counters.offered_from[Source.EAGLE] == 0


def test_a_depth_that_a_request_allows(model: Model) -> None:
    loop = loop_of(engine_of(model, tiny_head()))
    loop.receive(LINK, opening(1, GREEDY, replace(ALONE, max_depth=2)))
    deepest = 0
    while loop.step() is not None:
        for sequence in of_eagle(loop)._sequences.values():
            deepest = max([deepest, *(node.end - sequence.session.trie.position for node in sequence.session.trie)])
    assert deepest == 2


class InOnePass(StateReader):
    """A toy of a head that guesses several positions at once, as P-EAGLE and DFlash do: by copies of one state."""

    def __init__(self, weight_HAV: Tensor) -> None:
        self.weight_HAV = weight_HAV
        self.passes = 0
        self._states: dict[TargetSequence, Tensor] = {}

    def note(
        self, engine: StepEngine, chunks: Sequence[Chunk], entries: Sequence[BatchEntry], _decided: Sequence[Verdict]
    ) -> None:
        assert engine.aux is not None
        ends = torch.tensor([len(chunk.tokens) for chunk in chunks]).cumsum(0) - 1
        for entry, state_A in zip(entries, engine.aux[ends], strict=True):
            self._states[entry.sequence] = state_A

    def draft(
        self, _running: Sequence[TargetSequence], _part: Sequence[TargetSequence], wanting: Sequence[TargetSequence]
    ) -> bool:
        ready = [sequence for sequence in wanting if sequence in self._states]
        if not ready:
            return True
        self.passes += 1
        logits_HNV = torch.stack([self._states[sequence] for sequence in ready]) @ self.weight_HAV
        for sequence, tokens in zip(ready, logits_HNV.argmax(-1).T.tolist(), strict=True):
            opened, trie = sequence.session.opened, sequence.session.trie
            chain, sure = tuple(range(ANCHOR, len(tokens) - 1)), (0.5,) * len(tokens)
            place = opened.session, opened.epoch, trie.position, trie.digest
            sequence.session.propose(Proposal(*place, tuple(tokens), chain, sure, source=Source.EAGLE))
        return True

    def drop(self, sequence: TargetSequence) -> None:
        self._states.pop(sequence, None)


def test_a_source_may_guess_all_positions_in_one_pass(model: Model) -> None:
    """Nothing between hidden states and the trie assumes one token after the other."""
    openings = [opening(n, WARM if n % 2 else GREEDY) for n in range(4)]
    cache = KVCache(model.layers, 1024, block=model.block, dtype=model.dtype, device=model.device)
    loop = loop_of(Engine(model, cache, aux_layers=AUX))
    toy = InOnePass(torch.randn(3, len(AUX) * HIDDEN, VOCABULARY, generator=torch.Generator().manual_seed(1)))
    loop._drafters.append(toy)
    assert texts(loop, openings) == plain_texts(model, openings)
    assert toy.passes <= loop.counters.steps
    assert loop.counters.offered_from[Source.EAGLE] > 2 * toy.passes


@needs_no_gpu
@pytest.mark.thorough
def test_on_two_ranks_a_head_says_what_it_says_on_one(
    model: Model, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LaunchTime, "levels", lambda *_: MAX_LEVELS)  # however long they take
    save(tiny_head(), tmp_path / "head", dtype=torch.float32)  # the embedding is the target's, split or not
    settings = EngineSettings(folder, dtype="fp32", device="cpu", cache_tokens=512, eagle=str(tmp_path / "head"))
    openings = [opening(n, WARM if n % 2 else GREEDY) for n in range(4)]
    expected = plain_texts(model, openings)
    alone = loop_of(build(settings))
    assert texts(alone, openings) == expected
    with on_ranks(settings) as engine:
        loop = loop_of(engine)
        assert texts(loop, openings) == expected
    assert loop.counters.offered_from[Source.EAGLE] == alone.counters.offered_from[Source.EAGLE] > 50


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"target_hidden_size": 32}, "reads hidden states of 32 numbers"),
        ({"vocab_size": 200}, "knows 200 tokens"),
        ({"aux_layers": (1, 2, 9)}, "9"),
    ],
)
def test_a_head_for_another_target(folder: str, tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    save(tiny_head(**changes), tmp_path / "head", embedding=True, dtype=torch.float32)
    with pytest.raises(ModelError, match=said):
        build_target(EngineSettings(folder, dtype="fp32", device="cpu", eagle=str(tmp_path / "head")))


def test_the_bundled_head_is_often_right() -> None:
    settings = EngineSettings(str(MODELS / "target"), dtype="float32", device="cpu", cache_tokens=2048)
    openings = [
        Open(SessionId(n), 1, prompt, replace(WARM if n % 2 else GREEDY, seed=n), Limits(len(prompt) + NEW))
        for n, prompt in enumerate(held_out_prompts()[:6])
    ]
    plain = texts(loop_of(build_target(settings)), [replace(one, speculation=PLAIN) for one in openings])
    loop = loop_of(build_target(replace(settings, eagle=str(MODELS / "eagle"))))
    assert texts(loop, [replace(one, speculation=ALONE) for one in openings]) == plain
    assert loop.counters.accepted_from[Source.EAGLE] > 0.4 * loop.counters.committed
