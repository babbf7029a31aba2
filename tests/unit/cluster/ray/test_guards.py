"""The guards of parts that Ray starts: what the configuration says of them reaches the doors, as it does elsewhere."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from cluster.config.config import Config, from_mapping
from cluster.config.security import SecurityError
from cluster.ray import replicas
from router import service
from router.generation import ServedModel
from router.sessions.pool import Peer
from router.text.tokenizer import TokenizerError
from speculation.events import PeerId, Role
from speculation.messages import Welcome
from tests.bundled import MODELS
from tests.certificates import Authority
from transport.tls import Identity
from transport.worker import Door

KEY = "sk-somebody-who-is-known"
ADDRESS = "192.0.2.7"
"""Of the node: other machines can connect."""


@pytest.fixture
def security(tmp_path: Path) -> dict[str, str]:
    """Certificates and API keys."""
    folder = Authority.made(tmp_path / "certificates").folder
    (tmp_path / "keys").write_text(f"somebody: {KEY}\n")
    files = {"certificate": "{role}.crt", "key": "{role}.key", "authority": "ca.crt"}
    return {part: str(folder / name) for part, name in files.items()} | {"api_keys": str(tmp_path / "keys")}


def on_a_cluster(security: dict[str, str]) -> Config:
    model = {"target": {"model": str(MODELS / "target")}, "draft": {"model": str(MODELS / "draft")}}
    return from_mapping(model | {"ray": {"address": "auto"}, "security": security}, "args")


async def started(kind: Any, monkeypatch: pytest.MonkeyPatch, *args: object) -> Any:
    """A replica as Serve makes it; its destructor would have to be awaited."""
    monkeypatch.setattr(kind, "__del__", lambda _self: None)
    replica = kind.__new__(kind)
    await kind.__init__(replica, *args)
    return replica


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch, security: dict[str, str]) -> Any:
    """Starts a router's replica in a cluster that is not there."""
    nothing = SimpleNamespace(start=lambda *_: None)
    monkeypatch.setattr(replicas, "_check_doors", lambda _config: None)
    monkeypatch.setattr(replicas, "ServeDirectory", lambda *_: nothing)
    monkeypatch.setattr(replicas, "copy_metrics", lambda _collect: asyncio.sleep(0))
    monkeypatch.setattr(service, "freeze_loaded", lambda: None)
    return started(replicas.RouterReplica, monkeypatch, on_a_cluster(security), [])


async def test_a_router_shows_workers_its_certificate(router: Any, security: dict[str, str]) -> None:
    identity = (await router)._router.dispatcher.pool.identity
    assert isinstance(identity, Identity)
    assert identity.certificates[0] == Path(security["certificate"].format(role="router"))


async def test_a_router_asks_clients_for_their_keys(router: Any) -> None:
    app = (await router).__serve_build_asgi_app__()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as client:
        refused = await client.get("/v1/models")
        known = await client.get("/v1/models", headers={"authorization": f"Bearer {KEY}"})
    assert (refused.status_code, known.status_code) == (401, 200)


async def test_a_router_opens_nothing_on_the_word_of_a_worker(router: Any) -> None:
    with pytest.raises(TokenizerError, match="is not that of the served model m"):
        await (await router)._router.tokenizers.of(ServedModel("m", 400, 64, 0, "/etc"))


async def test_a_router_is_not_ready_where_it_cannot_read_the_tokenizer_of_what_is_served(router: Any) -> None:
    dispatcher = (await router)._router.dispatcher
    peer = Peer(PeerId("target@m"), Role.TARGET, dispatcher.pool)
    dispatcher.pool.peers[peer.peer] = peer
    peer.up(Welcome("target", "m", 400, 64, 7))
    async with asyncio.timeout(60):
        while (reason := dispatcher.snapshot().unready) is None:
            await asyncio.sleep(0.01)
    assert reason.startswith("the tokenizer of m cannot be read")


WORKERS = pytest.mark.parametrize("name", ["target", "draft"])


class OpenedError(Exception):
    """A door was to be opened so."""


@pytest.fixture
def doors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tell how they are to be opened, instead."""

    async def tell(role: str, listen: str, identity: Identity | None = None) -> Door:
        raise OpenedError(role, listen, identity and identity.certificates[0])

    monkeypatch.setattr(Door, "open", tell)
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: ADDRESS)


@WORKERS
async def test_a_worker_listens_with_its_certificate(
    name: str, doors: None, monkeypatch: pytest.MonkeyPatch, security: dict[str, str]
) -> None:
    deployment = f"{name.capitalize()}Worker"
    with pytest.raises(OpenedError) as opened:
        await started(replicas.ServedWorker, monkeypatch, on_a_cluster(security), deployment)
    assert opened.value.args == (name, f"{ADDRESS}:0", Path(security["certificate"].format(role=name)))


@WORKERS
async def test_a_worker_that_anyone_could_use_does_not_listen(
    name: str, doors: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SecurityError, match=rf"^{ADDRESS} can be reached from other machines"):
        await started(replicas.ServedWorker, monkeypatch, on_a_cluster({}), f"{name.capitalize()}Worker")
    assert not asyncio.all_tasks() - {asyncio.current_task()}
