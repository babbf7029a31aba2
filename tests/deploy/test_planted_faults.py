"""Each fault that an operator may make is refused, for its own reason and no other."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import yaml

from deploy.manifests import GPU, Manifests
from deploy.ray_rules import AUTHORITY, CLIENT_TIMEOUT, HARD_STOP, RETRIES, WORDS
from deploy.ray_rules import HAPROXY as ENABLED
from deploy.validate import findings
from tests.deploy.overlays import needs_kubectl, one, rendered

pytestmark = needs_kubectl

MODEL = "llama-8b"
HAPROXY, MIDDLEWARE = WORDS
COMMIT = "0123456789abcdef" * 2 + "01234567"


class Cluster:
    """Handles for spoiling an overlay."""

    def __init__(self, manifests: Manifests) -> None:
        self.manifests = manifests
        self.service = one(manifests, "RayService", "paceline")
        self.ray = self.service["spec"]["rayClusterConfig"]
        self.head = self.ray["headGroupSpec"]
        self.router, self.small, self.large = self.ray["workerGroupSpecs"]

    def get(self, kind: str, name: str) -> Any:
        return one(self.manifests, kind, name)

    def drop(self, kind: str, name: str) -> None:
        self.manifests.objects.remove(self.get(kind, name))

    def serve(self, change: Callable[[Any], object]) -> None:
        """Change the Serve configuration as a document."""
        document = yaml.safe_load(self.service["spec"]["serveConfigV2"])
        change(document)
        self.service["spec"]["serveConfigV2"] = yaml.safe_dump(document)

    def args(self, change: Callable[[Any], object]) -> None:
        """Change what Paceline itself is told."""
        self.serve(lambda document: change(document["applications"][0]["args"]))

    def policy(self, change: Callable[[Any], object]) -> None:
        """Change what decides how many replicas there are."""
        self.serve(lambda document: change(document["applications"][0]["autoscaling_policy"]))

    def kwargs(self, change: Callable[[Any], object]) -> None:
        """Change what that is told."""
        self.policy(lambda policy: change(policy["policy_kwargs"]))


def pod(group: Any) -> Any:
    return group["template"]["spec"]


def container(group: Any) -> Any:
    return pod(group)["containers"][0]


def put(part: Any, key: str | int, value: object) -> None:
    part[key] = value


def job(cluster: Cluster) -> Any:
    """What fetches models."""
    return cluster.get("Job", "paceline-models")["spec"]["template"]["spec"]["containers"][0]


def redis(cluster: Cluster) -> Any:
    """What keeps the head's state."""
    return cluster.get("StatefulSet", "paceline-redis")["spec"]["template"]["spec"]["containers"][0]


def door(cluster: Cluster, policy: str) -> Any:
    """The first rule of a policy about who may come in."""
    return cluster.get("NetworkPolicy", policy)["spec"]["ingress"][0]


