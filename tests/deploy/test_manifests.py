"""The manifests that we ship, as kubectl renders them."""

import importlib
import inspect
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray import serve
from ray._private import ray_constants
from ray.serve._private import constants as serve_constants

from deploy import ray_rules, validate
from deploy.chart import RULE, prometheus_rule
from deploy.crd import strict_schema
from deploy.manifests import Manifests, RenderError, render, selects
from deploy.policy_rules import CLOSED
from deploy.reference_rules import models_by_hand, secrets_by_hand
from deploy.validate import findings, main
from router.sessions.snapshot import Snapshot
from router.telemetry.worker_metrics import collect_for_pickers
from tests.deploy.overlays import KUBERNETES, OVERLAYS, needs_kubectl, one, rendered

pytestmark = needs_kubectl


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_overlay_is_valid(overlay: str) -> None:
    assert findings(rendered(overlay)) == []


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_placeholder_is_replaced_and_the_values_stay_home(overlay: str) -> None:
    manifests = rendered(overlay)
    assert "set-by-values" not in yaml.safe_dump(manifests.objects)
    assert "values" not in manifests.names("ConfigMap")


def test_overlays_are_what_they_say() -> None:
    dev, gpu, ha = (rendered(overlay) for overlay in OVERLAYS)
    kinds = {"Namespace", "ServiceAccount", "NetworkPolicy", "RayService", "Service"}
    assert {entry["kind"] for entry in dev.objects} == kinds
    assert {"Certificate", "HTTPRoute", "PodMonitor", "PrometheusRule", "Job"} <= {
        entry["kind"] for entry in gpu.objects
    }
    assert ha.names("PodDisruptionBudget") == {"paceline-router", "paceline-target"}
    cluster = one(ha, "RayService", "paceline")["spec"]["rayClusterConfig"]
    assert cluster["gcsFaultToleranceOptions"]["redisAddress"].startswith("rediss://")
    assert next(group for group in cluster["workerGroupSpecs"] if group["groupName"] == "router")["minReplicas"] >= 2


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_application_is_built_from_the_arguments(overlay: str) -> None:
    service = one(rendered(overlay), "RayService", "paceline")
    (entry,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    module, _, name = entry["import_path"].partition(":")
    assert isinstance(getattr(importlib.import_module(module), name)(entry["args"]), serve.Application)


def test_ray_reads_the_variables_that_the_rules_are_about() -> None:
    defaults = {ray_rules.DRAIN: ray_rules.USUAL[ray_rules.DRAIN]}
    assert {name: getattr(ray_constants, name) for name in defaults} == defaults
    assert getattr(serve_constants, ray_rules.HARD_STOP) == ray_rules.USUAL[ray_rules.HARD_STOP]
    assert ray_rules.USUAL[ray_rules.RETRIES] == serve_constants.MAX_PER_REPLICA_RETRY_COUNT
    assert f'get_env_int("{ray_rules.RETRIES}", 3)' in inspect.getsource(serve_constants)
    assert all(hasattr(serve_constants, name) for name in ray_rules.PROXIES)


def test_traces_reach_a_collector_beside_prometheus() -> None:
    manifests = rendered("gpu")
    service = one(manifests, "RayService", "paceline")
    document = yaml.safe_load(service["spec"]["serveConfigV2"])
    document["applications"][0]["args"]["tracing"] = {"otlp_endpoint": "http://collector.monitoring:4317"}
    service["spec"]["serveConfigV2"] = yaml.safe_dump(document)
    assert findings(manifests) == []


def test_who_may_ask_everybody_for_names_may_ask_those_who_know_them() -> None:
    manifests = rendered("gpu")
    for way in one(manifests, "NetworkPolicy", "names")["spec"]["egress"]:
        way.pop("to", None)
    assert findings(manifests) == []


def test_ports_that_stay_closed_are_those_of_haproxy() -> None:
    ports = {serve_constants.RAY_SERVE_HAPROXY_STATS_PORT, serve_constants.RAY_SERVE_HAPROXY_METRICS_PORT}
    assert CLOSED.keys() == ports


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_routers_own_ports_are_none_that_a_policy_opens(overlay: str) -> None:
    """Where HAProxy carries requests, each replica of a router has its own HTTP server beside."""
    first, last = (getattr(serve_constants, f"RAY_SERVE_DIRECT_INGRESS_{end}_HTTP_PORT") for end in ("MIN", "MAX"))
    assert (first, last) == (30000, 31000), "docs/security.md says from 30000 on"
    for policy in rendered(overlay).of("NetworkPolicy"):
        for way in policy["spec"].get("ingress", []):
            ours = all("podSelector" in place and "namespaceSelector" not in place for place in way["from"])
            assert ours or all(port["port"] < first and "endPort" not in port for port in way["ports"])


def test_redis_reads_its_password_from_the_file(tmp_path: Path) -> None:
    """Neither in its arguments nor in its environment; the shell gives its place to Redis, which gets the signals."""
    (container,) = one(rendered("ha"), "StatefulSet", "paceline-redis")["spec"]["template"]["spec"]["containers"]
    (script,) = container["args"]
    assert "env" not in container
    (tmp_path / "password").write_text("0badf00d")
    (tmp_path / "redis-server").write_text('#!/bin/sh\necho $PPID "$@"\ncat\n')
    (tmp_path / "redis-server").chmod(0o755)
    script = script.replace("/etc/paceline/redis", str(tmp_path))
    tls = "--tls-auth-clients no --tls-cert-file /etc/paceline/tls/tls.crt --tls-key-file /etc/paceline/tls/tls.key"
    arguments = f"- --appendonly yes --dir /data --port 0 --tls-port 6379 {tls}"
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run([*container["command"], script], env=environment, capture_output=True, text=True)
    assert done.stdout == f'{os.getpid()} {arguments}\nrequirepass "0badf00d"\n'


def test_secrets_to_make_by_hand() -> None:
    assert secrets_by_hand(rendered("dev-cpu")) == {}
    assert {"paceline-ray-auth", "paceline-api-keys", "paceline-redis"} <= secrets_by_hand(rendered("ha")).keys()


def machines_of(group: Any) -> Any:
    """The label by which a group chooses its machines."""
    affinity = group["template"]["spec"]["affinity"]["nodeAffinity"]
    (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    (expression,) = term["matchExpressions"]
    return expression


@pytest.mark.parametrize("overlay", ["gpu", "ha"])
def test_drafters_fit_the_smallest_machines_with_their_gpu(overlay: str) -> None:
    """Those of the clouds with an L4 have 4 CPUs and 16 GiB, of which Kubernetes leaves some 3.9 and 13."""
    group = one(rendered(overlay), "RayService", "paceline")["spec"]["rayClusterConfig"]["workerGroupSpecs"][1]
    assert machines_of(group)["values"] == ["NVIDIA-L4"]
    (container,) = group["template"]["spec"]["containers"]
    assert container["resources"]["requests"] == {"cpu": "3", "memory": "12Gi", "nvidia.com/gpu": "1"}


def test_one_edited_file_is_enough_for_other_gpus_and_models(tmp_path: Path) -> None:
    shutil.copytree(KUBERNETES.parent, tmp_path / "deploy")
    values = tmp_path / "deploy/kubernetes/overlays/gpu/values.yaml"
    text = values.read_text()
    for old, new in {
        "NVIDIA-L4": "NVIDIA-A10",
        "gpu-label: nvidia.com/gpu.product": "gpu-label: gpu",
        "NVIDIA-H100-80GB-HBM3": "NVIDIA-H200",
        'large-gpus: "2"': 'large-gpus: "8"',
        "tensor_parallel_size: 2": "tensor_parallel_size: 8",
        "llama-8b": "llama-70b",
        "llm.example.com": "text.example.com",
        'large-workers: "1"': 'large-workers: "3"',
        'drain-seconds: "900"': 'drain-seconds: "1500"',
        'grace-seconds: "930"': 'grace-seconds: "1530"',
        "router: {labels": "router: {drain_timeout: 1200, labels",
    }.items():
        assert old in text
        text = text.replace(old, new)
    values.write_text(text)
    manifests = render(values.parent)
    assert findings(manifests) == []
    large = one(manifests, "RayService", "paceline")["spec"]["rayClusterConfig"]["workerGroupSpecs"][2]
    pod = large["template"]["spec"]
    assert machines_of(large) == {"key": "gpu", "operator": "In", "values": ["NVIDIA-H200"]}
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert (large["replicas"], large["minReplicas"]) == (3, 3)
    assert pod["terminationGracePeriodSeconds"] == 1530
    assert one(manifests, "HTTPRoute", "paceline")["spec"]["hostnames"] == ["text.example.com"]
    listed = pod["initContainers"][0]["env"][0]["valueFrom"]["configMapKeyRef"]
    assert "llama-70b=" in one(manifests, "ConfigMap", listed["name"])["data"][listed["key"]]


def test_another_model_builds_no_second_cluster(tmp_path: Path) -> None:
    """KubeRay does so when the cluster's description changes; the Job that fetches models is not a part of it."""
    shutil.copytree(KUBERNETES.parent, tmp_path / "deploy")
    values = tmp_path / "deploy/kubernetes/overlays/gpu/values.yaml"
    values.write_text(values.read_text().replace("Llama-3.2-1B", "Llama-3.2-3B").replace("llama-1b", "llama-3b"))
    before, after = rendered("gpu"), render(values.parent)
    assert findings(after) == []
    services = [one(manifests, "RayService", "paceline")["spec"] for manifests in (before, after)]
    assert services[0]["rayClusterConfig"] == services[1]["rayClusterConfig"]
    assert services[0]["serveConfigV2"] != services[1]["serveConfigV2"]
    jobs = [one(manifests, "Job", "paceline-models") for manifests in (before, after)]
    assert jobs[0] != jobs[1]


def with_components(folder: Path, overlay: str, old: str, new: str) -> Manifests:
    """An overlay with another list of components."""
    shutil.copytree(KUBERNETES.parent, folder / "deploy")
    changed = folder / "deploy/kubernetes/overlays" / overlay
    text = (changed / "kustomization.yaml").read_text()
    assert old in text
    (changed / "kustomization.yaml").write_text(text.replace(old, new))
    return render(changed)


@pytest.mark.parametrize(
    "component", ["components/models", "components/certificates", "components/gateway", "monitoring"]
)
def test_a_component_that_the_cluster_does_not_have_can_be_left_out(tmp_path: Path, component: str) -> None:
    path = "../.." if component.startswith("components") else "../../.."
    manifests = with_components(tmp_path, "ha", f"- {path}/{component}\n", "")
    assert findings(manifests) == []
    assert models_by_hand(manifests) == (component == "components/models")
    by_hand = {name for name in secrets_by_hand(manifests) if name.endswith("-tls")}
    roles = ("router", "target", "draft", "redis") if component == "components/certificates" else ()
    assert by_hand == {f"paceline-{role}-tls" for role in roles}


def test_gpus_may_need_a_runtime_class(tmp_path: Path) -> None:
    manifests = with_components(tmp_path, "gpu", "components:\n", "components:\n- ../../components/nvidia-runtime\n")
    assert findings(manifests) == []
    groups = one(manifests, "RayService", "paceline")["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    classes = {group["groupName"]: group["template"]["spec"].get("runtimeClassName") for group in groups}
    assert classes == {"router": None, "small-gpu": "nvidia", "large-gpu": "nvidia"}


def test_a_registry_may_ask_for_a_login(tmp_path: Path) -> None:
    assert "paceline-registry" not in secrets_by_hand(rendered("ha"))
    manifests = with_components(tmp_path, "ha", "components:\n", "components:\n- ../../components/registry\n")
    assert findings(manifests) == []
    assert "paceline-registry" in secrets_by_hand(manifests)
    accounts = {pod.spec["serviceAccountName"] for pod in manifests.pods()}
    pulling = {entry["metadata"]["name"] for entry in manifests.of("ServiceAccount") if entry.get("imagePullSecrets")}
    assert accounts <= pulling


def test_prometheus_of_the_helm_chart_takes_what_we_give_it() -> None:
    manifests = rendered("gpu")
    for kind in ("PodMonitor", "PrometheusRule"):
        assert one(manifests, kind, "paceline")["metadata"]["labels"] == {"release": "kube-prometheus-stack"}


def test_ingress_may_replace_the_gateway(tmp_path: Path) -> None:
    manifests = with_components(tmp_path, "gpu", "components/gateway", "components/ingress")
    assert findings(manifests) == []
    ingress = one(manifests, "Ingress", "paceline")
    assert ingress["metadata"]["annotations"]["nginx.ingress.kubernetes.io/proxy-buffering"] == "off"
    ingress["spec"]["rules"][0]["http"]["paths"][-1]["pathType"] = "Prefix"
    assert findings(manifests) == [
        f"Ingress paceline: {path} is for operators, and comes through here" for path in ("/metrics", "/cluster")
    ]


def test_inference_pool_may_replace_the_gateway(tmp_path: Path) -> None:
    manifests = with_components(tmp_path, "gpu", "components/gateway", "components/inference-pool")
    assert findings(manifests) == []
    assert "set-by-values" not in yaml.safe_dump(manifests.objects)
    pool = one(manifests, "InferencePool", "paceline")
    assert [pod.where for pod in manifests.pods() if selects(pool["spec"]["selector"], pod.labels)] == [
        "RayService paceline router"
    ]


def test_endpoint_picker_asks_for_metrics_that_routers_have(tmp_path: Path) -> None:
    manifests = with_components(tmp_path, "gpu", "components/gateway", "components/inference-pool")
    config = yaml.safe_load(one(manifests, "ConfigMap", "paceline-picker")["data"]["picker.yaml"])
    parameters = {plugin["type"]: plugin.get("parameters", {}) for plugin in config["plugins"]}
    (engine,) = parameters["core-metrics-extractor"]["engineConfigs"]
    assert engine["name"] == parameters["core-metrics-extractor"]["defaultEngine"]
    asked = {value for key, value in engine.items() if key != "name"}
    assert asked == {family.name for family in collect_for_pickers(Snapshot())}
    used = {plugin["pluginRef"] for profile in config["schedulingProfiles"] for plugin in profile["plugins"]}
    assert used < parameters.keys()
    arguments = one(manifests, "Deployment", "paceline-picker")["spec"]["template"]["spec"]["containers"][0]["args"]
    assert f"--pool-name={one(manifests, 'InferencePool', 'paceline')['metadata']['name']}" in arguments


def test_endpoint_picker_that_needs_a_key_is_found(tmp_path: Path) -> None:
    manifests = with_components(tmp_path, "gpu", "components/gateway", "components/inference-pool")
    data = one(manifests, "ConfigMap", "paceline-picker")["data"]
    for old in ("path: /metrics/picker", ", path: /metrics"):
        assert old in data["picker.yaml"]
        data["picker.yaml"] = data["picker.yaml"].replace(
            old, old.removesuffix("/picker").replace(", path: /metrics", "")
        )
        found = findings(manifests)
        assert len(found) == 1 and "picker.yaml: /metrics wants a key; have it read /metrics/picker" in found[0]


@pytest.mark.parametrize(
    ("kind", "name", "path", "value", "found"),
    [
        ("InferencePool", "paceline", ("endpointPickerRef", "name"), "other", "there is no Service other"),
        ("InferencePool", "paceline", ("selector", "matchLabels", "app.kubernetes.io/name"), "other", "selects no pod"),
        ("InferencePool", "paceline", ("targetPorts", 0, "number"), 8080, "HTTP is on port 8000, got 8080"),
        ("InferencePool", "paceline", ("extensionRef",), {"name": "paceline-picker"}, "'extensionRef' was unexpected"),
        ("HTTPRoute", "paceline-pool", ("rules", 0, "backendRefs", 0, "name"), "other", "no InferencePool other"),
        ("NetworkPolicy", "picker", ("ingress", 0, "ports", 0, "port"), 9001, "no pod that it selects has port 9001"),
    ],
)
def test_faults_planted_in_the_pool_are_found(
    tmp_path: Path, kind: str, name: str, path: tuple[str | int, ...], value: object, found: str
) -> None:
    manifests = with_components(tmp_path, "gpu", "components/gateway", "components/inference-pool")
    part = one(manifests, kind, name)["spec"]
    for step in path[:-1]:
        part = part[step]
    part[path[-1]] = value
    assert [finding for finding in findings(manifests) if found in finding]


def test_command_says_what_to_make_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(KUBERNETES / "overlays/gpu")]) == 0
    assert "kubectl create secret -n paceline generic paceline-api-keys" in capsys.readouterr().out


def test_command_refuses_what_kustomize_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("deploy.validate: kubectl kustomize")
    assert error.count("\n") == 1


def test_missing_kubectl_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RenderError, match="kubectl is not on the PATH"):
        render(KUBERNETES / "overlays/gpu")


