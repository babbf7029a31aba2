"""A Ray cluster: reachable, guarded, with room and labels for every pool, and the same Paceline on all nodes."""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.config.config import Config
from cluster.config.pools import role_of
from cluster.config.security import check_worker_exposure
from cluster.console import CommandError
from cluster.discovery import ENDPOINT
from cluster.doctor.finding import Finding, ok, problem, warning
from cluster.doctor.versions import TELLING, code_digest, installed_version
from cluster.placement import APPLICATION, GPU_CLASS, ClusterNode, lacking, living, need, needs, router_need
from cluster.ray.cluster import application_details, applications, reason_in
from cluster.ray.connection import check_token, join
from cluster.ray.parts import all_settings, replicas_in
from speculation.events import Role

PACELINE = "paceline"
ANSWER_SECONDS = 60.0
"""How long nodes may take to say what they run; the first task on a node starts a process."""
WORKER_SECONDS = 10.0
"""How long workers may take to say where they listen."""
LOGS = "see its message in `serve status`, and Ray's logs"


@dataclass(frozen=True, slots=True)
class Seen:
    """A node, and what it says of itself."""

    room: ClusterNode
    says: Mapping[str, str] = field(default_factory=dict)
    """Versions by package; empty if it did not answer."""
    silence: str = ""
    """Why it did not."""
    lacks: Sequence[str] = ()
    """Model folders that are missing there."""


def check_room(config: Config, nodes: Sequence[Seen]) -> Iterator[Finding]:
    """Whether every pool finds nodes with its label, and GPUs, for as many workers as it always has."""
    reason = lacking([wanted for wanted in needs(config) if wanted.replicas], [node.room for node in nodes])
    classes = Counter(node.room.labels.get(GPU_CLASS, "none") for node in nodes)
    listed = ", ".join(f"{count} x {name}" for name, count in sorted(classes.items()))
    gpus = sum(node.room.gpus for node in nodes)
    text = f"{len(nodes)} nodes ({GPU_CLASS}: {listed}), {gpus:g} GPUs"
    fix = f"add such nodes, start them with --labels {GPU_CLASS}=..., or lower replicas, gpus or ranks"
    full = problem("ray", f"{reason}; there are {text}", fix)
    yield full if reason else ok("ray", f"{text}: room for every pool")


def check_nodes(nodes: Sequence[Seen], here: Mapping[str, str]) -> Iterator[Finding]:
    """Whether the nodes run what this machine does, and have the models."""
    faults = []
    for node in nodes:
        subject, mount = f"node {node.room.address}", "put the model there, or mount the same volume on all nodes"
        faults += [problem(subject, f"has no {folder}", mount) for folder in node.lacks]
        if node.silence:
            fix = "install the same Paceline on every node, for instance from its image"
            faults.append(problem(subject, node.silence, fix))
        says = {PACELINE: "an older one", **node.says} if node.says else {}  # older ones say nothing of themselves
        for name, version in says.items():
            if here.get(name) not in (None, version):
                text = f"{name} is {version} there and {here[name]} here"
                same = "the same Paceline" if name == PACELINE else "the same versions (requirements.lock)"
                faults.append(warning(subject, text, f"install {same}"))
    yield from faults or [ok("nodes", f"all {len(nodes)} run what this machine does")]


def check_doors(config: Config, address: str, hosts: Sequence[str]) -> Iterator[Finding]:
    """Whether workers may listen on these nodes, and their cluster, whose control service is there, be served from."""
    try:
        for host in hosts:
            check_worker_exposure(host, config)
        check_token(config, address, hosts)
    except CommandError as error:
        yield problem("doors", str(error), "nothing is served before")


def versions() -> dict[str, str]:
    """Python, Paceline's code, and the telling packages of this process."""
    found = {name: installed_version(name) for name in TELLING}
    return {"python": platform.python_version(), PACELINE: code_digest()} | {
        name: version for name, version in found.items() if version
    }


