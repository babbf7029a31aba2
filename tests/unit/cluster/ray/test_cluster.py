"""What the Ray backend makes of a Serve that is there already, with Serve replaced by what it would answer."""

import argparse
import os
import socket
import subprocess
import sys
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from types import SimpleNamespace

import pytest
import ray
from ray import serve
from ray.serve import context
from ray.serve.config import HTTPOptions
from ray.serve.schema import ServeInstanceDetails

from cluster.commands import up
from cluster.config.config import from_mapping
from cluster.console import CommandError
from cluster.ray import cluster as ray_cluster
from cluster.ray import connection

CONFIG = from_mapping({"router": {"port": 8001}, "ray": {"address": "10.0.0.5:6379"}}, "test")


@pytest.fixture
def cluster(monkeypatch):
    """A backend, where it finds Serve (``http``), and what it has deployed (``applied``)."""
    monkeypatch.setattr(serve, "start", lambda **options: None)
    backend = ray_cluster.RayCluster(CONFIG)
    found = SimpleNamespace(backend=backend, http=HTTPOptions(host="127.0.0.1", port=8001), applied=[])
    monkeypatch.setattr(context, "_get_global_client", lambda **_: SimpleNamespace(http_config=found.http))
    monkeypatch.setattr(ray_cluster, "_apply", found.applied.append)
    return found


def test_serve_that_listens_where_it_should_is_deployed_to(cluster):
    cluster.backend._deploy()
    ((declared,),) = cluster.applied
    assert declared["name"] == "paceline"


@pytest.mark.parametrize(
    ("host", "port", "where"),
    [
        ("0.0.0.0", 8001, "listens on 0.0.0.0:8001"),
        ("127.0.0.1", 8000, "listens on 127.0.0.1:8000"),
        ("::", 8001, "listens on [::]:8001"),
        (None, 8001, "serves no HTTP"),
    ],
)
def test_serve_that_listens_elsewhere_is_refused_before_anything_is_deployed(cluster, host, port, where):
    cluster.http = HTTPOptions(host=host, port=port)
    with pytest.raises(CommandError) as caught:
        cluster.backend._deploy()
    assert str(caught.value) == (
        f"Ray Serve runs at 10.0.0.5:6379 already and {where}, not on 127.0.0.1:8001; set router.host and router.port "
        "to that, or end it first: `paceline down --address 10.0.0.5:6379`, or `serve shutdown` if it is not Paceline's"
    )
    assert cluster.applied == []


def status(state: str, message: str = "", running: int = 1) -> ray_cluster.ApplicationStatus:
    entry = ray_cluster.DeploymentStatus("HEALTHY", message, Counter(RUNNING=running))
    return ray_cluster.ApplicationStatus(state, "", {"TargetWorker": entry})


FAILED = "The deployment failed to start 3 times in a row. Error:\nModelError: /m/broken: the weights lack 9 tensors"


@pytest.fixture
def changed(cluster, monkeypatch):
    """A backend that has just changed what had failed, and what Serve will say of it, the last for ever."""
    said = [status("DEPLOY_FAILED", FAILED)]
    answer = lambda: {ray_cluster.APPLICATION: said.pop(0) if len(said) > 1 else said[0]}  # noqa: E731
    monkeypatch.setattr(ray_cluster, "applications", answer)
    monkeypatch.setattr(ray_cluster, "_leaving", lambda _: False)
    monkeypatch.setattr(ray_cluster, "POLL_SECONDS", 0.0)
    cluster.backend._found = True
    cluster.backend._deploy()
    return SimpleNamespace(backend=cluster.backend, said=said)


def test_why_a_deployment_failed_before_it_was_changed_is_no_reason_to_give_up(changed):
    changed.said[:] = [status("DEPLOYING", FAILED), status("UPDATING"), status("RUNNING")]
    changed.backend._await(lambda *_: None)


@pytest.mark.parametrize("seconds", [0.0, 60.0])
def test_a_deployment_that_fails_again_is_told_at_once_and_one_that_stays_as_it_was_soon(changed, monkeypatch, seconds):
    monkeypatch.setattr(ray_cluster, "STALE_SECONDS", seconds)
    again = [status("DEPLOYING", ""), status("DEPLOYING", FAILED)]
    changed.said[:] = [status("DEPLOYING", FAILED), *(again if seconds else [])]
    with pytest.raises(CommandError, match=r"cannot start: .*/m/broken"):
        changed.backend._await(lambda *_: None)


def test_what_serve_cannot_do_is_said_in_a_line(cluster, monkeypatch):
    monkeypatch.setattr(serve, "start", lambda **options: 1 / 0)
    with pytest.raises(CommandError, match=r"^cannot start Ray Serve: division by zero$"):
        cluster.backend._deploy()


