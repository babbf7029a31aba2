"""Loading a model as on a GPU: kernels by rows and fused layers, each given up where it computes wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.attention.row_attention import RowAttention
from engine.layers.fused import FusedStack
from engine.layers.int8_kernels import Int8Product
from engine.layers.int8_linear import has_kernel
from engine.layers.layer_kernels import TritonOps
from engine.layers.layer_ops import LayerOps
from engine.loading import loader
from engine.model import Model
from speculation.messages import Loading
from tests.by_rows import PlainRows, Twins, by_rows
from tests.unit.engine.engine_models import save_model, slot_engine


def load(folder: str, **how: object) -> Model:
    return loader.load(folder, dtype="fp32", device="cpu", pack=False, **how)  # type: ignore[arg-type]


def fused(model: Model) -> bool:
    return isinstance(model.module.base_model.layers[0], FusedStack)  # type: ignore[union-attr, index]


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "find_attention", lambda *_: PlainRows(2))
    monkeypatch.setattr("engine.layers.layer_kernels.TritonOps", LayerOps)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_known_models_are_served_fused_and_by_rows(family: str, tmp_path: Path) -> None:
    folder = save_model(family, tmp_path, num_hidden_layers=2)
    told: list[Loading] = []
    model = load(folder, progress=told.append)
    assert fused(model) and Loading("decoder layers are computed fused") in told
    plain = load(folder, by_rows=False)
    assert not fused(plain) and type(plain.attention) is RowAttention
    twins = Twins(3, by_rows(model), slot_engine(plain, 400), branches=0.3)
    for _ in range(3):
        twins.open()
    for step in range(8):
        found, expected = twins.step()
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4, msg=f"step {step}")


@pytest.mark.skipif(not has_kernel(), reason="here no model is quantised on a CPU")
def test_int8_weights_are_multiplied_by_kernels_and_pass_the_self_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("engine.layers.layer_kernels.TritonOps", TritonOps)
    model = load(save_model("llama", tmp_path, num_hidden_layers=1), quantization="int8")
    assert fused(model) and not caplog.records
    layer = model.module.base_model.layers[0].layers[0]  # type: ignore[union-attr, index]
    products = (layer.qkv, layer.output, layer.gate_up, layer.down)  # type: ignore[union-attr]
    assert all(isinstance(product, Int8Product) for product in products)


def test_others_run_as_they_are_inside_the_same_steps(tmp_path: Path) -> None:
    told: list[Loading] = []
    model = load(save_model("gemma2", tmp_path, num_hidden_layers=2), progress=told.append)
    assert model.attention is not None
    why = "layers of model type 'gemma2' are not known"
    assert Loading(f"decoder layers are computed as transformers wrote them: {why}") in told


class Wrong(LayerOps):
    """Forgets to multiply."""

    def gate(self, gate_up_T2I: torch.Tensor, activation: object) -> torch.Tensor:
        return gate_up_T2I.chunk(2, -1)[0].contiguous()


def test_fused_layers_that_compute_wrong_are_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_model("llama", tmp_path, num_hidden_layers=1)
    monkeypatch.setattr("engine.layers.layer_kernels.TritonOps", Wrong)
    model = load(folder)
    assert model.attention is not None and not fused(model)
    (record,) = caplog.records
    assert record.message.startswith("decoder layers are computed as transformers wrote them, which is slower: ")


def test_rows_that_are_computed_wrong_are_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Zeros(PlainRows):
        def __call__(self, *args: object, **how: object) -> torch.Tensor:
            return torch.zeros_like(super().__call__(*args, **how))  # type: ignore[arg-type]

    monkeypatch.setattr(loader, "find_attention", lambda *_: Zeros(2))
    model = load(save_model("llama", tmp_path, num_hidden_layers=1))
    assert type(model.attention) is RowAttention and not fused(model)
    assert [record.message.split(",")[0] for record in caplog.records] == [
        "decoder layers are computed as transformers wrote them",
        "attention is computed by torch",
    ]
