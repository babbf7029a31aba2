"""Training heads: they learn, the best are kept, a run that is stopped goes on, mistakes end in one line.

Medusa's, and EAGLE-3's, whose training-time test is what drafting is.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from alignment.heads.eagle import EagleTraining, read_target, unroll
from alignment.heads.medusa import MedusaTraining
from alignment.options import EagleOptions, Interrupted, MedusaOptions
from alignment.workplace import Workplace
from cluster.cli import main
from engine.eagle.config import EagleConfig
from engine.eagle.head import EagleHead
from engine.eagle.loading import load_beside
from engine.eagle.loading import read as read_eagle
from engine.loading.loader import Model, load
from engine.loading.self_test import STOCK
from engine.medusa import read as read_medusa
from tests.bundled import MODELS
from tests.unit.engine.engine_models import random_tokens, save_model
from tests.unit.engine.test_eagle_heads import Cached

MEDUSA = MedusaOptions(heads=2, steps=36, batch_tokens=128, sequence=32, rate=1e-2)
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
    """Batches of one text, over and over; may be stopped at a step."""

    def __init__(self, stop: int = -1) -> None:
        self.rows = [random_tokens(33, seed) for seed in range(4)]
        self._stop = stop

    def at(self, step: int, sequences: int, length: int) -> Tensor:
        if step == self._stop:
            raise KeyboardInterrupt
        return torch.tensor(self.rows[:sequences])[:, : length + 1]


class AsItIs(EagleTraining):
    """Measures on the text held out itself, which random models go on from in no interesting way."""

    def _held_out(self, rows: list[Any]) -> list[Any]:
        return rows


def training(model: Model, out: Path, options: Any = MEDUSA) -> Any:
    place = Workplace(out, {"options": str(options)}, resume=True)
    kind: Any = MedusaTraining if isinstance(options, MedusaOptions) else AsItIs
    return kind(model, cast(Any, None), options, place, lambda _: None)


@pytest.mark.parametrize("options", [MEDUSA, replace(MEDUSA, shared_output=True), EAGLE])
def test_heads_learn_what_the_target_says(model: Model, tmp_path: Path, options: Any) -> None:
    text = OneText()
    figures = training(model, tmp_path / "out", options).fit(text, text.rows)
    before, after = figures["before"], figures["after"]
    assert after["run"] > before["run"] + 0.2
    assert figures["best_step"] > 0
    if options is EAGLE:
        head = load_beside(str(tmp_path / "out"), model)
        assert (head.config.aux_layers, head.target_ids.tolist()) == ((1, 2, 2), list(range(256)))
        return
    assert min(after["by_head"]) > max(before["by_head"]) + 0.1
    found = read_medusa(tmp_path / "out")
    assert (len(found), found.layers, len(found.outputs)) == (2, 1, 1 if options.shared_output else 2)
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


def test_training_time_test_is_what_drafting_computes(model: Model) -> None:
    """Row by row with a cache that forgets: every place of every step has the logits of drafting from there."""
    torch.manual_seed(3)
    rope = {"rope_type": "default", "rope_theta": 500.0}
    config = EagleConfig(64, 64, 256, 256, 1, 4, 2, 16, 80, 1e-5, 128, rope, aux_layers=(0, 1, 2))
    head, depth = EagleHead(config), 3
    tokens = torch.tensor([random_tokens(12, seed=1)])
    with torch.inference_mode():
        aux, _ = read_target(model.module, tokens, config)
        said = unroll(head, tokens, aux, depth)
        for place in range(tokens.shape[1] - depth - 1):
            attend, states = Cached(), head.fuse(aux[0, : place + 1])
            row, positions = tokens[0, 1 : place + 2], torch.arange(place + 1)
            for step in range(depth):
                states, normed = head(head.embed(row), states, positions, attend)
                torch.testing.assert_close(said[step][0, place], head.logits(normed)[-1], atol=1e-4, rtol=1e-4)
                states, row, positions = states[-1:], tokens[0, place + 2 + step : place + 3 + step], positions[-1:] + 1


def test_a_reduced_vocabulary_has_the_tokens_that_come_most_often(model: Model, tmp_path: Path) -> None:
    text = OneText()
    training(model, tmp_path / "out", replace(EAGLE, depth=2, steps=2, vocabulary=20)).fit(text, text.rows)
    counts = torch.bincount(torch.tensor(text.rows).flatten(), minlength=256)
    head = load_beside(str(tmp_path / "out"), model)
    assert len(head.target_ids) == 20
    others = [token for token in range(256) if token not in head.target_ids.tolist()]
    assert int(counts[head.target_ids].min()) >= int(counts[others].max())


@pytest.mark.thorough
@pytest.mark.parametrize("options", [MEDUSA, EAGLE])
def test_a_run_that_is_stopped_goes_on_as_if_it_had_not(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: Any
) -> None:
    monkeypatch.setattr("alignment.training.CHECKPOINT_SECONDS", 0.0)
    text = OneText()
    whole = training(model, tmp_path / "whole", options).fit(text, text.rows)
    with pytest.raises(Interrupted, match="goes on from the last checkpoint"):
        training(model, tmp_path / "parts", options).fit(OneText(stop=7), text.rows)
    parts = training(model, tmp_path / "parts", options).fit(text, text.rows)
    assert {**parts, "seconds": 0} == {**whole, "seconds": 0}
    name = "medusa_lm_head.pt" if options is MEDUSA else "model.safetensors"
    assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_training_ends_when_nothing_gets_better(model: Model, tmp_path: Path) -> None:
    text = OneText()
    still = MedusaOptions(heads=2, steps=240, batch_tokens=32, sequence=32, rate=1e-9)
    figures = training(model, tmp_path / "out", still).fit(text, text.rows)
    assert figures["step"] < 120
    assert (figures["best_step"], figures["after"]) == (0, figures["before"])


@pytest.mark.thorough
def test_a_head_goes_on_from_another(model: Model, tmp_path: Path) -> None:
    """Of another depth: it begins as right as that one ended, and leaves the target and the other alone."""
    text, embedding = OneText(), cast(Any, model.module).get_input_embeddings().weight
    before = embedding.detach().clone()
    first = training(model, tmp_path / "first", EAGLE).fit(text, text.rows)
    written = (tmp_path / "first" / "model.safetensors").read_bytes()
    options = replace(EAGLE, depth=4, farther=0.9, start=str(tmp_path / "first"), rate=1e-4)
    second = training(model, tmp_path / "second", options).fit(text, text.rows)
    assert second["before"]["by_head"][:3] == pytest.approx(first["after"]["by_head"], abs=0.1)
    assert second["after"]["run"] >= second["before"]["run"] > first["before"]["run"]
    assert torch.equal(embedding, before) and (tmp_path / "first" / "model.safetensors").read_bytes() == written


def command(kind: str, out: Path, *flags: str, data: str = DATA) -> list[str]:
    given = ["--target", str(MODELS / "target"), "--data", data, "--out", str(out), "--dtype", "float32"]
    return ["align", kind, *given, *flags]


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "size"), [("medusa", "--heads"), ("eagle", "--depth")])
def test_the_command_trains_and_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, size: str) -> None:
    given = command(kind, tmp_path / "out", size, "2", "--steps", "2", "--batch-tokens", "64", "--sequence", "32")
    assert main(given) == 0
    assert "in a row" in capsys.readouterr().out
    if kind == "medusa":
        assert len(read_medusa(tmp_path / "out")) == 2
    else:
        own = {"embed_tokens.weight": torch.zeros(4096, 256)}
        assert read_eagle(tmp_path / "out", own.__getitem__).config.aux_layers == (2, 4, 5)
    assert main(given) == 0
    assert "done before with the same settings" in capsys.readouterr().err


Change = Callable[[Path], list[str]]
BAD: list[tuple[Change, str]] = [
    (lambda path: command("medusa", path, "--heads", "0"), "--heads must be from 1 to 32, got 0"),
    (lambda path: command("medusa", path, "--rate", "nan"), "--rate must be from 1e-09 to 1, got nan"),
    (lambda path: command("medusa", path, data=str(path / "none.txt")), "none.txt: no such file or folder"),
    (
        lambda path: command("medusa", path, "--heads", "20", "--sequence", "16"),
        "--sequence must be more than the 21 tokens that are guessed",
    ),
    (lambda path: command("medusa", path, "--sequence", "9000"), "at most the context (1024), got 9000"),
    (lambda path: command("eagle", path, "--depth", "0"), "--depth must be from 1 to 16, got 0"),
    (
        lambda path: command("eagle", path, "--start", str(path), "--layers", "2"),
        "--layers is that of the head that --start names",
    ),
    (lambda path: command("eagle", path, "--start", str(MODELS / "draft")), "models/draft"),
]


@pytest.mark.parametrize(("given", "said"), BAD, ids=[said for _, said in BAD])
def test_mistakes_end_in_one_line(given: Change, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(given(tmp_path / "out")) == 2
    told = capsys.readouterr().err
    assert said in told
    assert "Traceback" not in told
