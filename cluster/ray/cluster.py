"""The Ray backend: starts Ray (or joins a cluster), deploys the application, and says why when that fails.

A deployment that cannot be placed never fails by itself in Ray, and one that fails says so deep in a traceback. So
room is checked before, the state is polled with our own deadlines, and the one line that matters is dug out.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections import Counter
from dataclasses import dataclass
from enum import Enum
from functools import partial
from threading import Thread
from typing import Any

from cluster.config.config import Config
from cluster.config.security import check_worker_exposure
from cluster.console import CommandError, Stages, complain, first_line
from cluster.placement import APPLICATION, Need, lacking, living, needs, with_routers
from cluster.ray.connection import check_token, end_own_processes, is_broken, join, prepare_environment
from cluster.ray.parts import PROXY_SETTINGS, declaration, importable
from transport.address import join as join_address
from transport.background import in_background

POLL_SECONDS, WATCH_SECONDS, GONE_SECONDS = 0.25, 2.0, 60.0
STALE_SECONDS = 5.0
"""For which a deployment that was changed may have the old one's message: Serve takes changes in turns of 0.1 s."""
OURS = re.compile("(Address|Check|Config|Model|Rank|Record|Security|Source|Tokenizer)Error")
"""Errors whose text says all."""
_ERROR_LINE = re.compile(r"^\s*(?:[\w.]*\.)?(\w*(?:Error|Exception))\b(?:\(.*?\))?: (.+)$")


@dataclass(frozen=True, slots=True)
class DeploymentStatus:
    """One deployment of an application."""

    status: str
    """``HEALTHY``, ``UPDATING`` and so on."""
    message: str
    replica_states: Counter[str]
    """How many replicas are ``RUNNING``, ``STOPPING`` and so on."""


@dataclass(frozen=True, slots=True)
class ApplicationStatus:
    """One application."""

    status: str
    """``RUNNING``, ``DEPLOYING``, ``DEPLOY_FAILED`` and so on."""
    message: str
    deployments: dict[str, DeploymentStatus]


