"""What the Ray backend makes of a Serve that is there already, with Serve replaced by what it would answer."""

import socket
from types import SimpleNamespace

import pytest
from ray import serve
from ray.serve import context
from ray.serve.config import HTTPOptions

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
    monkeypatch.setattr(context, "_get_global_client", lambda: SimpleNamespace(http_config=found.http))
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


def test_what_serve_cannot_do_is_said_in_a_line(cluster, monkeypatch):
    monkeypatch.setattr(serve, "start", lambda **options: 1 / 0)
    with pytest.raises(CommandError, match=r"^cannot start Ray Serve: division by zero$"):
        cluster.backend._deploy()


@pytest.fixture
def removed(monkeypatch):
    """A Serve whose application takes ``ending`` seconds of a clock of our own to end; and what is said meanwhile."""
    found = SimpleNamespace(now=0.0, ending=300.0, shut_down=False, said=[])
    deployments = {
        name: {"deployment_config": {"graceful_shutdown_timeout_s": seconds}}
        for name, seconds in {"Router": 600.0, "TargetWorker": 35.0}.items()
    }
    details = {"applications": {"paceline": {"deployments": deployments}}}

    def status():
        return SimpleNamespace(applications=["paceline"] if found.now < found.ending else [])

    monkeypatch.setattr(ray_cluster, "join", lambda config: None)
    monkeypatch.setattr(ray_cluster, "_apply", lambda ours: None)
    monkeypatch.setattr(context, "_get_global_client", lambda: SimpleNamespace(get_serve_details=lambda: details))
    monkeypatch.setattr(serve, "status", status)
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
