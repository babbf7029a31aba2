"""Draws that are a part of a step are those that are made behind it."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.build import welcome
from engine.interface import Chunk
from engine.model import Model
from engine.sampling.sampling import Draw, draw_numbers, drawn, drawn_in_step, is_plain
from engine.settings import EngineSettings
from engine.step import Engine
from speculation import noise
from speculation.messages import Limits, Open, Rule, Sampling, SessionId, Speculation, Verification
from target_service import verify_loop
from target_service.verdicts import Fault, verdicts
from target_service.verify_loop import TargetLimits, VerifyLoop
from tests.by_rows import PlainRows, Recorder, Twins, by_rows
from tests.unit.engine.engine_models import load_tiny, random_tokens

GREEDY = Sampling(temperature=0.0)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_tiny("llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=1)


def random_draws(rng: random.Random, count: int, hottest: float = 2.0) -> list[Draw]:
    """Greedy ones, cold ones, warm ones, for any seeds and positions."""
    return [
        Draw(
            Sampling(
                temperature=rng.choice([0.0, 1e-40, 0.1, 1.0, rng.random()]) * hottest,
                seed=rng.choice([0, 7, -3, 2**64 - 1, rng.getrandbits(70)]),
            ),
            rng.choice([0, 1, 100_000, rng.getrandbits(31)]),
        )
        for _ in range(count)
    ]


def numbers_of(draws: list[Draw]) -> Tensor:
    return torch.from_numpy(draw_numbers(draws))


@pytest.mark.parametrize("hottest", [0.0, 2.0], ids=["greedy", "mixed"])
@pytest.mark.parametrize("seed", range(10))
def test_random_rows_are_drawn_as_sampling_draws_them(seed: int, hottest: float) -> None:
    rng = random.Random(seed)
    count = rng.randint(1, 40)
    logits_RV = torch.randn(count, 3000, generator=torch.Generator().manual_seed(seed)) * rng.choice([0.1, 1.0, 5.0])
    logits_RV = logits_RV.bfloat16().float()  # many equals
    draws = random_draws(rng, count, hottest)
    expected = drawn(logits_RV, draws).tolist()
    ways = [True] if any(not draw.sampling.greedy for draw in draws) else [True, False]
    for way in ways:
        found_R2 = drawn_in_step(logits_RV, numbers_of(draws), noise=way)
        assert found_R2.dtype == torch.int32 and found_R2.tolist() == [[token, 1] for token in expected], f"seed {seed}"


def test_keys_are_those_of_the_noise() -> None:
    draws = [draw for draw in random_draws(random.Random(3), 60) if not draw.sampling.greedy]
    words = draw_numbers(draws)[1:].T.copy().view("uint64")[:, 0].tolist()
    assert words == [noise.key(draw.sampling.seed, draw.position) for draw in draws]


@pytest.mark.parametrize("way", [False, True])
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
def test_a_row_without_numbers_is_told_and_leaves_the_others_alone(broken: float, way: bool) -> None:
    logits_RV = torch.randn(5, 700, generator=torch.Generator().manual_seed(1))
    draws = [Draw(Sampling(temperature=0.9 * way, seed=2), position) for position in range(5)]
    expected = drawn(logits_RV, draws).tolist()
    logits_RV[3] = broken
    logits_RV[1, 9] = float("nan")
    tokens, sound = zip(*drawn_in_step(logits_RV, numbers_of(draws), noise=way).tolist(), strict=True)
    assert sound == (1, 0, 1, 0, 1)
    assert [tokens[i] for i in (0, 2, 4)] == [expected[i] for i in (0, 2, 4)]
    assert all(0 <= token < 700 for token in tokens)


@pytest.mark.parametrize(
    ("sampling", "plain"),
    [
        (GREEDY, True),
        (Sampling(temperature=0.7), True),
        (Sampling(temperature=0.7, top_k=3), False),
        (Sampling(temperature=0.7, top_p=0.9), False),
        (Sampling(temperature=0.7, min_p=0.1), False),
        (Sampling(temperature=0.0, top_k=3, top_p=0.9, min_p=0.1), True),
    ],
)
def test_what_is_plain(sampling: Sampling, plain: bool) -> None:
    assert is_plain(sampling) is plain


@pytest.mark.parametrize("seed", range(3))
def test_random_steps_draw_what_is_drawn_behind_them(llama: Model, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    record = Recorder()
    twins = Twins(seed, by_rows(llama, record=record), by_rows(llama, record=Recorder(), invariant=False), branches=0.4)
    for _ in range(3):
        twins.open()
    run, drew = Engine.run, []

    def drawing(engine: Engine, chunks: list[Chunk]) -> Tensor:
        if not engine.wants_exact:
            return run(engine, chunks)
        draws = random_draws(twins.rng, sum(len(chunk.rows) for chunk in chunks), twins.rng.choice([0.0, 2.0]))
        rest = iter(draws)
        logits_RV = run(engine, [chunk._replace(draws=[next(rest) for _ in chunk.rows]) for chunk in chunks])
        if engine.drawn is not None:
            assert engine.drawn[:, 0].tolist() == drawn(logits_RV, draws).tolist() and engine.drawn[:, 1].all()
            drew.append(len(draws))
        return logits_RV.clone()

    monkeypatch.setattr(Engine, "run", drawing)
    for step in range(14):
        found, expected = twins.step()
        assert torch.equal(found, expected), f"seed {seed}, step {step}"
    assert len(drew) > 10 and len({*drew}) > 3


def test_what_draws_and_what_does_not(llama: Model) -> None:
    """A chunk without its draws, rows out of order, a step in pieces, and a step that nobody replays draw nothing."""
    engine = by_rows(llama, record=Recorder())
    one, other = engine.cache.sequence(), engine.cache.sequence()
    draws = [Draw(GREEDY, position) for position in range(80)]
    engine.run([Chunk(one, [5, 6], rows=[0, 1], draws=draws[:2]), Chunk(other, [7], rows=[0], draws=draws[:1])])
    assert engine.drawn is not None and engine.drawn.shape == (3, 2)
    engine.run([Chunk(one, [5], rows=[0], draws=draws[:1]), Chunk(other, [7], rows=[0])])
    assert engine.drawn is None
    engine.run([Chunk(one, [5, 6], rows=[1, 0], draws=draws[:2])])
    assert engine.drawn is None
    one.rollback()
    logits_RV = engine.run([Chunk(one, random_tokens(80, 1), rows=range(80), draws=draws)])
    assert engine.drawn is None and logits_RV.shape[0] == 80
    for how in ({}, {"record": Recorder(), "invariant": False}):
        plain = by_rows(llama, **how)
        plain.run([Chunk(plain.cache.sequence(), [5], rows=[0], draws=draws[:1])])
        assert plain.drawn is None


def test_states_between_layers_outlive_a_step_that_draws(llama: Model) -> None:
    engine = by_rows(llama, record=Recorder(), aux_layers=(1,))
    sequence, kept = engine.cache.sequence(), []
    for token in (5, 6):
        engine.run([Chunk(sequence, [token], rows=[0], draws=[Draw(GREEDY, 1)])])
        assert engine.drawn is not None and engine.aux is not None
        kept.append((engine.aux, engine.aux.clone()))
        sequence.advance([0])
    assert all(torch.equal(states, copy) for states, copy in kept)


class Launches(TorchDispatchMode):
    """Lists the operations that torch is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def opening(number: int, sampling: Sampling, rule: Rule = Rule.COUPLED) -> Open:
    prompt = tuple(random_tokens(9, seed=number)) * 3
    how = Speculation(enabled=True, rule=rule)
    return Open(SessionId(number), 1, prompt, replace(sampling, seed=number), Limits(len(prompt) + 24), speculation=how)


