"""Where Ray may put each part: resources and labels of a replica, and whether any cluster could hold them all.

Labels, not accelerator types, name the class of a node's GPUs, so the same configuration runs on pretend nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cluster.config.config import Config, min_replicas_of
from cluster.config.pools import Pool
from cluster.config.settings import AUTO

APPLICATION = "paceline"
ROUTER = "Router"
"""Name of the routers' deployment in Ray Serve; those of workers are called as their pools say."""
GPU_CLASS = "paceline.io/gpu-class"
ROUTER_CPUS = 0.1
ROUTERS = 2
"""For the loss of one to be survivable."""


@dataclass(frozen=True, slots=True)
class Need:
    """What the replicas of one deployment ask of a node, each: room for all their ranks on the same one."""

    name: str
    """For people and process titles."""
    replicas: int
    cpus: float
    """Of a rank, as are the GPUs."""
    gpus: float = 0.0
    labels: Mapping[str, str] = field(default_factory=dict)
    ranks: int = 1
    deployment: str = ""
    """Its name in Ray Serve."""

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
class ClusterNode:
    """A node of the cluster, as far as placement cares, or what is left of it."""

    cpus: float
    gpus: float
    labels: Mapping[str, str]
    name: str = ""
    """Ray's, as its address is; empty for one that is only planned."""
    address: str = ""

    def has_labels(self, need: Need) -> bool:
        """Those that a replica asks for."""
        return need.labels.items() <= self.labels.items()

    def has_room(self, need: Need) -> bool:
        """For a replica."""
        slack = 1e-6  # sums of tenths
        return self.cpus + slack >= need.cpus * need.ranks and self.gpus + slack >= need.gpus * need.ranks

    def may_hold(self, need: Need) -> bool:
        """Whether Ray may put a replica on it, when it is empty."""
        return self.has_labels(need) and self.has_room(need)

    def without(self, need: Need) -> ClusterNode:
        """What a replica leaves of it."""
        return replace(self, cpus=self.cpus - need.cpus * need.ranks, gpus=self.gpus - need.gpus * need.ranks)


def living(nodes: Iterable[Mapping[str, Any]]) -> list[ClusterNode]:
    """Those of ``ray.nodes()`` that live."""
    found = []
    for node in nodes:
        if node["Alive"]:
            cpus, gpus = (node["Resources"].get(kind, 0.0) for kind in ("CPU", "GPU"))
            name, address = node.get("NodeID", ""), node["NodeManagerAddress"]
            found.append(ClusterNode(cpus, gpus, node.get("Labels") or {}, name, address))
    return found


def needs(config: Config) -> list[Need]:
    """Of every pool of workers that has some or may, then of the routers; of each the fewest that it may have."""
    return [*(need(pool, config) for pool in config.nonempty_pools()), router_need(config)]


def router_need(config: Config) -> Need:
    """Of the routers."""
    labels = labels_in(config.router.labels)
    return Need("router", min_replicas_of(config.router), ROUTER_CPUS, labels=labels, deployment=ROUTER)


def need(pool: Pool, config: Config) -> Need:
    """Of the workers of one pool."""
    worker = pool.settings
    labels = ({GPU_CLASS: worker.gpu_class} if worker.gpu_class else {}) | labels_in(worker.labels)
    ranks, cpus = worker.tensor_parallel_size, config.ray.cpus_per_worker
    return Need(str(pool), min_replicas_of(worker), cpus, worker.gpus, labels, ranks, pool.deployment)


def with_routers(config: Config, nodes: Iterable[ClusterNode]) -> Config:
    """The same with the routers that ``auto`` stands for: two where two of the nodes may each hold one, else one."""
    if config.router.replicas != AUTO or config.router.max_replicas:
        return config
    fitting = sum(node.may_hold(router_need(config)) for node in nodes)
    return replace(config, router=replace(config.router, replicas=min(max(fitting, 1), ROUTERS)))


def labels_in(text: str) -> dict[str, str]:
    """What a setting ``labels`` says; its form has been checked."""
    return dict(pair.strip().split("=", 1) for pair in text.split(",") if pair)


def lacking(wanted: Iterable[Need], nodes: Iterable[ClusterNode]) -> str | None:
    """Why these nodes can never hold all that, even when empty; None when they may. Scarce kinds are placed first."""
    left = list(nodes)
    for need in sorted(wanted, key=lambda need: (-len(need.labels), -need.gpus * need.ranks, -need.cpus * need.ranks)):
        labelled = [index for index, node in enumerate(left) if node.has_labels(need)]
        if not labelled:
            return f"no Ray node has the label for {need}"
        for placed in range(need.replicas):
            place = next((index for index in labelled if left[index].has_room(need)), None)
            if place is None:
                return f"Ray has no room for {need}: only {placed} fit on its nodes"
            left[place] = left[place].without(need)
    return None
