"""Writes the Grafana dashboard: ``python -m deploy.monitoring.dashboard`` puts ``dashboard.json`` beside this file.

How Grafana wants it written down; what is shown stands in :mod:`deploy.monitoring.panels`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from deploy.monitoring.panels import ROWS, Panel

OUTPUT = Path(__file__).with_name("dashboard.json")
COLUMNS, WIDTH, HEIGHT = 24, 8, 8

DESCRIPTION = """\
Paceline: disaggregated speculative decoding. All names begin with paceline_. Where routers are scraped directly they \
come so. Ray puts ray_ in front of them: let Prometheus take it off again, with the metric_relabel_configs of \
deploy/monitoring/prometheus.yml (a PodMonitor calls them metricRelabelings), and dashboard and alerts fit both."""


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS:
        panels.append(
            _placed({"type": "row", "title": title, "collapsed": False, "panels": []}, panels, 0, y, COLUMNS, 1)
        )
        y += 1
        for i, panel in enumerate(row):
            x = i * WIDTH % COLUMNS
            y += HEIGHT if i and not x else 0
            panels.append(_placed(_graph(panel), panels, x, y, WIDTH, HEIGHT))
        y += HEIGHT
    return {
        "uid": "paceline",
        "title": "Paceline",
        "description": DESCRIPTION,
        "tags": ["paceline", "llm"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [_data_source(), _models()]},
        "panels": panels,
    }


def _placed(panel: dict[str, Any], before: list[dict[str, Any]], x: int, y: int, w: int, h: int) -> dict[str, Any]:
    return {"id": len(before) + 1, **panel, "gridPos": {"x": x, "y": y, "w": w, "h": h}}


def _graph(panel: Panel) -> dict[str, Any]:
    custom = {"fillOpacity": 10, "showPoints": "never", "stacking": {"mode": "normal" if panel.stacked else "none"}}
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {"refId": chr(ord("A") + i), "expr": expression, "legendFormat": legend}
            for i, (legend, expression) in enumerate(panel.queries)
        ],
    }


def _data_source() -> dict[str, Any]:
    return {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _models() -> dict[str, Any]:
    query = "label_values(paceline_generation_tokens_total, model)"
    return {
        "name": "model",
        "label": "Model",
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "definition": query,
        "query": {"query": query, "refId": "models"},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def text() -> str:
    """The file's content."""
    return json.dumps(dashboard(), indent=2) + "\n"


if __name__ == "__main__":
    OUTPUT.write_text(text(), encoding="utf-8")
