"""Quantised models: what is quantised and what that saves, what is refused, and how much of the model is left."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torchao.quantization import Int8Tensor, Int8WeightOnlyConfig, quantize_
from transformers import AutoConfig, AutoModelForCausalLM, TorchAoConfig

from cluster.config.pools import QUANTIZATIONS
from engine.build import build, welcome
from engine.cpu.library import find_library
from engine.cpu.stack import widens
from engine.interface import Chunk
from engine.layers.int8_linear import Int8Linear, has_kernel
from engine.layers.linear import PackedLinear, PartialLinear
from engine.loading import checkpoint, quantisation, self_test
from engine.loading.loader import ModelError, Treatment, from_module, load
from engine.loading.quantisation import CHOICES, check, quantise, weight_bytes
from engine.settings import EngineSettings
from engine.step import Engine
from speculation.messages import Loading
from tests.ranks import needs_no_gpu, on_ranks
from tests.stack import MODELS, held_out_prompts, needs_invariant_bf16
from tests.thorough import mostly_thorough
from tests.unit.engine.engine_models import TINY, Stock, random_tokens, save_model
from tests.unit.engine.test_families import FAMILIES

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ON_CPU = ["int8", "int8-dynamic"]

needs_int8 = pytest.mark.skipif(not has_kernel(), reason="this CPU or build of torch has no kernel for int8")


class Tied(nn.Module):
    """Two layers and a last one that shares its weight with the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 64)
        self.layers = nn.Sequential(nn.Linear(64, 256, bias=False), nn.Linear(256, 64))
        self.last = nn.Linear(64, 100, bias=False)
        self.last.weight = self.embedding.weight

    def get_output_embeddings(self) -> nn.Module:
        return self.last


def test_the_choices_are_those_of_the_configuration() -> None:
    assert QUANTIZATIONS == CHOICES


@pytest.mark.parametrize("quantization", ON_CPU)
def test_every_layer_but_the_last_is_quantised_to_half_the_bytes(quantization: str) -> None:
    module = Tied().bfloat16()
    shared = 2 * 100 * 64
    assert weight_bytes(module) == shared + 2 * (256 * 64 + 64 * 256 + 64)
    assert quantise(module, quantization) == 2
    assert isinstance(module.layers[0].weight, Int8Tensor) and isinstance(module.layers[1].weight, Int8Tensor)
    assert type(module.last.weight) is nn.Parameter
    for layer in module.layers:
        assert isinstance(layer, nn.Linear)
        assert weight_bytes(layer) < 0.6 * 2 * layer.in_features * layer.out_features


@needs_int8
@pytest.mark.parametrize("quantization", ON_CPU)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt_oss"])
def test_families_load_quantised_and_pass_the_self_test(family: str, quantization: str, tmp_path: Path) -> None:
    told: list[Loading] = []
    folder = save_model(family, tmp_path)
    model = load(folder, dtype="bf16", device="cpu", quantization=quantization, progress=told.append)
    assert told[-1].doing.startswith("self-test passed")
    assert model.weights.startswith(f"{quantization} weights of ")
    assert told[-2].doing.startswith(f"{model.weights}; logits moved by 0.")
    module: Any = model.module
    attention = module.model.layers[0].self_attn
    assert isinstance(attention.o_proj, Int8Linear)
    assert isinstance(attention.q_proj, PartialLinear)
    assert isinstance(module.lm_head, PackedLinear)


@needs_int8
def test_a_worker_says_so(tmp_path: Path) -> None:
    settings = EngineSettings(save_model("llama", tmp_path), dtype="bf16", device="cpu", quantization="int8")
    engine = build(settings)
    assert welcome(settings, engine.model, "target").dtype == f"bfloat16, {engine.model.weights}"
    plain = EngineSettings(settings.model, dtype="bf16", device="cpu")
    assert welcome(plain, build(plain).model, "target").dtype == "bfloat16"


