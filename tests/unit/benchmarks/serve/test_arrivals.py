"""When requests are due and how many run: seeded, and from the time that was planned."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import pytest

from benchmarks.serve import rounds as arrivals
from benchmarks.serve.client import NOT_SENT, Heard
from benchmarks.serve.rounds import Log, ServerError, Turn, at_once, at_rate, offsets, stopped, take
from benchmarks.serve.settings import ServeOptions, ServerContender


def gaps(rate: float, seed: int, turn: int, n: int = 4000) -> list[float]:
    found = list(islice(offsets(rate, seed, turn), n))
    return [later - earlier for earlier, later in zip([0.0, *found], found, strict=False)]


def test_poisson_arrivals_are_exponential_and_seeded() -> None:
    seed = random.randrange(1 << 30)
    between = sorted(gaps(8.0, seed, 0))
    assert abs(fmean(between) - 1 / 8) < 0.012, seed
    # Of an exponential law, the median is ln 2 of the mean, and 1 in e is longer than the mean.
    assert abs(between[2000] - 0.6931 / 8) < 0.012, seed
    assert abs(sum(gap > 1 / 8 for gap in between) / 4000 - 0.3679) < 0.04, seed
    assert gaps(8.0, seed, 0, 9) == gaps(8.0, seed, 0, 9)
    assert gaps(8.0, seed, 0, 9) != gaps(8.0, seed, 1, 9)
    assert gaps(8.0, seed, 0, 9) != gaps(8.0, seed + 1, 0, 9)


async def test_a_stall_does_not_put_off_when_requests_were_due() -> None:
    asked: dict[int, tuple[float, float]] = {}

    async def ask(number: int, due: float) -> float:
        asked[number] = (due, time.perf_counter())
        if number == 0:
            time.sleep(0.05)  # noqa: ASYNC251 - this process is late with all that is due meanwhile
        return 0.0

    planned = [0.0, 0.01, 0.02, 0.03, 0.06]
    await at_rate(iter(range(5)), iter(planned), ask)
    for number, offset in enumerate(planned):
        assert abs(asked[number][0] - asked[0][0] - offset) < 1e-6
    assert asked[1][1] - asked[1][0] > 0.035


async def test_too_many_are_not_sent(monkeypatch) -> None:
    monkeypatch.setattr(arrivals, "MOST_OPEN", 2)
    asked, turn = [], Turn(ServerContender("a", ""), 0, 0.0)

    async def send(number: int, due: float) -> Heard:
        asked.append(number)
        while not turn.heard:
            await asyncio.sleep(0.001)
        return Heard(number, due)

    await take(send, turn, ServeOptions(rate=1000.0, requests=3, rounds=1), Log())
    assert (asked, turn.running) == ([0, 1], 0)
    assert [(one.number, one.error) for one in turn.heard] == [(2, NOT_SENT), (0, ""), (1, "")]


async def test_so_many_at_once_and_no_more() -> None:
    running, max_running, order = 0, 0, []

    async def ask(number: int, due: float) -> float:
        nonlocal running, max_running
        running += 1
        max_running = max(max_running, running)
        order.append(number)
        await asyncio.sleep(0.001)
        running -= 1
        return 0.0

    await at_once(iter(range(11)), 3, ask)
    assert (max_running, running) == (3, 0)
    assert sorted(order) == list(range(11))


async def test_senders_pause_when_told(monkeypatch) -> None:
    now = 0.0
    asked: list[float] = []

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(arrivals, "time", SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(arrivals, "asyncio", SimpleNamespace(sleep=sleep, TaskGroup=asyncio.TaskGroup))

    async def ask(number: int, due: float) -> float:
        asked.append(due)
        return 0.04

    await at_once(iter(range(3)), 1, ask)
    assert asked == pytest.approx([0.0, 0.04, 0.08])


def stands_still(process: int) -> bool:
    return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].startswith("T")


@pytest.fixture
def server() -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends when it is told to, unless it stands still."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True) as process:
        yield process


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="states of processes are read from /proc")
async def test_other_servers_stand_still_meanwhile_and_go_on(monkeypatch: pytest.MonkeyPatch, server) -> None:
    monkeypatch.setattr(arrivals, "RESUMED", 0.0)
    async with stopped([None, server.pid]):
        while not stands_still(server.pid):
            await asyncio.sleep(0.001)
    server.communicate(b"\n")
    assert server.returncode == 0
    with pytest.raises(ServerError, match=f"--process {server.pid}: cannot be stopped"):
        await stopped([server.pid]).__aenter__()