def policy(component: str, ports: list[Any], guests: list[Any]) -> Any:
    """One more, that lets guests in."""
    selector = {"matchLabels": {"app.kubernetes.io/component": component}}
    spec = {"podSelector": selector, "policyTypes": ["Ingress"], "ingress": [{"from": guests, "ports": ports}]}
    return {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": "guest"}, "spec": spec}


def scaled(document: Any, deployment: int) -> Any:
    """The bounds of a deployment, its own."""
    entry = document["applications"][0]["deployments"][deployment]
    entry["autoscaling_config"] = dict(entry["autoscaling_config"])
    return entry["autoscaling_config"]


def named(entries: Any, name: str) -> Any:
    """The entry of that name."""
    return next(entry for entry in entries if entry["name"] == name)


def fixed(document: Any, targets: int) -> None:
    """Two of everything and so many targets, whatever the load."""
    application = document["applications"][0]
    del application["autoscaling_policy"]
    names = [deployment["name"] for deployment in application["deployments"]]
    application["deployments"] = [{"name": name, "num_replicas": 2} for name in names]
    application["deployments"][0]["num_replicas"] = targets


def rename_model(cluster: Cluster) -> None:
    """In ``args`` and in ``deployments``, as one edits them."""

    def rename(document: Any) -> None:
        (application,) = document["applications"]
        application["args"]["models"]["qwen3-8b"] = application["args"]["models"].pop(MODEL)
        for deployment in application["deployments"]:
            deployment["name"] = deployment["name"].replace(MODEL, "qwen3-8b")

    cluster.serve(rename)


@dataclass(frozen=True)
class Fault:
    what: str
    plant: Callable[[Cluster], object]
    reason: str
    """Part of the one message, or of each, if the fault shows in several places."""
    places: int = 1


FAULTS = [
    # Shapes
    Fault("unknown key", lambda c: put(c.large, "minReplica", 1), "'minReplica' was unexpected"),
    Fault("unknown key in a pod", lambda c: put(pod(c.head), "nodeSelectors", {}), "'nodeSelectors' was unexpected"),
    Fault("number as text", lambda c: put(c.small, "replicas", "two"), "'two' is not of type 'integer'"),
    Fault(
        "unknown key of Kubernetes' own",
        lambda c: put(c.get("NetworkPolicy", "names")["spec"], "podSelectors", {}),
        "'podSelectors' was unexpected",
    ),
    Fault(
        "wrong usage of a certificate",
        lambda c: put(c.get("Certificate", "paceline-draft")["spec"], "usages", ["server"]),
        "'server' is not one of",
    ),
    Fault("kind without a schema", lambda c: put(c.get("PodMonitor", "paceline"), "kind", "PodMonitors"), "no schema"),
    # KubeRay
    Fault(
        "name too long",
        lambda c: (put(c.service["metadata"], "name", "p" * 48), c.drop("HTTPRoute", "paceline")),
        "48 characters; KubeRay takes",
    ),
    Fault(
        "name that is none",
        lambda c: (put(c.service["metadata"], "name", "1st"), c.drop("HTTPRoute", "paceline")),
        "begin with a letter",
    ),
    Fault(
        "given up for good",
        lambda c: put(c.service["metadata"], "annotations", {"ray.io/initializing-timeout": "30m"}),
        "ray.io/initializing-timeout is final",
    ),
    Fault(
        "given up after three starts",
        lambda c: container(c.head)["env"].remove(named(container(c.head)["env"], RETRIES)),
        "RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT of the head is 3; below 100 Serve soon gives workers up for good",
    ),
    Fault("no token", lambda c: put(c.ray["authOptions"], "mode", "disabled"), "authOptions.mode must be token"),
    Fault(
        "Kubernetes' own tokens",
        lambda c: put(c.ray["authOptions"], "enableK8sTokenAuth", True),
        "enableK8sTokenAuth does not work",
    ),
    Fault(
        "labels among start parameters",
        lambda c: put(c.small["rayStartParams"], "labels", "a=b"),
        "labels belong into the group's labels",
    ),
    Fault(
        "resources in both places",
        lambda c: (put(c.small, "resources", {"GPU": "1"}), put(c.small["rayStartParams"], "num-gpus", "1")),
        "resources stand in two places",
    ),
    Fault("restarting pods", lambda c: put(pod(c.large), "restartPolicy", "Always"), "must be Never or unset"),
    Fault("autoscaler v1", lambda c: put(c.ray["autoscalerOptions"], "version", "v1"), "version must be v2"),
    Fault(
        "no autoscaler",
        lambda c: [put(c.ray, "enableInTreeAutoscaling", False), c.serve(lambda d: fixed(d, 2))],
        "has no effect without",
    ),
    Fault("bounds crossed", lambda c: put(c.large, "minReplicas", 5), "replicas must be between"),
    Fault("replicas on the head", lambda c: put(c.head, "rayStartParams", {}), 'num-cpus must be "0"'),
    Fault(
        "grace below the drain",
        lambda c: put(pod(c.large), "terminationGracePeriodSeconds", 100),
        "must be above RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S (900)",
    ),
    Fault(
        "default grace",
        lambda c: pod(c.small).pop("terminationGracePeriodSeconds"),
        "terminationGracePeriodSeconds is 30",
    ),
    Fault(
        "preStop hook",
        lambda c: put(container(c.large), "lifecycle", {"preStop": {"exec": {"command": ["ray", "stop"]}}}),
        "preStop hook would stop Ray",
    ),
    Fault(
        "incremental upgrade, incomplete",
        lambda c: put(c.service["spec"], "upgradeStrategy", {"type": "NewClusterWithIncrementalUpgrade"}),
        "needs clusterUpgradeOptions",
    ),
    # Serve
    Fault("not YAML", lambda c: put(c.service["spec"], "serveConfigV2", "a: [b"), "is not YAML"),
    Fault("date that is none", lambda c: put(c.service["spec"], "serveConfigV2", "a: 2026-02-30"), "is not YAML: day"),
    Fault("nested too deep", lambda c: put(c.service["spec"], "serveConfigV2", "[" * 20000), "it is nested too deep"),
    Fault(
        "unknown key of Serve",
        lambda c: c.serve(lambda d: put(d["http_options"], "keepalive", 5)),
        "http_options.keepalive: Ray Serve has no such setting",
    ),
    Fault(
        "proxy on the head only",
        lambda c: c.serve(lambda d: put(d, "proxy_location", "HeadOnly")),
        "proxy_location is HeadOnly",
    ),
    Fault(
        "wrong type in Serve", lambda c: c.serve(lambda d: put(d["http_options"], "port", "http")), "http_options.port"
    ),
    Fault("loopback only", lambda c: c.serve(lambda d: d["http_options"].pop("host")), "host must be 0.0.0.0"),
    Fault("streams cut", lambda c: c.serve(lambda d: put(d["http_options"], "request_timeout_s", 60)), "cuts streams"),
    Fault(
        "other port",
        lambda c: c.serve(lambda d: put(d["http_options"], "port", 9000)),
        "http_options.port is 9000, but",
        places=4,
    ),
    Fault(
        "other application",
        lambda c: c.serve(lambda d: put(d["applications"][0], "import_path", "cluster.serve_app:build")),
        "one with import_path cluster.serve_app:application",
    ),
    # Paceline's own configuration
    Fault(
        "misspelt setting",
        lambda c: c.args(lambda a: put(a["models"][MODEL]["target"], "replica", 2)),
        "unknown setting 'models.llama-8b.target.replica'; did you mean 'models.llama-8b.target.replicas'?",
    ),
    Fault(
        "deployment that is none",
        lambda c: c.serve(lambda d: put(d["applications"][0]["deployments"][0], "name", "TargetWorker")),
        "deployments: there is none called 'TargetWorker'; there are TargetWorker-llama-8b, DraftWorker-llama-8b.small",
    ),
    Fault(
        "drain of routers cut",
        lambda c: c.args(lambda a: put(a["router"], "drain_timeout", 3600)),
        "router.drain_timeout is 3600, but Ray drains for 900",
    ),
    Fault(
        "router that ends before another has started",
        lambda c: c.args(lambda a: put(a["router"], "drain_timeout", 900)),
        "without 120 more the replica ends before another has started",
    ),
    Fault(
        "drain of workers cut",
        lambda c: c.args(lambda a: put(a, "drain_timeout", 800)),
        ": drain_timeout is 800, but Ray drains for 900; without 120 more",
        places=2,
    ),
    Fault(
        "streams cut by HAProxy",
        lambda c: [named(container(g)["env"], HARD_STOP).update(value="120") for g in (c.router, c.small)],
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S is 120; below router.drain_timeout (600) HAProxy cuts streams",
        places=2,
    ),
    Fault(
        "HAProxy's own hard stop",
        lambda c: container(c.head)["env"].remove(named(container(c.head)["env"], HARD_STOP)),
        "head: RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S is 120",
    ),
    Fault(
        "clients that hold connections for an hour",
        lambda c: container(c.head)["env"].remove(named(container(c.head)["env"], CLIENT_TIMEOUT)),
        "head: RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S is 3600; above 0 and at most 60, HAProxy cuts clients",
    ),
    Fault(
        "clients that hold connections for ever",
        lambda c: [named(container(g)["env"], CLIENT_TIMEOUT).update(value="0") for g in (c.router, c.large)],
        "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S is 0; above 0 and at most 60, HAProxy cuts clients",
        places=2,
    ),
    Fault(
        "bare 500s from HAProxy",
        lambda c: container(c.router)["env"].remove(named(container(c.router)["env"], HAPROXY)),
        "router: RAY_SERVE_HAPROXY_BINARY_PATH is not set; without /app/cluster/ray/haproxy.sh",
    ),
    Fault(
        "bare 500s from Serve's own proxy",
        lambda c: named(container(c.head)["env"], MIDDLEWARE).update(value="elsewhere.middleware"),
        "head: RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH is elsewhere.middleware; without cluster.ray.proxy.middleware",
    ),
    Fault(
        "collector on a port that no policy opens",
        lambda c: c.args(lambda a: put(a, "tracing", {"otlp_endpoint": "http://collector.monitoring:4319"})),
        "no NetworkPolicy lets RayService paceline",
        places=3,
    ),
    Fault("own Ray", lambda c: c.args(lambda a: put(a["ray"], "address", "local")), "ray.address must be auto"),
    Fault(
        "no certificates",
        lambda c: c.args(lambda a: put(a, "security", {"api_keys": "/etc/paceline/api-keys/keys"})),
        "workers cannot listen: 0.0.0.0 can be reached from other machines",
    ),
    Fault(
        "half a certificate",
        lambda c: c.args(lambda a: a["security"].pop("key")),
        "security.key must be given as well",
    ),
    Fault(
        "router without its tokenizer",
        lambda c: container(c.router)["volumeMounts"].pop(1),
        "target.model is /models/llama-8b, but router mount nothing there",
    ),
    Fault("drain that is none", lambda c: put(container(c.large)["env"][0], "value", "long"), "(nan)"),
    Fault("no API keys", lambda c: c.args(lambda a: a["security"].pop("api_keys")), "api_keys is empty"),
    Fault(
        "certificate elsewhere",
        lambda c: c.args(lambda a: put(a["security"], "authority", "/etc/ssl/ca.crt")),
        "security.authority is /etc/ssl/ca.crt, but nothing is mounted there",
        places=4,
    ),
    Fault(
        "head from which the doctor meets nobody",
        lambda c: put(named(container(c.head)["volumeMounts"], "tls"), "mountPath", "/etc/paceline/tls/ca.crt"),
        "head: security.certificate is /etc/paceline/tls/tls.crt, but nothing is mounted there; from there the doctor",
    ),
    Fault(
        "hub id",
        lambda c: c.args(lambda a: put(a["models"][MODEL]["target"], "model", "meta-llama/Llama-3.1-8B")),
        "workers have no network",
    ),
    Fault(
        "model not fetched",
        lambda c: c.args(lambda a: put(a["models"][MODEL]["target"], "model", "/models/llama-70b")),
        "`models` fetches only /models/llama-1b, /models/llama-8b",
    ),
    Fault(
        "model not mounted",
        lambda c: c.args(lambda a: put(a["models"][MODEL]["target"], "model", "/weights/llama-8b")),
        "target.model is /weights/llama-8b, but large-gpu and router mount nothing there",
    ),
    # Fetching models
    Fault(
        "volume smaller than the models",
        lambda c: put(job(c)["env"][0], "value", f"llama-8b=m/Llama-3.3-70B@{COMMIT} llama-1b=m/Llama-3.2-1B@{COMMIT}"),
        "by their names the models take 132 GiB, storage-size is 100Gi",
    ),
    Fault(
        "model that may change",
        lambda c: put(job(c)["env"][0], "value", f"llama-8b=m/Llama-8B@main llama-1b=m/Llama-1B@{COMMIT}"),
        "llama-8b=m/Llama-8B@main names no commit, so it may be another model tomorrow: llama-8b=m/Llama-8B@COMMIT",
    ),
    Fault(
        "size of another volume",
        lambda c: put(job(c)["env"][1], "value", "500Gi"),
        "STORAGE is '500Gi', but the volume has 100Gi",
    ),
    Fault(
        "everything fetched",
        lambda c: put(job(c), "command", ["hf", "download"]),
        "must run cluster.fetch, which checks that models fit, leaves copies out",
    ),
    Fault(
        "routers that wait for weights",
        lambda c: put(pod(c.router), "initContainers", pod(c.large)["initContainers"]),
        "router: must wait until each model has .tokenizer",
    ),
    Fault(
        "targets that do not wait",
        lambda c: pod(c.large).pop("initContainers"),
        "large-gpu: must wait until each model has .complete",
    ),
    # Sizes
    Fault(
        "model renamed everywhere but for the policy",
        rename_model,
        "policy_kwargs.pools does not list the pools of args, which are [{deployment: TargetWorker-qwen3-8b, role: tar",
    ),
    Fault(
        "pool that the policy does not know",
        lambda c: c.kwargs(lambda k: k["pools"].pop()),
        "{deployment: DraftWorker-llama-8b.small, role: draft, model: llama-8b}]",
    ),
    Fault(
        "pool of another role", lambda c: c.kwargs(lambda k: put(k["pools"][0], "role", "draft")), "role: target, model"
    ),
    Fault("no pools", lambda c: c.kwargs(lambda k: k.pop("pools")), "does not list the pools of args"),
    Fault(
        "misspelt setting of the policy",
        lambda c: c.kwargs(lambda k: put(k["settings"], "down", 300)),
        "policy_kwargs.settings: unknown setting 'autoscaling.down'; did you mean 'autoscaling.down_s'?",
    ),
    Fault(
        "setting of the policy that cannot be",
        lambda c: c.kwargs(lambda k: put(k["settings"], "load", 2)),
        "policy_kwargs.settings: autoscaling.load must be a number from 0.01 to 1, got 2",
    ),
    Fault(
        "routers that come and go",
        lambda c: c.kwargs(lambda k: put(k["settings"], "down_s", 5)),
        "policy_kwargs.settings.down_s is 5; below 60, HAProxy is replaced on every node with every lull",
    ),
    Fault(
        "routers that come and go by Serve's own policy",
        lambda c: c.serve(lambda d: d["applications"][0].pop("autoscaling_policy")),
        "Router: downscale_delay_s is 0; below 60, HAProxy is replaced on every node with every lull",
    ),
    Fault(
        "argument that the policy does not take",
        lambda c: c.kwargs(lambda k: put(k, "setting", {})),
        "autoscaling_policy.policy_kwargs.setting: there is no such setting; there are pools, settings",
    ),
    Fault(
        "other policy",
        lambda c: c.policy(lambda p: put(p, "policy_function", "cluster.autoscaling.serve_policy:Policy")),
        "policy_function must be cluster.autoscaling.serve_policy:ServePolicy, got",
    ),
    Fault(
        "bounds that nothing reads",
        lambda c: c.args(
            lambda a: (
                put(a["models"][MODEL]["target"], "max_replicas", 4),
                put(a["models"][MODEL]["drafts"]["small"], "max_replicas", 4),
                put(a["router"], "max_replicas", 4),
            )
        ),
        "max_replicas has no effect here; give",
        places=3,
    ),
    Fault(
        "policy's settings that nothing reads",
        lambda c: c.args(lambda a: put(a, "autoscaling", {"down_s": 60})),
        "autoscaling has no effect here; say it in autoscaling_policy.policy_kwargs.settings",
    ),
    *(
        Fault(
            f"standby that is not deployed, {why}",
            lambda c, plant=plant: (c.args(lambda a: put(a["models"][MODEL]["target"], "standby", 1)), plant(c)),
            f"TargetWorker-llama-8b: num_replicas is {said}; it must be 2, models.llama-8b.target.replicas (1) and",
        )
        for why, plant, said in (
            ("by number", lambda c: c.serve(lambda d: fixed(d, 3)), "3"),
            ("as the load asks for", lambda c: None, "auto"),
        )
    ),
    # Placement
    Fault(
        "wrong label", lambda c: put(c.large, "labels", {"paceline.io/gpu-class": "big"}), "no Ray node has the label"
    ),
    Fault(
        "too few GPUs for the ranks",
        lambda c: [
            put(container(c.large)["resources"][part], "nvidia.com/gpu", "1") for part in ("requests", "limits")
        ],
        "Ray has no room for 4 x target of llama-8b of 2 ranks on one node",
    ),
    Fault(
        "more replicas than workers",
        lambda c: c.serve(lambda d: fixed(d, 5)),
        "only 4 fit on its nodes",
    ),
    Fault(
        "more replicas than workers, under load",
        lambda c: c.serve(
            lambda d: put(
                d["applications"][0]["deployments"],
                0,
                {"name": "TargetWorker-llama-8b", "num_replicas": "auto", "autoscaling_config": {"max_replicas": 6}},
            )
        ),
        "no room for 6 x target of llama-8b of 2 ranks on one node",
    ),
    Fault(
        "role without its certificate",
        lambda c: put(c.get("Certificate", "paceline-target")["spec"], "dnsNames", ["draft.paceline"]),
        "large-gpu: may run a target, but mounts the certificate of draft.paceline",
    ),
    # Pods
    Fault(
        "privileged",
        lambda c: put(container(c.large)["securityContext"], "privileged", True),
        "privileged must not be set",
    ),
    Fault(
        "GPU that may be gone unnoticed",
        lambda c: container(c.large).pop("livenessProbe"),
        "large-gpu: its livenessProbe must run engine.host.live_gpus",
    ),
    Fault("any GPU", lambda c: pod(c.small).pop("affinity"), "small-gpu: takes any machine with a GPU, small or large"),
    Fault("root", lambda c: put(pod(c.head)["securityContext"], "runAsUser", 0), "runAsUser to a number above 0"),
    Fault(
        "writable root",
        lambda c: container(c.small)["securityContext"].pop("readOnlyRootFilesystem"),
        "readOnlyRootFilesystem must be true",
    ),
    Fault(
        "added capability",
        lambda c: put(container(c.small)["securityContext"]["capabilities"], "add", ["SYS_PTRACE"]),
        "must drop [ALL] and add none",
    ),
    Fault("no seccomp", lambda c: pod(c.router)["securityContext"].pop("seccompProfile"), "must be RuntimeDefault"),
    Fault("host network", lambda c: put(pod(c.large), "hostNetwork", True), "hostNetwork must not be set"),
    Fault("token in workers", lambda c: put(pod(c.small), "automountServiceAccountToken", True), "must be false"),
    Fault("latest", lambda c: put(container(c.router), "image", "paceline:latest"), "needs a version or a digest"),
    Fault(
        "password in arguments",
        lambda c: (
            container(c.head).update(args=["--password=$(PASSWORD)"]),
            container(c.head)["env"].append(
                {"name": "PASSWORD", "valueFrom": {"secretKeyRef": {"name": "paceline-redis", "key": "password"}}}
            ),
        ),
        "PASSWORD is a secret",
    ),
    Fault(
        "HAProxy's ports open to our pods",
        lambda c: c.get("NetworkPolicy", "between-our-pods")["spec"]["ingress"][0].pop("ports"),
        "lets others see HAProxy's",
        places=2,
    ),
    Fault(
        "HAProxy's metrics in a range",
        lambda c: put(c.get("NetworkPolicy", "between-our-pods")["spec"]["ingress"][0]["ports"][1], "endPort", 9101),
        "lets others see HAProxy's metrics, on port 9101",
    ),
    Fault("no room for files", lambda c: container(c.head)["volumeMounts"].pop(0), "mount an emptyDir there"),
    Fault(
        "memory unlimited",
        lambda c: container(c.small)["resources"]["limits"].pop("memory"),
        "must be what is requested",
    ),
    Fault("careless autoscaler", lambda c: c.ray["autoscalerOptions"].pop("resources"), "must name cpu and memory"),
    # What refers to what
    Fault("missing Secret", lambda c: put(c.ray["authOptions"], "secretName", "token"), "there is no Secret token"),
    Fault(
        "login that nobody makes",
        lambda c: put(c.get("ServiceAccount", "paceline"), "imagePullSecrets", [{"name": "registry"}]),
        "there is no Secret registry",
    ),
    Fault(
        "no certificate made",
        lambda c: c.drop("Certificate", "paceline-draft"),
        "there is no Secret paceline-draft-tls",
    ),
    Fault(
        "authority with another key at each renewal",
        lambda c: c.get("Certificate", "paceline-ca")["spec"]["privateKey"].pop("rotationPolicy"),
        "rotationPolicy of an authority must be Never",
    ),
    Fault(
        "missing volume claim",
        lambda c: c.drop("PersistentVolumeClaim", "paceline-models"),
        "there is no PersistentVolumeClaim paceline-models",
        places=2,
    ),
    Fault(
        "missing account",
        lambda c: c.drop("ServiceAccount", "paceline-head"),
        "there is no ServiceAccount paceline-head",
    ),
    Fault("missing volume", lambda c: pod(c.small)["volumes"].pop(0), "there is no volume tmp to mount"),
    Fault("missing issuer", lambda c: c.drop("Issuer", "paceline-bootstrap"), "there is no Issuer paceline-bootstrap"),
    Fault(
        "Redis in the clear",
        lambda c: put(c.ray["gcsFaultToleranceOptions"], "redisAddress", "redis://paceline-redis:6379"),
        "redisAddress is redis://paceline-redis:6379; with rediss:// nobody reads or changes it on the way",
    ),
    Fault(
        "any Redis",
        lambda c: container(c.head)["env"].remove(named(container(c.head)["env"], AUTHORITY)),
        "RAY_REDIS_CA_CERT of the head must name a mounted file",
    ),
    Fault(
        "authority of Redis that is not there",
        lambda c: named(container(c.head)["env"], AUTHORITY).update(value="/etc/redis/ca.crt"),
        "RAY_REDIS_CA_CERT of the head must name a mounted file",
    ),
    Fault(
        "password of Redis in the manifest",
        lambda c: put(c.ray["gcsFaultToleranceOptions"], "redisPassword", {"value": "secret"}),
        "redisPassword must come from a Secret",
    ),
    Fault(
        "Redis that listens in the clear too",
        lambda c: put(
            redis(c),
            "args",
            [redis(c)["args"][0].replace("--port 0", "--port 6380")],
        ),
        "StatefulSet paceline-redis: must listen with --tls-port alone",
    ),
    Fault("missing Redis", lambda c: c.drop("Service", "paceline-redis"), "there is no Service paceline-redis"),
    Fault(
        "route to nowhere",
        lambda c: put(c.get("HTTPRoute", "paceline")["spec"]["rules"][0]["backendRefs"][0], "name", "paceline-svc"),
        "there is no Service paceline-svc",
    ),
    *(
        Fault(
            f"route for operators, {why}",
            lambda c, matches=matches: put(c.get("HTTPRoute", "paceline")["spec"]["rules"][0], "matches", matches),
            "is for operators, and comes through here",
            places,
        )
        for why, matches, places in (
            ("by everything", [{"path": {"type": "PathPrefix", "value": "/"}}], 2),
            (
                "by name",
                [{"path": {"type": "PathPrefix", "value": "/v1"}}, {"path": {"type": "Exact", "value": "/metrics"}}],
                1,
            ),
            ("by no path", [{}], 2),
        )
    ),
    Fault(
        "route into GPU pods",
        lambda c: put(
            c.get("HTTPRoute", "paceline")["spec"]["rules"][0]["backendRefs"][0], "name", "paceline-serve-svc"
        ),
        "paceline-serve-svc leads clients into every pod; lead them to a Service of routers",
    ),
    Fault(
        "Service of targets",
        lambda c: put(c.get("Service", "paceline-router")["spec"]["selector"], "app.kubernetes.io/component", "target"),
        "Service paceline-router: leads clients into RayService paceline large-gpu, which computes",
    ),
    Fault(
        "clients before a router can serve",
        lambda c: container(c.router).pop("readinessProbe"),
        "router: must be ready by /ready: paceline-router leads clients in",
    ),
    Fault(
        "policy for nobody",
        lambda c: put(
            c.get("NetworkPolicy", "traces-to-monitoring")["spec"], "podSelector", {"matchLabels": {"app": "x"}}
        ),
        "podSelector: selects no pod",
    ),
    Fault(
        "no names where a node has its own cache of them",
        lambda c: c.get("NetworkPolicy", "names")["spec"]["egress"][0]["to"].pop(1),
        "lets it ask NodeLocal DNSCache (169.254.20.10/32, ",
        places=12,
    ),
    Fault(
        "no names where a node has no cache of them",
        lambda c: c.get("NetworkPolicy", "names")["spec"]["egress"][0]["to"].pop(0),
        "lets it ask Kubernetes' DNS (",
        places=12,
    ),
    Fault(
        "no long names",
        lambda c: c.get("NetworkPolicy", "names")["spec"]["egress"][0]["ports"].pop(1),
        "TCP port 53)",
        places=12,
    ),
    Fault("nothing denied", lambda c: c.drop("NetworkPolicy", "default-deny"), "denies everything, in and out"),
    Fault(
        "policy for another port",
        lambda c: door(c, "metrics-from-monitoring")["ports"].append({"port": 9090}),
        "no pod that it selects has port 9090",
    ),
    Fault(
        "monitor of another port",
        lambda c: put(c.get("PodMonitor", "paceline")["spec"]["podMetricsEndpoints"][0], "port", "stats"),
        "has no port stats",
        places=4,
    ),
    Fault(
        "budget in percent",
        lambda c: put(c.get("PodDisruptionBudget", "paceline-target")["spec"], "minAvailable", "50%"),
        "must be a whole number",
    ),
    Fault(
        "budget that blocks",
        lambda c: put(c.get("PodDisruptionBudget", "paceline-target")["spec"], "minAvailable", 2),
        "minAvailable is 2 of 2 pods",
    ),
    Fault(
        "spread of others",
        lambda c: put(pod(c.small)["topologySpreadConstraints"][0]["labelSelector"], "matchLabels", {"app": "x"}),
        "does not select the pod itself",
    ),
    Fault(
        "targets on one machine",
        lambda c: put(pod(c.large)["topologySpreadConstraints"][0], "whenUnsatisfiable", "ScheduleAnyway"),
        "large-gpu: all of its pods may come to one machine, whose loss PodDisruptionBudget paceline-target is against",
    ),
    Fault(
        "routers on one machine while there is no other",
        lambda c: pod(c.router)["topologySpreadConstraints"][1].pop("minDomains"),
        "router: all of its pods may come to one machine, whose loss PodDisruptionBudget paceline-router is against",
    ),
    Fault(
        "head and its state on one machine",
        lambda c: c.get("StatefulSet", "paceline-redis")["spec"]["template"]["spec"].pop("affinity"),
        "StatefulSet paceline-redis: may come to the machine of Ray's head, whose state it keeps",
    ),
    Fault(
        "spread over machines that take no router",
        lambda c: pod(c.router)["topologySpreadConstraints"][1].pop("nodeTaintsPolicy"),
        "its spread over kubernetes.io/hostname counts nodes that the pod cannot go to",
    ),
    Fault(
        "spread beside the cluster that is replaced",
        lambda c: pod(c.router)["topologySpreadConstraints"][1].pop("matchLabelKeys"),
        "its spread over kubernetes.io/hostname counts pods of other clusters",
    ),
    # Doors and ways
    Fault(
        "metrics open to all",
        lambda c: door(c, "metrics-from-monitoring").pop("from"),
        "lets everybody in to port 8080 of RayService paceline",
        places=4,
    ),
    Fault(
        "metrics open to all, by an empty list",
        lambda c: put(door(c, "metrics-from-monitoring"), "from", []),
        "lets everybody in to port 8080 of RayService paceline",
        places=4,
    ),
    Fault(
        "every port open to another namespace, by an empty list",
        lambda c: put(door(c, "http-from-gateway"), "ports", []),
        "NetworkPolicy http-from-gateway: lets ",
        places=3,
    ),
    Fault(
        "dashboard open to all",
        lambda c: door(c, "head-from-operator").pop("from"),
        "NetworkPolicy head-from-operator: lets everybody in to port 8265 of RayService paceline head",
    ),
    Fault(
        "everything open to all",
        lambda c: door(c, "between-our-pods").pop("from"),
        "lets everybody in to port ",
        places=3 * 5,
    ),
    Fault(
        "Ray's ports open to another namespace",
        lambda c: door(c, "head-from-operator")["ports"].append({"port": 6379, "protocol": "TCP"}),
        "lets others than our pods in to port 6379 of RayService paceline head",
    ),
    Fault(
        "Redis open to another namespace",
        lambda c: c.manifests.objects.append(policy("redis", [{"port": 6379}], [{"namespaceSelector": {}}])),
        "NetworkPolicy guest: lets others than our pods in to port 6379 of StatefulSet paceline-redis",
    ),
    Fault(
        "a range of ports of workers open to another namespace",
        lambda c: c.manifests.objects.append(
            policy("target", [{"port": 7000, "endPort": 8000}], [{"namespaceSelector": {}}])
        ),
        "lets others than our pods in to port 7000 to 8000 of RayService paceline large-gpu",
    ),
    Fault(
        "dashboard in the world",
        lambda c: put(c.get("Service", "paceline-redis")["spec"], "type", "LoadBalancer"),
        "Service paceline-redis: leads from outside to port 6379; only HTTP may be reached",
    ),
    Fault(
        "no way for the operator",
        lambda c: c.drop("NetworkPolicy", "head-from-operator"),
        "head: no NetworkPolicy lets KubeRay's operator in to port 8265",
    ),
    Fault(
        "no way for the operator to the dashboard",
        lambda c: door(c, "head-from-operator")["ports"].pop(0),
        "head: no NetworkPolicy lets KubeRay's operator in to port 8265",
    ),
    Fault(
        "no way for the autoscaler",
        lambda c: c.drop("NetworkPolicy", "head-to-kubernetes"),
        "head: no NetworkPolicy lets it out to Kubernetes' API, which Ray's autoscaler asks (TCP port 443)",
    ),
    Fault(
        "no way for Prometheus",
        lambda c: c.drop("NetworkPolicy", "metrics-from-monitoring"),
        "no NetworkPolicy lets Prometheus in to port 8080",
        places=4,
    ),
    Fault(
        "no way for clients",
        lambda c: c.drop("NetworkPolicy", "http-from-gateway"),
        "router: no NetworkPolicy lets clients in to port 8000",
    ),
    Fault(
        "no way to models",
        lambda c: c.drop("NetworkPolicy", "models-from-hub"),
        "Job paceline-models: no NetworkPolicy lets it out to where models are (TCP port 443)",
    ),
    Fault(
        "no way to models' port",
        lambda c: put(c.get("NetworkPolicy", "models-from-hub")["spec"]["egress"][0]["ports"][0], "port", 8443),
        "Job paceline-models: no NetworkPolicy lets it out to where models are (TCP port 443)",
    ),
    Fault(
        "no way from pod to pod",
        lambda c: c.get("NetworkPolicy", "between-our-pods")["spec"].pop("egress"),
        "no NetworkPolicy lets it out to ",
        places=4 * 4 + 1,
    ),
    Fault(
        "no way into Redis",
        lambda c: put(door(c, "between-our-pods")["ports"][0], "endPort", 6378),
        "StatefulSet paceline-redis: no NetworkPolicy lets RayService paceline head in",
    ),
    Fault(
        "collector in a namespace that no policy opens",
        lambda c: c.args(lambda a: put(a, "tracing", {"otlp_endpoint": "http://collector.tracing:4317"})),
        "otlp_endpoint is http://collector.tracing:4317, but no NetworkPolicy lets RayService paceline",
        places=3,
    ),
    Fault(
        "collector elsewhere",
        lambda c: c.args(lambda a: put(a, "tracing", {"otlp_endpoint": "http://otlp.example.com:4317"})),
        "otlp_endpoint is http://otlp.example.com:4317, but no NetworkPolicy lets RayService paceline",
        places=3,
    ),
    Fault(
        "Serve's own proxy",
        lambda c: [container(g)["env"].remove(named(container(g)["env"], ENABLED)) for g in (c.head, c.router)],
        "RAY_SERVE_ENABLE_HA_PROXY is not set; without 1 clients may hold connections for ever",
        places=2,
    ),
    Fault(
        "probe that only speaks of GPUs",
        lambda c: put(container(c.large)["livenessProbe"]["exec"], "command", ["echo", "engine.host.live_gpus"]),
        "large-gpu: its livenessProbe must run engine.host.live_gpus",
    ),
    Fault(
        "namespace where anything may run",
        lambda c: c.get("Namespace", "paceline")["metadata"].pop("labels"),
        "Namespace paceline: the label pod-security.kubernetes.io/enforce must be restricted",
    ),
    Fault(
        "volume that one machine mounts",
        lambda c: put(c.get("PersistentVolumeClaim", "paceline-models")["spec"], "accessModes", ["ReadWriteOnce"]),
        "PersistentVolumeClaim paceline-models: accessModes must have ReadWriteMany, for pods of several machines",
    ),
    Fault(
        "streams cut by the gateway",
        lambda c: c.get("HTTPRoute", "paceline")["spec"]["rules"][0].pop("timeouts"),
        'HTTPRoute paceline: timeouts.request must be "0s", or the gateway cuts streams',
    ),
    Fault(
        "clients by the head",
        lambda c: c.service["spec"].pop("excludeHeadPodFromServeSvc"),
        "excludeHeadPodFromServeSvc must be true",
    ),
    # One machine lost
    Fault(
        "one target at night",
        lambda c: c.serve(lambda d: put(scaled(d, 0), "min_replicas", 1)),
        "TargetWorker-llama-8b: there may be 1 alone; with 2 the loss of one machine is survived",
    ),
    Fault(
        "one router at night",
        lambda c: c.serve(lambda d: put(scaled(d, 2), "min_replicas", 1)),
        "Router: there may be 1 alone; with 2 the loss of one machine is survived",
    ),
    Fault(
        "one target always",
        lambda c: c.serve(lambda d: fixed(d, 1)),
        "TargetWorker-llama-8b: there may be 1 alone; with 2 the loss of one machine is survived",
    ),
    Fault(
        "two targets in a pod",
        lambda c: [put(part, GPU, "4") for part in container(c.large)["resources"].values()],
        "large-gpu: its 4 GPUs hold two of TargetWorker-llama-8b; one machine may take both",
    ),
    Fault(
        "targets together, without a budget that minds",
        lambda c: (
            c.drop("PodDisruptionBudget", "paceline-target"),
            pod(c.large).pop("topologySpreadConstraints"),
        ),
        "large-gpu: all of its pods may come to one machine, which Ray's head would survive",
    ),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_planted_fault_is_refused_for_its_own_reason(fault: Fault) -> None:
    cluster = Cluster(rendered("ha"))
    fault.plant(cluster)
    found = [str(finding) for finding in findings(cluster.manifests)]
    assert len(found) == fault.places, "\n".join(found) or "nothing was found"
    assert all(fault.reason in finding for finding in found), "\n".join(found)
