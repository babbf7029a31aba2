"""Packed linear layers equal the plain ones."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from engine.cache.kv_cache import KVCache
from engine.interface import Chunk
from engine.layers.linear import TILE_ROWS, PackedLinear, PartialLinear, can_pack, pack_linears, packs_bfloat16
from engine.step import Engine
from tests.unit.engine.engine_models import load_tiny

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}

pytestmark = pytest.mark.skipif(not can_pack(torch.empty(1)), reason="this build of torch has no oneDNN")

needs_bfloat16 = pytest.mark.skipif(not packs_bfloat16(), reason="oneDNN has no bfloat16 products for this CPU")
DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=needs_bfloat16)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 64), (37, 129), (256, 1000), (1, 1)])
@torch.inference_mode()
def test_equals_plain(inputs: int, outputs: int, bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(inputs + outputs)
    plain = nn.Linear(inputs, outputs, bias=bias, dtype=dtype)
    packed = PackedLinear(plain.weight, plain.bias)
    for tokens in (1, 2, 6, 12, 33):
        x_1NI = torch.randn(1, tokens, inputs).to(dtype)
        expected = plain.double()(x_1NI.double()).float()
        plain.to(dtype)
        actual = packed(x_1NI)
        assert actual.dtype == dtype
        assert actual.shape == (1, tokens, outputs)
        torch.testing.assert_close(actual.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@torch.inference_mode()
def test_packs_a_whole_model_once() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Embedding(9, 8), nn.Sequential(nn.Linear(8, 16), nn.ReLU()), Conv1D(12, 16), nn.Linear(12, 9)
    )
    module[3].weight = nn.Parameter(torch.randn(9, 12))
    tokens = torch.tensor([[1, 2, 3]])
    expected = module(tokens)
    assert pack_linears(module) == 3
    assert pack_linears(module) == 0
    torch.testing.assert_close(module(tokens), expected, atol=1e-5, rtol=1e-5)
    assert [name for name, _ in module.named_parameters()] == ["0.weight"]


@torch.inference_mode()
def test_does_not_read_the_plain_weight_again() -> None:
    plain = nn.Linear(32, 32)
    packed = PackedLinear(plain.weight, plain.bias)
    x_NI = torch.randn(3, 32)
    before = packed(x_NI)
    plain.weight.zero_()
    assert torch.equal(packed(x_NI), before)


def test_leaves_what_it_cannot_pack() -> None:
    module = nn.Sequential(nn.Linear(4, 4, dtype=torch.float64))
    assert pack_linears(module) == 0
    assert type(module[0]) is nn.Linear


def test_leaves_bfloat16_where_this_cpu_cannot_multiply_it_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.layers.linear.packs_bfloat16", lambda: False)
    module = nn.Sequential(nn.Linear(4, 4, dtype=torch.bfloat16), nn.Linear(4, 4))
    assert pack_linears(module) == 1
    assert type(module[0]) is nn.Linear


class Siblings(nn.Module):
    def __init__(self, bias: bool, odd: bool = False) -> None:
        super().__init__()
        self.q_proj = nn.Linear(24, 24, bias=bias)
        self.k_proj = nn.Linear(24, 8, bias=bias)
        self.v_proj = nn.Linear(24, 8, bias=bias or odd)
        self.gate_proj = nn.Linear(24, 40, bias=bias)
        self.up_proj = nn.Linear(24, 40, bias=bias)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        shared = [self.q_proj(x), self.k_proj(x), self.v_proj(x)]
        # Reversed, repeated and with different inputs: slower, but right.
        return [*shared, self.up_proj(x), self.gate_proj(y), self.gate_proj(x), self.up_proj(y), self.up_proj(y)]


@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_layers_packed_together_equal_plain_ones_in_any_order(bias: bool, odd: bool) -> None:
    torch.manual_seed(1)
    module = Siblings(bias, odd)
    inputs = [(torch.randn(1, tokens, 24), torch.randn(1, tokens, 24)) for tokens in (1, 5)]
    expected = [module(*pair) for pair in inputs]
    assert pack_linears(module) == 5
    assert isinstance(module.up_proj, PartialLinear)
    assert isinstance(module.q_proj, PackedLinear if odd and not bias else PartialLinear)
    for pair, outputs in zip(inputs, expected, strict=True):
        torch.testing.assert_close(module(*pair), outputs, atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_layers_packed_together_keep_nothing_after_the_last() -> None:
    module = Siblings(bias=False)
    pack_linears(module)
    x = torch.randn(1, 3, 24)
    reference = weakref.ref(x)
    for layer in (module.q_proj, module.k_proj, module.v_proj):
        layer(x)
    del x
    assert reference() is None


@needs_bfloat16
@pytest.mark.parametrize("invariant", [True, False])
def test_only_who_needs_exact_bits_pays_for_them(
    invariant: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if rows here depended on the others in every way they do anywhere."""
    model = load_tiny("llama", tmp_path, dtype="bf16")
    counts: list[int] = []
    product = PackedLinear._product

    def counted(self: PackedLinear, x_NI: torch.Tensor) -> torch.Tensor:
        counts.append(x_NI.numel() // self.in_features)
        return product(self, x_NI)

    monkeypatch.setattr(PackedLinear, "_product", counted)
    for module in model.module.modules():
        packed = module._shared._linear if isinstance(module, PartialLinear) else module
        if isinstance(packed, PackedLinear):
            packed._lone_row_differs = packed._many_rows_differ = True
    cache = KVCache(model.layers, 128, dtype=model.dtype, device=model.device)
    engine = Engine(model, cache, invariant=invariant)
    sequence = cache.sequence()
    engine.run([Chunk(sequence, range(3, 68), rows=[64])])
    sequence.advance(range(65))
    if invariant:
        assert min(counts) > 1
        assert max(counts) == TILE_ROWS
    else:
        assert sorted(set(counts)) == [1, 65]
        counts.clear()
        engine.run([Chunk(sequence, [5], rows=[0])])
        assert set(counts) == {1}
