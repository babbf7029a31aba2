"""What KubeRay refuses, or does without a word, although its schema allows it. Learned from KubeRay 1.7."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

from cluster.ray.parts import PROXY_SETTINGS
from deploy.manifests import Manifests, Object, Pod, RayService, Violation, environment_of, mount_of, where
from router.http.asgi import HEAD_SECONDS, STALL_SECONDS

MAX_NAME_CHARACTERS = 47
INITIALIZING = "ray.io/initializing-timeout"
DRAIN = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
HARD_STOP = "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"
CLIENT_TIMEOUT = "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S"
MAX_CLIENT_SECONDS = min(HEAD_SECONDS, STALL_SECONDS)
"""What a router that serves HTTP itself gives a client to send a head, or to read on. HAProxy takes 0 for no limit."""
_BARE = "a request whose router dies ends in a bare 500"
PROXIES: Mapping[str, tuple[str, str]] = {
    "RAY_SERVE_HAPROXY_BINARY_PATH": ("/app/cluster/ray/haproxy.sh", _BARE),
    **{name: (value, _BARE) for name, value in PROXY_SETTINGS.items()},
    "RAY_SERVE_ENABLE_HA_PROXY": ("1", "clients may hold connections for ever, by a head that never ends"),
}
"""What has Serve's HAProxy and its own proxy answer in our words what no router answers, and what is so without it."""
RETRIES = "RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT"
USUAL: Mapping[str, float] = {DRAIN: 30.0, HARD_STOP: 120.0, CLIENT_TIMEOUT: 3600.0, RETRIES: 3.0}
"""What Ray takes where these variables are not set."""
MIN_RETRIES = 100
"""Failed constructions of a replica after which Serve may give a deployment up for good. One takes seconds at least;
machines, volumes and drivers may need hours to be put right."""
DEFAULT_GRACE_SECONDS = 30
MAX_SLACK_SECONDS = 60
"""More grace than this after Ray's drain only keeps a hung pod."""
TLS, AUTHORITY = "rediss://", "RAY_REDIS_CA_CERT"
"""What begins the address of a Redis by TLS, and who must have signed for it: read by Ray, not by KubeRay."""
RESOURCES = ("num-cpus", "num-gpus", "memory", "resources")
_NAME = r"[a-z]([-a-z0-9]*[a-z0-9])?"


def ray_findings(manifests: Manifests) -> Iterator[Violation]:
    """Of the RayService, and the Redis that keeps its head's state where that is one of ours."""
    ray = manifests.ray
    for what in [*_of_service(ray), *_of_head(ray.head.main), *_of_autoscaler(ray), *_of_state(ray)]:
        yield where(ray.entry), what
    for pod in manifests.redis():
        said = " ".join(str(part) for part in pod.main.get("args", []))
        if "--tls-port" not in said or "--port 0" not in said:
            yield pod.where, "must listen with --tls-port alone, and --port 0"
    for pod in ray.pods:
        for what in [*_of_group(pod, ray), *_of_shutdown(pod), *_of_proxies(pod.main)]:
            yield pod.where, what


def number(container: Object, variable: str) -> float:
    """What a variable of :data:`USUAL` is for Ray's container; nan where it is no number.

    Of :data:`DRAIN`: how long Ray lets its node empty itself after SIGTERM; of :data:`HARD_STOP`: how long an HAProxy
    that was replaced keeps its streams.
    """
    try:
        return float(environment_of(container).get(variable, USUAL[variable]))
    except ValueError:
        return math.nan


def _of_service(ray: RayService) -> Iterator[str]:
    name, spec = ray.entry["metadata"]["name"], ray.entry["spec"]
    if len(name) > MAX_NAME_CHARACTERS:
        yield f"the name has {len(name)} characters; KubeRay takes at most {MAX_NAME_CHARACTERS}"
    if not re.fullmatch(_NAME, name):
        yield f"the name {name!r} must be lower-case letters, digits and -, and begin with a letter"
    if INITIALIZING in ray.entry["metadata"].get("annotations", {}):
        yield f"{INITIALIZING} is final: KubeRay gives the service up when nodes and models come later; leave it out"
    if spec.get("excludeHeadPodFromServeSvc") is not True:
        yield "excludeHeadPodFromServeSvc must be true: who enters by the head is cut off with it"
    authentication = ray.cluster.get("authOptions", {})
    if authentication.get("mode") != "token":
        yield "authOptions.mode must be token: whoever reaches the head could run anything"
    if authentication.get("enableK8sTokenAuth"):
        yield "authOptions.enableK8sTokenAuth does not work with a RayService"
    if not ray.cluster.get("rayVersion"):
        yield "rayVersion must be set for authOptions"
    upgrade = spec.get("upgradeStrategy", {})
    if upgrade.get("type") == "NewClusterWithIncrementalUpgrade":
        options = upgrade.get("clusterUpgradeOptions")
        if not ray.autoscales:
            yield "an incremental upgrade needs enableInTreeAutoscaling"
        if not options:
            yield "an incremental upgrade needs clusterUpgradeOptions"
        elif options.get("stepSizePercent", 0) > options.get("maxSurgePercent", 100):
            yield "clusterUpgradeOptions.stepSizePercent is above maxSurgePercent"
    names = [pod.group_name for pod in ray.pods]
    if len(names) != len(set(names)):
        yield f"worker groups share a name: {', '.join(sorted(names))}"


