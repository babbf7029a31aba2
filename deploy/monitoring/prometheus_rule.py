"""Wraps alerts.yaml, which plain Prometheus reads, for the Prometheus operator; kustomize cannot.

    python -m deploy.monitoring.prometheus_rule

puts ``prometheusrule.yaml`` beside this file. A test checks that it is current.
"""

from __future__ import annotations

from pathlib import Path

import yaml

ALERTS = Path(__file__).with_name("alerts.yaml")
OUTPUT = Path(__file__).with_name("prometheusrule.yaml")
HEADER = "# Made by `python -m deploy.monitoring.prometheus_rule` from alerts.yaml.\n"


def text() -> str:
    """The file's content."""
    rule = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "paceline"},
        "spec": yaml.safe_load(ALERTS.read_text(encoding="utf-8")),
    }
    return HEADER + yaml.safe_dump(rule, sort_keys=False, width=120)


if __name__ == "__main__":
    OUTPUT.write_text(text(), encoding="utf-8")
