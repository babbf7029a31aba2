"""The row operations as Triton kernels, interpreted where there is no GPU, against the plain ones that define them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from engine.layers.layer_kernels import GATE_BLOCK, TritonOps
from engine.layers.layer_ops import LayerOps, Norm
from tests.compiled import assert_compiles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPS = (LayerOps(), TritonOps())
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 4e-2}
"""Largest accepted difference, relative to the largest number.

In bfloat16 the interpreter cuts off where a GPU rounds, twice in a row. Whether kernels round where they should shows
in float16, which it rounds.
"""


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype and found.shape == expected.shape
    error = (found.double() - expected.double()).abs().max() / expected.double().abs().max()
    assert error <= TOLERANCE[found.dtype]
    if found.dtype == torch.float16 and DEVICE == "cpu":  # a place of rounding too few shows in more
        assert (found != expected).double().mean() <= 0.06


def tables(tokens: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angles_TE = random(tokens, size // 2, dtype=torch.float32, seed=5).repeat(1, 2)
    return angles_TE.cos().to(dtype), angles_TE.sin().to(dtype)


def rotated(
    ops: LayerOps, qkv_TF: Tensor, slots: list[int], heads: int, size: int, norms: tuple[Norm, Norm] | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, and all keys and values of a cache of 11 slots that was full of ones."""
    keys_SHE, values_SHE = torch.ones(2, 11, heads, size, dtype=qkv_TF.dtype, device=DEVICE)
    slots_T = torch.tensor(slots, dtype=torch.int32, device=DEVICE)
    angles = tables(len(qkv_TF), size, qkv_TF.dtype)
    query_TQE = ops.rotate_and_store(qkv_TF, angles, slots_T, (keys_SHE, values_SHE), norms or (None, None))
    return query_TQE, keys_SHE, values_SHE


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", [1, 33, 64])
@pytest.mark.parametrize("precise_weight", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_a_residual_is_added_and_normalised(dtype: torch.dtype, size: int, precise_weight: bool, first: bool) -> None:
    residual_TD, delta_TD = random(3, size, dtype=dtype), random(3, size, dtype=dtype, seed=1)
    norm = Norm(random(size, dtype=torch.float32 if precise_weight else dtype, seed=2), 1e-2)
    expected, found = (ops.add_norm(residual_TD, None if first else delta_TD, norm) for ops in OPS)
    assert torch.equal(found[0], expected[0]) or dtype == torch.bfloat16
    assert_close(found[0], expected[0])
    assert_close(found[1], expected[1])
    assert torch.equal(residual_TD, random(3, size, dtype=dtype)), "the residual was written to"


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("queries", "heads", "size"), [(4, 2, 16), (4, 1, 40), (1, 1, 2)])
@pytest.mark.parametrize("normed", [False, True])
def test_heads_are_rotated_and_stored(dtype: torch.dtype, queries: int, heads: int, size: int, normed: bool) -> None:
    qkv_TF = random(5, (queries + 2 * heads) * size, dtype=dtype)
    norms = None
    if normed:
        norms = Norm(random(size, dtype=dtype, seed=2), 1e-6), Norm(random(size, dtype=dtype, seed=3), 1e-1)
    expected, found = (rotated(ops, qkv_TF, [7, 0, 10, 3, 4], heads, size, norms) for ops in OPS)
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other)
    assert torch.equal(found[2], expected[2]), "values are copied"
    untouched = [1, 2, 5, 6, 8, 9]
    assert (found[1][untouched] == 1).all() and (found[2][untouched] == 1).all()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", [1, GATE_BLOCK + 5])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.filterwarnings("ignore:overflow")
def test_what_the_gate_lets_through(dtype: torch.dtype, size: int, activation: str) -> None:
    gate_up_T2I = 3 * random(3, 2 * size, dtype=dtype)
    gate_up_T2I[0, 0], gate_up_T2I[1, 0] = 100, -100  # far beyond where exponentials overflow
    expected, found = (ops.gate(gate_up_T2I, activation) for ops in OPS)
    assert_close(found, expected)


@pytest.mark.parametrize("ops", OPS, ids=["plain", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bits_of_a_row_do_not_depend_on_the_others(ops: LayerOps, dtype: torch.dtype) -> None:
    count, size, heads = 9, 96, 2
    x_TD, delta_TD = random(count, size, dtype=dtype), random(count, size, dtype=dtype, seed=1)
    qkv_TF, gate_up_T2I = random(count, 8 * 16, dtype=dtype), random(count, 2 * size, dtype=dtype)
    norm, head_norm = Norm(random(size, dtype=dtype, seed=2), 1e-6), Norm(random(16, dtype=dtype, seed=2), 1e-6)
    cos_TE, sin_TE = tables(count, 16, dtype)

    def computed(rows: list[int]) -> list[Tensor]:
        keys_SHE, values_SHE = torch.zeros(2, count, heads, 16, dtype=dtype, device=DEVICE)
        slots_T = torch.tensor(rows, device=DEVICE)
        angles, cached = (cos_TE[rows], sin_TE[rows]), (keys_SHE, values_SHE)
        query_TQE = ops.rotate_and_store(qkv_TF[rows], angles, slots_T, cached, (head_norm, head_norm))
        added = ops.add_norm(x_TD[rows], delta_TD[rows], norm)
        return [*added, ops.gate(gate_up_T2I[rows], "silu"), query_TQE, keys_SHE[rows], values_SHE[rows]]

    together = computed(list(range(count)))
    for rows in ([0], [8], [5, 2], [7, 1, 4, 0]):
        for alone, all_rows in zip(computed(rows), together, strict=True):
            assert torch.equal(alone, all_rows[rows])


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from engine.layers import layer_kernels as kernels

def asm(kernel, capability, dtype, **constants):
    types = {"slot_ptr": "*i32", **dict.fromkeys(("eps", "query_eps", "key_eps"), "fp32")}
    signature = {name: "constexpr" if name in constants else types.get(name, "*" + dtype) for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(kernels.EXACT)).asm

for add in (False, True):
    asm(kernels._add_norm, 80, "bf16", D=96, BLOCK=128, ADD=add)
for silu in (False, True):
    asm(kernels._gate, 80, "bf16", I=96, BLOCK=1024, SILU=silu)
for capability, dtype, norm in ((80, "fp32", False), (90, "bf16", True), (90, "bf16", False)):
    rotation = asm(kernels._rotate_and_store, capability, dtype, Q=4, H=2, E=24, BLOCK=16, NORM=norm)["ptx"]
assert "mul.rn.bf16" in rotation and "fma.rn" not in rotation, rotation
"""


@pytest.mark.thorough
@pytest.mark.skipif(DEVICE == "cuda", reason="the other tests compile them")
def test_kernels_compile_for_gpus_and_round_products_before_adding_them(tmp_path: Path) -> None:
    assert_compiles(COMPILE, tmp_path)
