"""The published layout of Medusa heads, what they compute, and every way in which a checkpoint does not fit."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from cluster.cli import main
from engine.build import build_target
from engine.loading.loader import Model
from engine.medusa import CONFIG, FILES, MedusaHeads, load_heads, read, save
from engine.model import ModelError
from engine.settings import EngineSettings
from tests.unit.engine.engine_models import load_tiny, save_model

HIDDEN, VOCABULARY, HEADS, LAYERS = 64, 256, 3, 2
STORED_AS = FILES[1]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_tiny("llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=1)


def tensors(
    heads: int = HEADS, layers: int = LAYERS, hidden: int = HIDDEN, vocabulary: int = VOCABULARY
) -> dict[str, Tensor]:
    """Random weights under the names that the authors' training gives them."""
    generator = torch.Generator().manual_seed(5)
    named = {}
    for head in range(heads):
        for layer in range(layers):
            named[f"{head}.{layer}.linear.weight"] = torch.randn(hidden, hidden, generator=generator) * 0.2
            named[f"{head}.{layer}.linear.bias"] = torch.randn(hidden, generator=generator)
        named[f"{head}.{layers}.weight"] = torch.randn(vocabulary, hidden, generator=generator)
    return named


def write(folder: Path, named: dict[str, Tensor], config: object = None, file: str = STORED_AS) -> Path:
    folder.mkdir(exist_ok=True)
    known = {"medusa_num_heads": HEADS, "medusa_num_layers": LAYERS, "base_model_name_or_path": "somewhere"}
    (folder / CONFIG).write_text(json.dumps(known if config is None else config))
    if file.endswith(".safetensors"):
        save_file(named, folder / file)
    else:
        torch.save(named, folder / file)
    return folder


def by_the_paper(named: dict[str, Tensor], hidden_ND: Tensor, head: int) -> Tensor:
    """W2 (SiLU(W1 h + b) + h), with as many blocks as there are."""
    for layer in range(LAYERS):
        z = torch.einsum("oi,ni->no", named[f"{head}.{layer}.linear.weight"], hidden_ND)
        z = z + named[f"{head}.{layer}.linear.bias"]
        hidden_ND = hidden_ND + z / (1 + torch.exp(-z))
    return torch.einsum("vi,ni->nv", named[f"{head}.{LAYERS}.weight"], hidden_ND)


@pytest.mark.parametrize("prefix", ["", "medusa_head.", "medusa_heads.", "module.medusa_head."])
@pytest.mark.parametrize("file", FILES)
def test_heads_compute_what_the_paper_says(model: Model, tmp_path: Path, file: str, prefix: str) -> None:
    named = tensors()
    folder = write(tmp_path / "heads", {prefix + name: tensor for name, tensor in named.items()}, file=file)
    hidden_ND = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(6))
    with torch.inference_mode():
        logits_HNV = load_heads(str(folder), model)(hidden_ND)
    assert logits_HNV.shape == (HEADS, 5, VOCABULARY)
    for head in range(HEADS):
        torch.testing.assert_close(logits_HNV[head], by_the_paper(named, hidden_ND, head), atol=1e-4, rtol=1e-4)


def test_what_is_saved_is_read_again_and_a_shared_output_layer_is_stored_once(tmp_path: Path) -> None:
    sizes = {}
    for shared in (False, True):
        heads = MedusaHeads(HIDDEN, VOCABULARY, HEADS, LAYERS, shared=shared)
        with torch.no_grad():
            for name, parameter in heads.named_parameters():
                parameter.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(len(name)))
        save(heads, tmp_path / str(shared), "base", torch.float32)
        again = read(tmp_path / str(shared))
        assert len(again.outputs) == (1 if shared else HEADS)
        assert all(torch.equal(again.tensors()[name], tensor) for name, tensor in heads.tensors().items())
        hidden_ND = torch.randn(2, HIDDEN)
        with torch.no_grad():
            torch.testing.assert_close(again(hidden_ND), heads(hidden_ND))
            torch.testing.assert_close(again.head(2, hidden_ND), heads(hidden_ND)[2])
        sizes[shared] = (tmp_path / str(shared) / STORED_AS).stat().st_size
    assert sizes[False] - sizes[True] > 1.9 * 4 * HIDDEN * VOCABULARY


