"""The local backend's words: what children say, and when it is nobody's concern."""

from __future__ import annotations

import pytest

from cluster.config.config import Config
from cluster.local.backend import LocalProcesses


def test_what_children_say_of_each_others_end_is_not_told(capsys: pytest.CaptureFixture[str]) -> None:
    processes = LocalProcesses(Config())
    processes._heard("router", "WARNING something is wrong")
    assert capsys.readouterr().err == "[router] WARNING something is wrong\n"
    processes.stop()
    processes._heard("router", "WARNING cannot reach target worker 127.0.0.1:1")
    assert capsys.readouterr().err == ""
