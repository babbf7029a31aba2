"""Memory that is moved to huge pages holds what it held."""

import re
from pathlib import Path

import pytest
import torch

from engine.host.memory import HUGE, collapse
from engine.layers.linear import PackedLinear, can_pack


def huge_bytes(address: int) -> int:
    """Bytes in huge pages of the mapping of this process that holds ``address``."""
    mappings = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    for mapping in filter(None, mappings):
        start, stop = (int(end, 16) for end in mapping.split(None, 1)[0].split("-"))
        if start <= address < stop:
            found = re.search(r"AnonHugePages:\s+(\d+) kB", mapping)
            return int(found[1]) * 1024 if found else 0
    raise AssertionError(f"nothing is mapped at {address:#x}")


def test_what_whole_huge_pages_cover_is_moved_and_keeps_its_numbers() -> None:
    numbers = torch.arange(4 * HUGE // 8)
    moved = collapse(numbers.data_ptr(), 4 * HUGE)
    assert torch.equal(numbers, torch.arange(4 * HUGE // 8))
    if not moved:
        pytest.skip("this system gives no huge pages")
    assert moved in (3 * HUGE, 4 * HUGE)
    assert huge_bytes(numbers.data_ptr() + HUGE) >= moved


def test_less_than_a_huge_page_is_left_alone() -> None:
    numbers = torch.zeros(2 * HUGE, dtype=torch.uint8)
    inside = -numbers.data_ptr() % HUGE + 4096
    assert collapse(numbers.data_ptr() + inside, HUGE - 4096) == 0


@pytest.mark.skipif(not can_pack(torch.empty(1)), reason="this build of torch has no oneDNN")
@torch.inference_mode()
def test_packed_weights_are_in_huge_pages_where_there_are_any() -> None:
    probe = torch.ones(4 * HUGE, dtype=torch.uint8)
    if not collapse(probe.data_ptr(), 4 * HUGE):
        pytest.skip("this system gives no huge pages")
    packed = PackedLinear(torch.randn(2048, 2048), None)
    assert huge_bytes(torch.ops.mkldnn.data_ptr(packed._packed) + 2 * HUGE) >= 2 * HUGE
