"""The stock forward that a self-test compares with."""

import copy

import pytest
import torch
from torch import nn

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

    together = test._stock(texts)

    reference = copy.deepcopy(model.module).float() if emulated else model.module
    with torch.inference_mode(), self_test._small_window(model):
        alone = torch.stack([reference(torch.tensor([text])).logits[0, -1, : model.vocabulary] for text in texts])
    assert together.dtype == torch.float32
    assert test._distance(together, alone) < (0.05 if emulated else 1e-5)


@pytest.mark.parametrize("bias", [False, True])
def test_widened_products_are_those_of_float32_rounded_once(monkeypatch, bias):
    monkeypatch.setattr(self_test, "WIDENED", 100)  # the last part has fewer rows
    layer = nn.Linear(24, 31, bias=bias, dtype=torch.bfloat16)
    x = torch.randn(5, 24, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(1))
    with self_test._Widened():
        y = layer(x)
    expected = copy.deepcopy(layer).double()(x.double())
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), expected, rtol=2**-8, atol=1e-5)


def test_quantised_weights_are_left_to_themselves():
    class Packed(torch.Tensor):
        seen = 0

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            cls.seen += func is nn.functional.linear
            return super().__torch_function__(func, types, args, kwargs or {})

    weight = torch.randn(3, 4).bfloat16().as_subclass(Packed)
    with self_test._Widened():
        nn.functional.linear(torch.ones(1, 4, dtype=torch.bfloat16), weight)
    assert Packed.seen == 1
