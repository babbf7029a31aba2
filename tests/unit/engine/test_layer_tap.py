"""States between decoder layers: those of transformers' own forward, whatever computes the layers and the step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from engine.attention.attention import NAME
from engine.cpu.library import find_library
from engine.interface import Chunk
from engine.layers.fused import RowOpsStack, fuse
from engine.layers.layer_ops import LayerOps
from engine.loading.loader import Model, load
from engine.model import ModelError
from engine.step import Engine
from tests.by_rows import Recorder, by_rows
from tests.eagle_heads import tiny_head
from tests.unit.engine.engine_models import load_tiny, random_tokens, save_model, slot_engine

LAYERS = (2, 0, 3)
SIZES: dict[str, Any] = {"head_dim": 32, "hidden_size": 48, "intermediate_size": 80}


def expected(folder: Path, tokens: list[int]) -> Tensor:
    """What stands behind each of LAYERS, by transformers."""
    module: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    module.eval()
    read: list[Tensor] = []
    module.model.norm.register_forward_pre_hook(lambda _, given: read.append(given[0][0]))
    with torch.inference_mode():
        found = module(input_ids=torch.tensor([tokens]), output_hidden_states=True, use_cache=False).hidden_states
    return torch.cat([read[0] if layer == 3 else found[layer][0] for layer in LAYERS], -1)


def stock(model: Model) -> Engine:
    computing = slot_engine(model)
    return Engine(computing.model, computing.cache, aux_layers=LAYERS)


def rows(model: Model, record: Recorder | None = None) -> Engine:
    return by_rows(model, record=record, aux_layers=LAYERS)


def fused(model: Model, record: Recorder | None = None) -> Engine:
    ops = LayerOps()
    module: Any = AutoModelForCausalLM.from_pretrained(model.name, dtype=model.dtype, attn_implementation=NAME)
    assert not fuse(module, ops.dtypes, lambda base: RowOpsStack(base, ops))
    return rows(replace(model, module=module.eval()), record)


KINDS: dict[str, Callable[[Model], Engine]] = {
    "stock": stock,
    "rows": rows,
    "replayed": partial(rows, record=Recorder()),
    "fused": fused,
    "fused, replayed": partial(fused, record=Recorder()),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_states_between_layers(family: str, kind: str, tmp_path: Path) -> None:
    engine = KINDS[kind](load_tiny(family, tmp_path, **SIZES))
    check(engine, tmp_path)


@pytest.mark.skipif(find_library() is None, reason="no C++ compiler, or a processor without AVX2")
@pytest.mark.parametrize("cut", [False, True], ids=["whole", "in pieces"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_states_between_layers_in_cpp(tmp_path: Path, cut: bool, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.cpu.stack.has_tiles", lambda: False)
    if cut:
        monkeypatch.setattr("engine.attention.attention.MAX_ROWS", 4)
    model = load(save_model("llama", tmp_path, **SIZES), dtype=dtype, device="cpu", self_test=False)
    assert model.attention is not None
    check(stock(model), tmp_path, dtype)


def check(engine: Engine, folder: Path, dtype: str = "fp32") -> None:
    """A prompt beside another's, then a tree beside a token; each twice, so that a recording is replayed."""
    one, other = random_tokens(11, 1), random_tokens(6, 2)
    bound = 1e-4 if dtype == "fp32" else 0.1
    for _ in range(2):
        first, second = engine.cache.sequence(), engine.cache.sequence()
        engine.run([Chunk(first, one[:8], rows=[7]), Chunk(second, other[:5])])
        assert engine.aux is not None and engine.aux.dtype == engine.model.dtype
        states_TA = torch.cat((expected(folder, one[:8]), expected(folder, other[:5])))
        torch.testing.assert_close(engine.aux.float(), states_TA, atol=bound, rtol=bound)
        first.advance(range(8))
        second.advance(range(5))
        before = engine.aux
        kept = before.clone()
        engine.run([Chunk(first, [9, 17, 4], [-1, -1, 1], range(3)), Chunk(second, other[5:])])
        assert torch.equal(before, kept), "what was handed out stays as it is"
        branch = expected(folder, [*one[:8], 17, 4])[8:]
        states_TA = torch.cat((expected(folder, [*one[:8], 9])[8:], branch, expected(folder, other)[5:]))
        torch.testing.assert_close(engine.aux.float(), states_TA, atol=bound, rtol=bound)
        first.free()
        second.free()


def test_a_recorded_step_fuses_them_itself(tmp_path: Path) -> None:
    """What a head makes of the states of every row; nothing is fused where no step is recorded."""
    model, head = load_tiny("llama", tmp_path, num_hidden_layers=4), tiny_head()
    found: list[Tensor] = []
    computing = slot_engine(model)
    for engine in (by_rows(model, record=Recorder(), eagle=head), Engine(computing.model, computing.cache, eagle=head)):
        for _ in range(2):
            sequence = engine.cache.sequence()
            engine.run([Chunk(sequence, random_tokens(9, 1), rows=[8])])
            assert engine.aux is not None
            found.append(engine.aux if engine.fuses else head.fuse(engine.aux))
    assert found[0].shape == (9, head.config.hidden_size)
    for states_TE in found[1:]:
        torch.testing.assert_close(states_TE, found[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("layer", [4, -1])
def test_layers_that_there_are_not(tmp_path: Path, layer: int) -> None:
    model = load_tiny("llama", tmp_path)
    with pytest.raises(ModelError, match=f"behind layer {layer} are asked for, it has 3 layers; each must be from 0"):
        Engine(model, slot_engine(model).cache, aux_layers=(1, layer))


def test_a_model_without_a_list_of_layers(tmp_path: Path) -> None:
    model = load_tiny("gpt2", tmp_path)
    with pytest.raises(ModelError, match="'gpt2' has no list of decoder layers"):
        Engine(model, slot_engine(model).cache, aux_layers=(1,))
