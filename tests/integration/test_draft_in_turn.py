"""A draft model in the target's process: the text is the target's own, whatever becomes of the drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draft_service import in_turn
from draft_service.in_turn import MAX_LEVELS, InTurn, limits_in_turn
from draft_service.levels import DraftLevels, LaunchTime
from engine.attention.row_attention import RowAttention
from engine.build import welcome
from engine.cache.kv_cache import KVCache
from engine.interface import Chunk
from engine.model import Model, ModelError
from engine.settings import EngineSettings
from engine.step import Engine
from speculation import digest as digests
from speculation.drafting.draft_session import DraftLimits
from speculation.messages import (
    Close,
    Limits,
    Open,
    RequestOptions,
    Rule,
    Sampling,
    SessionId,
    Source,
    Speculation,
    Token,
    Verification,
)
from speculation.verifying import payoff
from speculation.verifying.payoff import DraftTurn, Payoff
from target_service import scheduler
from target_service.drafting import draft_model
from target_service.drafting.draft_model import check_drafter
from target_service.drafting.state_reader import draft_all
from target_service.verify_loop import TargetLimits, VerifyLoop
from tests.by_rows import by_rows
from tests.grammars import CORPUS, STOP, regex, tiny_engine
from tests.ranks import needs_no_gpu, on_ranks
from tests.unit.engine.engine_models import load_tiny, random_tokens, save_model
from transport.worker import Outgoing

LINK = "router"
NEW = 24
GREEDY, WARM = Sampling(temperature=0.0), Sampling(temperature=0.8, top_k=12, seed=5)
PLAIN, DRAFTED = Speculation(enabled=False), Speculation(sources=frozenset({Source.DRAFT}), remember=False)


@pytest.fixture(autouse=True)
def _cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every level counts as worth its time, so that what is drafted does not depend on how fast the machine is."""
    monkeypatch.setattr(in_turn, "FIRST_LEVELS", 1 << 30)
    monkeypatch.setattr(in_turn, "SMOOTHING", 0.0)  # what growing a tree takes is not learned


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_tiny("llama", tmp_path_factory.mktemp("target") / "model", num_hidden_layers=2)


