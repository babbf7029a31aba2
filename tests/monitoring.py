"""Dashboard and alerts as tests read them, and a real Prometheus where there is one."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

MONITORING = Path(__file__).resolve().parents[1] / "deploy" / "monitoring"
DASHBOARD = MONITORING / "dashboard.json"
ALERTS = MONITORING / "alerts.yaml"
SCRAPING = MONITORING / "prometheus.yml"

needs_prometheus = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")), reason="needs Prometheus: apt-get install prometheus"
)
FROM_CONTROLLER = {"paceline_autoscaling_replicas", "paceline_autoscaling_decision_info"}
"""What no router tells: Ray Serve's controller does, about the policies that run there."""
_NAME = re.compile(r"\bpaceline_\w+")


def alerts() -> list[dict[str, Any]]:
    """All alert rules."""
    groups = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    """The dashboard as it is shipped."""
    found: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return found


def panels() -> list[dict[str, Any]]:
    """All its graphs."""
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def expressions() -> dict[str, str]:
    """Every query, by where it stands; Grafana's variables filled in."""
    found = {f"alert {rule['alert']}": rule["expr"] for rule in alerts()}
    for panel in panels():
        for target in panel["targets"]:
            expression = target["expr"].replace("$__rate_interval", "1m").replace("$model", ".*")
            found[f"panel {panel['title']} {target['refId']}"] = expression
    return found


def unknown_names(queries: dict[str, str], known: set[str]) -> dict[str, set[str]]:
    """Names of ours that a query uses and nothing tells, by where the query stands."""
    missing = {where: set(_NAME.findall(query)) - known for where, query in queries.items()}
    return {where: names for where, names in missing.items() if names}


def rules_beside(folder: Path) -> None:
    """Put the alert rules where a Prometheus configuration in ``folder`` finds them."""
    shutil.copy(ALERTS, folder / ALERTS.name)
