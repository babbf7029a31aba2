"""Fast int8 layers compute what torchao's numbers say, and a row never depends on the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torchao.quantization import (
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    MappingType,
    PerGroup,
    PerTensor,
    quantize_,
)

from engine.layers import int8_linear
from engine.layers.int8_linear import MAX_INPUTS, Int8Linear, has_kernel, planes_of
from engine.layers.linear import PackedLinear, PartialLinear, pack_linears

pytestmark = pytest.mark.skipif(not has_kernel(), reason="this CPU or build of torch has no kernel for int8")

DYNAMIC = Int8DynamicActivationInt8WeightConfig(set_inductor_config=False)
WEIGHTS = Int8WeightOnlyConfig(set_inductor_config=False)
PLANES = {1: DYNAMIC, 2: WEIGHTS}
TOLERANCE = {torch.float32: {1: 1e-6, 2: 1e-3}, torch.bfloat16: {1: 1e-2, 2: 1e-2}}
"""By dtype and planes, relative. torchao rounds a bfloat16 product twice; two planes hold 15 bits of an activation."""


def quantised(layer: nn.Linear, config: Any) -> nn.Linear:
    quantize_(layer, config)
    return layer


def packed(layer: nn.Linear) -> nn.Module:
    module = nn.Sequential(layer)
    assert pack_linears(module) == 1
    return module[0]


def distance(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("planes", PLANES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 64), (37, 129), (256, 1000), (2, 1)])
@torch.inference_mode()
def test_equals_torchao(inputs: int, outputs: int, bias: bool, planes: int, dtype: torch.dtype) -> None:
    torch.manual_seed(inputs + outputs)
    plain = quantised(nn.Linear(inputs, outputs, bias=bias, dtype=dtype), PLANES[planes])
    fast = packed(plain)
    assert isinstance(fast, Int8Linear)
    assert fast.planes == planes
    for tokens in (1, 2, 6, 33):
        x_1NI = torch.randn(1, tokens, inputs).to(dtype)
        x_1NI[0, 0, 0] = 30  # an outlier, which makes the steps of its row large
        actual = fast(x_1NI)
        assert (actual.dtype, actual.shape) == (dtype, (1, tokens, outputs))
        assert distance(actual, plain(x_1NI)) < TOLERANCE[dtype][planes]


@torch.inference_mode()
def test_weights_alone_lose_nothing_but_their_own_rounding() -> None:
    """In bfloat16 the result is nearer to the exact product than that of a bfloat16 layer with the same weights."""
    torch.manual_seed(3)
    plain = quantised(nn.Linear(1024, 256, bias=False, dtype=torch.bfloat16), WEIGHTS)
    weight: Any = plain.weight
    x_NI = torch.randn(50, 1024).to(torch.bfloat16)
    exact_NO = x_NI.double() @ (weight.qdata.double() * weight.scale.double()).T
    stored = PackedLinear(weight.dequantize(torch.bfloat16), None)
    assert distance(packed(plain)(x_NI), exact_NO) < distance(stored(x_NI), exact_NO) < 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("planes", PLANES)
@pytest.mark.parametrize("inputs", [64, 1023, 2816])
@torch.inference_mode()
def test_a_row_does_not_depend_on_the_others(inputs: int, planes: int, dtype: torch.dtype) -> None:
    torch.manual_seed(inputs)
    values_OI = torch.randint(-128, 128, (65, inputs), dtype=torch.int8)
    layer = Int8Linear(values_OI, torch.rand(65) / inputs, torch.randn(65), planes)
    x_NI = (torch.randn(40, inputs) * 10 ** torch.randn(40, 1)).to(dtype)
    alone_NO = torch.cat([layer(x_NI[i : i + 1]) for i in range(len(x_NI))])
    for rows in (2, 3, 5, 9, 16, 33):
        assert torch.equal(layer(x_NI[:rows]), alone_NO[:rows])
    shuffled = torch.randperm(len(x_NI))
    assert torch.equal(layer(x_NI[shuffled]), alone_NO[shuffled])


@pytest.mark.parametrize("inputs", [64, 2816, MAX_INPUTS])
@torch.inference_mode()
def test_sums_are_exact_up_to_the_most_inputs(inputs: int) -> None:
    """The largest sums there are: an overflow, or a saturating kernel, would be far off."""
    for weight in (127, -128):
        layer = Int8Linear(torch.full((32, inputs), weight, dtype=torch.int8), torch.ones(32), None, 1)
        for step in (127, -128):
            sums_NO = layer._product(torch.full((3, inputs), float(step)))
            assert torch.equal(sums_NO, torch.full((3, 32), float(step * weight * inputs)))


@pytest.mark.parametrize("planes", PLANES)
@torch.inference_mode()
def test_a_row_that_is_no_number_spoils_only_itself(planes: int) -> None:
    torch.manual_seed(5)
    layer = Int8Linear(torch.randint(-128, 128, (40, 64), dtype=torch.int8), torch.rand(40), None, planes)
    x_NI = torch.randn(6, 64)
    expected_NO = layer(x_NI)
    x_NI[1, 3], x_NI[4, 0], x_NI[2] = torch.nan, torch.inf, 0
    actual_NO = layer(x_NI)
    assert not actual_NO[1].isfinite().any() and not actual_NO[4].isfinite().any()
    assert torch.equal(actual_NO[2], torch.zeros(40))
    assert torch.equal(actual_NO[[0, 3, 5]], expected_NO[[0, 3, 5]])


class Siblings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(24, size, bias=False) for size in (24, 8, 8))
        self.gate_proj, self.up_proj = nn.Linear(24, 40), nn.Linear(24, 40)


@torch.inference_mode()
def test_siblings_are_multiplied_together_if_quantised_alike() -> None:
    torch.manual_seed(1)
    module = Siblings()
    for name in ("q_proj", "k_proj", "v_proj", "gate_proj"):
        quantised(getattr(module, name), WEIGHTS)
    x_NI = torch.randn(4, 24)
    expected = {name: layer(x_NI) for name, layer in module.named_children()}
    assert pack_linears(module) == 5
    assert pack_linears(module) == 0
    for name, layer in module.named_children():
        assert distance(layer(x_NI), expected[name]) < 1e-4
    assert isinstance(module.v_proj, PartialLinear)
    assert isinstance(module.gate_proj, Int8Linear)
    assert isinstance(module.up_proj, PackedLinear)


@pytest.mark.parametrize(
    "config",
    [
        Int8WeightOnlyConfig(granularity=PerGroup(8), set_inductor_config=False),
        Int8DynamicActivationInt8WeightConfig(granularity=PerTensor(), set_inductor_config=False),
        Int8DynamicActivationInt8WeightConfig(act_mapping_type=MappingType.ASYMMETRIC, set_inductor_config=False),
        Int8DynamicActivationInt8WeightConfig(reduce_range=True, set_inductor_config=False),
    ],
)
def test_other_numbers_are_left_to_torchao(config: Any) -> None:
    module = nn.Sequential(quantised(nn.Linear(16, 16), config))
    assert planes_of(module[0].weight) == 0
    assert pack_linears(module) == 0
    assert type(module[0]) is nn.Linear


def test_without_the_kernel_all_is_left_to_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8_linear, "has_kernel", lambda: False)
    assert pack_linears(nn.Sequential(quantised(nn.Linear(16, 16), WEIGHTS))) == 0