def texts(engine: Engine, openings: list[Open]) -> dict[int, list[int]]:
    loop = VerifyLoop(engine, welcome(EngineSettings("tiny"), engine.model, "target"), TargetLimits(adaptive=False))
    said: dict[int, list[int]] = {one.session: [] for one in openings}
    for one in openings:
        assert loop.receive("link", one) == []
    while (sent := loop.step()) is not None:
        for _, message in sent:
            assert isinstance(message, Verification), message
            said[message.session] += message.tokens
    return said


@pytest.mark.parametrize("plain", [True, False])
def test_texts_are_those_of_draws_made_behind_the_step(
    llama: Model, plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With drafts from the text itself; where one session is not plain, all are drawn behind the steps it is in."""
    openings = [opening(i, Sampling(temperature=0.9 * (i % 2))) for i in range(4)]
    if not plain:
        openings += [
            opening(9, Sampling(temperature=0.8, top_p=0.9)),
            opening(10, Sampling(temperature=1.0), Rule.REJECTION),
        ]
    decided, ways = verify_loop.verdicts, []
    monkeypatch.setattr(
        verify_loop,
        "verdicts",
        lambda logits_RV, entries, drawn_R2=None: (
            ways.append((drawn_R2 is not None, len(logits_RV) > len(entries))) or decided(logits_RV, entries, drawn_R2)
        ),
    )
    drawing = by_rows(llama, 1000, PlainRows(2), record=Recorder())
    found = texts(drawing, openings)
    drew = [in_step for in_step, _ in ways]
    prompts = 2  # steps of more rows than draw
    assert all(drew[prompts:]) if plain else not all(drew[prompts:])
    assert any(drafted for _, drafted in ways)
    ways.clear()
    assert found == texts(by_rows(llama, 1000, record=Recorder(), invariant=False), openings)
    assert not any(in_step for in_step, _ in ways)


def test_what_was_drawn_is_decided_without_another_launch(llama: Model) -> None:
    engine = by_rows(llama, record=Recorder())
    loop = VerifyLoop(engine, welcome(EngineSettings("tiny"), llama, "target"))
    loop.receive("link", opening(1, Sampling(temperature=0.5)))
    (entry,) = loop._plan(0.0)
    assert entry.is_plain
    logits_RV = engine.run([entry.chunk(draws=True)])
    assert engine.drawn is not None
    with Launches() as launches:
        (verdict,) = verdicts(logits_RV, [entry], engine.drawn)
    assert launches.names == [] and verdict == verdicts(logits_RV, [entry])[0]
    engine.drawn[0, 1] = 0
    (fault,) = verdicts(logits_RV, [entry], engine.drawn)
    assert isinstance(fault, Fault) and fault.not_finite


def test_earlier_outputs_are_indexed_before_the_draws_are_fetched(
    llama: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def noted(name: str, function: Any) -> Any:
        return lambda *arguments, **how: done.append(name) or function(*arguments, **how)

    engine = by_rows(llama, record=Recorder())
    loop = VerifyLoop(engine, welcome(EngineSettings("tiny"), llama, "target"))
    monkeypatch.setattr(engine, "run", noted("run", engine.run))
    monkeypatch.setattr(loop._suffix_store, "work", noted("index", loop._suffix_store.work))
    monkeypatch.setattr(verify_loop, "verdicts", noted("fetch", verify_loop.verdicts))
    loop.receive("link", opening(1, GREEDY))
    assert loop.step()
    assert done == ["run", "index", "fetch"]
