"""What a worker does before it is up is told to routers that come, and by them in /ready; and to the doctor."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import httpx
import pytest

from cluster.doctor.workers import judge, meet
from engine.model import ModelError
from router.service import Router, RouterSettings
from speculation.events import Role
from speculation.messages import Loading, Progress
from tests.integration.test_transport import Echo
from transport.worker import Door, Worker

SHARDS = Loading("loading weights: 3 of 12 tensors", 0.25)


class SlowLoad:
    """Weights that are there once the test says so."""

    def __init__(self) -> None:
        self.said, self._there = threading.Event(), threading.Event()

    def __call__(self, progress: Progress) -> str:
        progress(SHARDS)
        self.said.set()
        self._there.wait(60)
        return "weights"

    def end(self) -> None:
        self._there.set()


@pytest.fixture
def load() -> Iterator[SlowLoad]:
    load = SlowLoad()
    yield load
    load.end()


@asynccontextmanager
async def a_router(*targets: str) -> AsyncIterator[httpx.AsyncClient]:
    router = Router(RouterSettings(targets=targets, port=0, ready_timeout=0.0, drain_timeout=0.0))
    await router.start()
    try:
        async with httpx.AsyncClient(base_url=router.address, trust_env=False) as client:
            yield client
    finally:
        await router.stop()


async def told(client: httpx.AsyncClient, status: int, doing: list[str]) -> dict[str, object]:
    """What /ready says once it says that."""
    async with asyncio.timeout(60):
        while True:
            answer = await client.get("/ready")
            body = answer.json()
            if (answer.status_code, [one["doing"] for one in body.get("starting", ())]) == (status, doing):
                return body
            await asyncio.sleep(0.01)


async def test_ready_says_how_far_a_target_has_loaded_until_it_is_up(load: SlowLoad) -> None:
    door = await Door.open("target", "127.0.0.1:0")
    loading = asyncio.create_task(door.load(load, "llama", 3600.0))
    async with a_router(door.server.address, "127.0.0.1:9") as client:
        body = await told(client, 503, [SHARDS.doing, "waiting for this worker"])
        assert body["reason"] == "1 of 2 target workers load: loading weights: 3 of 12 tensors"
        assert body["starting"] == [
            {"role": "target", "model": "llama", "doing": SHARDS.doing, "fraction": 0.25},
            {"role": "target", "model": "", "doing": "waiting for this worker", "fraction": None},
        ]
        asked = await client.post("/v1/completions", json={"prompt": "hi"})
        assert (asked.status_code, asked.headers["retry-after"]) == (503, "1")
        shown = {one["state"]: one for one in (await client.get("/cluster")).json()["workers"]}
        assert shown.keys() == {"connecting", "loading"}
        assert (shown["loading"]["model"], shown["loading"]["fraction"]) == ("llama", 0.25)
        load.end()
        assert await loading == "weights"
        worker = Worker(Echo(), "target")
        await worker.start(door)
        assert await told(client, 200, []) == {"status": "ready", "exact": None}
        await worker.stop()


async def test_a_worker_that_dies_while_it_loads_is_waited_for(load: SlowLoad) -> None:
    door = await Door.open("target", "127.0.0.1:0")
    loading = asyncio.create_task(door.load(load, "llama", 3600.0))
    async with a_router(door.server.address) as client:
        await told(client, 503, [SHARDS.doing])
        await door.server.stop(0.0)
        await told(client, 503, ["waiting for this worker"])
        load.end()
        await loading


async def test_the_doctor_says_what_a_worker_does(load: SlowLoad) -> None:
    door = await Door.open("target", "127.0.0.1:0")
    loading = asyncio.create_task(door.load(load, "llama", 3600.0))
    await asyncio.to_thread(load.said.wait)
    await asyncio.sleep(0)
    (finding,) = judge([await meet(Role.TARGET, door.server.address)])
    assert str(finding.level) == "warning" and finding.text == f"not up yet: {SHARDS.doing}", finding
    load.end()
    await loading
    await door.server.stop(0.0)


async def test_a_load_that_fails_closes_the_door() -> None:
    door = await Door.open("target", "127.0.0.1:0")

    def fail(_progress: Progress) -> None:
        raise ModelError("no weights")

    with pytest.raises(ModelError, match="no weights"):
        async with door:
            await door.load(fail, "llama", 3600.0)
    again = await Door.open("target", door.server.address)  # the port is free
    await again.server.stop(0.0)
