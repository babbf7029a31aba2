"""Training Medusa heads: they learn, the best are kept, a run that is stopped goes on, mistakes end in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from alignment.errors import Interrupted
from alignment.heads.medusa import MedusaOptions, MedusaTraining
from alignment.workplace import Workplace
from cluster.cli import main
from engine.loading.loader import Model, load
from engine.loading.self_test import STOCK
from engine.medusa import read
from tests.bundled import MODELS
from tests.unit.engine.engine_models import random_tokens, save_model

OPTIONS = MedusaOptions(heads=2, steps=36, batch_tokens=128, sequence=32, rate=1e-2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Says its tokens with much confidence, so that there is something to learn."""
    folder = save_model("llama", tmp_path_factory.mktemp("tiny"), num_hidden_layers=1, tie_word_embeddings=True)
    loaded = load(folder, dtype="fp32", device="cpu", pack=False, self_test=False)
    loaded.module.set_attn_implementation(STOCK)  # type: ignore[operator]
    return loaded


class OneText:
    """Batches of one text, over and over; may be stopped at a step."""

    def __init__(self, stop: int = -1) -> None:
        self.rows = [random_tokens(33, seed) for seed in range(4)]
        self._stop = stop

    def at(self, step: int, sequences: int, length: int) -> Tensor:
        if step == self._stop:
            raise KeyboardInterrupt
        return torch.tensor(self.rows[:sequences])[:, : length + 1]


def training(model: Model, out: Path, options: MedusaOptions = OPTIONS) -> MedusaTraining:
    place = Workplace(out, {"options": str(options)}, resume=True)
    return MedusaTraining(model, cast(Any, None), options, place, lambda _: None)


@pytest.mark.parametrize("shared", [False, True])
def test_heads_learn_what_the_target_says(model: Model, tmp_path: Path, shared: bool) -> None:
    text = OneText()
    options = MedusaOptions(**{**{name: getattr(OPTIONS, name) for name in OPTIONS.__slots__}, "shared_output": shared})
    figures = training(model, tmp_path / "out", options).fit(text, text.rows)
    before, after = figures["before"], figures["after"]
    assert after["run"] > before["run"] + 0.2
    assert min(after["by_head"]) > max(before["by_head"]) + 0.1
    assert figures["best_step"] > 0
    found = read(tmp_path / "out")
    assert (len(found), found.layers, len(found.outputs)) == (2, 1, 1 if shared else 2)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["base_model_name_or_path"] == model.name


def test_measured_is_how_many_in_a_row_are_right(model: Model, tmp_path: Path) -> None:
    """By hand: head i read at t against what the target says after t + 1 + i."""
    one = training(model, tmp_path / "out")
    one.begin(OneText())
    row = random_tokens(20, seed=3)
    with torch.inference_mode():
        output = model.module(input_ids=torch.tensor([row]), use_cache=False, output_hidden_states=True)
        said = output.logits[0].argmax(-1).tolist()
        guessed = [one._heads.head(head, output.hidden_states[-1][0]).argmax(-1).tolist() for head in range(2)]
    rights = [[guessed[head][t] == said[t + 1 + head] for head in range(2)] for t in range(18)]
    found = one.measure([row])
    assert found.by_head == tuple(round(sum(right[head] for right in rights) / 18, 4) for head in range(2))
    assert found.run == round(sum(first + (first and second) for first, second in rights) / 18, 4)


def test_a_run_that_is_stopped_goes_on_as_if_it_had_not(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("alignment.training.CHECKPOINT_SECONDS", 0.0)
    text = OneText()
    whole = training(model, tmp_path / "whole").fit(text, text.rows)
    with pytest.raises(Interrupted, match="goes on from the last checkpoint"):
        training(model, tmp_path / "parts").fit(OneText(stop=7), text.rows)
    parts = training(model, tmp_path / "parts").fit(text, text.rows)
    assert {**parts, "seconds": 0} == {**whole, "seconds": 0}
    one, other = (read(tmp_path / name).tensors() for name in ("whole", "parts"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_training_ends_when_nothing_gets_better(model: Model, tmp_path: Path) -> None:
    text = OneText()
    still = MedusaOptions(heads=2, steps=240, batch_tokens=32, sequence=32, rate=1e-9)
    figures = training(model, tmp_path / "out", still).fit(text, text.rows)
    assert figures["step"] < 120
    assert (figures["best_step"], figures["after"]) == (0, figures["before"])


def command(tmp_path: Path, *flags: str, data: str | None = None) -> list[str]:
    text = Path(__file__).parents[2] / "speculation"
    given = ["--target", str(MODELS / "target"), "--data", data or str(text), "--out", str(tmp_path / "out")]
    return ["align", "medusa", *given, "--dtype", "float32", *flags]


def test_the_command_trains_and_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--heads", "1", "--steps", "2", "--batch-tokens", "64", "--sequence", "32")
    assert main(command(tmp_path, *flags)) == 0
    assert "in a row" in capsys.readouterr().out
    assert len(read(tmp_path / "out")) == 1
    assert main(command(tmp_path, *flags)) == 0
    assert "done before with the same settings" in capsys.readouterr().err


Change = Callable[[Path], list[str]]
BAD: list[tuple[Change, str]] = [
    (lambda path: command(path, "--heads", "0"), "--heads must be from 1 to 32, got 0"),
    (lambda path: command(path, "--rate", "nan"), "--rate must be from 1e-09 to 1, got nan"),
    (lambda path: command(path, data=str(path / "none.txt")), "none.txt: no such file or folder"),
    (
        lambda path: command(path, "--heads", "20", "--sequence", "16"),
        "--sequence must be more than the 21 tokens that are guessed",
    ),
    (lambda path: command(path, "--sequence", "9000"), "at most the context (1024), got 9000"),
]


@pytest.mark.parametrize(("given", "said"), BAD, ids=[said for _, said in BAD])
def test_mistakes_end_in_one_line(given: Change, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(given(tmp_path)) == 2
    told = capsys.readouterr().err
    assert said in told
    assert "Traceback" not in told
