"""Moves of slots by kernels, interpreted where there is no GPU, are those made tensor by tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.cache import move_kernels
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


class Allocated(TorchDispatchMode):
    """Counts the bytes of what is made to keep copies in."""

    BY = (torch.ops.aten.empty.memory_format, torch.ops.aten.new_empty.default, torch.ops.aten.index_select.default)

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.bytes += made.nbytes if func in self.BY and isinstance(made, Tensor) else 0
        return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "moves", [[(2, 9)], SWAPPED_SHIFTED_AND_CLEARED, [(CLEAR, 3)]], ids=["one", "several", "cleared"]
)
@pytest.mark.parametrize("scratch", [0, 16 << 10, move_kernels.SCRATCH])
def test_slots_move_all_at_once(scratch: int, dtype: torch.dtype, moves: list[Move], monkeypatch) -> None:
    """However many tensors the scratch is for: one, a few or all."""
    monkeypatch.setattr(move_kernels, "SCRATCH", scratch)
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


def test_many_moves_keep_the_copies_of_few_tensors_at_a_time(monkeypatch) -> None:
    store = filled(torch.float32)
    widest = max(tensor[0].nbytes for tensor in contents(store))
    monkeypatch.setattr(move_kernels, "SCRATCH", 2 * 4 * widest)
    moves = [(slot, slot + 4) for slot in range(4)]
    with Allocated() as allocated:
        SlotMover(contents(store))([*moves, (CLEAR, 0), (CLEAR, 1)])
    assert 0 < allocated.bytes <= 2 * 4 * widest
    layers = KVStore(40, 4096, dtype=torch.float32, device="cpu")
    for layer in range(40):
        layers.layer(layer, 1, 2, 4)
    with Allocated() as allocated:
        layers.move([(slot, slot + 1) for slot in range(4000)])
    assert 4000 * 4 * 4 <= allocated.bytes < 2 * 4000 * 4 * 4


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from engine.cache import move_kernels as kernels

types = dict.fromkeys(("address_N", "words_N", "moves_2M"), "*i64") | {"kept_KCW": "*i32"}
types |= dict.fromkeys(kernels.VARYING, "i32")
for kernel in (kernels._read, kernels._write):
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs={"W": 700, "BLOCK": kernels.BLOCK})
    triton.compile(source, target=GPUTarget("cuda", 90, 32))
    for parameter in kernel.params:
        assert parameter.is_constexpr or parameter.do_not_specialize == (types[parameter.name] == "i32")
"""


@pytest.mark.thorough
@pytest.mark.skipif(DEVICE == "cuda", reason="the other test compiles them")
def test_the_kernels_compile_for_gpus(tmp_path: Path) -> None:
    assert_compiles(COMPILE, tmp_path)