class RayCluster:
    """The application on Ray Serve, for as long as this process runs, unless it leaves it there."""

    def __init__(self, config: Config, *, detach: bool = False) -> None:
        """Nothing is started yet. ``detach``: what is deployed already may be changed, since it is left at the end."""
        self._config, self._detach = config, detach
        self._local = config.ray.address == "local"
        self._needs: dict[str, Need] = {}
        self._connected = self._found = self._deployed = self._serves = False
        self._room_since = 0.0
        self._said_before: dict[str, str] = {}
        """Of each deployment that is changed, what Serve said of it until then."""
        self._applied = 0.0

    def start(self, report: Stages) -> None:
        """Start everything and wait until it serves. Raises :class:`cluster.console.CommandError`."""
        report("starting Ray" if self._local else f"joining Ray at {self._config.ray.address}")
        if self._local:
            prepare_environment()
        self._connected = True  # also when interrupted halfway: there may be processes to end
        join(self._config)
        self._found = not self._local and APPLICATION in applications()
        if self._found and not self._detach:  # two that both believe they own it would take it from each other
            address = self._config.ray.address
            raise CommandError(
                f"Paceline is deployed at {address} already; change it with --detach, or remove it with "
                f"`paceline down --address {address}`",
            )
        self._check_room()
        report("starting Ray Serve")
        self._deploy()
        self._await(report)
        self._serves = True

    def watch(self) -> None:
        """Serve heals the application; this only notices when all of Ray is gone. Returns only to leave it there."""
        import ray

        if self._detach:
            self._deployed = self._serves = False
            return
        told = ""
        while True:
            time.sleep(WATCH_SECONDS)
            if self._local and is_broken():
                raise CommandError("Ray is gone: one of its processes has ended")
            try:
                status = applications()[APPLICATION]
            except (ray.exceptions.RayError, KeyError) as error:
                raise CommandError(f"Ray is gone: {type(error).__name__}") from error
            waiting = [f"{self._called(name)}: {entry.status}" for name, entry in status.deployments.items()]
            down = f"some replicas are down ({', '.join(waiting)}); Ray replaces them"
            said = "" if status.status == "RUNNING" else down
            if said != told:
                complain(said or "all replicas are well again")
                told = said

    def stop(self) -> None:
        """End the application and what of Ray was started here."""
        if not self._connected:
            return
        import ray

        # In a thread of its own, since Ray waits for a minute when its processes end meanwhile: whoever ends this one
        # may have ended all of its group, or of its service.
        ending = Thread(target=self._end_application, daemon=True)
        ending.start()
        while ending.is_alive() and not (self._local and is_broken()):
            ending.join(POLL_SECONDS)
        if self._local and is_broken():
            end_own_processes()
        ray.shutdown()

    def _end_application(self) -> None:
        with contextlib.suppress(Exception):  # Ray may be gone already; then there is nothing to end
            if (self._serves or (self._deployed and not self._local)) and not self._found:
                _apply([])
                _await_gone()

    def _check_room(self) -> None:
        import ray

        nodes = living(ray.nodes())  # type: ignore[no-untyped-call]
        if not self._local:
            hosts = [node.address for node in nodes]
            for host in hosts:
                check_worker_exposure(host, self._config)
            check_token(self._config, ray.get_runtime_context().gcs_address, hosts)
        self._config = with_routers(self._config, nodes)
        self._needs = {need.deployment: need for need in needs(self._config)}
        # A larger cluster may be on its way where an autoscaler runs; here only what is there counts.
        if reason := lacking(self._needs.values(), nodes):
            raise CommandError(reason)

    def _deploy(self) -> None:
        from ray import serve

        router = self._config.router
        patience = str(int(self._config.ray.placement_timeout))
        environment = {"RAY_SERVE_SLOW_STARTUP_WARNING_S": patience, "RAY_SERVE_SLOW_STARTUP_WARNING_PERIOD_S": "2"}
        environment |= PROXY_SETTINGS | importable(self._config)
        start = partial(
            serve.start,
            proxy_location="HeadOnly" if self._local else "EveryNode",
            http_options={"host": router.host, "port": router.port},
            logging_config={"log_level": "WARNING", "enable_access_log": False},
            controller_options={"runtime_env": {"env_vars": environment}},
        )
        try:
            started = in_background(start, "Ray Serve")  # it waits for HTTP, seconds after the controller can be told
            while not (started.done() or serve_client(raise_if_no_controller_running=False)):
                time.sleep(POLL_SECONDS)
            if started.done():
                started.result()
            check_http(self._config)
            self._deployed = True
            if self._found and (before := applications().get(APPLICATION)) is not None:
                self._said_before = {name: entry.message for name, entry in before.deployments.items()}
            _apply([declaration(self._config)])
            self._applied = time.monotonic()
            started.result()
        except CommandError:
            raise
        except Exception as error:  # whatever Serve raises: it could not be deployed
            raise CommandError(f"cannot start Ray Serve: {first_line(error)}") from error

    def _await(self, report: Stages) -> None:
        """Poll until all replicas run, one fails, or a deadline passes."""
        deadline = time.monotonic() + self._config.start_timeout
        while True:
            status = applications().get(APPLICATION)
            if status is not None:
                if status.status == "RUNNING":
                    return
                if _leaving(status):
                    self._room_since = time.monotonic()
                self._raise_if_hopeless(status)
                for name, need in self._needs.items():
                    deployment = status.deployments.get(name)
                    running = deployment.replica_states["RUNNING"] if deployment else 0
                    report(f"{running} of {need.replicas} ready", need.name)
            if time.monotonic() > deadline:
                raise CommandError(f"not ready within {self._config.start_timeout:.0f} s (start_timeout)")
            time.sleep(POLL_SECONDS)

    def _raise_if_hopeless(self, status: ApplicationStatus) -> None:
        for name, deployment in status.deployments.items():
            if deployment.message != self._said_before.get(name):
                self._said_before.pop(name, None)
            elif time.monotonic() < self._applied + STALE_SECONDS:
                continue
            if "failed to start" in deployment.message:
                raise CommandError(f"{self._called(name)} cannot start: {reason_in(deployment.message)}")
            if "to be scheduled" in deployment.message and not self._local:
                seconds = self._config.ray.placement_timeout
                if time.monotonic() < self._room_since + seconds:
                    continue
                wanted = self._needs.get(name, name)
                raise CommandError(f"Ray found no room within {seconds:.0f} s for {wanted}")
        if status.status in ("DEPLOY_FAILED", "UNHEALTHY"):
            raise CommandError(f"cannot start: {reason_in(status.message)}")

    def _called(self, deployment: str) -> str:
        return self._needs[deployment].name if deployment in self._needs else deployment


def applications() -> dict[str, ApplicationStatus]:
    """How all applications do, by name; none where Serve does not run. Raises :class:`ray.exceptions.RayError`."""
    return {name: _application(details) for name, details in application_details().items()}


