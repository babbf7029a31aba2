"""``paceline worker`` ends when it is told to, whatever holds it up."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest

START = """
import asyncio, sys, time
from types import SimpleNamespace
from cluster.commands import worker

def stuck(*_):
    print("stuck", flush=True)
    time.sleep(60)  # holds up the loop, as an import or a collective does

async def start(*_):
    async def wait():
        print("stuck", flush=True)
        if sys.argv[1] == "fail":
            raise ValueError("a step")
        await asyncio.Event().wait()

    async def drain(_=0):
        print("drains", flush=True)
        time.sleep(60)

    welcome = SimpleNamespace(dtype="fp32")
    return SimpleNamespace(address="here", welcome=welcome, freeze_loaded=bool, wait=wait, drain=drain, stop=drain)

worker.STOP_SECONDS = float(sys.argv[2])
if sys.argv[1] == "import":
    worker.import_worker = stuck
else:
    worker._start = start
from cluster.cli import main
sys.exit(main(["worker", "draft", "--listen", "127.0.0.1:0"]))
"""


@contextmanager
def standing_still(stage, bound, line):
    """A worker that stands still at this stage and may for so long; it has said this line."""
    command = [sys.executable, "-c", START, stage, str(bound)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert any(line in said for said in process.stdout)
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("stage", "bound", "signals", "says"),
    [("import", 60, 1, ""), ("drain", 60, 2, ""), ("drain", -29, 1, "in drain")],
    ids=["while it imports", "by a second signal", "once its time is up"],
)
def test_a_worker_that_stands_still_ends(stage, bound, signals, says, number):
    with standing_still(stage, bound, "stuck") as process:
        process.send_signal(number)
        if signals == 2:
            assert "drains" in process.stdout.readline()
            process.send_signal(number)
        _, errors = process.communicate(timeout=40)
    assert says in errors
    assert process.returncode == (1 if says else -number)


@pytest.mark.parametrize("bound", [60, 1], ids=["by a signal", "once its time is up"])
def test_a_worker_that_failed_and_stands_still_ends(bound):
    with standing_still("fail", bound, "drains") as process:
        if bound == 60:
            process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=40)
    assert "the draft worker failed: ValueError: a step" in errors
    assert process.returncode == (-signal.SIGTERM if bound == 60 else 1)
