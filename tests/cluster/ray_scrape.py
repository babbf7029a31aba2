"""``python -m tests.cluster.ray_scrape``: what Ray's own endpoint tells of a router's metrics, copied by an actor.

Prints the copied metrics in Prometheus' format as the actor sees them, a line of ``---``, and what Ray's endpoint says
once they are there; then another such line, and what it says some time after one worker has gone.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress

import httpx

from cluster.ray.replicas import copy_metrics
from router.sessions.snapshot import Snapshot, WorkerState, WorkerView
from router.sessions.tally import RouterCounters
from router.telemetry.metrics import RouterMetrics
from speculation.events import PeerId, Role
from speculation.messages import Load
from tests.ports import free_port

PATIENCE_SECONDS = 60
FIRST, SECOND = "target@10.0.0.1:7001", "target@10.0.0.2:7001"
ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "1",
    "RAY_metrics_report_interval_ms": "1000",
}


class Router:
    """What a router replica does with its metrics."""

    def __init__(self) -> None:
        """Some tokens were committed; there are two workers."""
        counters = {"step_microseconds": 3, "wait_microseconds": 1}
        load = Load(sessions=2, capacity_tokens=10, free_tokens=5, counters=counters)
        self._workers = [WorkerView(PeerId(name), Role.TARGET, WorkerState.UP, "m", load) for name in (FIRST, SECOND)]
        tally = RouterCounters()
        record = tally.session("m", prompt=5)
        for i in range(10):
            record.committed(i / 8, tokens=3, accepted=2, offered=5, cached=0)
        self._metrics = RouterMetrics(tally, lambda: Snapshot(workers=tuple(self._workers)))

    async def start(self) -> str:
        self._copying = asyncio.create_task(copy_metrics(self._metrics.collect))
        await asyncio.sleep(0)
        return self._metrics.exposition()[0].decode()

    async def lose_worker(self) -> None:
        self._workers.pop()


def scrape(port: int, enough: Callable[[str], bool]) -> str:
    """Ray's text as soon as it is what was waited for."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        with suppress(httpx.TransportError):
            text = httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False).text
            if enough(text):
                return text
        time.sleep(0.3)
    raise SystemExit(f"Ray's endpoint did not tell what was expected within {PATIENCE_SECONDS} s")


def main() -> None:
    os.environ.update(ENVIRONMENT)
    import ray

    port = free_port()
    size = 80 << 20
    options = {"include_dashboard": False, "num_cpus": 4, "object_store_memory": size, "log_to_driver": False}
    ray.init(_metrics_export_port=port, namespace="metrics", **options)
    try:
        router = ray.remote(num_cpus=0.1)(Router).remote()
        told = ray.get(router.start.remote())
        scraped = scrape(port, lambda text: text.count("\nray_paceline_") >= told.count("\npaceline_"))
        ray.get(router.lose_worker.remote())
        later = scrape(port, lambda text: FIRST in text and SECOND not in text)
        sys.stdout.write(f"{told}---\n{scraped}---\n{later}")
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
