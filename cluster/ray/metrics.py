"""A replica's metrics, told through Ray: every sample, of routers :mod:`router.telemetry.metrics`, every other second.

Behind Serve's proxy ``/metrics`` is that of any one router, so in a cluster Prometheus reads them from Ray's endpoint
on each node, under ``ray_<name>``, with the labels ``deployment``, ``replica`` and ``application`` that Serve adds.
Each sample, those of counters and histograms too, is told as a Ray gauge with the value it has here: a gauge is the one
kind that can be set, so nothing drifts when a copy is late, and names and labels come out as they are. Prometheus
computes rates and quantiles from names, labels and values; the declared type does not matter to it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from prometheus_client import Metric
from ray.serve import metrics

from cluster.autoscaling.serve_policy import PERIOD_SECONDS

log = logging.getLogger(__name__)


async def copy_metrics(collect: Callable[[], Iterable[Metric]]) -> None:
    """Tell Ray every sample as it is now, again and again until cancelled. Must run in a Ray worker.

    Ray forgets a series some seconds after it was told the last time. ``collect`` tells all families as of now.
    """
    gauges: dict[str, metrics.Gauge] = {}
    while True:
        try:
            for family in collect():
                for sample in family.samples:
                    if sample.name not in gauges:
                        about, keys = family.documentation, tuple(sample.labels)
                        # Ray declares a tuple of one key; it takes any number.
                        gauges[sample.name] = metrics.Gauge(sample.name, about, tag_keys=keys)  # type: ignore[arg-type]
                    gauges[sample.name].set(sample.value, tags=sample.labels)
        except Exception:  # metrics must never take a router down
            log.exception("metrics could not be copied to Ray")
        await asyncio.sleep(PERIOD_SECONDS)