def test_fresh_heads_say_what_their_output_layers_say() -> None:
    """Blocks begin as nothing, so that training starts from the target's own output layer."""
    heads = MedusaHeads(HIDDEN, VOCABULARY, 2, 1)
    hidden_ND = torch.randn(3, HIDDEN)
    with torch.no_grad():
        torch.testing.assert_close(heads.head(1, hidden_ND), heads.outputs[1](hidden_ND))


def changed(name: str, tensor: Tensor | None) -> dict[str, Tensor]:
    named: dict[str, Any] = tensors() | {name: tensor}
    return {key: value for key, value in named.items() if value is not None}


class Harmful:
    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return print, ("this must not run",)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"named": tensors(2)}, "lacks 5 tensors, first '2.0.linear.bias'; config.json tells of 3 heads of 2 blocks"),
    ({"named": tensors(4)}, "has 5 tensors too many, first '3.0.linear.bias'"),
    ({"named": tensors(layers=1)}, "lacks 9 tensors"),
    ({"named": tensors(hidden=32)}, "read hidden states of 32 numbers"),
    ({"named": tensors(vocabulary=200)}, "know 200 tokens"),
    ({"named": tensors(vocabulary=300)}, "know 300 tokens"),
    ({"named": changed("1.0.linear.weight", torch.zeros(64, 32))}, "'1.0.linear.weight' has the shape [64, 32]"),
    ({"named": changed("2.2.weight", torch.zeros(64))}, "'2.2.weight' has the shape [64]"),
    ({"named": changed("0.2.weight", torch.zeros(64))}, "'0.2.weight' has the shape [64]"),
    ({"named": changed("0.1.linear.bias", torch.zeros(64, dtype=torch.int8))}, "holds torch.int8"),
    ({"named": changed("0.1.linear.bias", torch.full((64,), torch.nan))}, "holds NaN or infinite values"),
    ({"config": {"medusa_num_layers": 1}}, "has no medusa_num_heads"),
    ({"config": {"medusa_num_heads": 3}}, "has no medusa_num_layers"),
    ({"config": [1]}, "has no medusa_num_heads"),
    ({"config": {"medusa_num_heads": 10**9, "medusa_num_layers": 1}}, "a whole number from 1 to 32, got 1000000000"),
    ({"config": {"medusa_num_heads": "3", "medusa_num_layers": 1}}, "a whole number from 1 to 32, got '3'"),
    ({"named": {}}, "lacks 15 tensors"),
    ({"named": [1, 2]}, "must hold tensors by name"),
]


@pytest.mark.parametrize(("given", "said"), BAD, ids=[said for _, said in BAD])
def test_what_does_not_fit_is_refused_in_one_line(
    model: Model, tmp_path: Path, given: dict[str, Any], said: str
) -> None:
    folder = write(tmp_path / "heads", **{"named": tensors(), **given})
    refused(model, folder, said)


def refused(model: Model, folder: Path, said: str) -> None:
    with pytest.raises(ModelError) as error:
        load_heads(str(folder), model)
    assert said in str(error.value)
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("file", FILES)
def test_files_that_cannot_be_read_are_refused(
    model: Model, tmp_path: Path, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(model, tmp_path / "nowhere", "no such folder")
    folder = tmp_path / "heads"
    folder.mkdir()
    refused(model, folder, "not a folder of Medusa heads, it has no config.json")
    write(folder, tensors(), file=file)
    whole = (folder / file).read_bytes()
    for wrong in (b"", b"not tensors", whole[: len(whole) // 2], pickle.dumps({"0.0.linear.weight": Harmful()}, 2)):
        (folder / file).write_bytes(wrong)
        refused(model, folder, f"{file}: cannot be read")
    (folder / file).unlink()
    refused(model, folder, "has no weights; they must be in medusa_lm_head.safetensors or medusa_lm_head.pt")
    (folder / CONFIG).write_text("{")
    refused(model, folder, "config.json: cannot be read")
    assert "must not run" not in capsys.readouterr().out


def test_a_model_that_cannot_speculate_takes_no_heads(tmp_path: Path) -> None:
    folder = save_model("mamba", tmp_path / "model")
    settings = EngineSettings(folder, device="cpu", dtype="fp32", medusa=str(write(tmp_path / "heads", tensors())))
    with pytest.raises(ModelError, match="cannot use Medusa heads: model type 'mamba' cannot speculate"):
        build_target(settings)


def test_a_worker_does_not_start_with_what_is_no_folder_of_heads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["worker", "target", "--medusa", str(tmp_path), "--listen", "127.0.0.1:0"]) == 2
    assert f"--medusa {tmp_path}: not a folder of Medusa heads" in capsys.readouterr().err
