"""Multi-token prediction layers of a model's own checkpoint: read, equal to a plain reference, and lossless."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from engine.build import build_target
from engine.eagle import mtp
from engine.interface import StepEngine
from engine.model import ModelError
from engine.parallel import group
from engine.settings import EngineSettings
from speculation.messages import Source
from tests.eagle_heads import GREEDY, WARM, Watched, loop_of, opening, plain_texts, texts, watched
from tests.ranks import needs_no_gpu, on_ranks
from tests.unit.engine.engine_models import as_hub_id, save_model
from tests.unit.engine.test_families import FAMILIES as KNOWN
from tests.unit.engine.test_families import STATE

LAYERS, SIZE = 3, 64


@pytest.fixture(scope="module", params=mtp.FAMILIES)
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model of four layers, and one of three whose checkpoint has the fourth for a prediction layer."""
    whole, folder = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("mtp")
    save_model(request.param, whole, **KNOWN[request.param].changes | {"num_hidden_layers": LAYERS + 1})
    tensors = load_file(whole / "model.safetensors")
    generator, prefix = torch.Generator().manual_seed(2), f"model.layers.{LAYERS}."
    tensors |= {f"{prefix}{name}.weight": 1 + torch.rand(SIZE, generator=generator) for name in ("enorm", "hnorm")}
    tensors[f"{prefix}eh_proj.weight"] = torch.randn(SIZE, 2 * SIZE, generator=generator) * 0.15
    tensors[f"{prefix}shared_head.norm.weight"] = 1 + torch.rand(SIZE, generator=generator)
    tensors[f"{prefix}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    tensors[f"{prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((whole / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": LAYERS}))
    return whole, folder


def settings_of(folder: Path) -> EngineSettings:
    return EngineSettings(str(folder), dtype="fp32", device="cpu", cache_tokens=512, eagle="mtp")


def engine_of(folder: Path) -> StepEngine:
    return build_target(settings_of(folder))


def reference(whole: Path, folder: Path, tokens: list[int]) -> Tensor:
    """The normed states of all rows in one causal pass of transformers' own layer, ``[T - 1, D]``."""
    module: Any = AutoModelForCausalLM.from_pretrained(whole, attn_implementation="eager", dtype=torch.float32)
    module.eval()
    layer = module.model.layers[LAYERS]
    module.model.layers = module.model.layers[:LAYERS]
    module.config.num_hidden_layers = LAYERS
    stored = load_file(folder / "model.safetensors")

    def normed(x_ND: Tensor, name: str) -> Tensor:
        weight_D = stored[f"model.layers.{LAYERS}.{name}.weight"]
        scale_N1 = torch.rsqrt(x_ND.pow(2).mean(-1, keepdim=True) + float(module.config.rms_norm_eps))
        return x_ND * scale_N1 * weight_D

    with torch.inference_mode():
        states_ND = module.model(input_ids=torch.tensor([tokens]), use_cache=False).last_hidden_state[0, :-1]
        embedded_ND = module.model.embed_tokens(torch.tensor(tokens[1:]))
        both = torch.cat((normed(embedded_ND, "enorm"), normed(states_ND, "hnorm")), -1)
        x_1ND = (both @ stored[f"model.layers.{LAYERS}.eh_proj.weight"].T)[None]
        count = len(tokens) - 1
        positions = torch.arange(count)[None]
        mask = torch.full((1, 1, count, count), float("-inf")).triu(1)
        angles = module.model.rotary_emb(x_1ND, positions)
        out = layer(x_1ND, attention_mask=mask, position_ids=positions, position_embeddings=angles)
        return normed(out[0], "shared_head.norm")


def test_the_layer_is_what_transformers_computes(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    whole, folder = folders
    monkeypatch.setattr("target_service.drafting.eagle.CachedHead", Watched)
    loop = loop_of(engine_of(folder))
    one = opening(4, GREEDY)
    truth = [*one.tokens, *texts(loop, [one])[4]]
    expected = reference(whole, folder, truth)
    read = watched(loop).read
    assert len(read) >= len(truth) - 4
    for (position, token), normed_D in read.items():
        assert token == truth[position + 1]
        torch.testing.assert_close(normed_D, expected[position], atol=1e-4, rtol=1e-4)


def test_texts_are_those_without(folders: tuple[Path, Path]) -> None:
    engine = engine_of(folders[1])
    openings = [opening(n, WARM if n % 2 else GREEDY) for n in range(4)]
    loop = loop_of(engine)
    assert texts(loop, openings) == plain_texts(engine.model, openings)
    assert loop.counters.offered_from[Source.EAGLE] > 50


@needs_no_gpu
@pytest.mark.thorough
def test_on_two_ranks_it_says_what_it_says_on_one(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "COMPUTING", timedelta(seconds=20))  # so long it hangs if it asks ranks for anything
    alone = engine_of(folders[1])
    openings = [opening(n, WARM if n % 2 else GREEDY) for n in range(4)]
    one = loop_of(alone)
    expected = texts(one, openings)
    with on_ranks(settings_of(folders[1])) as engine:
        two = loop_of(engine)
        assert texts(two, openings) == expected
    offered, accepted = two.counters.offered_from[Source.EAGLE], two.counters.accepted_from[Source.EAGLE]
    assert offered == one.counters.offered_from[Source.EAGLE] > 50
    assert accepted == one.counters.accepted_from[Source.EAGLE]


def test_a_model_of_a_hub_has_its_layer_there(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = engine_of(folders[1]).model
    fetched = replace(model, name=as_hub_id(model.name, tmp_path, monkeypatch))
    expected, found = (mtp.load_mtp(one).state_dict() for one in (model, fetched))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("lost", "said"),
    [("eh_proj.weight", "lacks model.layers.3.eh_proj.weight"), ("mlp.gate.weight", "layer lacks")],
)
def test_what_is_missing_is_named(folders: tuple[Path, Path], tmp_path: Path, lost: str, said: str) -> None:
    tensors = load_file(folders[1] / "model.safetensors")
    del tensors[f"model.layers.{LAYERS}.{lost}"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((folders[1] / "config.json").read_text())
    with pytest.raises(ModelError, match=said):
        engine_of(tmp_path)


@needs_no_gpu
def test_a_quantised_layer_is_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Without their scales the numbers would make a head that nothing is accepted from."""
    tensors = load_file(folders[1] / "model.safetensors")
    name = f"model.layers.{LAYERS}.eh_proj.weight"
    tensors |= {name: tensors[name].to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.ones(1, 1)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    how = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["model", "lm_head"]}
    said = json.loads((folders[1] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(said | {"quantization_config": how}))
    with pytest.raises(ModelError, match=r"layer is quantised, with scales like 'eh_proj\.weight_scale_inv'"):
        engine_of(tmp_path)


@pytest.mark.parametrize(
    ("family", "said"), [("llama", "layers of model type 'llama' are not read"), ("qwen3_next", STATE)]
)
def test_a_family_without(tmp_path: Path, family: str, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        engine_of(Path(save_model(family, tmp_path, **KNOWN[family].changes)))
