"""What tests of several kinds share."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

if not Path("/dev/nvidiactl").exists():
    # Kernels run in Triton's interpreter. It counts when triton is imported first.
    os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from cluster import console
from models.pair import load, load_tokenizer, save_tokenizer
from models.stretch import stretch
from tests.stack import MODELS

CLUSTERS = "tests/cluster/"

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As a shell leaves it for what it starts in the background; tests interrupt themselves and what they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)

torch.set_num_threads(1)  # Small models gain nothing from more, and other processes need the cores.

# An example takes as long as the machine lets it: a pause is no defect of what is tested.
settings.register_profile("machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("machine")


class ByFile(LoadScopeScheduling):
    """The tests of a file share a process, and so do all that start clusters."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::")[0]
        return CLUSTERS if file.startswith(CLUSTERS) else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByFile:
    """Where tests run in several processes."""
    return ByFile(config, log)


@pytest.fixture(autouse=True)
def no_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that run in the process of a test tell mistakes alone: a slow machine must not add a line."""
    monkeypatch.setattr(console, "SLOW_SECONDS", threading.TIMEOUT_MAX)


@pytest.fixture(scope="session")
def slow_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled target at several times its cost, so that drafts come in time on any machine; same text."""
    folder = tmp_path_factory.mktemp("slow") / "target"
    stretch(load(MODELS / "target", torch.float32), hidden_size=512, layers=12).save_pretrained(folder)
    save_tokenizer(load_tokenizer(MODELS / "target"), folder)
    return folder
