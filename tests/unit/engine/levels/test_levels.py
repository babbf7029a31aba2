"""What a launch of draft levels is told of its sessions."""

from __future__ import annotations

import tracemalloc
from array import array
from collections.abc import Iterator
from itertools import count
from unittest.mock import Mock

import pytest
import torch

from engine.levels.level_memory import LevelExpansion, LevelMemory, TreePlace
from engine.levels.levels import Levels
from speculation.messages import Sampling, Source
from speculation.verifying.calibration import Calibration

PAGE, SESSIONS, WIDTH = 4, 3, 2


class Told(Levels):
    """Computes nothing, and keeps what it was told."""

    memory: LevelMemory

    def _expand(self, memory: LevelMemory, levels: int, *, noisy: bool) -> None:
        self.memory = memory


def told(pages: int) -> Told:
    """``pages``: of the longest sequence."""
    layers = Mock(store=Mock(device=torch.device("cpu"), slots=9), attention=Mock(group=1, page=PAGE), pages=pages)
    return Told(layers, 8, torch.float32, [WIDTH * SESSIONS], width=WIDTH, children=1)


def expansion(home: int, branches: list[list[int]], numbers: Iterator[int]) -> LevelExpansion:
    """A session with places at the end of ``home`` tokens, and one page more than these need."""
    pages = -(-home // PAGE) + 1
    return LevelExpansion(
        sampling=Sampling(temperature=0.0),
        stops=(),
        position=home,
        max_end=home + 8,
        min_weight=0.0,
        width=WIDTH,
        children=1,
        factors=Calibration().factors(Source.DRAFT),
        blocks=array("i", (next(numbers) for _ in range(pages))),
        rows=range(len(branches)),
        places=[TreePlace(home + len(branch), home, branch) for branch in branches],
        weights=[1.0] * len(branches),
        leaves=(),
        slots=(),
    )


@pytest.mark.parametrize("homes", [(1, PAGE, PAGE + 1), (4001, 3, 400), (7,)], ids=str)
def test_every_session_finds_its_pages_and_the_branches_of_its_places(homes: tuple[int, ...]) -> None:
    levels, numbers = told(1002), count(100)
    branches = [[[7 * home, 7 * home + 1], [home]][: 1 + home % 2] for home in homes]
    growths = [expansion(home, branch, numbers) for home, branch in zip(homes, branches, strict=True)]
    levels.launch(torch.zeros(WIDTH, 8), growths, Calibration().table(Source.DRAFT), 2)
    fields = {name: field.tolist() for name, field in levels.memory.fields.items()}
    found = levels.memory.rows.numbers_F
    for session, growth in enumerate(growths):
        table, pages = fields["table"][session][0], -(-homes[session] // PAGE)
        assert found[table : table + pages].tolist() == [*growth.blocks[:pages]]
        for place, branch in enumerate(branches[session]):
            first = fields["branch"][session][levels.leaves + place]
            assert found[first : first + len(branch)].tolist() == branch


def test_the_pages_of_a_long_text_are_copied_at_once() -> None:
    """A number made of each would take 32 bytes, and the host milliseconds a launch."""
    pages = 100_000
    levels, growth = told(pages), expansion(PAGE * (pages - 1), [[5]], count())
    odds = Calibration().table(Source.DRAFT)
    levels.launch(torch.zeros(WIDTH, 8), [growth], odds, 2)  # what is kept
    tracemalloc.start()
    levels.launch(torch.zeros(WIDTH, 8), [growth], odds, 2)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 * pages
