"""Families of Prometheus metrics from plain values. Every name gets the prefix ``paceline_``, if no other is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TypeVar

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from router.sessions.tally import Buckets

PREFIX = "paceline_"
K = TypeVar("K", bound=tuple[str, ...])
"""The values of the labels, in the order of their names."""


def gauge(name: str, about: str, labels: Sequence[str], values: Mapping[K, float], *, prefix: str = PREFIX) -> Metric:
    """A family of gauges."""
    family = GaugeMetricFamily(prefix + name, about, labels=labels)
    for label_values, value in values.items():
        family.add_metric(label_values, float(value))
    return family


def counter(name: str, about: str, labels: Sequence[str], values: Mapping[K, float]) -> Metric:
    """A family of counters; its samples are named ``<name>_total``."""
    family = CounterMetricFamily(PREFIX + name, about, labels=labels)
    for label_values, value in values.items():
        family.add_metric(label_values, float(value))
    return family


def histogram(name: str, about: str, labels: Sequence[str], values: Mapping[K, Buckets]) -> Metric:
    """A family of histograms."""
    family = HistogramMetricFamily(PREFIX + name, about, labels=labels)
    for label_values, buckets in values.items():
        bounds = [*map(str, buckets.bounds), "+Inf"]
        cumulative = list(zip(bounds, accumulate(buckets.counts), strict=True))
        family.add_metric(label_values, cumulative, buckets.total)
    return family
