"""The local backend's words: what children say, and when it is nobody's concern."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.config.config import Config
from cluster.config.pools import DraftConfig, TargetConfig
from cluster.console import stages
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


def test_the_router_serves_while_workers_load(tmp_path: Path) -> None:
    """It is let go once they listen: here they are ready only once it runs."""
    serves = tmp_path / "serves"
    processes = LocalProcesses(Config(draft=DraftConfig(replicas=0)))
    load = f"echo target worker loading on x; until [ -e {serves} ]; do sleep 0.01; done; echo target worker ready on x"
    (worker,) = processes._workers
    worker._command = ["sh", "-c", f"{load}; sleep 600"]
    processes._router._command = ["sh", "-c", f"cat > /dev/null; touch {serves}; echo router ready on y; sleep 600"]
    with stages() as report:
        processes.start(report)
    assert worker.ready and processes._router.ready
    processes.stop()
