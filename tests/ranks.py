"""Ranks of a tensor-parallel group under test. A process can have one group at a time."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from cluster.processes.rank_processes import RankProcesses
from engine.build import build
from engine.leader import Loss
from engine.settings import EngineSettings
from engine.step import Engine
from tests.forked import ForkedProcess

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="ranks take the GPUs where there are some")


class Watched(RankProcesses):
    """Ranks whose loss is told to the test instead of ending its process."""

    def __init__(self) -> None:
        super().__init__()
        self.reason = ""
        self.told = threading.Event()

    @property
    def pids(self) -> dict[int, int]:
        return {number: rank.process.pid for number, rank in self._ranks.items()}

    def end_worker(self, loss: Loss, reason: str) -> None:
        self.reason = reason
        self.told.set()


class Forked(Watched):
    """Watched ranks that are there at once."""

    def spawned(self) -> Any:
        return ForkedProcess(self.module)


@contextmanager
def on_ranks(settings: EngineSettings, ranks: Watched | None = None, count: int = 2) -> Iterator[Engine]:
    """An engine on several ranks, which are gone afterwards. They have time to join however slow the machine is."""
    ranks = ranks or Forked()
    if settings.join_timeout == EngineSettings("").join_timeout:
        settings = replace(settings, join_timeout=900.0)
    engine = build(replace(settings, tensor_parallel_size=count), ranks=ranks)
    try:
        yield engine
    finally:
        engine.close()
    assert not any(alive(pid) for pid in ranks.pids.values())


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
