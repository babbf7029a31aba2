"""A router that was told which models there are to be, while only some of them have a target."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from router.dispatch import Dispatcher, DispatchLimits
from router.http.api import ApiSettings, build_app
from router.sessions.choice import FIRST_SECONDS
from router.sessions.pool import Peer
from router.telemetry.cluster_view import ClusterView
from speculation.events import PeerId, Role
from speculation.messages import Loading, Welcome
from tests.fakes import FakeTokenizers, tiny_tokenizer

BOTH = DispatchLimits(models=("small", "large"))
LATER = 60.0
"""A target that is up so many seconds after the router began."""


def up(dispatcher: Dispatcher, model: str, started: float = LATER, role: Role = Role.TARGET) -> Peer:
    peer = Peer(PeerId(f"{role.value}@{model}"), role, dispatcher.pool)
    dispatcher.pool.peers[peer.peer] = peer
    peer.up(Welcome(role.value, model, 100, 1000, 1, instance=model, started=time.time() + started))
    return peer


def loads(dispatcher: Dispatcher, model: str) -> None:
    peer = Peer(PeerId(f"target@loads {model}"), Role.TARGET, dispatcher.pool)
    dispatcher.pool.peers[peer.peer] = peer
    peer.loading(Loading("loading weights", model=model))


@asynccontextmanager
async def asking(dispatcher: Dispatcher, settings: ApiSettings | None = None) -> AsyncIterator[httpx.AsyncClient]:
    app = build_app(dispatcher, FakeTokenizers(tiny_tokenizer()), settings, dispatcher.metrics)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as client:
        yield client


async def test_a_configured_model_without_a_target_is_on_its_way() -> None:
    dispatcher = Dispatcher(BOTH)
    up(dispatcher, "small")
    async with asking(dispatcher) as client:
        ready = await client.get("/ready")
        assert ready.status_code == 503
        assert ready.json()["reason"] == "no target worker of these models has been up yet: large"
        body = {"prompt": [999], "max_tokens": 1}
        for answer in (
            await client.post("/v1/completions", json=body | {"model": "large"}),
            await client.get("/v1/models/large"),
        ):
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
            assert answer.headers["x-should-retry"] == "true"
            assert answer.json()["error"]["message"].startswith("no target worker of model large is connected")
        for answer in (
            await client.post("/v1/completions", json=body | {"model": "huge"}),
            await client.get("/v1/models/huge"),
        ):
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
            assert "this server has 'small', 'large'" in answer.json()["error"]["message"]
        unnamed = await client.post("/v1/completions", json=body)
        assert (unnamed.status_code, unnamed.json()["error"]["param"]) == (400, "model")
        named = await client.post("/v1/completions", json=body | {"model": "small"})
        assert (named.status_code, named.json()["error"]["param"]) == (400, "prompt")  # it has no such token
        assert [one["id"] for one in (await client.get("/v1/models")).json()["data"]] == ["small"]
        up(dispatcher, "large", role=Role.DRAFT)
        assert (await client.get("/ready")).status_code == 503
        up(dispatcher, "large")
        assert (await client.get("/ready")).status_code == 200
        assert (await client.get("/v1/models/large")).status_code == 200


async def test_a_model_that_is_lost_for_long_is_no_unknown_one() -> None:
    dispatcher, now = Dispatcher(BOTH), [0.0]
    dispatcher.pool.clock = lambda: now[0]
    up(dispatcher, "small")
    large = up(dispatcher, "large")
    assert list(dispatcher.models) == ["large", "small"]
    del dispatcher.pool.peers[large.peer]
    now[0] = 301.0
    async with asking(dispatcher) as client:
        assert list(dispatcher.models) == ["small"]
        assert (await client.get("/ready")).status_code == 200  # one dead model does not end the others
        assert (await client.get("/v1/models/large")).status_code == 503
        unnamed = await client.post("/v1/completions", json={"prompt": "hi"})
        assert (unnamed.status_code, unnamed.json()["error"]["param"]) == (400, "model")


async def test_a_model_that_does_not_come_holds_up_no_other_for_ever_and_none_that_was_served_before() -> None:
    running = Dispatcher(BOTH)
    up(running, "small", started=-LATER)
    assert running.snapshot().unready is None
    new = Dispatcher(BOTH)
    up(new, "small")
    began = new.pool.clock()
    assert new.snapshot().unready is not None
    new.pool.clock = lambda: began + FIRST_SECONDS
    assert new.snapshot().unready is None


@pytest.mark.parametrize("public", [None, "org/public"])
async def test_a_router_that_was_told_of_no_models_learns_them_by_its_targets(public: str | None) -> None:
    """Also of those that load; but until they are up, a request that names none is for the only one."""
    dispatcher = Dispatcher()
    up(dispatcher, "small")
    loads(dispatcher, "small")
    name = public or "small"
    async with asking(dispatcher, ApiSettings(model_name=public)) as client:
        assert (await client.get("/ready")).status_code == 200
        assert (await client.get(f"/v1/models/{name}")).status_code == 200
        assert (await client.get("/v1/models/large")).status_code == 404
        if public:
            assert (await client.get("/v1/models/small")).status_code == 404
        loads(dispatcher, "large")
        assert (await client.get("/v1/models/large")).status_code == 503
        assert (await client.get("/ready")).status_code == 200
        unnamed = await client.post("/v1/completions", json={"prompt": [999]})
        assert unnamed.json()["error"]["param"] == "prompt"


def test_the_view_of_the_cluster_says_which_models_are_waited_for() -> None:
    dispatcher = Dispatcher(BOTH)
    up(dispatcher, "small")
    router = ClusterView(dispatcher.metrics)()["router"]
    assert (router["ready"], router["unready"]) == (False, "no target worker of these models has been up yet: large")
