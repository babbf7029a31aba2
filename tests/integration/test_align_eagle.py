"""Training EAGLE-3 heads: training-time test is what drafting is, heads learn, go on, and have the published layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from alignment.errors import Interrupted
from alignment.heads.eagle import EagleOptions, EagleTraining, read_target, unroll
from alignment.workplace import Workplace
from cluster.cli import main
from engine.eagle.config import EagleConfig
from engine.eagle.head import EagleHead
from engine.eagle.loading import load_beside, read
from engine.loading.loader import Model, load
from engine.loading.self_test import STOCK
from tests.bundled import MODELS
from tests.unit.engine.engine_models import random_tokens, save_model
from tests.unit.engine.test_eagle_heads import Cached

OPTIONS = EagleOptions(depth=3, steps=40, batch_tokens=128, sequence=32, rate=5e-3)


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


def training(model: Model, out: Path, options: EagleOptions = OPTIONS) -> EagleTraining:
    place = Workplace(out, {"options": str(options)}, resume=True)
    return AsItIs(model, cast(Any, None), options, place, lambda _: None)


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


def test_heads_learn_what_the_target_says_and_serve_it(model: Model, tmp_path: Path) -> None:
    text = OneText()
    figures = training(model, tmp_path / "out").fit(text, text.rows)
    before, after = figures["before"], figures["after"]
    assert after["run"] > before["run"] + 0.3
    assert figures["best_step"] > 0
    found = load_beside(str(tmp_path / "out"), model)
    assert found.config.aux_layers == (1, 2, 2)
    assert found.target_ids.tolist() == list(range(256))


def test_a_reduced_vocabulary_has_the_tokens_that_come_most_often(model: Model, tmp_path: Path) -> None:
    text = OneText()
    options = EagleOptions(depth=2, steps=2, batch_tokens=128, sequence=32, vocabulary=20)
    training(model, tmp_path / "out", options).fit(text, text.rows)
    counts = torch.bincount(torch.tensor(text.rows).flatten(), minlength=256)
    head = load_beside(str(tmp_path / "out"), model)
    assert len(head.target_ids) == 20
    others = [token for token in range(256) if token not in head.target_ids.tolist()]
    assert int(counts[head.target_ids].min()) >= int(counts[others].max())


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
    one, other = (load_beside(str(tmp_path / name), model).state_dict() for name in ("whole", "parts"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_head_goes_on_from_another(model: Model, tmp_path: Path) -> None:
    """Of another depth: it begins as right as that one ended, and leaves the target and the other alone."""
    text, embedding = OneText(), cast(Any, model.module).get_input_embeddings().weight
    before = embedding.detach().clone()
    first = training(model, tmp_path / "first").fit(text, text.rows)
    written = (tmp_path / "first" / "model.safetensors").read_bytes()
    options = replace(OPTIONS, depth=4, farther=0.9, start=str(tmp_path / "first"), rate=1e-4)
    second = training(model, tmp_path / "second", options).fit(text, text.rows)
    assert second["before"]["by_head"][:3] == pytest.approx(first["after"]["by_head"], abs=0.1)
    assert second["after"]["run"] >= second["before"]["run"] > first["before"]["run"]
    assert torch.equal(embedding, before) and (tmp_path / "first" / "model.safetensors").read_bytes() == written


def test_the_command_trains_and_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, out = Path(__file__).parents[2] / "speculation", tmp_path / "out"
    given = ["align", "eagle", "--target", str(MODELS / "target"), "--data", str(text), "--out", str(out)]
    flags = ["--dtype", "float32", "--depth", "2", "--steps", "2", "--batch-tokens", "64", "--sequence", "32"]
    assert main([*given, *flags]) == 0
    assert "in a row" in capsys.readouterr().out

    def targets_own(name: str) -> Tensor:
        assert name == "embed_tokens.weight"
        return torch.zeros(4096, 256)

    assert read(out, targets_own).config.aux_layers == (2, 4, 5)
    assert main([*given, *flags]) == 0
    assert "done before with the same settings" in capsys.readouterr().err
    assert main([*given, "--start", str(out), "--layers", "2"]) == 2
    assert "--layers is that of the head that --start names" in capsys.readouterr().err
    assert main([*given, "--no-resume", "--start", str(MODELS / "draft")]) == 2
    assert "models/draft" in capsys.readouterr().err
    assert main([*given, "--depth", "0"]) == 2
    assert "--depth must be from 1 to 16, got 0" in capsys.readouterr().err