def test_prometheus_rule_is_current() -> None:
    assert RULE.read_text() == prometheus_rule(), "run python -m deploy.chart"


def test_schema_of_a_crd_is_strict() -> None:
    properties = {
        "size": {"x-kubernetes-int-or-string": True, "description": "dropped"},
        "free": {"type": "object", "x-kubernetes-preserve-unknown-fields": True, "properties": {}},
        "none": {"type": "string", "nullable": True},
        "count": {"type": "integer", "format": "int32"},
    }
    spec = {"type": "object", "properties": properties, "x-kubernetes-validations": []}
    crd = {"spec": {"versions": [{"name": "v1", "schema": {"openAPIV3Schema": {"properties": {"spec": spec}}}}]}}
    schema = strict_schema(crd)["properties"]["spec"]
    assert schema["additionalProperties"] is False
    assert schema["properties"] == {
        "size": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        "free": {"type": "object", "properties": {}},
        "none": {"type": ["string", "null"]},
        "count": {"type": "integer"},
    }


def test_production_wants_every_image_by_its_digest(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    manifests = rendered("gpu")
    monkeypatch.setattr(validate, "render", lambda overlay: manifests)
    assert validate.main(["gpu"]) == 0
    capsys.readouterr()
    assert validate.main(["--production", "gpu"]) == 1
    said = capsys.readouterr().out.splitlines()
    assert "RayService paceline head ray-head: the image 'registry.example.com/paceline:0.1.0-cuda' may be" in said[0]
    for pod in manifests.pods():
        for container in pod.containers():
            container["image"] = f"{container['image'].partition(':')[0]}@sha256:{'0' * 64}"
    assert validate.main(["--production", "gpu"]) == 0
