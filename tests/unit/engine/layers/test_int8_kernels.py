"""Products with int8 weights on CUDA compute what torchao's numbers say, and a row never depends on the others.

Here the kernels run in Triton's interpreter; on a GPU they are compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig, quantize_

from engine.layers.int8_kernels import Int8Product
from engine.layers.int8_linear import weights_alone
from engine.layers.layer_kernels import TritonOps
from engine.loading.quantisation import weight_bytes
from tests.compiled import assert_compiles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3}
"""Relative, to the exact product of the same weights. Triton's interpreter does not multiply bfloat16."""
if DEVICE == "cuda":
    TOLERANCE[torch.bfloat16] = 4e-3


def quantised(inputs: int, outputs: Sequence[int], dtype: torch.dtype, *, bias: bool = False) -> list[nn.Linear]:
    torch.manual_seed(inputs)
    layers = [nn.Linear(inputs, size, bias=bias, dtype=dtype, device=DEVICE) for size in outputs]
    for layer in layers:
        quantize_(layer, Int8WeightOnlyConfig(set_inductor_config=False))
        assert weights_alone(layer.weight)
    return layers


def exact(layers: Sequence[nn.Linear], x_TI: torch.Tensor) -> torch.Tensor:
    found = []
    for layer in layers:
        weight_OI = layer.weight.qdata.double() * layer.weight.scale.double()  # type: ignore[union-attr, operator]
        product_TO = x_TI.double() @ weight_OI.T
        found.append(product_TO if layer.bias is None else product_TO + layer.bias.double())
    return torch.cat(found, -1)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("inputs", "outputs", "bias"),
    [(64, [48], False), (1100, [70, 30, 30], True), (1600, [96], True), (130, [64, 64], False)],
)
@torch.inference_mode()
def test_equals_the_exact_product(inputs: int, outputs: list[int], bias: bool, dtype: torch.dtype) -> None:
    layers = quantised(inputs, outputs, dtype, bias=bias)
    product = Int8Product(layers)
    for rows in (1, 3, 17, 70):
        x_1TI = torch.randn(1, rows, inputs, device=DEVICE).to(dtype)
        found_1TO = product(x_1TI)
        assert (found_1TO.dtype, found_1TO.shape) == (dtype, (1, rows, sum(outputs)))
        expected_TO = exact(layers, x_1TI[0])
        assert (found_1TO[0].double() - expected_TO).norm() <= TOLERANCE[dtype] * expected_TO.norm()


@pytest.fixture
def same_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the interpreter multiply in float64: the order of numpy's sums goes by the processor and the columns."""
    if DEVICE == "cuda":
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(_: object, a: Any, b: Any, d: Any, *__: object) -> Any:
        product = np.matmul(a.data, b.data, dtype=np.float64).astype(d.data.dtype)
        return TensorHandle(product + d.data, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


@pytest.mark.usefixtures("same_products")
@torch.inference_mode()
def test_a_row_has_the_same_bits_among_any_number() -> None:
    """Sums in one piece and in several; more rows than are multiplied at a time."""
    for inputs, outputs in ((300, 64), (1200, 64)):
        product = Int8Product(quantised(inputs, [outputs], torch.float32))
        x_TI = torch.randn(530, inputs, device=DEVICE)
        together_TO = product(x_TI)
        for rows in (1, 16, 31, 64):
            assert torch.equal(product(x_TI[:rows]), together_TO[:rows])
        assert torch.equal(product(x_TI[520:523]), together_TO[520:523])


@torch.inference_mode()
def test_joined_weights_are_not_kept_twice() -> None:
    layers = quantised(64, [32, 16], torch.float32)
    expected_TO = exact(layers, x_TI := torch.randn(2, 64, device=DEVICE))
    product = Int8Product(layers)
    storages = {layer.weight.qdata.untyped_storage().data_ptr() for layer in layers}  # type: ignore[union-attr, operator]
    assert storages == {product.values_OI.untyped_storage().data_ptr()}
    assert weight_bytes(product) == 48 * 64 + 48 * 4, "reports of memory and the floor of a benchmark leave it out"
    torch.testing.assert_close(
        torch.cat([layer(x_TI) for layer in layers], -1).double(), expected_TO, atol=1e-5, rtol=0
    )


@torch.inference_mode()
def test_other_layers_stay_as_they_are() -> None:
    plain, quantised_one = nn.Linear(64, 16, device=DEVICE), quantised(64, [16], torch.float32)[0]
    ops = TritonOps()
    assert ops.product([plain]) is None
    assert ops.product([quantised_one, plain]) is None
    assert isinstance(ops.product([quantised_one]), Int8Product)


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from engine.layers import int8_kernels as kernels

def compiled(kernel, capability, dtype, stages, out, **constants):
    types = {"x_ptr": "*" + dtype, "weight_ptr": "*i8", "out_ptr": "*" + out, "T": "i32"}
    signature = {name: "constexpr" if name in constants else types.get(name, "*fp32") for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    options = {"num_warps": kernels.WARPS, "num_stages": stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)

taken = []
for capability, dtype, size in ((80, "fp16", 2), (89, "bf16", 2), (89, "fp32", 4), (90, "bf16", 2)):
    bias = dtype != "bf16"
    for whole, rows in ((False, kernels.ROWS[0]), (True, kernels.ROWS[-1])):
        made = compiled(
            kernels._multiply, capability, dtype, kernels.STAGES[size], dtype if whole else "fp32", SIZE_I=4096,
            SIZE_O=6144, PIECE=4096 if whole else 1024, BLOCK_T=rows, BLOCK_O=kernels.OUTPUTS, BLOCK_I=kernels.INPUTS,
            BIAS=bias, WHOLE=whole, PRECISION="ieee" if dtype == "fp32" else "tf32",
        )
        taken.append(made.metadata.shared)
    compiled(kernels._add, capability, dtype, 2, dtype, SIZE_O=6144, PIECES=4, BLOCK=kernels.SUMMED, BIAS=bias)
assert max(taken) <= 99 << 10, f"an L4 has 99 KiB of shared memory for a program, asked for are {taken}"
assert "wgmma" in made.asm["ptx"], "the tensor cores of an H100 are not used as they are meant to be"
"""


@pytest.mark.thorough
@pytest.mark.skipif(DEVICE == "cuda", reason="the other tests compile them")
def test_the_kernels_compile_for_gpus(tmp_path: Path) -> None:
    assert_compiles(COMPILE, tmp_path)
