"""The kernels of draft levels compile for GPUs; what they compute is tested beside what defines it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from tests.compiled import assert_compiles

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from engine.cuda import draw_kernels as draws, level_kernels as kernels
from engine.layers.layer_kernels import EXACT

DOUBLE = {"odds_ptr", "factor_ptr", "min_weight_ptr", "weight_ptr", "place_weight_ptr", "found_ptr", "temperature_ptr",
          "weight_field_ptr", "leaf_weight_ptr"}
INT32 = {"numbers_ptr", "pages_ptr", "tokens_ptr", "positions_ptr", "slots_ptr", "keys_ptr", "homes_ptr", "group_ptr",
         "common_ptr"}
SINGLE = {"largest_ptr", "total_ptr"}

def asm(kernel, capability, **constants):
    def kind(name):
        if name in constants:
            return "constexpr"
        if not name.endswith("_ptr"):
            return "i32"
        precise = "*fp64" if name in DOUBLE else "*fp32" if name in SINGLE else "*i64"
        return "*i32" if name in INT32 else "*bf16" if name == "logits_ptr" else precise
    signature = {name: kind(name) for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(EXACT)).asm["ptx"]

PARTS = {"PARTS": 32, "PARTS_PADDED": 32, "KEPT": 7, "WIDTH": 4, "RECORD": 111}
SIZES = {"WIDTH": 4, "RECORD": 111, "CHILDREN": 3, "LEAVES": 8, "PLACES": 40, "DRAFTS": 104, "DRAFTS_PADDED": 128,
         "BRANCH": 64, "TOLD": 3}
for capability in (89, 90):
    asm(draws._find_largest, capability, V=32064, PARTS=32, PART=1024)
    for noisy in (False, True):
        asm(draws._find_best, capability, V=32064, PART=1024, LEAVES=8, PLACES=40, NOISY=noisy, **PARTS)
        asm(draws._merge, capability, KEPT_PADDED=8, BEST_PADDED=256, CHILDREN=3, TOLD=3, NOISY=noisy, **PARTS)
    asm(kernels._begin, capability, GIVEN_PADDED=16, **SIZES)
    ptx = asm(kernels._next_level, capability, LEVELS=8, STOPS=8, GROUP=4, **SIZES)
    assert ".local" not in ptx, "registers are spilt"
    worth = [line for line in ptx.splitlines() if ".f64" in line and "fma" in line]
    assert "mul.rn.f64" in ptx and not worth, worth
"""


@pytest.mark.thorough
@pytest.mark.skipif(torch.cuda.is_available(), reason="the other tests compile them")
def test_the_kernels_compile_for_gpus(tmp_path: Path) -> None:
    assert_compiles(COMPILE, tmp_path)
