"""Where Ray may put each part: resources and labels of a replica, and whether any cluster could hold them all.

Labels, not accelerator types, name the class of a node's GPUs, so the same configuration runs on pretend nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cluster.config import Config

APPLICATION = "paceline"
DEPLOYMENTS = {"target": "TargetWorker", "draft": "DraftWorker", "router": "Router"}
"""Names in Ray Serve, by role."""
GPU_CLASS = "paceline.io/gpu-class"
ROUTER_CPUS = 0.1


@dataclass(frozen=True, slots=True)
class Need:
    """What the replicas of one deployment ask of a node, each."""

    name: str
    replicas: int
    cpus: float
    gpus: float = 0.0
    labels: Mapping[str, str] = field(default_factory=dict)

    def actor_options(self, environment: Mapping[str, str]) -> dict[str, Any]:
        """As Ray takes it."""
        options: dict[str, Any] = {"num_cpus": self.cpus, "num_gpus": self.gpus}
        if self.labels:
            options["label_selector"] = dict(self.labels)
        return options | {"runtime_env": {"env_vars": dict(environment)}}

    def __str__(self) -> str:
        parts = [f"{self.cpus:g} CPU"] + ([f"{self.gpus:g} GPU"] if self.gpus else [])
        parts += [f"label {key}={value}" for key, value in self.labels.items()]
        return f"{self.replicas} x {self.name} with {', '.join(parts)} each"


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the cluster, as far as placement cares."""

    cpus: float
    gpus: float
    labels: Mapping[str, str]


@dataclass(slots=True)
class _Room:
    """What is left of a node."""

    cpus: float
    gpus: float
    labels: Mapping[str, str]

    def fits(self, need: Need) -> bool:
        slack = 1e-6  # sums of tenths
        return self.cpus + slack >= need.cpus and self.gpus + slack >= need.gpus


def needs(config: Config) -> dict[str, Need]:
    """By deployment: ``target``, ``draft`` (if any) and ``router``."""
    cpus = config.ray.cpus_per_worker
    found = {
        "target": Need("target", config.target.replicas, cpus, config.target.gpus, _labels(config.target.gpu_class)),
        "draft": Need("draft", config.drafts, cpus, config.draft.gpus, _labels(config.draft.gpu_class)),
        "router": Need("router", config.router.replicas, ROUTER_CPUS),
    }
    return {name: need for name, need in found.items() if need.replicas}


def lacking(wanted: Iterable[Need], nodes: Iterable[Node]) -> str | None:
    """Why these nodes can never hold all that, even when empty; None when they may. Scarce kinds are placed first."""
    free = [_Room(node.cpus, node.gpus, node.labels) for node in nodes]
    for need in sorted(wanted, key=lambda need: (-len(need.labels), -need.gpus, -need.cpus)):
        fitting = [node for node in free if need.labels.items() <= node.labels.items()]
        if not fitting:
            return f"no Ray node has the label for {need}"
        for placed in range(need.replicas):
            room = next((node for node in fitting if node.fits(need)), None)
            if room is None:
                return f"Ray has no room for {need}: only {placed} fit on its nodes"
            room.cpus -= need.cpus
            room.gpus -= need.gpus
    return None


def _labels(gpu_class: str) -> dict[str, str]:
    return {GPU_CLASS: gpu_class} if gpu_class else {}
