"""Models that cannot speculate: one state per sequence, whose text is transformers' own whatever happens between."""

from __future__ import annotations

import logging
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from draft_service.service import DraftSettings, start_draft
from engine.build import build_target, welcome
from engine.cache.kv_cache import CacheFull
from engine.interface import Chunk
from engine.loading.loader import load
from engine.model import Model, ModelError
from engine.settings import EngineSettings
from engine.stateful import StatefulCache, StatefulEngine, StatefulSequence
from speculation.messages import Limits, Open, Sampling, SessionId, Welcome
from target_service.scheduler import Budget
from target_service.verify_loop import TargetLimits, VerifyLoop
from tests.unit.engine.engine_models import Stock, decode_plainly, random_tokens, save_model
from tests.unit.engine.test_families import FAMILIES
from transport.worker import Door

STATEFUL = ["mamba", "mamba2", "qwen3_next", "lfm2"]
"""The first one's prompts go wrong in parts in transformers; lfm2 keeps no recurrent state, only layers of its own."""


def save(family: str, folder: Path) -> str:
    return save_model(family, folder, tie_word_embeddings=False, **FAMILIES[family].changes)


def engine_of(model: Model, capacity: int = 512) -> StatefulEngine:
    return StatefulEngine(model, StatefulCache(capacity, block=8, dtype=model.dtype, device=model.device))


@pytest.fixture(scope="module", params=STATEFUL)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Stock]:
    path = save(request.param, tmp_path_factory.mktemp(request.param))
    return load(path, dtype="fp32", device="cpu", without_speculation=True), Stock(path)


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = save("mamba2", tmp_path_factory.mktemp("mamba2"))
    return load(path, dtype="fp32", device="cpu", without_speculation=True)


def feed(engine: StatefulEngine, sequence: StatefulSequence, tokens: list[int]) -> torch.Tensor:
    """Commit ``tokens``; the logits ``[V]`` after the last."""
    logits_RV = engine.run([Chunk(sequence, tokens, rows=[len(tokens) - 1])])
    sequence.advance(range(len(tokens)))
    return logits_RV[0]


@pytest.mark.parametrize("part", [1, 3, 40])
def test_text_is_that_of_generate_however_the_prompt_is_fed(pair: tuple[Model, Stock], part: int) -> None:
    model, stock = pair
    prompt = random_tokens(25, seed=part)
    assert decode_plainly(engine_of(model), prompt, 20, part) == stock.generate(prompt, 20)


def test_interleaved_sequences_do_not_disturb_each_other(pair: tuple[Model, Stock]) -> None:
    """Random parts in random order, rollbacks between, and a sequence that starts over."""
    model, stock = pair
    engine = engine_of(model)
    rng = random.Random(6)
    texts = [random_tokens(length, seed=length) for length in (13, 22, 30)]
    expected = [text + stock.generate(text, 12) for text in texts]
    sequences = [engine.cache.sequence() for _ in texts]
    steps = 0
    while any(len(text) < len(whole) for text, whole in zip(texts, expected, strict=True)):
        chosen = rng.sample([i for i in range(3) if len(texts[i]) < len(expected[i])], k=1) if steps % 3 else [0, 1, 2]
        chunks = []
        for i in chosen:
            fed = texts[i][sequences[i].length :][: rng.randint(1, 6)]
            ends = sequences[i].length + len(fed) == len(texts[i])
            chunks.append(Chunk(sequences[i], fed, rows=[len(fed) - 1] if ends else []))
        drawn = iter(engine.run(chunks).argmax(-1).tolist())
        for i, chunk in zip(chosen, chunks, strict=True):
            token = [next(drawn)] if chunk.rows else []
            if rng.random() < 0.2:
                sequences[i].rollback()
                continue
            sequences[i].commit(range(len(chunk.tokens)))
            texts[i] += token
        if steps == 9:
            sequences[1].free()
            sequences[1] = engine.cache.sequence()
        engine.cache.validate()
        steps += 1
    assert [text[: len(whole)] for text, whole in zip(texts, expected, strict=True)] == expected
    for sequence in sequences:
        sequence.free()
    assert engine.cache.free_tokens == engine.cache.capacity