@pytest.fixture(scope="module")
def likeness(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The target with other numbers in its output layer: mostly, but not always, of one mind with it."""
    model = load_tiny("llama", tmp_path_factory.mktemp("draft") / "model", num_hidden_layers=2)
    weight = model.module.get_output_embeddings().weight  # type: ignore[operator]
    with torch.no_grad():
        weight += 0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    return model


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_tiny("llama", tmp_path_factory.mktemp("other") / "model", num_hidden_layers=1, hidden_size=32)


def engine_of(model: Model, capacity: int = 2048, *, invariant: bool = True) -> Engine:
    model = replace(model, attention=RowAttention(page=8))
    cache = KVCache(model.layers, capacity, block=model.block, dtype=model.dtype, device=model.device)
    return Engine(model, cache, invariant=invariant)


def drafter_of(engine: Engine) -> InTurn:
    return InTurn(engine, welcome(EngineSettings("draft"), engine.model, "draft"), limits_in_turn(DraftLimits()))


def loop_of(model: Model, drafter: InTurn | None = None, capacity: int = 2048, **limits: object) -> VerifyLoop:
    """Verifies all there is, so that what is tested does not depend on how fast the machine is; drafts what pays."""
    engine = engine_of(model, capacity)
    chosen = replace(TargetLimits(adaptive=False), **limits)  # type: ignore[arg-type]
    loop = VerifyLoop(engine, welcome(EngineSettings("tiny"), model, "target"), chosen, drafter=drafter)
    for own in loop._drafters:
        own._adaptive = True  # type: ignore[attr-defined]
    return loop


def opening(number: int, sampling: Sampling, speculation: Speculation = DRAFTED, new: int = NEW) -> Open:
    prompt = tuple(random_tokens(10 + 7 * number, seed=number))
    chosen = replace(sampling, seed=sampling.seed + number)
    limits, digest = Limits(len(prompt) + new), digests.of(prompt)
    return Open(SessionId(number), 1, prompt, chosen, limits, speculation=speculation, digest=digest)


def opened_again(before: Open, epoch: int, said: Sequence[Token]) -> Open:
    tokens = (*before.tokens, *said)
    return replace(before, epoch=epoch, tokens=tokens, prompt=len(before.tokens), digest=digests.of(tokens))


def texts(loop: VerifyLoop, openings: Sequence[Open]) -> dict[int, list[Token]]:
    """What the sessions say, all at once; nothing is left of them then."""
    for one in openings:
        assert loop.receive(LINK, one) == []
    said: dict[int, list[Token]] = {one.session: [] for one in openings}
    while (sent := loop.step()) is not None:
        for _, message in sent:
            assert isinstance(message, Verification), message
            said[message.session] += message.tokens
    assert loop.load().free_tokens == loop.load().capacity_tokens
    return said


def assert_empty(drafter: InTurn) -> None:
    assert not drafter._sequences
    drafter._engine.cache.validate()
    assert drafter._engine.cache.free_tokens == drafter._engine.cache.capacity


def mixed(count: int = 6, speculation: Speculation = DRAFTED) -> list[Open]:
    return [opening(number, WARM if number % 2 else GREEDY, speculation) for number in range(count)]


@pytest.fixture(scope="module")
def expected(model: Model) -> dict[int, list[Token]]:
    return texts(loop_of(model), mixed(speculation=PLAIN))


def test_levels_of_one_launch_change_nothing_but_the_number_of_forwards(
    model: Model, likeness: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By rows, with a repeated call in place of a recording; each launch has as many levels as are left."""
    monkeypatch.setattr(LaunchTime, "levels", lambda self, interval: MAX_LEVELS)
    openings = [opening(number, replace(WARM if number % 2 else GREEDY, top_k=0)) for number in range(4)]
    expected = texts(loop_of(model), [replace(one, speculation=PLAIN) for one in openings])
    found = []
    for launched in (False, True):
        engine = by_rows(likeness, 2048, record=lambda compute: compute, invariant=False)
        limits = limits_in_turn(replace(DraftLimits(), min_weight=0.001))
        levels = DraftLevels(engine.levels(limits.draft.width, limits.draft.children)) if launched else None
        drafter = InTurn(engine, welcome(EngineSettings("draft"), likeness, "draft"), limits, levels=levels)
        loop = loop_of(model, drafter)
        assert texts(loop, openings) == expected
        assert_empty(drafter)
        found.append((loop.counters.accepted_from[Source.DRAFT], drafter.counters.steps))
    (accepted, forwards), (launched_accepted, launches) = found
    assert launched_accepted >= 0.9 * accepted > 0
    assert launches < 0.5 * forwards


def test_texts_are_those_without_drafts_and_steps_are_fewer(
    model: Model, likeness: Model, expected: dict[int, list[Token]]
) -> None:
    """Greedy and at temperature 0.8, all at once and each alone."""
    drafter = drafter_of(engine_of(likeness, invariant=False))
    loop = loop_of(model, drafter)
    assert texts(loop, mixed()) == expected
    counters = loop.counters
    assert counters.accepted_from[Source.DRAFT] > counters.committed // 2
    assert counters.steps < NEW
    assert counters.draft_microseconds > 0 and counters.draft_faults == counters.draft_left_out == 0
    assert_empty(drafter)
    for one in mixed():
        assert texts(loop, [one])[one.session] == expected[one.session]


def test_a_draft_of_another_mind_costs_no_text(model: Model, stranger: Model, expected: dict[int, list[Token]]) -> None:
    drafter = drafter_of(engine_of(stranger, invariant=False))
    assert texts(loop_of(model, drafter), mixed()) == expected
    assert_empty(drafter)


def test_preempted_sessions_make_room_and_are_read_again(
    model: Model, likeness: Model, expected: dict[int, list[Token]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "HEADROOM", 0)
    drafter = drafter_of(engine_of(likeness, invariant=False))
    loop = loop_of(model, drafter, capacity=128)
    assert texts(loop, mixed()) == expected
    assert loop.counters.preempted and loop.counters.accepted_from[Source.DRAFT]
    assert drafter.counters.lost == 0, "what it is opened with again has another digest than the prompt"
    assert_empty(drafter)


@pytest.mark.parametrize("tokens", [240, 300], ids=["fewer", "more"])
def test_a_draft_model_drafts_for_shaped_texts_whose_model_has_other_tokens_at_the_end(
    model: Model, tmp_path: Path, tokens: int
) -> None:
    """Models of one tokenizer may differ in how many of its last tokens they know."""
    shaping: dict[str, Any] = {"presence_penalty": 0.5, "bias": ((250, 1.0), (7, -2.0)), "banned": ((9, 11),)}
    openings = [replace(one, sampling=replace(one.sampling, **shaping)) for one in mixed()]
    other = load_tiny("llama", tmp_path / "draft", num_hidden_layers=2, vocab_size=tokens)
    loop = loop_of(model, drafter := drafter_of(engine_of(other, invariant=False)))
    assert texts(loop, openings) == texts(loop_of(model), [replace(one, speculation=PLAIN) for one in openings])
    assert loop.counters.draft_faults == 0 and loop.counters.offered_from[Source.DRAFT] > NEW
    assert_empty(drafter)


def test_nothing_is_kept_of_a_session_that_ends_on_a_token_which_the_draft_model_lacks(
    model: Model, tmp_path: Path
) -> None:
    """It is refused what it hears of as the session is closed."""
    other = load_tiny("llama", tmp_path / "draft", num_hidden_layers=2, vocab_size=240)
    loop = loop_of(model, drafter := drafter_of(engine_of(other, invariant=False)))
    only_new = replace(GREEDY, allowed=(250, 251))
    one = replace(opening(1, only_new), tokens=tuple(token % 240 for token in opening(1, GREEDY).tokens), digest=0)
    loop.receive(LINK, one)
    loop.step()
    assert loop._sequences and drafter._sequences
    loop.receive(LINK, Close(one.session, 1))
    (drafts,) = loop._drafters
    assert not drafts._again  # type: ignore[attr-defined]
    assert_empty(drafter)


@pytest.mark.parametrize("capacity", [8, 64, 120])
def test_a_small_draft_cache_costs_drafts_only(
    model: Model, likeness: Model, expected: dict[int, list[Token]], capacity: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sessions without room go on without drafts, and are tried again unless there will never be any."""
    monkeypatch.setattr(draft_model, "RETRY_AFTER", 2)
    drafter = drafter_of(engine_of(likeness, capacity, invariant=False))
    loop = loop_of(model, drafter)
    assert texts(loop, mixed()) == expected
    assert loop.counters.draft_left_out and loop.counters.draft_faults == 0
    assert bool(loop.counters.accepted_from[Source.DRAFT]) is (capacity > 8)
    assert (loop.counters.draft_left_out == len(expected)) is (capacity == 8)
    assert_empty(drafter)


class Poisoned(Engine):
    """Says nothing but NaN from its third step on, or fails."""

    raises = False
    steps = 0

    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        self.steps += 1
        if self.steps < 3:
            return super().run(chunks)
        if self.raises:
            raise RuntimeError("out of everything")
        return torch.full_like(super().run(chunks), float("nan"))


@pytest.mark.parametrize("raises", [False, True])
def test_a_draft_model_that_fails_is_counted_and_done_without(
    model: Model, likeness: Model, expected: dict[int, list[Token]], raises: bool
) -> None:
    cache = KVCache(likeness.layers, 2048, block=likeness.block, dtype=likeness.dtype, device=likeness.device)
    engine = Poisoned(likeness, cache, invariant=False)
    engine.raises = raises
    drafter = drafter_of(engine)
    loop = loop_of(model, drafter)
    assert texts(loop, mixed()) == expected
    assert loop.counters.draft_faults == len(expected) and loop.counters.refused == 0
    assert_empty(drafter)


class Broken(InTurn):
    """Fails beyond any session."""

    def draft(self, *_: object) -> list[object]:  # type: ignore[override]
        raise RuntimeError("broken")


def test_a_drafter_that_fails_as_a_whole_ends_nothing(
    model: Model, likeness: Model, expected: dict[int, list[Token]]
) -> None:
    engine = engine_of(likeness, invariant=False)
    drafter = Broken(engine, welcome(EngineSettings("draft"), likeness, "draft"), limits_in_turn(DraftLimits()))
    loop = loop_of(model, drafter)
    assert texts(loop, mixed()) == expected
    assert loop.counters.draft_faults == len(expected)
    assert_empty(drafter)


def test_opened_again_elsewhere_the_text_goes_on(
    model: Model, likeness: Model, expected: dict[int, list[Token]]
) -> None:
    """From every third committed token, as after the loss of a worker, and here again under a later epoch."""
    loop = loop_of(model, drafter_of(engine_of(likeness, invariant=False)))
    for one in mixed():
        text = expected[one.session]
        for done in range(1, len(text), 3):
            assert texts(loop, [opened_again(one, done + 1, text[:done])])[one.session] == text[done:]
    one = opening(1, WARM)
    loop.receive(LINK, one)
    said: list[Token] = []
    while len(said) < NEW // 2:
        said += [
            token for _, message in loop.step() or () if isinstance(message, Verification) for token in message.tokens
        ]
    assert [*said, *texts(loop, [opened_again(one, 2, said)])[one.session]] == expected[one.session]


def test_a_closed_session_is_forgotten(model: Model, likeness: Model) -> None:
    drafter = drafter_of(engine_of(likeness, invariant=False))
    loop = loop_of(model, drafter)
    for one in mixed():
        loop.receive(LINK, one)
    for _ in range(3):
        loop.step()
    assert drafter._sequences
    loop.receive(LINK, Close(SessionId(0), 1))
    assert (LINK, SessionId(0)) not in drafter._sequences
    loop.forget(LINK)
    assert_empty(drafter)


def test_long_prompts_are_read_in_parts(model: Model, likeness: Model) -> None:
    """No step reads more for the draft model than its limits say, but for the part of one session."""
    prompt = tuple(random_tokens(180, seed=9))
    sizes: list[int] = []

    class Sized(Engine):
        def run(self, chunks: Sequence[Chunk]) -> Tensor:
            sizes.append(sum(len(chunk.tokens) for chunk in chunks))
            return super().run(chunks)

    cache = KVCache(likeness.layers, 2048, block=likeness.block, dtype=likeness.dtype, device=likeness.device)
    engine = Sized(likeness, cache, invariant=False)
    limits = replace(limits_in_turn(DraftLimits()), prefill=48)
    drafter = InTurn(engine, welcome(EngineSettings("draft"), likeness, "draft"), limits)
    loop = loop_of(model, drafter)
    openings = [Open(SessionId(n), 1, (*prompt, n + 3), GREEDY, Limits(205), speculation=DRAFTED) for n in range(3)]
    plain = texts(loop_of(model), [replace(one, speculation=PLAIN) for one in openings])
    assert texts(loop, openings) == plain
    assert max(sizes) < 2 * 48 and loop.counters.accepted_from[Source.DRAFT]
    assert_empty(drafter)


def test_some_steps_go_without_so_that_there_is_something_to_compare_with(
    model: Model, likeness: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(payoff, "LOST", 1e9)
    engine = engine_of(likeness, invariant=False)
    asked: list[int] = []

    class Noted(InTurn):
        def draft(self, *turn: Any, probe: bool = False) -> Outgoing:
            asked.append(len(turn[1]))
            return super().draft(*turn, probe=probe)

    drafter = Noted(engine, welcome(EngineSettings("draft"), likeness, "draft"), limits_in_turn(DraftLimits()))
    loop = loop_of(model, drafter)
    plain = 0
    for number in range(20):
        loop.receive(LINK, opening(1, replace(WARM, seed=number), new=60))
        while (before := len(asked), sent := loop.step())[1] is not None:
            offered = sum(message.offered for _, message in sent if isinstance(message, Verification))
            assert offered == 0 or len(asked) > before, "what was drafted before waits as well"
            plain += len(asked) == before
    assert len(asked) > 128 and set(asked) == {0, 1}
    assert payoff.PROBE <= plain <= payoff.PROBE * (1 + len(asked) // payoff.OFTEN)


class Asked:
    """A draft model that counts how often it is asked."""

    def __init__(self) -> None:
        self.turns = 0

    def receive(self, link: object, message: object) -> Outgoing:
        return []

    def draft(self, *_: object, probe: bool) -> Outgoing:
        self.turns += 1
        return [(LINK, Close(SessionId(0), 1))]  # for anything

    def shape(self, *_: object) -> None:
        pass

    def rests(self) -> bool:
        return False

    def passes(self, *_: object) -> bool:
        return False


@pytest.mark.parametrize(("committed", "rests"), [(56, False), (30, True)])
def test_drafting_that_costs_more_than_it_brings_rests(model: Model, committed: int, rests: bool) -> None:
    """A step over 16 sessions takes 50 ms with drafts and 20 without, which commit 40 tokens in the same time."""
    loop = loop_of(model)
    for number in range(16):
        loop.receive(LINK, opening(number, WARM))
    sequences = list(loop._sequences.values())
    drafter = Asked()
    drafts = draft_model.DraftModel(drafter, loop._planner, loop.counters)  # type: ignore[arg-type]
    plain = 0
    for _ in range(1000):
        before = drafter.turns
        plain += not drafts.draft(sequences, sequences, sequences)
        drafted = drafter.turns > before
        drafts.observe(16, committed if drafted else 16, 0.05 if drafted else 0.02)
    assert plain <= 1000 // payoff.OFTEN * payoff.PROBE + 2 * payoff.PROBE
    assert (drafter.turns < 200) == rests


def test_a_probe_ends_where_no_session_is_left_that_it_drafts_for(model: Model) -> None:
    """Sessions of other sources go on with theirs."""
    loop = loop_of(model)
    loop.receive(LINK, opening(1, WARM, Speculation(sources=frozenset({Source.LOOKUP}))))
    sequences = list(loop._sequences.values())
    drafts = draft_model.DraftModel(Asked(), loop._planner, loop.counters)  # type: ignore[arg-type]
    probe(drafts._payoffs[1])
    assert all(drafts.draft(sequences, sequences, sequences) for _ in range(20))


def probe(payoff: Payoff) -> None:
    """Have it want steps without drafts."""
    while not payoff.probing:
        payoff.observe(1, 0.01, quiet=False)
        payoff.drafted(1, 1, 0.01)


def test_of_a_step_without_drafts_only_who_needs_it_learns(model: Model) -> None:
    loop = loop_of(model)
    loop.receive(LINK, opening(1, WARM))
    sequences = list(loop._sequences.values())
    both = [draft_model.DraftModel(Asked(), loop._planner, loop.counters) for _ in range(2)]  # type: ignore[arg-type]
    assert draft_all(both, sequences, sequences, sequences) and all(one._judged for one in both)
    for probing, other in (both, both[::-1]):
        probe(probing._payoffs[1])
        turns = other._drafter.turns  # type: ignore[attr-defined]
        assert not draft_all(both, sequences, sequences, sequences)
        assert probing._judged and other._judged is None
        assert other._drafter.turns == turns + 1, "it reads at least"  # type: ignore[attr-defined]
        while probing._payoffs[1].probing:
            probing.observe(1, 1, 0.01)


def test_requests_shape_what_is_drafted(model: Model, likeness: Model) -> None:
    """Allowed tokens and penalties hold for drafts too, or hardly any would be accepted."""
    shaped = replace(WARM, allowed=tuple(range(3, 60)), repetition_penalty=1.2, presence_penalty=0.3)
    one = opening(1, shaped)
    expected = texts(loop_of(model), [replace(one, speculation=PLAIN)])
    loop = loop_of(model, drafter_of(engine_of(likeness, invariant=False)))
    assert texts(loop, [one]) == expected
    assert loop.counters.accepted_from[Source.DRAFT] > NEW // 3


def test_the_rejection_rule_gets_drafts_with_their_q(model: Model, likeness: Model) -> None:
    """Without randomness its text is the plain one; with it, drafts are sampled, never chosen."""
    speculation = replace(DRAFTED, rule=Rule.REJECTION)
    greedy = [opening(n, GREEDY, speculation) for n in range(3)]
    plain = texts(loop_of(model), [replace(one, speculation=PLAIN) for one in greedy])
    loop = loop_of(model, drafter_of(engine_of(likeness, invariant=False)))
    assert texts(loop, greedy) == plain
    loop.receive(LINK, opening(7, WARM, speculation))
    offered = 0
    while loop.step() is not None:
        for sequence in loop._sequences.values():
            assert all(node.q is not None for node in sequence.session.trie)
        offered = loop.counters.offered_from[Source.DRAFT]
    assert offered and loop.counters.proposals["missing_q"] == 0


def test_what_allows_no_draft_model_has_none(model: Model, likeness: Model) -> None:
    loop = loop_of(model, drafter_of(engine_of(likeness, invariant=False)))
    texts(loop, [opening(1, GREEDY, Speculation(sources=frozenset({Source.LOOKUP}))), opening(2, GREEDY, PLAIN)])
    assert loop.counters.offered_from[Source.DRAFT] == 0


def test_another_vocabulary_is_refused(model: Model, tmp_path: Path) -> None:
    other = load_tiny("llama", tmp_path / "model", num_hidden_layers=1, vocab_size=300)
    with pytest.raises(ModelError, match=r"draft model small \(300 tokens\).*target .* \(256 tokens\)"):
        check_drafter(replace(welcome(EngineSettings("small"), other, "draft")), engine_of(model))
    check_drafter(welcome(EngineSettings("small"), model, "draft"), engine_of(model))


def test_levels_are_drafted_while_they_pay(model: Model, likeness: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dear against the target's tokens, none is but for a probe now and then; at no price, all are."""
    limits = limits_in_turn(DraftLimits(children=1, width=1, min_weight=0.0))
    engine = engine_of(likeness, invariant=False)
    drafter = InTurn(engine, welcome(EngineSettings("draft"), likeness, "draft"), limits)
    key, one = (LINK, SessionId(1)), opening(1, GREEDY, new=120)
    drafter.receive(LINK, one)
    monkeypatch.setattr(in_turn, "FIRST_LEVELS", 0)
    drafter._cost.observe(1, 0.01)

    def levels(step_seconds: float) -> int:
        before = drafter.counters.steps
        drafter.draft([key], {key: 0.8}, DraftTurn(1, step_seconds, 0.0))
        return drafter.counters.steps - before

    assert levels(1e-6) == 0
    assert levels(0.02) in range(1, 8), "as far as the chance of getting there is worth the time"
    drafter.receive(LINK, Close(SessionId(1), 1))
    drafter.receive(LINK, one)
    assert levels(1e9) == 8
    drafter.receive(LINK, Close(SessionId(1), 1))
    drafter.receive(LINK, one)
    assert [levels(1e-6) for _ in range(18)] == [0] * 14 + [8, 8] + [0] * 2
    drafter.receive(LINK, Close(SessionId(1), 1))
    assert_empty(drafter)


def test_levels_of_a_launch_are_weighed_together(
    model: Model, likeness: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first level that is dear pays with what further ones bring; none of these counts more than a step."""
    monkeypatch.setattr(in_turn, "FIRST_LEVELS", 0)
    engine = by_rows(likeness, 2048, record=lambda compute: compute, invariant=False)
    limits = limits_in_turn(replace(DraftLimits(), min_weight=0.0))
    levels = DraftLevels(engine.levels(limits.draft.width, limits.draft.children))
    drafter = InTurn(engine, welcome(EngineSettings("draft"), likeness, "draft"), limits, levels=levels)
    key, one = (LINK, SessionId(1)), opening(1, GREEDY, new=120)
    drafter.receive(LINK, one)
    drafter._cost.observe(1, 0.01)
    time = levels.time_of(1)
    time.levels(None)  # a first launch has one level
    for step, level, plain, expected in [
        (0.01, 0.001, 0.002, 0),
        (0.01, 0.001, 0.02, 8),
        (0.01, 0.05, 0.002, 0),
        (0.01, 0.05, 0.02, 2),
    ]:
        time.step, time.level = step, level
        places, found = drafter._level({key: 0.8}, DraftTurn(1, plain, 0.0), probe=False)
        assert (found if places else 0) == expected, (level, plain)
    drafter._levels._levels.classes = ()  # type: ignore[union-attr, misc]
    assert drafter._level({key: 0.8}, DraftTurn(1, 0.02, 0.0), probe=False)[1] == 1, "more sessions than a launch takes"
    drafter.receive(LINK, Close(SessionId(1), 1))


@pytest.mark.parametrize("costs", [(0.002, 0.0), (0.0, 0.001)], ids=["a row", "growing the trees"])
def test_what_a_draft_costs_keeps_unlikely_ones_out(
    model: Model, likeness: Model, monkeypatch: pytest.MonkeyPatch, costs: tuple[float, float]
) -> None:
    """Under the coupled rule; drawn drafts of the rejection rule are never left out by what they are."""
    one, key = opening(1, GREEDY, new=120), (LINK, SessionId(1))
    for rule, kept_out in ((Rule.COUPLED, True), (Rule.REJECTION, False)):
        weights: list[list[float]] = []
        for row_seconds, growth_seconds in ((0.0, 0.0), costs):
            drafter = drafter_of(engine_of(likeness, invariant=False))
            drafter._growth_seconds = growth_seconds
            drafter.receive(LINK, replace(one, speculation=replace(DRAFTED, rule=rule)))
            drafter._rate = 100.0
            drafter.draft([key], {key: 0.8}, DraftTurn(1, 0.01, row_seconds))
            (sequence,) = drafter._sequences.values()
            weights.append([node.weight for node in sequence.session.trie if node.rank])
            drafter.receive(LINK, Close(SessionId(1), 1))
        assert (weights[0] != weights[1]) == kept_out
        assert not kept_out or (min(weights[0]) < 0.2 <= min(weights[1], default=1.0))


def test_where_nothing_has_paid_for_a_while_it_is_told_without_reading_what_was_committed(
    model: Model, likeness: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for probes, and until drafting would pay again."""
    monkeypatch.setattr(in_turn, "FIRST_LEVELS", 0)
    drafter, key, dear, cheap = drafter_of(engine_of(likeness, invariant=False)), (LINK, SessionId(1)), 1e-6, 1e9
    drafter._cost.observe(1, 0.01)

    def passes(step_seconds: float) -> bool:
        return drafter.passes({key: 0.8}, DraftTurn(1, step_seconds, 0.0))

    assert not passes(dear), "it has paid, for all that is known"
    drafter._idle_turns = 1
    assert not passes(cheap)
    passed = [passes(dear) for _ in range(in_turn.PROBE_EVERY - in_turn.PROBES - 1)]
    assert all(passed) and drafter.rests()
    assert not passes(dear), "it is time for a probe"


def test_what_growing_the_trees_takes_is_learned(
    model: Model, likeness: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_turn, "SMOOTHING", 0.1)
    drafter = drafter_of(engine_of(likeness, invariant=False))
    texts(loop_of(model, drafter), mixed())
    assert 0.0 < drafter._growth_seconds < 1.0


def test_what_does_not_pay_rests_and_catches_up(
    model: Model, likeness: Model, expected: dict[int, list[Token]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Resting, it hears of nothing, in the end of all at once; once drafting pays, drafts are right again."""
    monkeypatch.setattr(in_turn, "FIRST_LEVELS", 0)
    monkeypatch.setattr(in_turn, "IDLE_SHARE", 1e-9)
    monkeypatch.setattr(in_turn, "MAX_REST_SECONDS", 1e9)
    heard: list[int] = []
    step_seconds = [1e-9]

    class Heard(InTurn):
        def receive(self, link: object, message: object, at: float = 0.0) -> Outgoing:
            if isinstance(message, Verification):
                heard.append(len(message.tokens))
            return super().receive(link, message, at)  # type: ignore[arg-type]

    monkeypatch.setattr(draft_model.DraftModel, "_plain_step", lambda *_: DraftTurn(1, step_seconds[0], 0.0))
    drafter = Heard(
        engine_of(likeness, invariant=False),
        welcome(EngineSettings("draft"), likeness, "draft"),
        limits_in_turn(DraftLimits()),
    )
    drafter._cost.observe(1, 0.01)
    loop = loop_of(model, drafter)
    text = texts(loop, [opening(1, GREEDY, new=50)])
    turns = len(heard) - 1
    assert heard == [1] * turns + [50 - turns] and turns <= in_turn.IDLE_TURNS + 1
    assert drafter.counters.steps == 0
    drafter._rests_until = 0.0
    step_seconds[0] = 1e9
    assert texts(loop, [replace(opening(1, GREEDY, new=50), epoch=2)]) == text
    assert loop.counters.accepted_from[Source.DRAFT] > 20
    assert_empty(drafter)


def test_a_grammar_holds_for_drafts(tmp_path: Path) -> None:
    """A draft model of one mind with the target is right within the grammar as well."""
    engine, tokenizer = tiny_engine(tmp_path)
    cache = KVCache(engine.model.layers, 2048, dtype=engine.model.dtype, device="cpu")
    drafter = drafter_of(Engine(engine.model, cache, invariant=False))
    prompt = tuple(tokenizer.encode(CORPUS[0]).ids)

    def text(drafter: InTurn | None, speculation: Speculation) -> tuple[list[Token], VerifyLoop]:
        loop = loop_of(engine.model, drafter)
        limits = Limits(len(prompt) + 48, frozenset({STOP}))
        request_options = RequestOptions(grammar=regex("[a-z]{40,60}"))
        loop.receive(
            LINK, Open(SessionId(1), 1, prompt, WARM, limits, speculation=speculation, request_options=request_options)
        )
        said: list[Token] = []
        while loop._sequences:
            for _, message in loop.step() or ():
                assert isinstance(message, Verification), message
                said += message.tokens
        return said, loop

    expected, _ = text(None, PLAIN)
    said, loop = text(drafter, DRAFTED)
    assert said == expected
    assert loop.counters.accepted_from[Source.DRAFT] > loop.counters.offered_from[Source.DRAFT] // 4 > 0
    assert_empty(drafter)


@needs_no_gpu
@pytest.mark.thorough
def test_beside_rank_0_of_a_target_on_several_ranks(
    model: Model, likeness: Model, expected: dict[int, list[Token]], tmp_path: Path
) -> None:
    folder = save_model("llama", tmp_path / "model", num_hidden_layers=2)
    drafter = drafter_of(engine_of(likeness, invariant=False))
    with on_ranks(EngineSettings(folder, dtype="fp32", device="cpu", cache_tokens=2048)) as engine:
        limits = TargetLimits(adaptive=False)
        loop = VerifyLoop(engine, welcome(EngineSettings("tiny"), engine.model, "target"), limits, drafter=drafter)
        assert texts(loop, mixed()) == expected
    assert loop.counters.accepted_from[Source.DRAFT] > loop.counters.committed // 2
    assert_empty(drafter)