def inspect(models: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Runs on a node: its versions, and which of the folders it lacks."""
    return versions(), [folder for folder in models if not os.path.isdir(folder)]


def deployed(config: Config) -> tuple[Mapping[str, Any], dict[str, dict[str, int]]] | None:
    """The settings of the application at ``ray.address``, if it was given all, and its :func:`replicas_in`.

    None also where nobody can say.
    """
    import ray

    try:
        join(config)
        entry = application_details().get(APPLICATION, {}).get("deployed_app_config")
        settings = all_settings(entry) if entry else None
        return None if settings is None else (settings, replicas_in(entry))
    except Exception:  # :func:`check` says why
        return None
    finally:
        ray.shutdown()


def check(config: Config, addresses: dict[Role, list[str]], *, models: bool = False) -> Iterator[Finding]:
    """All of the above for the cluster at ``ray.address``; fills in the workers that serve there.

    ``models``: they are not here, so a router's node is to look at them, if there is one to ask.
    """
    try:
        join(config)
    except CommandError as error:
        if models:
            yield from models_there(config)
        fix = "check ray.address; with token authentication set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN(_PATH)"
        yield problem("ray", str(error), fix)
        return
    import ray

    try:
        rooms = living(ray.nodes())  # type: ignore[no-untyped-call]
        if models:
            yield from check_models(config, rooms)
        nodes = list(_nodes(config, rooms))
        yield from check_room(config, nodes)
        yield from check_nodes(nodes, versions())
        hosts = [node.room.address for node in nodes]
        yield from check_doors(config, ray.get_runtime_context().gcs_address, hosts)
        yield from check_application(config, addresses)
    finally:
        ray.shutdown()


def check_models(config: Config, rooms: Iterable[ClusterNode]) -> Iterator[Finding]:
    """What a node that may hold a router says of the models, which is asked to look at them."""
    import ray

    place = next((room.name for room in rooms if room.may_hold(router_need(config))), None)
    if place is None:
        text = "are not here, and no node for routers runs that could look at them"
        yield problem("models", text, "wait for one, or run the doctor where the models are")
        return
    yield from ray.get(_ask(place, models_there, config), timeout=ANSWER_SECONDS)


def models_there(config: Config) -> list[Finding]:
    """Runs on a node: what is to be said of the models as they are there."""
    from cluster.doctor import models

    return list(models.check(config))


def _ask(node: str, function: Callable[..., Any], *arguments: object) -> Any:
    """Have a node, by its id, call a function; what ``ray.get`` takes."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    place = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(num_cpus=0, max_retries=0)(function).options(scheduling_strategy=place).remote(*arguments)


def models_on(config: Config, node: ClusterNode) -> list[str]:
    """Folders of the models that may be read there: by the workers that may come there, or by a router."""
    loading = [pool for pool in config.pools() if node.may_hold(need(pool, config))]
    read = {path for pool in loading for _, path in config.loaded(pool)}
    if node.may_hold(router_need(config)):
        read |= {path for _, path in config.read_by_routers()}
    return sorted(folder for folder in read if os.path.isdir(folder) or os.path.isabs(folder))


def _nodes(config: Config, rooms: Sequence[ClusterNode]) -> Iterator[Seen]:
    """Each node, asked by a task that runs there."""
    import ray

    asked = [_ask(room.name, inspect, models_on(config, room)) for room in rooms]
    ray.wait(asked, num_returns=len(asked), timeout=ANSWER_SECONDS)
    for room, answer in zip(rooms, asked, strict=True):
        try:
            says, lacks = ray.get(answer, timeout=0)
        except ray.exceptions.GetTimeoutError:
            yield Seen(room, silence=f"did not answer within {ANSWER_SECONDS:.0f} s")
        except ray.exceptions.RayError as error:
            yield Seen(room, silence=f"cannot run Paceline ({str(error).strip().splitlines()[-1]})")
        else:
            yield Seen(room, says, lacks=lacks)


def check_application(config: Config, addresses: dict[Role, list[str]]) -> Iterator[Finding]:
    """How what is deployed there does, whatever it is called; fills in where its workers listen."""
    status = applications().get(APPLICATION)
    if status is None:
        yield ok("application", "not deployed yet; `paceline up --address` deploys it")
        return
    if status.status == "RUNNING":
        yield ok("application", "running")
    else:
        yield problem("application", f"{status.status}: {' '.join(status.message.split())[:300]}", "see Ray's logs")
    there = [name for name in status.deployments if role_of(name)]
    if not {pool.deployment for pool in config.pools()} & set(there):
        text = f"has {', '.join(sorted(there)) or 'no workers'}, and none that this configuration describes"
        yield warning("application", text, "give by --config what was deployed; room is judged by what is given")
    for name, deployment in status.deployments.items():
        role = role_of(name)
        if role is None:
            continue
        why = f": {reason_in(deployment.message)}" if deployment.message.strip() else ""
        if deployment.replica_states["RUNNING"]:
            yield from _listening(name, addresses.setdefault(role, []))
        elif role is Role.TARGET or why:
            yield problem(f"{role} {name}", f"none runs{why}", LOGS)


def _listening(deployment: str, addresses: list[str]) -> Iterator[Finding]:
    from ray import serve
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    handle: Any = None
    try:
        handle = serve.get_deployment_handle(deployment, APPLICATION)
        addresses.extend(handle.broadcast(ENDPOINT).results(timeout_s=WORKER_SECONDS))
    except (RayError, RayServeException, TimeoutError) as error:
        text = f"does not say where it listens ({type(error).__name__})"
        yield problem(deployment, text, "try again; see Ray's logs")
    finally:
        if handle is not None:
            handle.shutdown()  # it would go on to report to Serve, and connect to Ray again for that