def test_a_shortened_sequence_goes_on_from_there(pair: tuple[Model, Stock]) -> None:
    model, stock = pair
    engine, text = engine_of(model), random_tokens(20, seed=8)
    sequence = engine.cache.sequence()
    feed(engine, sequence, text)
    sequence.truncate(11)
    logits_V = feed(engine, sequence, text[11:15])
    torch.testing.assert_close(logits_V, stock(text[:15])[-1], atol=1e-4, rtol=1e-4)


def test_a_failed_step_changes_nothing(recurrent: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the sequence that failed nor the one computed before it."""
    engine, a, b = engine_of(recurrent), random_tokens(12, seed=1), random_tokens(12, seed=2)
    expected = [feed(engine, engine.cache.sequence(), text) for text in (a, b)]
    first, second = engine.cache.sequence(), engine.cache.sequence()
    feed(engine, first, a[:6])
    feed(engine, second, b[:6])
    forward = recurrent.module.forward
    calls: list[int] = []

    def failing(**inputs: object) -> object:
        calls.append(1)
        outcome = forward(**inputs)
        if len(calls) == 2:
            raise MemoryError
        return outcome

    free = engine.cache.free_tokens
    with monkeypatch.context() as patch:
        patch.setattr(recurrent.module, "forward", failing)
        with pytest.raises(MemoryError):
            engine.run([Chunk(first, a[6:]), Chunk(second, b[6:])])
    assert (first.length, first.pending, second.length, second.pending) == (6, 0, 6, 0)
    assert engine.cache.free_tokens == free
    for sequence, text, logits_V in ((first, a, expected[0]), (second, b, expected[1])):
        torch.testing.assert_close(feed(engine, sequence, text[6:]), logits_V, atol=1e-4, rtol=1e-4)


def test_a_prompt_that_must_be_whole_is_computed_at_its_end(recurrent: Model) -> None:
    engine = engine_of(replace(recurrent, whole_prompts=True))
    sequence = engine.cache.sequence()
    engine.run([Chunk(sequence, [3, 4, 5])])
    assert (engine.forward_seconds, sequence.computed, sequence.pending) == (0.0, 0, 3)
    sequence.advance(range(3))
    engine.run([Chunk(sequence, [6], rows=[0])])
    assert (sequence.computed, sequence.length) == (4, 3)


def test_the_time_of_parts_that_are_put_off_is_no_measure_of_a_step(recurrent: Model) -> None:
    """A step that ends a prompt may compute all of it, however long the steps before it took."""
    engine = engine_of(replace(recurrent, whole_prompts=True))
    introduced = Welcome("target", "tiny", recurrent.vocabulary, recurrent.context)
    loop = VerifyLoop(engine, introduced, TargetLimits(budget=Budget(tokens=8, alone=16)))
    said = []
    forward = engine._forward
    engine._forward = lambda *given: said.append(loop.longest_step()) or forward(*given)  # type: ignore[method-assign]
    tokens = tuple(random_tokens(40, seed=1))
    loop.receive("router", Open(SessionId(1), 1, tokens, Sampling(temperature=0.0), Limits(43)))
    while loop.step() is not None:
        pass
    assert len(said) == 3 and set(said) == {None}


def test_a_sequence_that_is_freed_keeps_no_state(recurrent: Model) -> None:
    engine = engine_of(recurrent)
    sequence = engine.cache.sequence()
    feed(engine, sequence, [3, 4, 5])
    assert sequence.state is not None
    sequence.free()
    assert (sequence.state, sequence.fed, sequence.reuse()) == (None, [], 0)


def test_what_cannot_be_computed_is_refused_and_nothing_changes(recurrent: Model) -> None:
    engine = engine_of(recurrent, capacity=16)
    sequence = engine.cache.sequence()
    engine.run([Chunk(sequence, [3, 4])])
    for chunk, error, message in [
        (Chunk(sequence, [5, 6], [1, 1]), ValueError, "computes no trees"),
        (Chunk(sequence, [5], [-1]), ValueError, "computes no trees"),
        (Chunk(sequence, []), ValueError, "a chunk without tokens"),
        (Chunk(sequence, [5], rows=[1]), ValueError, "row 1 of a chunk of 1 tokens"),
        (Chunk(sequence, [256]), ValueError, re.escape("token ids must be in [0, 256), got 256 to 256")),
        (Chunk(sequence, [5] * 15), CacheFull, "15 tokens need 2 free blocks, there are 1"),
        (Chunk(sequence, [5] * 255), ValueError, "position 256 is beyond the model's context of 256 tokens"),
    ]:
        with pytest.raises(error, match=message):
            engine.run([chunk])
        assert (sequence.pending, sequence.fed, engine.cache.ledger.free) == (2, [3, 4], 1)


def test_no_rows_are_no_rows(recurrent: Model) -> None:
    engine = engine_of(recurrent)
    assert engine.run([]).shape == engine.run([Chunk(engine.cache.sequence(), [3])]).shape == (0, 256)


def test_a_target_says_that_it_serves_without_speculation(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = EngineSettings(save("mamba2", tmp_path), dtype="float32", cache_tokens=64)
    with caplog.at_level(logging.WARNING):
        engine = build_target(settings)
    assert not engine.speculates
    assert not welcome(settings, engine.model, "target").speculates
    why = "model type 'mamba2' cannot speculate: it keeps a recurrent state, which cannot roll back"
    assert caplog.messages == [f"{tmp_path} is served without speculation: {why}"]


async def test_a_draft_worker_refuses_it_in_one_line(tmp_path: Path) -> None:
    path = save("lfm2", tmp_path)
    with pytest.raises(ModelError, match=r"^model type 'lfm2' cannot speculate: its layers must each .*$") as caught:
        await start_draft(DraftSettings(EngineSettings(path, dtype="float32")), await Door.open("draft", "127.0.0.1:0"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("self_test", [False, True])
def test_prompts_of_unknown_model_types_are_taken_whole(
    self_test: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save("mamba2", tmp_path)
    monkeypatch.setattr("engine.loading.loader.RIGHT_IN_PARTS", frozenset({"mamba"}))
    model = load(path, dtype="fp32", device="cpu", self_test=self_test, without_speculation=True)
    assert model.whole_prompts


def test_a_cache_that_goes_wrong_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.loading.loader.RIGHT_IN_PARTS", frozenset({"jamba"}))
    with pytest.raises(
        ModelError, match=r"'jamba' cannot speculate: .*; nor can it be served without: .* logits differ"
    ):
        load(save("jamba", tmp_path), dtype="fp32", device="cpu", without_speculation=True)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_cache_that_sequences_share_is_refused(dtype: str, tmp_path: Path) -> None:
    """This one keeps its state in the layers themselves."""
    with pytest.raises(ModelError, match="its own cache mixes sequences: they change each other by"):
        load(save("recurrent_gemma", tmp_path), dtype=dtype, device="cpu", without_speculation=True)


def test_logits_that_are_no_numbers_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever made them so: such weights themselves are refused before."""
    monkeypatch.setattr("engine.loading.loader._check_numbers", lambda *_: None)
    folder = tmp_path / "model"
    path = save("mamba2", folder)
    stock = Stock(path)._module
    with torch.no_grad():
        next(iter(stock.parameters()))[:] = float("nan")
    stock.save_pretrained(folder)
    with pytest.raises(ModelError, match=r"logits are not numbers in torch\.float32; check the weights"):
        load(path, dtype="fp32", device="cpu", without_speculation=True)