@pytest.mark.parametrize(
    ("quantization", "dtype", "device", "message"),
    [
        ("int4", torch.bfloat16, CPU, "'int4' is unknown; choose one of none, int8, int8-dynamic, fp8"),
        ("int8", torch.float64, CPU, "int8 needs a dtype of at most 32 bits, got float64"),
        ("fp8", torch.bfloat16, CPU, "fp8 needs a GPU, got device cpu; int8 runs on CPUs too"),
        ("fp8", torch.float16, CUDA, "fp8 needs dtype bfloat16, got float16"),
        ("int8-dynamic", torch.bfloat16, CUDA, "int8-dynamic is for CPUs, got device cuda; use int8 or fp8"),
    ],
)
def test_what_cannot_be_had_is_refused(
    quantization: str, dtype: torch.dtype, device: torch.device, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    with pytest.raises(ModelError) as caught:
        check(quantization, dtype, device)
    assert str(caught.value) == f"quantization {message}"


def test_fp8_needs_a_gpu_that_multiplies_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    check("fp8", torch.bfloat16, CUDA)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with pytest.raises(ModelError, match=r"compute capability 8\.9, this has 8\.0; use int8"):
        check("fp8", torch.bfloat16, CUDA)


def test_int8_needs_a_cpu_that_adds_it_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantisation, "has_kernel", lambda: False)
    check("int8", torch.bfloat16, CUDA)
    with pytest.raises(ModelError, match="int8 needs a CPU with VNNI instructions"):
        check("int8", torch.bfloat16, CPU)


@needs_int8
def test_a_model_without_linear_layers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="'gpt2' has no linear layers that could be quantised to int8"):
        load(save_model("gpt2", tmp_path), device="cpu", quantization="int8")


@needs_int8
def test_weights_that_say_something_else_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_model("llama", tmp_path)
    monkeypatch.setattr(self_test, "LARGEST_DRIFT", 1e-4)
    with pytest.raises(ModelError, match=r"quantised weights move its logits by 0\.0\d+ \(relative; at most 0\.0001\)"):
        load(folder, device="cpu", quantization="int8")
    assert load(folder, device="cpu").weights == ""


@needs_int8
def test_torchaos_own_checkpoints_load_as_they_are(tmp_path: Path) -> None:
    scheme = TorchAoConfig(Int8WeightOnlyConfig(set_inductor_config=False))
    source, folder = save_model("llama", tmp_path / "plain"), str(tmp_path / "quantised")
    AutoModelForCausalLM.from_pretrained(source, quantization_config=scheme, dtype=torch.bfloat16).save_pretrained(
        folder
    )
    model = load(folder, device="cpu")
    assert model.weights == "torchao weights of 0 MB"
    assert isinstance(model.module.model.layers[0].self_attn.o_proj, Int8Linear)  # type: ignore[union-attr]
    with pytest.raises(ModelError, match="its weights are quantised already; quantization must be none"):
        load(folder, device="cpu", quantization="int8")


def store_in_float8(folder: Path, scale_name: str, block: int, **configuration: Any) -> dict[str, torch.Tensor]:
    """Quantise the projections of a model folder, and say so in its configuration; returns what the weights mean.

    ``block``: rows and columns that share a scale, which is stored beside the weight; 0: all of them do.
    """
    meant, stored = load_file(folder / "model.safetensors"), {}
    for name, tensor in meant.items():
        stored[name] = tensor.bfloat16()
        if name.endswith("proj.weight"):
            rows, columns = tensor.shape
            high, wide = (block, block) if block else (rows, columns)
            blocks = tensor.view(rows // high, high, columns // wide, wide)
            scales = blocks.abs().amax((1, 3), keepdim=True) / 448
            stored[name] = (blocks / scales).to(torch.float8_e4m3fn).view(rows, columns)
            stored[f"{name}{scale_name}"] = scales[:, 0, :, 0] if block else scales.view(())
            meant[name] = (stored[name].float().view(blocks.shape) * scales).view(rows, columns)
        else:
            meant[name] = stored[name].float()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**said, "dtype": "bfloat16", **configuration}))
    return meant


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({}, r"its weights are quantised, with scales like 'model\.layers\.0\.mlp\..*down_proj\.weight_scale'; take"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "its weights are quantised by 'modelopt'; take the origin"),
        ({"quant_algo": "FP8"}, "cannot read the configuration: .* no `quant_method`"),
    ],
)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_weights_quantised_in_unknown_ways_are_refused(
    family: str, said: dict[str, str], message: str, tmp_path: Path
) -> None:
    """transformers would read the numbers without their scales, and only warn."""
    folder = Path(save_model(family, tmp_path))
    store_in_float8(folder, "_scale", 0, **({"quantization_config": said} if said else {}))
    with pytest.raises(ModelError, match=message):
        load(str(folder), device="cpu", self_test=False)