def test_what_is_deployed_does_not_wait_for_http(cluster, monkeypatch):
    """Its workers load while the proxy starts. And a proxy that cannot start is no success."""
    deployed = Event()

    def start(**options):
        assert deployed.wait(30)
        raise RuntimeError("cannot bind 127.0.0.1:8001")

    monkeypatch.setattr(serve, "start", start)
    monkeypatch.setattr(ray_cluster, "_apply", lambda _: deployed.set())
    with pytest.raises(CommandError, match=r"^cannot start Ray Serve: cannot bind 127.0.0.1:8001$"):
        cluster.backend._deploy()
    assert cluster.backend._deployed


def test_a_thread_that_outlives_its_ray_starts_no_other():
    """As that of an interrupted start does: its Ray would go on when the command has ended."""
    program = """
from cluster.config.config import from_mapping
from cluster.ray import connection
try:
    connection.join(from_mapping({"ray": {"address": "auto"}}, "test"))
except Exception as error:
    print(error)
import ray
from ray._private.auto_init_hook import auto_init_ray
auto_init_ray()
print(ray.is_initialized())
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1:] == ["False"], done.stdout + done.stderr


@pytest.fixture
def removed(monkeypatch):
    """A Serve whose application takes ``ending`` seconds of a clock of our own to end; and what is said meanwhile."""
    found = SimpleNamespace(now=0.0, ending=300.0, shut_down=False, said=[])
    deployments = {
        name: {"deployment_config": {"graceful_shutdown_timeout_s": seconds}}
        for name, seconds in {"Router": 600.0, "TargetWorker": 35.0}.items()
    }
    details = {"applications": {"paceline": {"deployments": deployments}}}

    monkeypatch.setattr(ray_cluster, "join", lambda config: None)
    monkeypatch.setattr(ray_cluster, "_apply", lambda ours: None)
    monkeypatch.setattr(context, "_get_global_client", lambda **_: SimpleNamespace(get_serve_details=lambda: details))
    monkeypatch.setattr(ray_cluster, "applications", lambda: ["paceline"] if found.now < found.ending else [])
    monkeypatch.setattr(serve, "shutdown", lambda: setattr(found, "shut_down", True))
    clock = SimpleNamespace(
        monotonic=lambda: found.now, sleep=lambda seconds: setattr(found, "now", found.now + seconds)
    )
    monkeypatch.setattr(ray_cluster, "time", clock)
    return found


def test_what_is_removed_has_ended_its_streams(removed):
    ray_cluster.remove(CONFIG, removed.said.append)
    assert removed.said == ["waiting until streams have ended, for 600 s at most"]
    assert removed.shut_down
    assert removed.now >= 300


def test_what_does_not_end_is_not_called_removed(removed):
    removed.ending = 1e9
    with pytest.raises(CommandError, match=r"^Paceline has not ended at 10\.0\.0\.5:6379 within 660 s; "):
        ray_cluster.remove(CONFIG, removed.said.append)
    assert not removed.shut_down


def test_what_no_longer_listens_is_about_to_end():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert not connection._refuses(address)
    assert connection._refuses(address)


def test_what_serve_says_is_read_as_its_own_status_has_it(monkeypatch):
    replica = {"node_id": "1", "node_ip": "127.0.0.1", "replica_id": "r", "pid": 1, "start_time_s": 1.0}
    deployment = {
        "name": "TargetWorker",
        "status": "UPDATING",
        "status_trigger": "CONFIG_UPDATE_STARTED",
        "message": "has 1 replica that takes long",
        "deployment_config": {"name": "TargetWorker"},
        "target_num_replicas": 2,
        "required_resources": {},
        "replicas": [replica | {"state": state} for state in ("RUNNING", "STARTING", "RUNNING")],
    }
    application = {
        "name": "paceline",
        "route_prefix": "/",
        "docs_path": None,
        "status": "DEPLOYING",
        "message": "soon",
        "last_deployed_time_s": 1.0,
        "source": "declarative",
        "external_scaler_enabled": False,
        "deployments": {"TargetWorker": deployment},
    }
    details = ServeInstanceDetails(
        controller_info={"node_id": "1"},
        proxy_location="HeadOnly",
        proxies={},
        applications={"paceline": application},
        target_capacity=None,
    )
    sent = details._get_user_facing_json_serializable_dict(exclude_unset=True)
    client = SimpleNamespace(get_serve_details=lambda: sent)
    monkeypatch.setattr(context, "_get_global_client", lambda raise_if_no_controller_running: client)
    ours, its_own = ray_cluster.applications()["paceline"], details._get_status().applications["paceline"]
    assert (ours.status, ours.message) == (its_own.status, its_own.message)
    ((name, found),), ((its_name, its),) = ours.deployments.items(), its_own.deployments.items()
    assert (name, found.status, found.message) == (its_name, its.status, its.message)
    assert (f"{ours.status}", f"{found.status}") == ("DEPLOYING", "UPDATING")
    assert dict(found.replica_states) == its.replica_states == {"RUNNING": 2, "STARTING": 1}
    monkeypatch.setattr(context, "_get_global_client", lambda raise_if_no_controller_running: None)
    assert ray_cluster.applications() == {}


@pytest.mark.parametrize(
    ("labels", "said", "routers"),
    [
        ([{}, {}, {}], {}, 2),
        ([{}], {}, 1),
        ([{}, {}, {}], {"replicas": 1}, 1),
        ([{}, {"kind": "cpu"}], {"labels": "kind=cpu"}, 1),
        ([{"kind": "cpu"}, {"kind": "cpu"}], {"labels": "kind=cpu"}, 2),
    ],
)
def test_there_are_two_routers_where_two_nodes_may_hold_one(cluster, monkeypatch, labels, said, routers):
    """Unless their number is given. The nodes have room for all."""
    nodes = [
        {"Alive": True, "NodeManagerAddress": "127.0.0.1", "Resources": {"CPU": 4.0}, "Labels": own} for own in labels
    ]
    dead = [{"Alive": False, "NodeManagerAddress": "127.0.0.1", "Resources": {"CPU": 4.0}, "Labels": {"kind": "cpu"}}]
    monkeypatch.setattr(ray, "nodes", lambda: [*nodes, *dead])
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="127.0.0.1:6379"))
    monkeypatch.setattr(ray_cluster, "check_token", lambda *_: None)
    router = {"port": 8001} | said
    cluster.backend._config = from_mapping({"router": router, "ray": {"address": "10.0.0.5:6379"}}, "test")
    cluster.backend._check_room()
    cluster.backend._deploy()
    ((declared,),) = cluster.applied
    assert {entry["name"]: entry["num_replicas"] for entry in declared["deployments"]}["Router"] == routers


class Models(BaseHTTPRequestHandler):
    """The API of another node."""

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"data": [{}]}')

    def log_message(self, *_arguments):
        """Nobody reads it."""


@pytest.fixture
def away(monkeypatch):
    """A node without replicas in a cluster that has just started, and the port of another's HTTP."""
    applied = []

    def start(backend, _report):
        backend._connected = backend._deployed = backend._serves = True

    monkeypatch.setattr(ray_cluster.RayCluster, "start", start)
    monkeypatch.setattr(ray_cluster, "_apply", applied.append)
    monkeypatch.setattr(ray_cluster, "_await_gone", lambda: True)
    monkeypatch.setattr(up.signal, "signal", lambda *_: None)
    monkeypatch.setattr(up, "HTTP_SECONDS", 5.0)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "here"))
    proxies = {"head": {"node_ip": "127.0.0.2", "status": "HEALTHY"}, "new": {"node_ip": "-", "status": "STARTING"}}
    client = SimpleNamespace(get_serve_details=lambda: {"proxies": proxies})
    monkeypatch.setattr(ray_cluster, "serve_client", lambda: client)
    with ThreadingHTTPServer(("127.0.0.2", 0), Models) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield SimpleNamespace(port=server.server_port, applied=applied, proxies=proxies)
        server.shutdown()


@pytest.mark.parametrize(
    ("flags", "where", "at"),
    [
        ("--host 0.0.0.0 --allow-remote", "127.0.0.2:{port}\n", "in another terminal"),
        ("", "127.0.0.1:{port} on 127.0.0.2; this node has no replica, so no HTTP\n", "on 127.0.0.2"),
    ],
)
def test_what_is_deployed_from_a_node_without_http_stays(away, capsys, flags, where, at):
    parser = argparse.ArgumentParser()
    up.add(parser)
    told = f"--address 10.0.0.5:6379 --detach --port {away.port} {flags}"
    assert up.run(parser.parse_args(told.split())) == 0
    said = capsys.readouterr().out
    assert f"Paceline serves at http://{where.format(port=away.port)}" in said
    assert f"Try, {at}:" in said
    assert away.applied == []


def test_a_node_with_http_is_asked_itself(away):
    away.proxies["here"] = {"node_ip": "127.0.0.1", "status": "STARTING"}
    assert ray_cluster.http_elsewhere() == ""
