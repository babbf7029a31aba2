"""Row operations in the sizes of a Llama 3 8B, and fused models, on a GPU. Small sizes: tests/unit, on a GPU too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.layers.layer_ops import LayerOps, Norm

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: GPU equality is not checked here"
)

HIDDEN, INTERMEDIATE, QUERIES, HEADS, SIZE = 4096, 14336, 32, 8, 128
ROWS = 300
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def triton_ops() -> LayerOps:
    from engine.layers.layer_kernels import TritonOps

    return TritonOps()


def random(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def computed(ops: LayerOps, dtype: torch.dtype, rows: int) -> list[Tensor]:
    """What the operations make of the first ``rows`` of the same tensors."""
    norm, head_norm = Norm(random(HIDDEN, dtype=dtype, seed=0), 1e-5), Norm(random(SIZE, dtype=dtype, seed=1), 1e-6)
    angles_TE = random(ROWS, SIZE // 2, dtype=torch.float32, seed=2).repeat(1, 2)[:rows]
    residual_TD, delta_TD = random(2, ROWS, HIDDEN, dtype=dtype, seed=3)[:, :rows]
    qkv_TF = random(ROWS, (QUERIES + 2 * HEADS) * SIZE, dtype=dtype, seed=4)[:rows]
    keys_SHE, values_SHE = torch.zeros(2, ROWS, HEADS, SIZE, dtype=dtype, device="cuda")
    slots_T = torch.arange(rows, dtype=torch.int32, device="cuda")
    tables = angles_TE.cos().to(dtype), angles_TE.sin().to(dtype)
    query_TQE = ops.rotate_and_store(qkv_TF, tables, slots_T, (keys_SHE, values_SHE), (head_norm, head_norm))
    gate_up_T2I = random(ROWS, 2 * INTERMEDIATE, dtype=dtype, seed=5)[:rows]
    gated = [ops.gate(gate_up_T2I, "silu"), ops.gate(gate_up_T2I, "gelu_tanh")]
    return [*ops.add_norm(residual_TD, delta_TD, norm), query_TQE, keys_SHE[:rows], values_SHE[:rows], *gated]


@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_compute_what_torch_does(dtype: torch.dtype) -> None:
    for found, expected in zip(computed(triton_ops(), dtype, ROWS), computed(LayerOps(), dtype, ROWS), strict=True):
        # Roundings that fall the other way, of products that nearly cancel each other.
        tolerance = 2e-3 if dtype == torch.float16 else None
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
        if dtype != torch.float32:  # a place of rounding too few shows in more
            assert (found != expected).double().mean() <= 0.06


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_among_any_number(dtype: torch.dtype) -> None:
    together = computed(triton_ops(), dtype, ROWS)
    for rows in (1, 16, 33, 256):
        for found, all_rows in zip(computed(triton_ops(), dtype, rows), together, strict=True):
            assert torch.equal(found, all_rows[:rows])


@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_models_compute_what_transformers_does(dtype: torch.dtype) -> None:
    from tests.unit.engine.layers.test_fused import (
        KNOWN,
        TOLERANCE,
        OneSequence,
        distance,
        fuse,
        logits_of,
        stock_logits,
        tiny,
    )

    for family in KNOWN:
        module = tiny(family, dtype).cuda()
        expected_TV = stock_logits(module)
        step = OneSequence(3, dtype, "cuda")
        assert fuse(module, triton_ops()) == ""
        assert distance(logits_of(module, step), expected_TV) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_a_row_of_an_int8_product_has_the_same_bits_among_any_number(dtype: torch.dtype) -> None:
    """And is nearer to what the weights say than torchao's own product."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    from engine.layers.int8_kernels import Int8Product

    for inputs, outputs in ((HIDDEN, 6144), (INTERMEDIATE, HIDDEN)):
        layer = nn.Linear(inputs, outputs, bias=False, dtype=dtype, device="cuda")
        quantize_(layer, Int8WeightOnlyConfig(set_inductor_config=False))
        weight: Any = layer.weight
        x_TI = random(ROWS, inputs, dtype=dtype, seed=1)
        product, exact_TO = Int8Product([layer]), x_TI.double() @ (weight.qdata.double() * weight.scale.double()).T
        together_TO, theirs_TO = product(x_TI), layer(x_TI)
        error, their_error = ((found_TO.double() - exact_TO).norm() for found_TO in (together_TO, theirs_TO))
        assert error <= their_error * 1.01
        for rows in (1, 16, 33, 256):
            assert torch.equal(product(x_TI[:rows]), together_TO[:rows])