@needs_no_gpu
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16", "auto"])
@pytest.mark.parametrize("has_bfloat16", [False, True])
def test_float8_in_blocks_is_dequantised_on_a_cpu(
    dtype: str, has_bfloat16: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it to the chosen format, as a model that was stored dequantised is read."""
    monkeypatch.setattr(checkpoint, "computes_bfloat16", lambda _: has_bfloat16)
    folder = Path(save_model("llama", tmp_path / "float8", intermediate_size=128))
    how = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}
    meant = store_in_float8(folder, "_scale_inv", 32, quantization_config=how)
    model = load(str(folder), dtype=dtype, device="cpu", self_test=False, pack=False)
    assert {parameter.dtype for parameter in model.module.parameters()} == {model.dtype}
    for name, tensor in model.module.state_dict().items():
        torch.testing.assert_close(tensor, meant[name].to(model.dtype), atol=1e-5, rtol=1e-2)
    assert not load(str(folder), dtype=dtype, device="cpu").no_speculation


@needs_no_gpu
def test_float8_in_blocks_is_dequantised_on_ranks(tmp_path: Path) -> None:
    folder = Path(save_model("llama", tmp_path, num_hidden_layers=2, intermediate_size=128, head_dim=32))
    how = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}
    store_in_float8(folder, "_scale_inv", 32, quantization_config=how)
    settings = EngineSettings(str(folder), dtype="fp32", device="cpu", cache_tokens=256)
    text = random_tokens(9, seed=1)
    alone = build(settings)
    expected = alone.run([Chunk(alone.cache.sequence(), text, rows=range(9))]).clone()
    with on_ranks(settings) as engine:
        assert {parameter.dtype for parameter in engine.model.module.parameters()} == {torch.float32}
        logits = engine.run([Chunk(engine.cache.sequence(), text, rows=range(9))])
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@needs_no_gpu
@pytest.mark.parametrize(("device", "kernels"), [(CUDA, False), (CUDA, True), (CPU, True)])
def test_float8_is_dequantised_beside_a_gpu_that_has_no_products_for_it(
    device: torch.device, kernels: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU that multiplies float8 makes transformers keep it, whether or not something is installed that would."""
    read = AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda **how: read(**{**how, "device_map": None}))
    monkeypatch.setattr(checkpoint, "is_kernels_available", lambda: kernels)
    folder = Path(save_model("llama", tmp_path / "float8", intermediate_size=128))
    how = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}
    meant = store_in_float8(folder, "_scale_inv", 32, quantization_config=how)
    told: list[Loading] = []
    module = checkpoint.read_module(str(folder), torch.bfloat16, device, None, told.append)
    kept = device == CUDA and kernels
    said = Loading("its quantised weights are read as bfloat16")
    assert (said in told, hasattr(module, "hf_quantizer")) == (not kept, kept)
    weight = module.get_parameter(name := "model.layers.0.mlp.up_proj.weight")
    assert weight.dtype == (torch.float8_e4m3fn if kept else torch.bfloat16)
    if not kept:
        torch.testing.assert_close(weight, meant[name].bfloat16(), atol=1e-5, rtol=1e-2)


def test_scales_of_what_is_no_weight_are_left_alone(tmp_path: Path) -> None:
    """A cache is not kept in float8 here."""
    folder = Path(save_model("llama", tmp_path))
    tensors = load_file(folder / "model.safetensors")
    scales = {f"model.layers.0.self_attn.{name}_proj.{name}_scale": torch.ones(()) for name in "kv"}
    save_file({**tensors, **scales}, folder / "model.safetensors", metadata={"format": "pt"})
    assert load(str(folder), device="cpu", self_test=False).weights == ""


