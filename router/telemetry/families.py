"""Families of metrics from plain values, and the one that routers and workers both tell."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from cryptography import x509
from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

if TYPE_CHECKING:  # workers have no use for the rest of a router
    from router.sessions.tally import Buckets

log = logging.getLogger(__name__)

PREFIX = "paceline_"
UNREADABLE = 0.0
"""What is said of a file that holds no certificate: it ended long ago, so that the alert for it comes."""
K = TypeVar("K", bound=tuple[str, ...])
"""The values of the labels, in the order of their names."""


def gauge(name: str, about: str, labels: Sequence[str], values: Mapping[K, float], *, prefix: str = PREFIX) -> Metric:
    """A family of gauges."""
    return _filled(GaugeMetricFamily(prefix + name, about, labels=labels), values)


def counter(name: str, about: str, labels: Sequence[str], values: Mapping[K, float]) -> Metric:
    """A family of counters; its samples are named ``<name>_total``."""
    return _filled(CounterMetricFamily(PREFIX + name, about, labels=labels), values)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[K, float]) -> Metric:
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


def collect_certificates(paths: Iterable[Path]) -> Iterator[Metric]:
    """The family that says when TLS certificates end, for the alert that comes before they do."""
    yield gauge(
        "certificate_expiry_timestamp_seconds",
        "When a TLS certificate in use ends, in seconds since 1970; 0: its file cannot be read.",
        ("file",),
        {(str(path),): _expiry(path) for path in paths},
    )


def _expiry(path: Path) -> float:
    """When the first certificate of a PEM file to end does so, in seconds since 1970. It is read anew every time."""
    try:
        certificates = x509.load_pem_x509_certificates(path.read_bytes())
        return min(certificate.not_valid_after_utc.timestamp() for certificate in certificates)
    except (OSError, ValueError) as error:
        log.warning("no certificate in %s: %s", path, error)
        return UNREADABLE
