"""Moves of slots by kernels, interpreted where there is no GPU, are those made tensor by tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.cache.kv_store import CLEAR, KVStore, Move
from engine.cache.move_kernels import SlotMover
from tests.compiled import assert_compiles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLOTS = 12
SWAPPED_SHIFTED_AND_CLEARED = [(3, 1), (1, 3), (5, 6), (6, 7), (CLEAR, 0), (CLEAR, 5)]


def filled(dtype: torch.dtype) -> KVStore:
    """Three layers of different sizes, one of them larger than a program has in hand, and what lies beside."""
    store = KVStore(3, SLOTS, dtype=dtype, device=DEVICE, spare=2)
    generator = torch.Generator().manual_seed(1)
    for layer, (heads, key_size, value_size) in enumerate(((2, 8, 8), (1, 6, 10), (4, 300, 8))):
        for tensor in store.layer(layer, heads, key_size, value_size):
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    store.beside(4).copy_(torch.randn(SLOTS + 2, 4, generator=generator))
    return store


def contents(store: KVStore) -> list[torch.Tensor]:
    return [tensor for tensor in (*store._keys, *store._values) if tensor is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("moves", [[(2, 9)], SWAPPED_SHIFTED_AND_CLEARED], ids=["one", "several"])
def test_slots_move_all_at_once(dtype: torch.dtype, moves: list[Move]) -> None:
    store = filled(dtype)
    before = [tensor.clone() for tensor in contents(store)]
    SlotMover(contents(store))(moves)
    for old, new in zip(before, contents(store), strict=True):
        expected = old.clone()
        for source, destination in moves:
            expected[destination] = 0 if source == CLEAR else old[source]
        assert torch.equal(new, expected)
    other = filled(dtype)
    other.move(moves)
    assert all(map(torch.equal, contents(other), contents(store)))


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from engine.cache import move_kernels as kernels

types = {"address_N": "*i64", "words_N": "*i64", "moves_2M": "*i64", "kept_NMW": "*i32", "M": "i32"}
for kernel in (kernels._read, kernels._write):
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs={"W": 700, "BLOCK": kernels.BLOCK})
    triton.compile(source, target=GPUTarget("cuda", 90, 32))
"""


@pytest.mark.thorough
@pytest.mark.skipif(DEVICE == "cuda", reason="the other test compiles them")
def test_the_kernels_compile_for_gpus(tmp_path: Path) -> None:
    assert_compiles(COMPILE, tmp_path)
