"""What tests of several kinds share."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

if not Path("/dev/nvidiactl").exists():
    # Kernels run in Triton's interpreter. It counts when triton is imported first.
    os.environ["TRITON_INTERPRET"] = "1"

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

from cluster import console
from tests.time_limit import pytest_runtest_call as pytest_runtest_call  # a hook
from tests.words import in_one_process, may_match

CLUSTERS = "tests/cluster/"
OURS = ("router", "transport", "engine", "speculation", "target_service", "draft_service", "cluster")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As a shell leaves it for what it starts in the background; tests interrupt themselves and what they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# An example takes as long as the machine lets it: a pause is no defect of what is tested.
settings.register_profile("machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("machine")


class ByFile(LoadScopeScheduling):
    """The tests of a file share a process, and so do all that start clusters."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::")[0]
        return CLUSTERS if file.startswith(CLUSTERS) else file

    def remove_node(self, node: WorkerController) -> str | None:
        """Return the test that ended its process, by a crash or a hang: it failed, and is not run again."""
        units = self.assigned_work[node]
        crashed = next((test for unit in units.values() for test, done in unit.items() if not done), None)
        for scope, unit in list(units.items()):
            units[scope] = {test: done or test == crashed for test, done in unit.items()}
            if all(units[scope].values()):
                del units[scope]
        super().remove_node(node)
        return crashed


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByFile:
    """Where tests run in several processes."""
    return ByFile(config, log)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Two processes, one of them for what starts clusters; none beside this one for a few tests."""
    return 0 if in_one_process(config.option.keyword, config.args) else 2


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file of which ``-k`` cannot want a test."""
    if collection_path.match("test_*.py") and not may_match(config.option.keyword, collection_path):
        return True
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """One thread: small models gain nothing from more, and other processes need the cores. No import of torch here."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that run in the process of a test tell mistakes alone: a slow machine must not add a line."""
    monkeypatch.setattr(console, "SLOW_SECONDS", threading.TIMEOUT_MAX)


@pytest.fixture(autouse=True)
def loggers_as_before() -> Iterator[None]:
    """What a test has left unsaid, another one may be about."""
    yield
    levels = {name: logging.getLogger(name).level for name in logging.root.manager.loggerDict if name.startswith(OURS)}
    assert not any(levels.values()), f"the level of a logger was changed for good: {levels}"


@pytest.fixture(scope="session")
def slow_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled target at several times its cost, so that drafts come in time on any machine; same text."""
    import torch

    from models.growth import stretch
    from models.pair import load, load_tokenizer, save_tokenizer
    from tests.bundled import MODELS

    folder = tmp_path_factory.mktemp("slow") / "target"
    stretch(load(MODELS / "target", torch.float32), hidden_size=768, layers=6).save_pretrained(folder)
    save_tokenizer(load_tokenizer(MODELS / "target"), folder)
    return folder
