"""The stock forward that a self-test compares with."""

import copy

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from engine.loading import self_test
from engine.loading.checkpoint import STOCK
from engine.loading.loader import load
from tests.bundled import MODELS


@pytest.mark.parametrize("emulated", [False, True])
def test_one_padded_forward_says_what_a_forward_for_each_text_says(monkeypatch, emulated):
    monkeypatch.setattr(self_test, "computes_bfloat16", lambda _: not emulated)
    dtype = "bfloat16" if emulated else "float32"
    model = load(str(MODELS / "draft"), dtype=dtype, device="cpu", self_test=False, by_rows=False, pack=False)
    model.module.set_attn_implementation(STOCK)
    test = self_test.SelfTest(model)
    texts = [test.other[:3], test.trunk[:9], test.trunk, test.other, test.trunk + test.tree[:2], test.trunk[:1]]

    with Multiplied() as seen:
        together = test._stock(texts)
    assert {weight.dtype for weight in seen.weights} == {torch.float32}  # also where the weights are bfloat16

    reference = copy.deepcopy(model.module).float() if emulated else model.module
    with torch.inference_mode(), self_test._small_window(model):
        alone = torch.stack([reference(torch.tensor([text])).logits[0, -1, : model.vocabulary] for text in texts])
    assert together.dtype == torch.float32
    assert test._distance(together, alone) < (0.05 if emulated else 1e-5)


class Multiplied(TorchFunctionMode):
    """What linear layers were given, by number format."""

    def __init__(self):
        super().__init__()
        self.weights = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is nn.functional.linear:
            self.weights.append(args[1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("bias", [False, True])
def test_widened_products_are_those_of_float32_rounded_once(monkeypatch, bias):
    monkeypatch.setattr(self_test, "WIDENED", 100)  # four rows of 24, and three in the last part
    layer = nn.Linear(24, 31, bias=bias, dtype=torch.bfloat16)
    x = torch.randn(5, 24, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(1))
    with Multiplied() as seen, self_test._Widened():
        y = layer(x)
    assert [(weight.dtype, len(weight)) for weight in seen.weights] == 7 * [(torch.float32, 4)] + [(torch.float32, 3)]
    expected = copy.deepcopy(layer).double()(x.double())
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), expected, rtol=2**-8, atol=1e-5)


def test_quantised_weights_are_left_to_themselves():
    class Packed(torch.Tensor):
        pass

    weight = torch.randn(3, 4).bfloat16().as_subclass(Packed)
    with Multiplied() as seen, self_test._Widened():
        nn.functional.linear(torch.ones(1, 4, dtype=torch.bfloat16), weight)
    assert [given is weight for given in seen.weights] == [True]
