"""``paceline bench scale``: its figures are right, its flags are checked, and it measures what really runs."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from dataclasses import replace

import pytest

from benchmarks.harness import processes
from benchmarks.harness.options import BenchError
from benchmarks.harness.processes import ReadyProcess
from benchmarks.http import load
from benchmarks.http.load import Contest
from benchmarks.http.scale import (
    BARE,
    CONTENDERS,
    FEATURES,
    ROUTER,
    LoadPoint,
    ScaleOptions,
    carried,
    features_over_router,
    result,
    summary,
)

POINT = LoadPoint(ROUTER, 64, 1000.0, 990.0, (1.0, 20.0, 30.0), 25.0, 0.5, 0.1, 1.5, 3.0, 40.0)


def test_what_is_carried_is_the_highest_pace_that_is_kept_up_with_in_time() -> None:
    points = [
        POINT,
        replace(POINT, asked=2000.0, delivered=2000.0, cpu_us_per_token=20.0),
        replace(POINT, asked=4000.0, delivered=4000.0, delays_ms=(1.0, 51.0, 60.0)),
        replace(POINT, asked=8000.0, delivered=5000.0),
        replace(POINT, contender=BARE, delivered=9000.0, asked=9000.0),
        replace(POINT, streams=8, asked=9000.0, delivered=9000.0),
    ]
    assert carried(points, ROUTER, 64) == 2000.0
    assert carried([points[3]], ROUTER, 64) == 0.0
    assert summary(points) == {
        "streams": 64,
        "tokens_per_core": 50_000.0,
        "carried_tokens": 2000.0,
        "p99_added_ms": 51.0,
        "first_ms": 3.0,
        "kb_per_stream": 40.0,
    }


def test_features_are_compared_where_both_kept_up() -> None:
    with_features = replace(POINT, contender=FEATURES, cpu_us_per_token=30.0)
    late = replace(POINT, asked=9000.0, cpu_us_per_token=1.0)
    assert features_over_router([POINT, with_features, late, replace(late, contender=FEATURES)]) == 1.2
    assert features_over_router([POINT, late, replace(late, contender=FEATURES)]) is None


async def test_what_threads_used_counts_when_they_have_ended() -> None:
    code = """
import sys, threading, time
def burn():
    while time.thread_time() < 0.1: pass
thread = threading.Thread(target=burn)
thread.start(), thread.join()
print(time.process_time(), flush=True)
sys.stdin.read()
"""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdin=PIPE, stdout=PIPE)
    assert process.stdout is not None
    said = float(await process.stdout.readline())
    used = Contest(ROUTER, 1, ScaleOptions(), print)._usage(ReadyProcess("router", process, ""))
    await process.communicate(b"")
    assert used.cpu >= said and used.memory_kb > 0


@pytest.mark.thorough
async def test_where_measuring_ends_early_no_router_waits_for_streams_that_go_on(monkeypatch) -> None:
    stood_still = []

    async def fails(_: Contest) -> None:
        raise BenchError("no more")

    async def abort(name: str, process: Process) -> None:
        stood_still.append(name)
        process.kill()

    monkeypatch.setattr(Contest, "_listen", fails)
    monkeypatch.setattr(processes, "_abort", abort)
    with pytest.raises(BenchError, match="no more"):
        await load.measure(ScaleOptions(streams=(3,), tokens=(90,), only=ROUTER))
    assert not stood_still


@pytest.mark.thorough
async def test_every_event_is_matched_with_its_commit(tmp_path) -> None:
    options = ScaleOptions(
        streams=(3,), tokens=(90,), seconds=0.5, drafters=True, features=64, json=tmp_path / "scale.json"
    )
    points = await load.measure(options)
    assert [point.contender for point in points] == list(CONTENDERS)
    for point in points:
        assert 0 < point.delays_ms[0] <= point.delays_ms[1] <= point.delays_ms[2]
        assert min(point.delivered, point.cpu_us_per_token, point.request_ms, point.first_ms) > 0
        assert (point.relayed_bytes > 2 * options.features) is (point.contender == FEATURES)
        for relayed in (point.verified_ms, point.proposed_ms):
            assert relayed is None if point.contender == BARE else relayed > 0
    result(options, points).publish()
    command = "paceline bench scale --streams 3 --tokens 90 --sessions 64 --commit 3 --seconds 0.5"
    assert options.command == f"{command} --drafters --features 64"
