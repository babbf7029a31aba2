"""A Ray cluster: reachable, with room and labels for every pool, and the same Paceline on all nodes."""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.config import Config
from cluster.console import CommandError
from cluster.doctor.finding import Finding, ok, problem, warning
from cluster.doctor.versions import TELLING, installed_version
from cluster.placement import APPLICATION, GPU_CLASS, Node, lacking, needs
from speculation.events import Role

ANSWER_SECONDS = 60.0
"""How long nodes may take to say what they run; the first task on a node starts a process."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A node, and what it says of itself."""

    address: str
    room: Node
    says: Mapping[str, str] = field(default_factory=dict)
    """Versions by package; empty if it did not answer."""
    silence: str = ""
    """Why it did not."""
    lacks: Sequence[str] = ()
    """Model folders that are missing there."""


def check_room(config: Config, nodes: Sequence[Seen]) -> Iterator[Finding]:
    """Whether every pool finds nodes with its label, and GPUs."""
    reason = lacking(needs(config), [node.room for node in nodes])
    classes = Counter(node.room.labels.get(GPU_CLASS, "none") for node in nodes)
    listed = ", ".join(f"{count} x {name}" for name, count in sorted(classes.items()))
    gpus = sum(node.room.gpus for node in nodes)
    text = f"{len(nodes)} nodes ({GPU_CLASS}: {listed}), {gpus:g} GPUs"
    if reason:
        fix = f"add such nodes, start them with --labels {GPU_CLASS}=..., or lower replicas, gpus or ranks"
        yield problem("ray", f"{reason}; there are {text}", fix)
    else:
        yield ok("ray", f"{text}: room for every pool")


def check_nodes(nodes: Sequence[Seen], here: Mapping[str, str]) -> Iterator[Finding]:
    """Whether the nodes run what this machine does, and have the models."""
    sound = True
    for node in nodes:
        subject = f"node {node.address}"
        for folder in node.lacks:
            sound = False
            yield problem(subject, f"has no {folder}", "put the model there, or mount the same volume on all nodes")
        if node.silence:
            sound = False
            yield problem(subject, node.silence, "install the same Paceline on every node, for instance from its image")
        for name, version in node.says.items():
            if here.get(name) not in (None, version):
                sound = False
                text = f"{name} is {version} there and {here[name]} here"
                yield warning(subject, text, "install the same versions (requirements.lock)")
    if sound:
        yield ok("nodes", f"all {len(nodes)} run what this machine does")


def versions() -> dict[str, str]:
    """Python and the telling packages of this process."""
    found = {name: installed_version(name) for name in TELLING}
    return {"python": platform.python_version()} | {name: version for name, version in found.items() if version}


def inspect(models: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Runs on a node: its versions, and which of the folders it lacks."""
    return versions(), [folder for folder in models if not os.path.isdir(folder)]


def check(config: Config, addresses: dict[Role, list[str]]) -> Iterator[Finding]:
    """All of the above for the cluster at ``ray.address``; fills in the workers that serve there."""
    from cluster.ray_cluster import join

    try:
        join(config)
    except CommandError as error:
        fix = "check ray.address; with token authentication set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN(_PATH)"
        yield problem("ray", str(error), fix)
        return
    import ray

    try:
        nodes = list(_nodes(config))
        yield from check_room(config, nodes)
        yield from check_nodes(nodes, versions())
        yield from _application(config, addresses)
    finally:
        ray.shutdown()


def _nodes(config: Config) -> Iterator[Seen]:
    """All living nodes; each is asked by a task that runs there."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    folders = sorted({pool.settings.model for pool in config.pools() if os.path.isdir(pool.settings.model)})
    ask = ray.remote(num_cpus=0, max_retries=0)(inspect)
    alive = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    there = {node["NodeID"]: NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in alive}
    asked = {name: ask.options(scheduling_strategy=strategy).remote(folders) for name, strategy in there.items()}
    ray.wait(list(asked.values()), num_returns=len(asked), timeout=ANSWER_SECONDS)
    for node in alive:
        resources, labels = node["Resources"], node.get("Labels") or {}
        room = Node(resources.get("CPU", 0.0), resources.get("GPU", 0.0), labels)
        yield _answered(Seen(node["NodeManagerAddress"], room), asked[node["NodeID"]])


def _answered(node: Seen, answer: Any) -> Seen:
    import ray

    try:
        says, lacks = ray.get(answer, timeout=0)
    except ray.exceptions.GetTimeoutError:
        return Seen(node.address, node.room, silence=f"did not answer within {ANSWER_SECONDS:.0f} s")
    except ray.exceptions.RayError as error:
        last = str(error).strip().splitlines()[-1]
        return Seen(node.address, node.room, silence=f"cannot run Paceline ({last})")
    return Seen(node.address, node.room, says, lacks=lacks)


def _application(config: Config, addresses: dict[Role, list[str]]) -> Iterator[Finding]:
    """How what is deployed there does, and where its workers listen."""
    from ray import serve

    from cluster.discovery import ENDPOINT

    status = serve.status().applications.get(APPLICATION)
    if status is None:
        yield ok("application", "not deployed yet; `paceline up --address` deploys it")
        return
    if status.status == "RUNNING":
        yield ok("application", "running")
    else:
        yield problem(
            "application", f"{status.status.value}: {' '.join(status.message.split())[:300]}", "see Ray's logs"
        )
    for pool in config.pools():
        if pool.deployment in status.deployments:
            handle = serve.get_deployment_handle(pool.deployment, APPLICATION)
            addresses.setdefault(pool.role, []).extend(handle.broadcast(ENDPOINT).results(timeout_s=10.0))
