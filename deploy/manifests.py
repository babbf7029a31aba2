"""What an overlay renders to, and the ways the rules look at it: by kind, by name, by pod."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cluster.fetch import quantity

Object = Mapping[str, Any]
"""A Kubernetes object, or a part of one."""
Violation = tuple[str, str]
"""Where something would go wrong (kind and name of the object, and the part of it), and what."""
GPU = "nvidia.com/gpu"
RENDER_SECONDS = 60


class RenderError(Exception):
    """kubectl is missing, or kustomize refuses the overlay. One line."""


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod template, and how many pods there are of it at least."""

    where: str
    labels: Mapping[str, str]
    spec: Object
    at_least: int
    ray: Object
    """The group of a RayService that it is of, as the manifest has it; empty for others."""

    @classmethod
    def of(cls, where: str, owner: Object, at_least: int, ray: Object) -> Pod:
        """That of what has a pod template."""
        template = owner["template"]
        return cls(where, template.get("metadata", {}).get("labels", {}), template["spec"], at_least, ray)

    @property
    def group_name(self) -> str:
        """For messages. The head has no ``groupName``."""
        return str(self.ray.get("groupName", "head"))

    @property
    def main(self) -> Object:
        """Its first container: KubeRay takes it for Ray's own."""
        found: Object = self.spec["containers"][0]
        return found

    @property
    def gpus(self) -> float:
        """That this reserves."""
        return requested(self.main, GPU)

    def containers(self) -> Iterator[Object]:
        """All, those that run first included."""
        yield from self.spec.get("initContainers", [])
        yield from self.spec["containers"]

    def ports(self) -> dict[str, int]:
        """Those that it says it listens on, by name."""
        return {
            port.get("name", ""): port["containerPort"] for one in self.containers() for port in one.get("ports", [])
        }


class RayService:
    """A RayService, and what the rules ask of it."""

    def __init__(self, entry: Object) -> None:
        self.entry = entry
        self.serve_service = f"{entry['metadata']['name']}-serve-svc"
        """The Service for HTTP that KubeRay makes."""
        self.cluster: Object = entry["spec"]["rayClusterConfig"]
        self.autoscales = bool(self.cluster.get("enableInTreeAutoscaling"))
        self.autoscaler: Object = self.cluster.get("autoscalerOptions", {})
        self.state: Object = self.cluster.get("gcsFaultToleranceOptions", {})
        """Where the head keeps what is to outlive it; empty: nowhere."""
        self.head = self._pod(self.cluster["headGroupSpec"])
        self.workers = [self._pod(group) for group in self.cluster.get("workerGroupSpecs", [])]
        self.pods = [self.head, *self.workers]

    def _pod(self, group: Object) -> Pod:
        scaled = self.autoscales and "groupName" in group
        fewest = group.get("minReplicas", 0) if scaled else group.get("replicas", 1)
        return Pod.of(where(self.entry, group.get("groupName", "head")), group, fewest, group)


class Manifests:
    """The objects of one overlay."""

    def __init__(self, objects: Iterable[Object]) -> None:
        self.objects = list(objects)

    @property
    def ray(self) -> RayService:
        """The one RayService; that there is one :mod:`deploy.schema_rules` has found."""
        return RayService(*self.of("RayService"))

    def of(self, *kinds: str) -> list[Object]:
        """All objects of these kinds."""
        return [entry for entry in self.objects if entry["kind"] in kinds]

    def names(self, *kinds: str) -> set[str]:
        """Their names."""
        return {str(entry["metadata"]["name"]) for entry in self.of(*kinds)}

    def pods(self) -> list[Pod]:
        """Every pod template: of Ray's head and worker groups, and of what Kubernetes runs itself."""
        others = self.of("Deployment", "StatefulSet", "Job")
        return self.ray.pods + [
            Pod.of(where(entry), entry["spec"], entry["spec"].get("replicas", 1), {}) for entry in others
        ]

    def selected(self, selector: Object) -> list[Pod]:
        """Those that a label selector takes."""
        return [pod for pod in self.pods() if selects(selector, pod.labels)]

    def pods_of(self, service: Object) -> list[Pod]:
        """Those that a Service leads to."""
        return self.selected({"matchLabels": service["spec"].get("selector", {})})

    def redis(self) -> list[Pod]:
        """Those of ours that keep the state of Ray's head."""
        name = host_in(self.ray.state.get("redisAddress", ""))
        services = [entry for entry in self.of("Service") if entry["metadata"]["name"] == name]
        return [pod for service in services for pod in self.pods_of(service)]

    def ways(self, pod: Pod, side: str) -> list[tuple[Object, Object]]:
        """Rules (``ingress`` or ``egress``) of all NetworkPolicies that select a pod, each behind its policy."""
        policies = [one for one in self.of("NetworkPolicy") if selects(one["spec"]["podSelector"], pod.labels)]
        return [(policy, way) for policy in policies for way in policy["spec"].get(side, [])]


def render(overlay: Path) -> Manifests:
    """What ``kubectl kustomize`` makes of it; no cluster is asked. Raises :class:`RenderError`."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        raise RenderError("kubectl is not on the PATH; install it, its `kubectl kustomize` needs no cluster")
    try:
        command = [kubectl, "kustomize", str(overlay)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=RENDER_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise RenderError(f"kubectl kustomize {overlay} did not end within {RENDER_SECONDS} s") from error
    if done.returncode:
        raise RenderError(f"kubectl kustomize {overlay}: {' '.join(done.stderr.split())}")
    return Manifests(entry for entry in yaml.load_all(done.stdout, yaml.CSafeLoader) if entry)


def where(entry: Object, part: str = "") -> str:
    """How a finding names an object."""
    return " ".join(filter(None, (f"{entry['kind']} {entry['metadata']['name']}", part)))


def requested(container: Object, resource: str) -> float:
    """How much of a resource it reserves; its schema has found the form of quantities right."""
    return quantity(str(container.get("resources", {}).get("requests", {}).get(resource, 0)))


def environment_of(container: Object) -> dict[str, str]:
    """Variables and their values; empty where something else gives these."""
    return {entry["name"]: entry.get("value", "") for entry in container.get("env", [])}


def host_in(address: str) -> str:
    """That of an address such as ``rediss://HOST:PORT``."""
    return address.rpartition("://")[2].partition(":")[0]


def mount_of(container: Object, path: str) -> Object | None:
    """The volume mount that a path in the container lies on, if any."""
    fitting = [mount for mount in container.get("volumeMounts", []) if Path(path).is_relative_to(mount["mountPath"])]
    return max(fitting, key=lambda mount: len(mount["mountPath"]), default=None)


def selects(selector: Object, labels: Mapping[str, str]) -> bool:
    """Whether a Kubernetes label selector takes a pod with these labels."""
    exact = all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())
    return exact and all(_holds(rule, labels) for rule in selector.get("matchExpressions", []))


def _holds(rule: Object, labels: Mapping[str, str]) -> bool:
    value, values = labels.get(rule["key"]), rule.get("values", ())
    told = {"In": value in values, "NotIn": value not in values, "Exists": value is not None}
    return told.get(rule["operator"], value is None)
