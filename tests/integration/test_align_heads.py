"""Training an EAGLE-3 head: it learns, the best is kept, a run that is stopped goes on, mistakes end in one line.

Its training-time test is what drafting is.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from alignment.data import Conversation, Passage
from alignment.eagle.training import EagleTraining
from alignment.eagle.unrolled import read_target, unroll
from alignment.encoding import EncodedText, Encoder, tokenizer_of
from alignment.options import DataError, EagleOptions, Interrupted
from alignment.pair import load_stock
from alignment.training import Trainer
from alignment.workplace import Workplace
from alignment.writing import WrittenRow
from cluster.cli import main
from engine.eagle.config import EagleConfig
from engine.eagle.head import EagleHead
from engine.eagle.loading import load_beside, read, save
from engine.loading.checkpoint import STOCK
from engine.loading.loader import Model, load
from engine.model import ModelError
from tests.bundled import MODELS
from tests.unit.engine.engine_models import random_tokens, save_model
from tests.unit.engine.test_eagle_heads import Cached

EAGLE = EagleOptions(depth=3, steps=40, batch_tokens=128, sequence=32, rate=5e-3)
DATA = str(Path(__file__).parents[2] / "speculation")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Says its tokens with much confidence, so that there is something to learn."""
    folder = save_model("llama", tmp_path_factory.mktemp("tiny"), num_hidden_layers=3, tie_word_embeddings=True)
    loaded = load(folder, dtype="fp32", device="cpu", pack=False, self_test=False)
    loaded.module.set_attn_implementation(STOCK)  # type: ignore[operator]
    return loaded


class OneText:
    """Batches of one text, over and over."""

    def __init__(self) -> None:
        self.rows = [random_tokens(33, seed) for seed in range(4)]
        self.pieces = [EncodedText(tuple(row[:32]), 0) for row in self.rows]

    def at(self, step: int, sequences: int, length: int) -> Tensor:
        return torch.tensor(self.rows[:sequences])[:, : length + 1]


