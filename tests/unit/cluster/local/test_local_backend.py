"""The local backend's words: what children say, and when it is nobody's concern."""

from __future__ import annotations

import pytest

from cluster.config.config import Config
from cluster.config.pools import TargetConfig
from cluster.local.backend import LocalProcesses


def test_targets_that_stand_by_run_besides_the_others() -> None:
    processes = LocalProcesses(Config(target=TargetConfig(replicas=2, standby=1)))
    assert [child.name for child in processes.children] == ["target 0", "target 1", "target 2", "draft 0", "router"]
    processes.stop()


def test_what_children_say_of_each_others_end_is_not_told(capsys: pytest.CaptureFixture[str]) -> None:
    processes = LocalProcesses(Config())
    processes._heard("router", "WARNING something is wrong")
    assert capsys.readouterr().err == "[router] WARNING something is wrong\n"
    processes.stop()
    processes._heard("router", "WARNING cannot reach target worker 127.0.0.1:1")
    assert capsys.readouterr().err == ""