def _of_head(head: Object) -> Iterator[str]:
    if "serve" not in {port.get("name") for port in head.get("ports", [])}:
        yield "the head's container needs a port named serve, or KubeRay makes no service for HTTP"
    retries = number(head, RETRIES)
    if not retries >= MIN_RETRIES:
        yield f"{RETRIES} of the head is {retries:g}; below {MIN_RETRIES} Serve soon gives workers up for good"


def _of_state(ray: RayService) -> Iterator[str]:
    """What Redis keeps for the head is what the cluster runs, code included; so is who may write there."""
    if not ray.state:
        return
    address, head = ray.state.get("redisAddress", ""), ray.head.main
    if not address.startswith(TLS):
        yield f"gcsFaultToleranceOptions.redisAddress is {address}; with {TLS} nobody reads or changes it on the way"
    authority = environment_of(head).get(AUTHORITY, "")
    if not authority or mount_of(head, authority) is None:
        yield f"{AUTHORITY} of the head must name a mounted file, or Ray sends its password to whoever answers"
    if "secretKeyRef" not in ray.state.get("redisPassword", {}).get("valueFrom", {}):
        yield "gcsFaultToleranceOptions.redisPassword must come from a Secret"


def _of_autoscaler(ray: RayService) -> Iterator[str]:
    if not ray.autoscales:
        if ray.autoscaler:
            yield "autoscalerOptions has no effect without enableInTreeAutoscaling"
        return
    if ray.autoscaler.get("version") != "v2":
        yield "autoscalerOptions.version must be v2; v1 does not know Ray's labels"
    for group in ray.pods:
        policy = group.spec.get("restartPolicy", "Never")
        if policy != "Never":
            yield f"{group.group_name}: restartPolicy is {policy}; with autoscaler v2 it must be Never or unset"


def _of_group(pod: Pod, ray: RayService) -> Iterator[str]:
    group = pod.ray
    start: Mapping[str, str] = group.get("rayStartParams", {})
    if "labels" in start:
        yield "labels belong into the group's labels, not into rayStartParams"
    twice = [key for key in RESOURCES if key in start]
    if group.get("resources") and twice:
        yield f"resources stand in two places: resources, and {', '.join(twice)} in rayStartParams"
    if "groupName" not in group:
        if start.get("num-cpus") != "0":
            yield 'rayStartParams.num-cpus must be "0", so that no replica runs on the head'
        return
    low, usual, high = (group.get(key, 0) for key in ("minReplicas", "replicas", "maxReplicas"))
    if not low <= usual <= high:
        yield f"replicas must be between minReplicas and maxReplicas, got {low} <= {usual} <= {high}"
    if group.get("idleTimeoutSeconds") is not None and ray.autoscaler.get("version") != "v2":
        yield "idleTimeoutSeconds needs autoscaler v2"


def _of_proxies(container: Object) -> Iterator[str]:
    environment = environment_of(container)
    for name, (value, otherwise) in PROXIES.items():
        if environment.get(name) != value:
            yield f"{name} is {environment.get(name) or 'not set'}; without {value} {otherwise}"
    seconds = number(container, CLIENT_TIMEOUT)
    if not 0 < seconds <= MAX_CLIENT_SECONDS:
        why = "HAProxy cuts clients that send no whole head or read nothing"
        yield f"{CLIENT_TIMEOUT} is {seconds:g}; above 0 and at most {MAX_CLIENT_SECONDS:g}, {why}"


def _of_shutdown(group: Pod) -> Iterator[str]:
    """Pods get SIGTERM, drain, and must not be killed before that ends."""
    drain = number(group.main, DRAIN)
    grace = group.spec.get("terminationGracePeriodSeconds", DEFAULT_GRACE_SECONDS)
    if not drain < grace <= drain + MAX_SLACK_SECONDS:
        wanted = f"above {DRAIN} ({drain:g}), and by at most {MAX_SLACK_SECONDS}"
        yield f"terminationGracePeriodSeconds is {grace}; it must be {wanted}"
    if "preStop" in group.main.get("lifecycle", {}):
        yield "a preStop hook would stop Ray before it has drained; leave it out"
