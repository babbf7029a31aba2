"""A benchmark that is told to end lets go what it has stopped, and keeps nothing busy."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from benchmarks.harness import processes

HOLDS = """
import asyncio, sys
from argparse import Namespace
from benchmarks.harness.options import Options, run
from benchmarks.serve.rounds import stopped

class Held(Options):
    FOLDER, MODULE = None, "__main__"

async def hold():
    async with stopped([int(sys.argv[1])]):
        print("held", flush=True)
        await asyncio.sleep(60)

def main(_):
    asyncio.run(hold())

run(Held, Namespace(quick=False, json=None, out=None))
"""
SPINS = """
import asyncio, os
from benchmarks.chaos import faults

async def spin():
    os.cpu_count = lambda: 1
    async with faults._busy_cores():
        with open(f"/proc/self/task/{os.getpid()}/children") as children:
            print(children.read(), flush=True)
        await asyncio.sleep(60)

asyncio.run(spin())
"""
pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="states of processes are read from /proc")


def state(process: int) -> str:
    """A letter; none of a process that is gone."""
    stat = Path(f"/proc/{process}/stat")
    return stat.read_text().rpartition(") ")[2][0] if stat.exists() else ""


def becomes(process: int, *states: str) -> bool:
    until = time.monotonic() + 20.0
    while state(process) not in states and time.monotonic() < until:
        time.sleep(0.01)
    return state(process) in states


@pytest.fixture
def server() -> Iterator[subprocess.Popen[bytes]]:
    """A process in a group of its own, which waits."""
    with subprocess.Popen(["sleep", "100"], start_new_session=True) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_servers_that_stand_still_go_on(server, number: signal.Signals, background: bool) -> None:
    first = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # below nohup, tests have it ignored
    first += "signal.signal(signal.SIGINT, signal.SIG_IGN)\n" if background else ""
    command = [sys.executable, "-c", first + HOLDS, str(server.pid)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as bench:
        assert bench.stdout is not None and bench.stdout.readline() == "held\n"
        assert becomes(server.pid, "T")
        bench.send_signal(number)
        try:
            bench.communicate(timeout=30)
        finally:
            bench.kill()
    assert becomes(server.pid, "S")


def test_no_core_stays_busy_without_the_benchmark() -> None:
    with subprocess.Popen([sys.executable, "-c", SPINS], stdout=subprocess.PIPE, text=True) as bench:
        assert bench.stdout is not None
        (spinner,) = map(int, bench.stdout.readline().split())
        assert becomes(spinner, "R")
        bench.kill()
    gone = becomes(spinner, "", "Z")
    if not gone:
        os.kill(spinner, signal.SIGKILL)
    assert gone


STANDS = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('there', flush=True); time.sleep(99)"
)


@pytest.mark.parametrize("ready", ["there", "never"])
async def test_a_process_that_stands_still_says_where_and_is_ended(
    ready: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "stands.py").write_text(STANDS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(processes, "READY_SECONDS", 1.0 if ready == "never" else 60.0)
    monkeypatch.setattr(processes, "END_SECONDS", 1.0)
    with pytest.raises(TimeoutError) if ready == "never" else nullcontext():
        async with processes.child("sleeper", "stands", ready=f"({ready})") as child:
            process = child.process.pid
    said = capfd.readouterr().err
    assert "the sleeper stands still, and is ended; where it stood:" in said
    assert "stands.py" in said
    assert ready == "never" or not state(process)