def application_details() -> dict[str, Any]:
    """All that Serve says of them, by name, as its controller sends it. Raises :class:`ray.exceptions.RayError`.

    ``serve.status()`` first makes models of all of it and checks them, for 45 ms of CPU each time: a start asks some
    fifty times while workers load on the same cores, and whoever watches asks for ever. This takes 1 ms.
    """
    client = serve_client(raise_if_no_controller_running=False)
    return client.get_serve_details()["applications"] if client else {}


def serve_client(**options: bool) -> Any:
    """What talks to Serve's controller."""
    from ray.serve import context

    return context._get_global_client(**options)


def http_elsewhere() -> str:
    """Address of a node that serves HTTP, if this one does not; empty where it does, or nobody does yet.

    Serve has a proxy on its head and where replicas run, also if it is told to have one on every node.
    """
    import ray

    proxies = serve_client().get_serve_details()["proxies"] or {}
    if ray.get_runtime_context().get_node_id() in proxies:
        return ""
    return min((entry["node_ip"] for entry in proxies.values() if entry["status"] == "HEALTHY"), default="")


def _application(details: dict[str, Any]) -> ApplicationStatus:
    def plain(state: Any) -> str:
        return str(state.value) if isinstance(state, Enum) else str(state)

    deployments = {}
    for name, entry in details["deployments"].items():
        replicas = Counter(plain(replica["state"]) for replica in entry["replicas"])
        deployments[name] = DeploymentStatus(plain(entry["status"]), entry["message"], replicas)
    return ApplicationStatus(plain(details["status"]), details["message"], deployments)


def _leaving(status: ApplicationStatus) -> bool:
    """Whether replicas of an earlier configuration still hold the room that its successors wait for."""
    from ray.util import list_named_actors

    if any(deployment.replica_states["STOPPING"] for deployment in status.deployments.values()):
        return True
    # Serve's status no longer tells of a deployment that it is deleting, but its replicas keep their names.
    names = [entry["name"].split("#") for entry in list_named_actors(all_namespaces=True)]
    application = f"SERVE_REPLICA::{APPLICATION}"
    return any(name[0] == application and name[1] not in status.deployments for name in names if len(name) == 3)


def _apply(ours: list[dict[str, Any]]) -> None:
    """Have Serve run these applications besides all that are not Paceline's, which it would otherwise end."""
    from ray.serve.schema import ServeDeploySchema

    known = application_details().items()
    others = [entry["deployed_app_config"] for name, entry in known if name != APPLICATION]
    wanted = [*filter(None, others), *ours]
    serve_client().deploy_apps(ServeDeploySchema.model_validate({"applications": wanted}))


def check_http(config: Config) -> None:
    """Whether Serve listens where it is to: one that ran before keeps its address. Raises :class:`CommandError`."""
    found, router, address = serve_client().http_config, config.router, config.ray.address
    if (found.host, found.port) != (router.host, router.port):
        where = f"listens on {join_address(found.host, found.port)}" if found.host else "serves no HTTP"
        raise CommandError(
            f"Ray Serve runs at {address} already and {where}, not on {join_address(router.host, router.port)}; set "
            f"router.host and router.port to that, or end it first: `paceline down --address {address}`, or `serve "
            "shutdown` if it is not Paceline's",
        )


def _await_gone(seconds: float = GONE_SECONDS) -> bool:
    """Until Serve has ended the application, but no longer than so many seconds. Whether it has."""
    deadline = time.monotonic() + seconds
    while APPLICATION in applications():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


def remove(config: Config, report: Stages) -> None:
    """Remove the application once its streams have ended, and Serve if nothing else is served. Raises CommandError."""
    join(config)
    import ray
    from ray import serve

    try:
        if APPLICATION not in applications():
            raise CommandError(f"no Paceline is deployed at {config.ray.address}")
        replicas = [entry["deployment_config"] for entry in application_details()[APPLICATION]["deployments"].values()]
        drain = max((entry["graceful_shutdown_timeout_s"] for entry in replicas), default=0.0)
        _apply([])
        report(f"waiting until streams have ended, for {drain:.0f} s at most")
        if not _await_gone(seconds := drain + GONE_SECONDS):
            text = f"Paceline has not ended at {config.ray.address} within {seconds:.0f} s; Serve goes on ending it"
            raise CommandError(text)
        if not applications():
            serve.shutdown()  # type: ignore[no-untyped-call]
    finally:
        ray.shutdown()


def reason_in(message: str) -> str:
    """The line of a Serve status message that says why: the last error of the innermost traceback."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    errors = [match for line in lines if (match := _ERROR_LINE.match(line))]
    if not errors:
        return lines[-1] if lines else "no reason given; see Ray's logs"
    kind, reason = errors[-1].groups()
    return reason if OURS.fullmatch(kind) else f"{kind}: {reason}"
