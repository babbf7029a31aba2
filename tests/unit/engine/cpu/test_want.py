"""A C++ step for which there is no memory fails alone, and one for which there are not enough threads has fewer."""

from __future__ import annotations

import subprocess
import sys

import pytest

from engine.cpu.library import find_library

pytestmark = pytest.mark.skipif(find_library() is None, reason="no C++ compiler, or a processor without AVX2")

START = """
import resource
from pathlib import Path
import torch
from engine.cpu.library import CRows, CStack, find_library
from engine.cpu.thread_choice import COUNTS

library = find_library()
packed, x = library.pack(torch.ones(32, 64)), torch.ones(8, 64)
expected = library.product(packed, None, 32, x)
hard = resource.getrlimit(resource.RLIMIT_AS)[1]

def leave(megabytes):
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + (megabytes << 20), hard))
"""

MEMORY = """
stack = CStack(hidden=64, query_heads=1, key_heads=1, head_size=32, value_size=32, intermediate=1 << 30)
leave(200)
try:
    library.step(stack, CRows(count=8), x.clone(), (x, x), 1)
except MemoryError as error:
    print(error)
assert torch.equal(library.product(packed, None, 32, x), expected)
"""

THREADS = """
def product():
    before = len(list(Path("/proc/self/task").iterdir()))
    assert torch.equal(library.product(packed, None, 32, x), expected)
    return len(list(Path("/proc/self/task").iterdir())) - before

COUNTS.most = 40
leave(20)
came = product()
assert came < 39, came
resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
assert came + product() == 39
assert product() == 0
"""


def said(script: str) -> str:
    done = subprocess.run([sys.executable, "-c", START + script], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_memory_a_step_fails_and_the_next_one_does_not() -> None:
    assert said(MEMORY) == "there is no memory for a step\n"


def test_without_threads_a_step_has_fewer_until_they_can_be_had() -> None:
    said(THREADS)
