"""Every graph of the dashboard has a place; alerts come when they should, as the real Prometheus evaluates them."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from speculation.request.session import SessionLimits
from tests.monitoring import ALERTS, SCRAPING, alerts, dashboard, needs_prometheus, panels, rules_beside

EXPECTED = {
    "PacelineNoTarget",
    "PacelineNoTargetOfModel",
    "PacelineRequestsFail",
    "PacelineRequestsTimeOut",
    "PacelineRequestsRefused",
    "PacelineQueueGrowing",
    "PacelineFailovers",
    "PacelineAcceptanceCollapsed",
    "PacelineDraftersAway",
    "PacelineCachePressure",
    "PacelineCertificateExpires",
    "PacelineGpuFaulty",
    "PacelineGpuLost",
    "PacelineHeadAway",
    "PacelineRedisAway",
}


def test_panels_have_a_place_of_their_own() -> None:
    seen: set[tuple[int, int]] = set()
    ids = [panel["id"] for panel in dashboard()["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in dashboard()["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & seen, panel["title"]
        assert all(x < 24 for x, _ in cells)
        seen |= cells
    assert all(panel["targets"] for panel in panels())


def test_every_alert_says_how_bad_it_is_and_where_to_read_on() -> None:
    assert {rule["alert"] for rule in alerts()} == EXPECTED
    for rule in alerts():
        assert rule["for"]
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["description"]
        assert rule["annotations"]["runbook_url"] == f"docs/alerts.md#{rule['alert'].lower()}"


def test_an_alert_says_how_long_running_requests_wait_for_a_target() -> None:
    (rule,) = [rule for rule in alerts() if rule["alert"] == "PacelineNoTarget"]
    assert f"or else {SessionLimits().begun_timeout:.0f} s." in rule["annotations"]["description"]


@needs_prometheus
def test_prometheus_takes_the_configuration_and_the_rules() -> None:
    for command in (["config", str(SCRAPING)], ["rules", "--lint-fatal", str(ALERTS)]):
        done = subprocess.run(["promtool", "check", *command], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


HEALTHY = {
    "paceline_router_ready": "1x200",
    'paceline_workers{role="draft",state="up"}': "2x200",
    'paceline_request_success_total{model="m",finished_reason="stop"}': "0+600x200",
    'paceline_request_failure_total{code="faulty"}': "0x200",
    'paceline_requests_refused_total{code="overloaded"}': "0x200",
    'paceline_generation_tokens_total{model="m"}': "0+100x200",
    'paceline_num_requests_running{model="m",role="target",worker="t"}': "8x200",
    'paceline_num_requests_waiting{model="m",role="target",worker="t"}': "2x200",
    'paceline_num_requests_waiting{role="draft",worker="d"}': "99x200",
    "paceline_failovers_total": "0x60 3x140",
    'paceline_acceptance_collapsed{target="t",draft="d"}': "0x200",
    'paceline_draft_lead_tokens_sum{model="m"}': "0+600x200",
    'paceline_kv_cache_usage_perc{model="m",role="target",worker="t"}': "0.99x200",
    'paceline_num_preemptions_total{model="m",role="target",worker="t"}': "5x200",
    'paceline_certificate_expiry_timestamp_seconds{file="tls.crt"}': "2000000x200",
    'certmanager_certificate_expiration_timestamp_seconds{name="paceline-redis"}': "2000000x200",
    'certmanager_certificate_expiration_timestamp_seconds{name="not-ours"}': "500000x200",
    'DCGM_FI_DEV_XID_ERRORS{Hostname="n",gpu="0",UUID="a"}': "43x200",  # of a program, not of the GPU
    'DCGM_FI_DEV_ROW_REMAP_FAILURE{Hostname="n",gpu="0",UUID="a"}': "0x200",
    'DCGM_FI_DEV_GPU_TEMP{Hostname="n",gpu="0",UUID="a"}': "60x200",
    'DCGM_FI_DEV_GPU_TEMP{Hostname="n",gpu="1",UUID="b"}': "60x200",
    'DCGM_FI_DEV_GPU_TEMP{Hostname="gone",gpu="0",UUID="c"}': "60x30 stale",  # with its machine
    'kube_pod_status_ready{namespace="p",pod="paceline-x1-head-ab",condition="true"}': "1x200",
    'kube_statefulset_status_replicas_ready{namespace="p",statefulset="paceline-redis"}': "1x200",
}
"""One value a minute."""


def cell(metric: str, values: str, labels: str = "") -> dict[str, str]:
    """A series of a cell beside the healthy one."""
    named = ",".join(filter(None, (labels, 'namespace="c"')))
    return {f"{metric}{{{named}}}": values}


FEW = cell("paceline_request_success_total", "0+20x200", 'model="m",finished_reason="stop"')
"""Requests, where the other cell has many."""
DECIDED = 'paceline_autoscaling_replicas{pool="DraftWorker-m.draft",state="decided"}'


@needs_prometheus
@pytest.mark.parametrize(
    ("alert", "changed"),
    [
        (None, {}),
        # Drafters that were scaled to zero while nobody wants them, and a cluster that never had any.
        (
            None,
            {
                'paceline_workers{role="draft",state="up"}': "2x20 0x180",
                'paceline_draft_lead_tokens_sum{model="m"}': "0x200",
            },
        ),
        (None, {'paceline_workers{role="draft",state="up"}': "0x200"}),
        # The autoscaler rests them; sessions without drafters go on to tell a lead.
        (None, {'paceline_workers{role="draft",state="up"}': "2x20 0x180", DECIDED: "2x20 0x180"}),
        ("PacelineDraftersAway", {'paceline_workers{role="draft",state="up"}': "2x20 0x180", DECIDED: "2x200"}),
        # One router of two drains.
        (None, {'paceline_router_ready{instance="b"}': "0x200"}),
        ("PacelineNoTarget", {"paceline_router_ready": "1x60 0x140"}),
        ("PacelineNoTarget", {"paceline_router_ready": "_x200"}),
        ("PacelineNoTargetOfModel", {'paceline_generation_tokens_total{model="b"}': "0+100x60 6000x140"}),
        # One cell of two is not well, or away with all its pods.
        ("PacelineNoTarget", cell("paceline_router_ready", "1x60 0x140")),
        ("PacelineNoTarget", cell("paceline_router_ready", "1x120 stale")),
        (None, cell("paceline_router_ready", "1x60 stale")),  # for longer than an hour
        (
            "PacelineNoTargetOfModel",
            cell("paceline_router_ready", "1x200")
            | cell("paceline_generation_tokens_total", "0+100x60 6000x140", 'model="m"'),
        ),
        ("PacelineRequestsTimeOut", cell("paceline_request_failure_total", "0+3x200", 'code="timeout"') | FEW),
        ("PacelineRequestsRefused", cell("paceline_requests_refused_total", "0+1x200", 'code="overloaded"') | FEW),
        (
            "PacelineQueueGrowing",
            cell("paceline_num_requests_running", "1x200", 'model="m",role="target",worker="u"')
            | cell("paceline_num_requests_waiting", "2x200", 'model="m",role="target",worker="u"'),
        ),
        (
            "PacelineDraftersAway",
            cell("paceline_workers", "2x20 0x180", 'role="draft",state="up"')
            | cell("paceline_draft_lead_tokens_sum", "0+600x200", 'model="m"'),
        ),
        # Cells that each lose a target, once.
        (
            None,
            cell("paceline_failovers_total", "0x137 15x62")
            | {'paceline_failovers_total{namespace="d"}': "0x145 15x54"},
        ),
        # As a whole cluster that is away.
        (
            "PacelineNoTarget",
            {
                "paceline_router_ready": "1x60 0x140",
                'paceline_num_requests_running{model="m",role="target",worker="t"}': "8x60 stale",
            },
        ),
        ("PacelineRequestsFail", {'paceline_request_failure_total{code="faulty"}': "0x60 0+1x140"}),
        # A client that gives its requests no time, and a router that stops.
        (None, {'paceline_request_failure_total{code="timeout"}': "0x60 0+1x140"}),
        (None, {'paceline_request_failure_total{code="draining"}': "0x60 9x140"}),
        ("PacelineRequestsTimeOut", {'paceline_request_failure_total{code="timeout"}': "0x60 0+50x140"}),
        ("PacelineRequestsRefused", {'paceline_requests_refused_total{code="overloaded"}': "0+50x200"}),
        ("PacelineQueueGrowing", {'paceline_num_requests_waiting{model="m",role="target",worker="t"}': "20x200"}),
        # A model that is busy beside it, without a queue.
        (
            "PacelineQueueGrowing",
            {
                'paceline_num_requests_running{model="b",role="target",worker="u"}': "60x200",
                'paceline_num_requests_waiting{model="b",role="target",worker="u"}': "0x200",
                'paceline_num_requests_waiting{model="m",role="target",worker="t"}': "20x200",
            },
        ),
        ("PacelineFailovers", {"paceline_failovers_total": "0+3x200"}),
        # A target that dies again every seven minutes, as soon as it has loaded.
        ("PacelineFailovers", {"paceline_failovers_total": " ".join(f"{25 * n}x6" for n in range(30))}),
        # One target was lost, with all its sessions, eight minutes ago.
        (None, {"paceline_failovers_total": "0x141 25x58"}),
        ("PacelineAcceptanceCollapsed", {'paceline_acceptance_collapsed{target="t",draft="d"}': "1x200"}),
        ("PacelineDraftersAway", {'paceline_workers{role="draft",state="up"}': "2x20 0x180"}),
        (
            "PacelineCachePressure",
            {'paceline_num_preemptions_total{model="m",role="target",worker="t"}': "0+1x200"},
        ),
        ("PacelineCertificateExpires", {'paceline_certificate_expiry_timestamp_seconds{file="tls.crt"}': "500000x200"}),
        ("PacelineCertificateExpires", {'paceline_certificate_expiry_timestamp_seconds{file="tls.crt"}': "0x200"}),
        (
            "PacelineCertificateExpires",
            {'paceline_certificate_expiry_timestamp_seconds{file="tls.crt",pod="target"}': "500000x200"},
        ),
        (
            "PacelineCertificateExpires",
            {'certmanager_certificate_expiration_timestamp_seconds{name="paceline-redis"}': "500000x200"},
        ),
        ("PacelineGpuFaulty", {'DCGM_FI_DEV_XID_ERRORS{Hostname="n",gpu="0",UUID="a"}': "43x60 79x140"}),
        ("PacelineGpuFaulty", {'DCGM_FI_DEV_ROW_REMAP_FAILURE{Hostname="n",gpu="0",UUID="a"}': "1x200"}),
        ("PacelineGpuLost", {'DCGM_FI_DEV_GPU_TEMP{Hostname="n",gpu="1",UUID="b"}': "60x60 stale"}),
        (
            "PacelineHeadAway",
            {'kube_pod_status_ready{namespace="p",pod="paceline-x1-head-ab",condition="true"}': "1x60 0x140"},
        ),
        (
            "PacelineHeadAway",
            {'kube_pod_status_ready{namespace="p",pod="paceline-x1-head-ab",condition="true"}': "1x120 stale"},
        ),
        (
            "PacelineRedisAway",
            {'kube_statefulset_status_replicas_ready{namespace="p",statefulset="paceline-redis"}': "1x60 0x140"},
        ),
        (
            "PacelineRedisAway",
            {'kube_statefulset_status_replicas_ready{namespace="p",statefulset="paceline-redis"}': "1x120 stale"},
        ),
    ],
)
def test_an_alert_comes_when_it_should_and_alone(tmp_path, alert: str | None, changed: dict[str, str]) -> None:
    firing = [{"labels": f'{{alertname="{alert}"}}', "value": 1}] if alert else []
    query = 'count by (alertname) (ALERTS{alertstate="firing"})'
    evaluate(tmp_path, changed, {"promql_expr_test": [{"expr": query, "eval_time": "150m", "exp_samples": firing}]})


@needs_prometheus
@pytest.mark.parametrize("label", ["namespace", "exported_namespace"])
def test_certificates_of_one_name_are_told_by_their_cell(tmp_path, label: str) -> None:
    others = {"namespace": "cert-manager"} if label == "exported_namespace" else {}
    cells = [others | {label: name, "name": "paceline-redis"} for name in ("c", "d")]
    named = [",".join(f'{key}="{value}"' for key, value in one.items()) for one in cells]
    ending = {f"certmanager_certificate_expiration_timestamp_seconds{{{labels}}}": "500000x200" for labels in named}
    (rule,) = [rule for rule in alerts() if rule["alert"] == "PacelineCertificateExpires"]
    fixed = {key: rule["annotations"][key] for key in ("description", "runbook_url")}
    fixed["description"] = fixed["description"].replace("{{ $value | humanizeDuration }}", "5d 16h 23m 20s")
    firing = [
        {
            "exp_labels": one | rule["labels"],
            "exp_annotations": fixed
            | {"summary": f"The certificate paceline-redis  in {one[label]} ends within a week"},
        }
        for one in cells
    ]
    expected = {"eval_time": "150m", "alertname": rule["alert"], "exp_alerts": firing}
    evaluate(tmp_path, ending, {"alert_rule_test": [expected]})


def evaluate(folder: Path, changed: dict[str, str], expected: dict[str, Any]) -> None:
    """Whether the healthy cell, with other series changed or beside it, comes to what is expected."""
    rules_beside(folder)
    series = [{"series": name, "values": values} for name, values in (HEALTHY | changed).items()]
    test = {
        "rule_files": [ALERTS.name],
        "evaluation_interval": "1m",
        "tests": [{"interval": "1m", "input_series": series} | expected],
    }
    (folder / "test.yaml").write_text(yaml.safe_dump(test))
    done = subprocess.run(["promtool", "test", "rules", "test.yaml"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
