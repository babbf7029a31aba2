"""What an overlay renders to, and the ways the rules look at it: by kind, by name, by pod."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
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
    ray: Object = field(default_factory=dict)
    """The group of a RayService that it is of, as the manifest has it."""

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


class Manifests:
    """The objects of one overlay."""

    def __init__(self, objects: Iterable[Object]) -> None:
        self.objects = list(objects)

    def of(self, *kinds: str) -> list[Object]:
        """All objects of these kinds."""
        return [entry for entry in self.objects if entry["kind"] in kinds]

    def names(self, *kinds: str) -> set[str]:
        """Their names."""
        return {str(entry["metadata"]["name"]) for entry in self.of(*kinds)}

    def pods(self) -> list[Pod]:
        """Every pod template: of Ray's head and worker groups, and of what Kubernetes runs itself."""
        found = [pod for entry in self.of("RayService") for pod in groups(entry)]
        for entry in self.of("Deployment", "StatefulSet", "Job"):
            template, count = entry["spec"]["template"], entry["spec"].get("replicas", 1)
            labels = template.get("metadata", {}).get("labels", {})
            found.append(Pod(where(entry), labels, template["spec"], count))
        return found

    def selected(self, selector: Object) -> list[Pod]:
        """Those that a label selector takes."""
        return [pod for pod in self.pods() if selects(selector, pod.labels)]

    def pods_of(self, service: Object) -> list[Pod]:
        """Those that a Service leads to."""
        return self.selected({"matchLabels": service["spec"].get("selector", {})})

    def redis_of(self, rayservice: Object) -> list[Pod]:
        """Those of ours that keep the state of its head in Redis."""
        options = rayservice["spec"]["rayClusterConfig"].get("gcsFaultToleranceOptions", {})
        name = host_in(options.get("redisAddress", ""))
        services = [entry for entry in self.of("Service") if entry["metadata"]["name"] == name]
        return [pod for service in services for pod in self.pods_of(service)]

    def ways_out(self, pod: Pod) -> list[Object]:
        """Egress rules of all NetworkPolicies that select a pod."""
        return [way for policy in self._policies_of(pod) for way in policy["spec"].get("egress", [])]

    def ways_in(self, pod: Pod) -> list[tuple[Object, Object]]:
        """Ingress rules of all NetworkPolicies that select a pod, each behind its policy."""
        return [(policy, way) for policy in self._policies_of(pod) for way in policy["spec"].get("ingress", [])]

    def _policies_of(self, pod: Pod) -> list[Object]:
        return [one for one in self.of("NetworkPolicy") if selects(one["spec"]["podSelector"], pod.labels)]


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


def groups(rayservice: Object) -> list[Pod]:
    """Of the head group, then of the worker groups."""
    cluster = rayservice["spec"]["rayClusterConfig"]
    found = []
    for group in (cluster["headGroupSpec"], *cluster.get("workerGroupSpecs", [])):
        scaled = cluster.get("enableInTreeAutoscaling") and "groupName" in group
        fewest = group.get("minReplicas", 0) if scaled else group.get("replicas", 1)
        template = group["template"]
        labels = template.get("metadata", {}).get("labels", {})
        place = where(rayservice, group.get("groupName", "head"))
        found.append(Pod(place, labels, template["spec"], fewest, group))
    return found


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
