"""How many compiled kernels oneDNN keeps: as many as the engine says, in force before PyTorch is used."""

import os
import subprocess
import sys

import pytest

from cluster.config.environment import CHECKOUT
from engine import KERNELS_KEPT

NAMES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")

TWICE = """
import sys
import engine
import torch
from engine.layers.linear import PackedLinear
linear = PackedLinear(torch.rand(64, 64), None)
for _ in range(2):
    for rows in range(1, int(sys.argv[1]) + 1):
        linear(torch.rand(rows, 64))
"""
"""Products of so many shapes, one after the other, twice."""


def fresh(**more: str) -> dict[str, str]:
    return {name: text for name, text in os.environ.items() if name not in NAMES} | more


def kernels_made(shapes: int) -> int:
    """How often oneDNN had to make a kernel for the products."""
    command = [sys.executable, "-c", TWICE, str(shapes)]
    environment = fresh(ONEDNN_VERBOSE="profile_create", OMP_NUM_THREADS="1")
    done = subprocess.run(command, cwd=CHECKOUT, env=environment, capture_output=True, text=True, check=True)
    made = [
        line for line in done.stdout.splitlines() if ("create" in line and "matmul" in line) or "inner_product" in line
    ]
    return sum("cache_miss" in line for line in made)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="oneDNN's log is read on Linux")
def test_no_more_kernels_are_kept_than_said():
    """Taking turns, one shape more than are kept is made again every time; as many as are kept are made once."""
    assert kernels_made(int(KERNELS_KEPT) + 1) >= 2 * int(KERNELS_KEPT)
    assert kernels_made(int(KERNELS_KEPT) // 4) < int(KERNELS_KEPT) // 2


def test_who_has_chosen_is_left_alone():
    program = "import os, engine; print(*(os.environ[name] for name in ('" + "', '".join(NAMES) + "')))"
    environment = fresh(LRU_CACHE_CAPACITY="7")
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=CHECKOUT, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [KERNELS_KEPT, "7"]
