"""Where Ray may put each part: resources and labels of a replica, and whether any cluster could hold them all.

Labels, not accelerator types, name the class of a node's GPUs, so the same configuration runs on pretend nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cluster.config import Config, DraftConfig, TargetConfig

APPLICATION = "paceline"
DEPLOYMENTS = {"target": "TargetWorker", "draft": "DraftWorker", "router": "Router"}
"""Names in Ray Serve, by role."""
GPU_CLASS = "paceline.io/gpu-class"
ROUTER_CPUS = 0.1


@dataclass(frozen=True, slots=True)
class Need:
    """What the replicas of one deployment ask of a node, each: room for all their ranks on the same one."""

    name: str
    replicas: int
    cpus: float
    """Of a rank, as are the GPUs."""
    gpus: float = 0.0
    labels: Mapping[str, str] = field(default_factory=dict)
    ranks: int = 1

    def deployment_options(self, environment: Mapping[str, str]) -> dict[str, Any]:
        """As Serve takes it. Several ranks are a placement group, with rank 0, the replica, in its first bundle."""
        actor: dict[str, Any] = {"num_cpus": self.cpus, "num_gpus": self.gpus}
        actor["runtime_env"] = {"env_vars": dict(environment)}
        options: dict[str, Any] = {"num_replicas": self.replicas, "ray_actor_options": actor}
        if self.ranks > 1:
            bundle = {"CPU": self.cpus, "GPU": self.gpus}
            options["placement_group_bundles"] = [dict(bundle) for _ in range(self.ranks)]
            options["placement_group_strategy"] = "STRICT_PACK"
            if self.labels:
                options["placement_group_bundle_label_selector"] = [dict(self.labels) for _ in range(self.ranks)]
        elif self.labels:
            actor["label_selector"] = dict(self.labels)
        return options

    def __str__(self) -> str:
        parts = [f"{self.cpus:g} CPU"] + ([f"{self.gpus:g} GPU"] if self.gpus else [])
        parts += [f"label {key}={value}" for key, value in self.labels.items()]
        ranks = f" of {self.ranks} ranks on one node" if self.ranks > 1 else ""
        return f"{self.replicas} x {self.name}{ranks} with {', '.join(parts)} each"


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
        return self.cpus + slack >= need.cpus * need.ranks and self.gpus + slack >= need.gpus * need.ranks

    def take(self, need: Need) -> None:
        self.cpus -= need.cpus * need.ranks
        self.gpus -= need.gpus * need.ranks


def needs(config: Config) -> dict[str, Need]:
    """By deployment: ``target``, ``draft`` (if any) and ``router``."""
    found = {
        "target": _worker("target", config.target.replicas, config.target, config),
        "draft": _worker("draft", config.drafts, config.draft, config),
        "router": Need("router", config.router.replicas, ROUTER_CPUS),
    }
    return {name: need for name, need in found.items() if need.replicas}


def lacking(wanted: Iterable[Need], nodes: Iterable[Node]) -> str | None:
    """Why these nodes can never hold all that, even when empty; None when they may. Scarce kinds are placed first."""
    free = [_Room(node.cpus, node.gpus, node.labels) for node in nodes]
    for need in sorted(wanted, key=_scarcity):
        fitting = [node for node in free if need.labels.items() <= node.labels.items()]
        if not fitting:
            return f"no Ray node has the label for {need}"
        for placed in range(need.replicas):
            room = next((node for node in fitting if node.fits(need)), None)
            if room is None:
                return f"Ray has no room for {need}: only {placed} fit on its nodes"
            room.take(need)
    return None


def _worker(name: str, replicas: int, worker: TargetConfig | DraftConfig, config: Config) -> Need:
    labels = {GPU_CLASS: worker.gpu_class} if worker.gpu_class else {}
    return Need(name, replicas, config.ray.cpus_per_worker, worker.gpus, labels, worker.tensor_parallel_size)


def _scarcity(need: Need) -> tuple[float, ...]:
    """What is hard to place sorts first."""
    return -len(need.labels), -need.gpus * need.ranks, -need.cpus * need.ranks
