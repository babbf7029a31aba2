"""Telling something never ends what serves, and a result that cannot be written is told."""

from __future__ import annotations

import asyncio
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import IO

import pytest

from cluster import console
from cluster.commands import worker
from cluster.config.config import Config
from cluster.config.environment import CHECKOUT
from cluster.local.backend import LocalProcesses
from cluster.processes.child import Child, ours

FULL = Path("/dev/full")
pytestmark = pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")


ways = pytest.mark.parametrize("how", ["full", "gone", "closed", "none"])


@contextmanager
def unwritable(how: str) -> Iterator[None]:
    """Standard streams that take nothing."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("stdout", "stderr"):
            patch.setattr(sys, name, open_unwritable(how))
        yield
        console.let_go()


def open_unwritable(how: str) -> IO[str] | None:
    if how == "none":
        return None
    if how == "full":
        return FULL.open("w")
    reader, writer = os.pipe()
    os.close(reader)
    file = os.fdopen(writer, "w")
    if how == "closed":
        file.close()
    return file


@ways
def test_what_cannot_be_told_is_lost_and_ends_nothing(how: str) -> None:
    with unwritable(how):
        for _ in range(2):
            console.tell("it serves")
            console.complain("something ended")
            console.stderr_console().print("a line")
        with pytest.raises(console.CommandError, match="cannot write the result: "):
            console.say("a result")


@ways
def test_the_output_of_a_child_is_read_to_its_end(how: str) -> None:
    processes = LocalProcesses(Config())
    script = "echo one >&2; echo two >&2; echo it is ready on 127.0.0.1:1"
    child = Child("draft", ["sh", "-c", script], processes._heard)
    with unwritable(how):
        child.start(0.0)
        child.stop(30.0)
        assert child.reason == "two"
        child._readers[0].join(30.0)
    assert child.ready
    processes.stop()


@ways
async def test_a_worker_serves_whether_or_not_its_ready_line_can_be_written(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drained: list[float] = []

    async def drain(seconds: float) -> None:
        drained.append(seconds)

    async def wait() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.Event().wait()

    async def start(*_: object) -> SimpleNamespace:
        welcome = SimpleNamespace(dtype="fp32")
        return SimpleNamespace(address="here", welcome=welcome, freeze_loaded=bool, wait=wait, drain=drain)

    monkeypatch.setattr(worker, "_start", start)
    bounds: list[float] = []
    monkeypatch.setattr("faulthandler.dump_traceback_later", lambda seconds, **_: bounds.append(seconds))
    with unwritable(how):
        assert await worker._serve("draft", Config(), "127.0.0.1:0") == 0
    assert drained == [Config().drain_timeout]
    assert bounds == [Config().drain_timeout + worker.STOP_SECONDS]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_a_result_that_cannot_be_written_fails_in_one_line() -> None:
    with FULL.open("w") as full:
        done = subprocess.run(
            ours("cluster.cli", "config"), stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (1, "paceline: cannot write the result: No space left on device\n")


COMPLETE = """
import sys
from cluster import cli, completion
from cluster.commands import complete
completion.stream = lambda *_: iter([("1 \u2192 ", False), ("2", True)])
sys.exit(cli.main(["complete", "x", "--no-compare"]))
"""


@pytest.mark.parametrize("terminal", [False, True])
def test_text_that_the_encoding_of_the_output_lacks_is_spelled_out(terminal: bool) -> None:
    ends = pty.openpty() if terminal else os.pipe()
    variables = os.environ | {"PYTHONIOENCODING": "latin-1", "NO_COLOR": "1", "TERM": "dumb"}
    done = subprocess.run(
        [sys.executable, "-c", COMPLETE],
        stdout=ends[1],
        stderr=subprocess.PIPE,
        env=variables,
        cwd=CHECKOUT,
        check=False,
    )
    os.close(ends[1])
    assert done.returncode == 0, done.stderr
    assert os.read(ends[0], 4096).decode("latin-1").removeprefix("x").strip() == "1 \\u2192 2"
    os.close(ends[0])
