"""What a worker's replica on Ray tells of its certificates."""

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import Metric

from cluster.ray import replicas
from router.telemetry.families import UNREADABLE


class FakeWorker:
    """Runs until it is drained."""

    def __init__(self) -> None:
        self.drained = asyncio.Event()

    def freeze_loaded(self) -> None:
        """Nothing is loaded."""

    async def wait(self) -> None:
        await self.drained.wait()

    async def drain(self, seconds: float) -> None:
        self.drained.set()


FILES = ("/nowhere/tls.crt", "/nowhere/ca.crt")


@pytest.mark.parametrize(("files", "told"), [(None, []), (FILES, [dict.fromkeys(FILES, UNREADABLE)])])
async def test_a_worker_with_certificates_tells_when_they_end(monkeypatch, files, told) -> None:
    """Without any there is nothing to tell, so nothing runs for it."""
    heard, ended = [], []

    async def copy_metrics(collect: Callable[[], Iterable[Metric]]) -> None:
        heard.append({sample.labels["file"]: sample.value for family in collect() for sample in family.samples})
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    monkeypatch.setattr(replicas, "copy_metrics", copy_metrics)
    worker = FakeWorker()
    # One of the class has a destructor that must be awaited.
    replica = SimpleNamespace(_exit_on_failure=worker.wait, _copying=None)
    certified = SimpleNamespace(certificates=tuple(map(Path, files))) if files else None
    await replicas.ServedWorker._begin(replica, worker, 1.0, certified)
    await asyncio.sleep(0)
    assert heard == told
    await replicas.ServedWorker.__del__(replica)
    assert worker.drained.is_set()
    await asyncio.sleep(0)
    assert len(ended) == len(told)