class AsItIs(EagleTraining):
    """Measures on the text held out itself, which random models go on from in no interesting way."""

    def _held_out(self, pieces: Sequence[EncodedText]) -> list[WrittenRow]:
        return [WrittenRow(piece.ids, len(piece.ids) // 2, 0.0) for piece in pieces]


def training(
    model: Model, out: Path, options: EagleOptions = EAGLE, stopped: Callable[[], bool] = lambda: False
) -> AsItIs:
    place = Workplace(out, {"options": str(options)}, resume=True)
    return AsItIs(model, cast(Any, None), options, place, stopped, lambda _: None)


def test_a_head_learns_what_the_target_says(model: Model, tmp_path: Path) -> None:
    text = OneText()
    figures = training(model, tmp_path / "out").fit(text, text.pieces)
    before, after = figures["before"], figures["after"]
    assert after["run"] > before["run"] + 0.2
    assert figures["best_step"] > 0
    head = load_beside(str(tmp_path / "out"), model)
    assert (head.config.aux_layers, head.target_ids.tolist()) == ((1, 2, 2), list(range(256)))


def test_padding_is_never_what_the_target_says(model: Model, tmp_path: Path) -> None:
    one = training(replace(model, vocabulary=100), tmp_path / "out")
    one.begin(OneText())
    with torch.no_grad():
        _, logits = one._read_target(torch.tensor([random_tokens(33, 0)]))
    assert int(logits.argmax(-1).max()) < 100


def test_measured_is_how_many_in_a_row_are_right(model: Model, tmp_path: Path) -> None:
    """By hand: guess s read at t against what the target says after t + 1 + s, in the second half of the text."""
    text, depth = OneText(), EAGLE.depth
    one = training(model, tmp_path / "out")
    one.fit(text, text.pieces)
    row = text.rows[0][:24]
    said = stock_said(model, row)
    rights = []
    for place in range(12, len(row) - depth):
        guessed = [int(logits.argmax()) for logits in drafted(one._head, model, row, place, depth)]
        rights.append([guess == said[place + 1 + step] for step, guess in enumerate(guessed)])
    found = one.measure([WrittenRow(tuple(row), 12, 0.0)])
    assert found["by_head"] == [round(sum(each) / len(rights), 4) for each in zip(*rights, strict=True)]
    assert found["run"] == round(sum(sum(takewhile(bool, each)) for each in rights) / len(rights), 4)
    assert 0.0 < found["run"] < depth, "some are right and some are not"


def test_measured_is_what_the_target_answers_to_whole_prompts(tmp_path: Path) -> None:
    """However long the beginning that they have in common."""
    target, encoder = load_stock(str(MODELS / "target"), "float32", "cpu", 1), Encoder(tokenizer_of(f"{MODELS}/target"))
    asked = [Conversation(({"role": "user", "content": "Be brief. " * 25 + f"What is {n}?"},)) for n in range(2)]
    pieces = [encoder.piece(Passage(conversation, "")) for conversation in asked]
    place = Workplace(tmp_path / "out", {}, resume=True)
    rows = EagleTraining(target, encoder, EagleOptions(sequence=160), place, lambda: False, print)._held_out(pieces)
    assert len({row.tokens for row in rows}) == 2
    for row, piece in zip(rows, pieces, strict=True):
        assert piece.ids == row.tokens[: row.start] and len(row.tokens) > row.start


def test_text_that_is_too_short_to_be_judged_is_told(model: Model, tmp_path: Path) -> None:
    place = Workplace(tmp_path / "out", {}, resume=True)
    brief = EagleTraining(
        replace(model, stop_tokens=frozenset(range(256))), cast(Any, None), EAGLE, place, lambda: False, print
    )
    with pytest.raises(DataError, match="longer than the 4 tokens guessed"):
        brief._held_out([EncodedText((5, 6, 7, 8), 4)])
    (row,) = brief._held_out([EncodedText((5, 6, 7, 8, 9), 0)])
    assert (row.tokens, row.start) == ((5, 6, 7, 8, 9), 0)


def stock_said(model: Model, row: list[int]) -> list[int]:
    """The target's first choice after each token."""
    with torch.inference_mode():
        found: list[int] = model.module(input_ids=torch.tensor([row]), use_cache=False).logits[0].argmax(-1).tolist()
    return found


@torch.inference_mode()
def drafted(head: EagleHead, model: Model, row: list[int], place: int, depth: int) -> list[Tensor]:
    """What drafting says from a place on, row by row with a cache that forgets, where each guess was the text's."""
    tokens = torch.tensor([row])
    aux, _ = read_target(model.module, tokens, head.config)
    attend, states = Cached(), head.fuse(aux[0, : place + 1])
    fed, positions, said = tokens[0, 1 : place + 2], torch.arange(place + 1), []
    for step in range(depth):
        states, normed = head(head.embed(fed), states, positions, attend)
        said.append(head.logits(normed)[-1])
        states, fed, positions = states[-1:], tokens[0, place + 2 + step : place + 3 + step], positions[-1:] + 1
    return said


def test_training_time_test_is_what_drafting_computes(model: Model) -> None:
    """Every place of every step has the logits of drafting from there."""
    torch.manual_seed(3)
    rope = {"rope_type": "default", "rope_theta": 500.0}
    config = EagleConfig(64, 64, 256, 256, 1, 4, 2, 16, 80, 1e-5, 128, rope, aux_layers=(0, 1, 2))
    head, depth = EagleHead(config), 3
    row = random_tokens(12, seed=1)
    tokens = torch.tensor([row])
    with torch.inference_mode():
        aux, _ = read_target(model.module, tokens, config)
        said = unroll(head, tokens, head.fuse(aux), depth)
    for place in range(len(row) - depth - 1):
        for step, logits in enumerate(drafted(head, model, row, place, depth)):
            torch.testing.assert_close(said[step][0, place], logits, atol=1e-4, rtol=1e-4)


def test_a_reduced_vocabulary_has_the_tokens_that_come_most_often(model: Model, tmp_path: Path) -> None:
    text = OneText()
    training(model, tmp_path / "out", replace(EAGLE, depth=2, steps=2, vocabulary=20)).fit(text, text.pieces)
    counts = torch.bincount(torch.tensor(text.rows).flatten(), minlength=256)
    head = load_beside(str(tmp_path / "out"), model)
    assert len(head.target_ids) == 20
    others = [token for token in range(256) if token not in head.target_ids.tolist()]
    assert int(counts[head.target_ids].min()) >= int(counts[others].max())


@pytest.mark.thorough
def test_a_run_that_is_stopped_goes_on_as_if_it_had_not(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("alignment.training.CHECKPOINT_SECONDS", 0.0)
    text = OneText()
    whole = training(model, tmp_path / "whole").fit(text, text.pieces)
    steps = iter(range(7))
    with pytest.raises(Interrupted, match="stopped after step 8 of 40; the same command goes on from there"):
        training(model, tmp_path / "parts", stopped=lambda: next(steps, None) is None).fit(text, text.pieces)
    parts = training(model, tmp_path / "parts").fit(text, text.pieces)
    assert {**parts, "seconds": 0} == {**whole, "seconds": 0}
    written = [(tmp_path / run / "model.safetensors").read_bytes() for run in ("parts", "whole")]
    assert written[0] == written[1]


def test_training_ends_when_nothing_gets_better(model: Model, tmp_path: Path) -> None:
    text = OneText()
    still = replace(EAGLE, steps=240, batch_tokens=32, rate=1e-9)
    figures = training(model, tmp_path / "out", still).fit(text, text.pieces)
    assert figures["step"] < 120
    assert (figures["best_step"], figures["after"]) == (0, figures["before"])


@pytest.mark.thorough
def test_a_head_goes_on_from_another(model: Model, tmp_path: Path) -> None:
    """Of another depth: it begins as right as that one ended, and leaves the target and the other alone."""
    text, embedding = OneText(), cast(Any, model.module).get_input_embeddings().weight
    before = embedding.detach().clone()
    first = training(model, tmp_path / "first").fit(text, text.pieces)
    written = (tmp_path / "first" / "model.safetensors").read_bytes()
    options = replace(EAGLE, depth=4, farther=0.9, start=str(tmp_path / "first"), rate=1e-4)
    second = training(model, tmp_path / "second", options).fit(text, text.pieces)
    assert second["before"]["by_head"][:3] == pytest.approx(first["after"]["by_head"], abs=0.1)
    assert second["after"]["run"] >= second["before"]["run"] > first["before"]["run"]
    assert torch.equal(embedding, before) and (tmp_path / "first" / "model.safetensors").read_bytes() == written


def test_a_head_keeps_an_embedding_of_its_own(model: Model, tmp_path: Path) -> None:
    text, rope = OneText(), {"rope_type": "default", "rope_theta": 500.0}
    target = model.config.get_text_config(decoder=True)
    config = EagleConfig.beside(target, num_hidden_layers=1, rope_parameters=rope, aux_layers=(0, 1, 2))
    for name, of in (("wide", config), ("narrow", replace(config, hidden_size=32))):
        begun = EagleHead(of)
        save(begun, tmp_path / name, embedding=True)
        options = replace(EAGLE, steps=1, start=str(tmp_path / name))
        training(model, tmp_path / f"{name}-out", options).fit(text, text.pieces)
        head = load_beside(str(tmp_path / f"{name}-out"), model)
        assert torch.equal(head.embed_tokens.weight, begun.embed_tokens.weight.bfloat16().float())


def test_a_head_of_the_last_output_is_refused(model: Model, tmp_path: Path) -> None:
    text, rope = OneText(), {"rope_type": "default", "rope_theta": 500.0}
    target = model.config.get_text_config(decoder=True)
    config = EagleConfig.beside(target, num_hidden_layers=1, rope_parameters=rope, aux_layers=(1, 2, 3))
    save(EagleHead(config), tmp_path / "last")
    options = replace(EAGLE, start=str(tmp_path / "last"))
    with pytest.raises(ModelError, match=r"last: this head reads the output of the target's last layer \(3\)"):
        training(model, tmp_path / "out", options).fit(text, text.pieces)


def command(out: Path, *flags: str, data: str = DATA) -> list[str]:
    given = ["--target", str(MODELS / "target"), "--data", data, "--out", str(out), "--dtype", "float32"]
    return ["align", "eagle", *given, *flags]


@pytest.mark.thorough
def test_the_command_trains_and_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = command(tmp_path / "out", "--depth", "2", "--steps", "2", "--batch-tokens", "64", "--sequence", "32")
    assert main(given) == 0
    assert "in a row" in capsys.readouterr().out
    own = {"embed_tokens.weight": torch.zeros(4096, 256)}
    assert read(tmp_path / "out", own.__getitem__).config.aux_layers == (2, 4, 5)
    assert main(given) == 0
    assert "done before with the same settings" in capsys.readouterr().err


@pytest.mark.parametrize("told", [signal.SIGINT, signal.SIGTERM])
def test_the_command_stops_with_a_checkpoint(
    told: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = Trainer._step

    def stopped_step(trainer: Any, *rest: Any) -> None:
        step(trainer, *rest)
        os.kill(os.getpid(), told)

    monkeypatch.setattr(Trainer, "_step", stopped_step)
    before = signal.signal(told, lambda *_: None)  # what ends the tests, if nothing listens
    try:
        sizes = ("--depth", "2", "--steps", "2", "--batch-tokens", "64", "--sequence", "32", "--data-tokens", "2000")
        assert main(command(tmp_path / "out", *sizes)) == 130
    finally:
        signal.signal(told, before)
    assert "stopped after step 1 of 2; the same command goes on from there" in capsys.readouterr().err
    assert (tmp_path / "out" / ".align" / "checkpoint.pt").exists()


Change = Callable[[Path], list[str]]
BAD: list[tuple[Change, str]] = [
    (lambda path: command(path, "--rate", "nan"), "--rate must be from 1e-09 to 1, got nan"),
    (lambda path: command(path, data=str(path / "none.txt")), "none.txt: no such file or folder"),
    (
        lambda path: command(path, "--depth", "16", "--sequence", "34"),
        "--sequence must be more than twice the 17 tokens that are guessed (--depth and one)",
    ),
    (lambda path: command(path, "--sequence", "9000"), "at most the context (1024), got 9000"),
    (lambda path: command(path, "--depth", "0"), "--depth must be from 1 to 16, got 0"),
    (
        lambda path: command(path, "--start", str(path), "--layers", "2"),
        "--layers is that of the head that --start names",
    ),
    (lambda path: command(path, "--start", str(MODELS / "draft")), "models/draft"),
]


@pytest.mark.parametrize(("given", "said"), BAD, ids=[said for _, said in BAD])
def test_mistakes_end_in_one_line(given: Change, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(given(tmp_path / "out")) == 2
    told = capsys.readouterr().err
    assert said in told
    assert "Traceback" not in told
