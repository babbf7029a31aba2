"""A probe fails where a GPU no longer answers, and nowhere else."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

import pytest

from cluster.config.environment import CHECKOUT
from engine.host import live_gpus


@dataclass
class FakeNvml:
    """A driver with some GPUs; the codes that its functions return."""

    gpus: int = 2
    init: int = 0
    handles: dict[int, int] = field(default_factory=dict)
    temperature: int = 0

    def nvmlInit_v2(self) -> int:
        return self.init

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = self.gpus
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: Any) -> int:
        return self.handles.get(index, 0)

    def nvmlDeviceGetTemperature(self, handle: Any, sensor: int, degrees: Any) -> int:
        return self.temperature


@pytest.mark.parametrize(
    ("driver", "said"),
    [
        (FakeNvml(), ""),
        (FakeNvml(temperature=3), ""),  # no such sensor
        (FakeNvml(handles={1: 15}), "GPU 1 does not answer (lost)"),
        (FakeNvml(handles={1: 4}), ""),  # another container's
        (FakeNvml(handles={0: 4, 1: 15}), "GPU 1 does not answer (lost)"),
        (FakeNvml(handles={0: 4, 1: 4}), "the driver knows no GPU"),
        (FakeNvml(handles={0: 999}), "GPU 0 does not answer (999)"),
        (FakeNvml(temperature=15), "GPU 0 does not answer (lost)"),
        (FakeNvml(init=999), "the driver does not answer (nvmlInit: 999)"),
        (FakeNvml(gpus=0), "the driver knows no GPU"),
    ],
)
def test_a_gpu_that_does_not_answer_is_a_fault(driver: FakeNvml, said: str, monkeypatch, capsys) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    assert live_gpus.main() == bool(said)
    assert capsys.readouterr().err == (f"{said}\n" if said else "")


def test_where_there_is_no_driver_nothing_is_said(monkeypatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert live_gpus.main() == 0


def test_the_probe_starts_without_what_is_installed() -> None:
    command = [sys.executable, "-S", "-c", "import engine.host.live_gpus, sys; sys.exit('torch' in sys.modules)"]
    assert subprocess.run(command, cwd=CHECKOUT, check=False).returncode == 0