@needs_int8
@pytest.mark.parametrize("names", [("layers",), ("mlp",), ("o_proj", "down_proj"), ("lm_head",)])
def test_nothing_quantised_before_is_computed_in_cpp(names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.cpu.stack.has_tiles", lambda: False)
    monkeypatch.setattr("engine.cpu.stack.find_library", lambda: find_library() or pytest.skip("there is no C++"))
    config = AutoConfig.for_model("llama", **{**TINY, "head_dim": 32, "intermediate_size": 64})
    module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    quantize_(
        module,
        Int8WeightOnlyConfig(set_inductor_config=False),
        lambda part, at: isinstance(part, nn.Linear) and any(name in at for name in names),
    )
    told: list[str] = []
    model = from_module("tiny", module, {}, torch.bfloat16, CPU, Treatment(), told.append)
    assert "decoder layers are computed one operation at a time: its weights are quantised" in told
    assert not model.no_speculation


@pytest.mark.parametrize("quantised", [False, True])
def test_what_was_quantised_before_is_not_widened(quantised: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.cpu.stack.has_tiles", lambda: False)
    monkeypatch.setattr("engine.cpu.stack.find_library", lambda: find_library() or pytest.skip("there is no C++"))
    how = {"quantization_config": {"quant_method": "torchao"}} if quantised else {}
    sizes = {**TINY, "head_dim": 32, "intermediate_size": 64}
    assert widens(AutoConfig.for_model("llama", **sizes, dtype=torch.bfloat16, **how)) is not quantised


def engine_of(quantization: str) -> Engine:
    folder = str(MODELS / "target")
    return build(EngineSettings(folder, dtype="bfloat16", device="cpu", quantization=quantization, cache_tokens=4096))


def rows_of(engine: Engine, text: list[int], sizes: list[int]) -> torch.Tensor:
    """The logits of all positions of a text, fed in chunks of these sizes."""
    sequence, rows = engine.cache.sequence(), []
    for size in sizes:
        fed = text[sequence.length : sequence.length + size]
        rows.append(engine.run([Chunk(sequence, fed, rows=range(len(fed)))]))
        sequence.advance(range(len(fed)))
    sequence.free()
    return torch.cat(rows)


@needs_int8
@needs_no_gpu
@pytest.mark.parametrize("family", mostly_thorough(["mixtral", "phi3", "deepseek_v3"], quick={"phi3"}))
def test_ranks_quantise_what_they_split_by_themselves(family: str, tmp_path: Path) -> None:
    """Experts of mixtral, two layers in one of phi3 and the latent of deepseek_v3 stay as transformers split them."""
    folder = save_model(family, tmp_path, tie_word_embeddings=False, **FAMILIES[family].changes)
    text = random_tokens(30, seed=1)
    with on_ranks(EngineSettings(folder, dtype="fp32", device="cpu", cache_tokens=256, quantization="int8")) as engine:
        logits_TV = rows_of(engine, text, [20, 10])
        assert engine.model.weights.startswith("int8 weights of ")
    stock_TV = Stock(folder)(text)
    # By all numbers: a token may go to another expert.
    assert 1e-4 < float((logits_TV - stock_TV).norm() / stock_TV.norm()) < 0.1


@needs_int8
@needs_invariant_bf16
@pytest.mark.parametrize("quantization", ON_CPU)
def test_logits_do_not_depend_on_how_tokens_are_batched(quantization: str) -> None:
    engine = engine_of(quantization)
    rng = Random(3)
    text = [*held_out_prompts()[0], *(rng.randrange(engine.model.vocabulary) for _ in range(100))][:105]
    one_by_one = rows_of(engine, text, [1] * len(text))
    assert torch.equal(rows_of(engine, text, [len(text)]), one_by_one)
    assert torch.equal(rows_of(engine, text, [40, *[9, 1, 3] * 5]), one_by_one)


@needs_int8
@pytest.mark.parametrize("quantization", ON_CPU)
def test_the_bundled_target_still_says_the_same(quantization: str) -> None:
    """Next tokens of held-out prompts; measured: 99 percent agree."""
    original, quantised = engine_of("none"), engine_of(quantization)
    agreeing = total = 0
    for prompt in held_out_prompts()[:20]:
        first, second = (rows_of(engine, list(prompt), [len(prompt)]) for engine in (original, quantised))
        agreeing += int((first.argmax(-1) == second.argmax(-1)).sum())
        total += len(prompt)
    assert total > 300
    assert 0.95 * total <= agreeing < total
