"""When the TLS certificates in use end, for the metric that warns before they do."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

from cryptography import x509
from prometheus_client import Metric

from router.telemetry.families import gauge

log = logging.getLogger(__name__)

UNREADABLE = 0.0
"""What is said of a file that holds no certificate: it ended long ago, so that the alert for it comes."""


def expiry(path: Path) -> float:
    """When the first certificate of a PEM file to end does so, in seconds since 1970.

    Raises ``OSError`` and ``ValueError``.
    """
    certificates = x509.load_pem_x509_certificates(path.read_bytes())
    return min(certificate.not_valid_after_utc.timestamp() for certificate in certificates)


def collect_certificates(paths: Iterable[Path]) -> Iterator[Metric]:
    """The family of metrics that says so."""
    yield gauge(
        "certificate_expiry_timestamp_seconds",
        "When a TLS certificate in use ends, in seconds since 1970; 0: its file cannot be read.",
        ("file",),
        {(file,): at for file, at in expiries(paths).items()},
    )


def expiries(paths: Iterable[Path]) -> dict[str, float]:
    """For each file by its path; :data:`UNREADABLE` for one that cannot be read. Reads them anew every time."""
    found = {}
    for path in paths:
        try:
            found[str(path)] = expiry(path)
        except (OSError, ValueError) as error:
            log.warning("no certificate in %s: %s", path, error)
            found[str(path)] = UNREADABLE
    return found
