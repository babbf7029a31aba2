"""What the local backend promises of its processes: ports that nobody else is given, and their last words."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from cluster import local
from cluster.child import Child
from cluster.local import LOWEST_PORT, free_port


def given(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str) -> None:
    """Have the kernel say so of the ports that it gives."""
    (folder / "range").write_text(text)
    monkeypatch.setattr(local, "GIVEN_PORTS", folder / "range")


@pytest.mark.parametrize(("text", "below"), [("30000\t60999\n", 30_000), ("rubbish", 32_768), ("", 32_768)])
def test_a_free_port_is_none_that_connections_are_given(
    text: str, below: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given(monkeypatch, tmp_path, text)
    assert all(LOWEST_PORT <= free_port() < below for _ in range(50))


def test_where_connections_may_be_given_any_port_a_free_one_is_any(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given(monkeypatch, tmp_path, "1024\t65535\n")
    assert free_port() > 1023


def test_a_port_that_is_taken_is_not_free(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port()))
        port = taken.getsockname()[1]
        monkeypatch.setattr(local, "LOWEST_PORT", port)
        monkeypatch.setattr(local, "ATTEMPTS", 1)
        given(monkeypatch, tmp_path, f"{port + 1}\t65535")
        assert free_port() != port


def test_the_last_words_of_a_process_are_waited_for() -> None:
    """They come only some time after the process has ended."""
    words = "import os, sys, time\nif os.fork() == 0: time.sleep(0.3); print('last words', file=sys.stderr)"
    child = Child("one", [sys.executable, "-c", words], lambda *_: None)
    child.start(0.0)
    child.stop(30.0)
    assert child.reason == "last words"
