"""A replica's metrics, told through Ray: every sample, of routers :mod:`router.telemetry.metrics`, every other second.

Behind Serve's proxy ``/metrics`` is that of any one router, so in a cluster Prometheus reads them from Ray's endpoint
on each node, under ``ray_<name>``, with the labels ``deployment``, ``replica`` and ``application`` that Serve adds.
Each sample, those of counters and histograms too, is told as a Ray gauge with the value it has here: a gauge is the one
kind that can be set, so nothing drifts when a copy is late, and names and labels come out as they are. Prometheus
computes rates and quantiles from names, labels and values; the declared type does not matter to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable

from prometheus_client import Metric
from ray.serve import metrics

log = logging.getLogger(__name__)

PERIOD_SECONDS = 2.0


class RayExporter:
    """Copies samples into Ray's metrics until closed. Must live in a Ray worker."""

    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect
        self._gauges: dict[str, metrics.Gauge] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to copy; needs a running event loop."""
        self._task = asyncio.create_task(self._run(), name="copy metrics to Ray")

    async def close(self) -> None:
        """Copy no more."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        while True:
            try:
                self.copy()
            except Exception:  # metrics must never take a router down
                log.exception("metrics could not be copied to Ray")
            await asyncio.sleep(PERIOD_SECONDS)

    def copy(self) -> None:
        """Tell Ray every sample as it is now. Ray forgets a series some seconds after it was told the last time."""
        for family in self._collect():
            for sample in family.samples:
                gauge = self._gauges.get(sample.name)
                if gauge is None:
                    about, keys = family.documentation, tuple(sample.labels)
                    # Ray declares a tuple of one key; it takes any number.
                    gauge = metrics.Gauge(sample.name, about, tag_keys=keys)  # type: ignore[arg-type]
                    self._gauges[sample.name] = gauge
                gauge.set(sample.value, tags=sample.labels)
