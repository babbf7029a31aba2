"""How a router starts: what it waits for, and what it does without."""

from __future__ import annotations

import asyncio
import os
import platform
import signal
import socket
import subprocess
import sys

import httpx
import pytest

from cluster.commands import router as command
from cluster.config import serving
from cluster.config.config import from_mapping
from cluster.discovery import StaticDirectory
from cluster.processes.starting import READY, STOPPING
from router import service
from router.dispatch import Dispatcher
from router.generation import ServedModel
from router.service import Router, RouterSettings
from router.sessions.pool import Peer
from router.text import tokenizer
from router.text.tokenizer import Tokenizer, TokenizerError
from speculation.events import PeerId, Role
from speculation.messages import Welcome
from tests.fakes import tiny_tokenizer
from tests.ports import free_port
from transport import address as addresses


async def test_a_router_without_a_target_serves_and_keeps_trying(caplog: pytest.LogCaptureFixture) -> None:
    router = Router(RouterSettings(targets=("127.0.0.1:9",), port=0, ready_timeout=0.0, drain_timeout=0.0))
    await router.start()
    said = [record.message for record in caplog.records if record.name == "router.service"]
    assert said == ["no target worker answered within 0 s (127.0.0.1:9); requests get 503 until one does"]
    async with httpx.AsyncClient(base_url=router.address, trust_env=False) as client:
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ready")).status_code == 503
        asked = await client.post("/v1/completions", json={"prompt": "hi"})
    assert (asked.status_code, asked.json()["error"]["code"]) == (503, "unavailable")
    assert asked.headers["retry-after"] == "1"
    assert [known.peer for known in router.dispatcher.pool.peers.values()], "it tries no more"
    await router.stop()


async def test_a_router_is_not_ready_while_it_can_read_the_tokenizer_of_no_model_that_is_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(service, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(tokenizer, "RETRY_SECONDS", 0.0)
    kept = {"own": tiny_tokenizer()}
    monkeypatch.setattr(Tokenizer, "load", lambda source: kept[source])
    router = Router(RouterSettings(port=0, ready_timeout=0.0, drain_timeout=0.0, tokenizer="own", models=()))
    await router.start()
    new = tiny_tokenizer(tags=["<new>"])

    async def answers(client: httpx.AsyncClient, status: int) -> dict[str, str]:
        async with asyncio.timeout(60):
            while (ready := await client.get("/ready")).status_code != status:
                await asyncio.sleep(0.01)
        return ready.json()

    async with httpx.AsyncClient(base_url=router.address, trust_env=False) as client:
        up(router.dispatcher, "large", new.digest)
        reason = (await answers(client, 503))["reason"]
        assert reason == "the tokenizer of large cannot be read; this router's log says why"
        why = "cannot read the tokenizer of large: the tokenizer in 'own' is not that of the served model large"
        assert [each.message for each in caplog.records if each.name == "router.service"][-1:] == [why]
        up(router.dispatcher, "small", kept["own"].digest)  # one dead model does not end the others
        await answers(client, 200)
        del router.dispatcher.pool.peers[PeerId("target@small")]
        await answers(client, 503)
        kept["own"] = new
        await answers(client, 200)
    await router.stop()


async def test_a_router_that_has_another_tokenizer_than_its_target_names_the_model_and_the_flag(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Tokenizer, "load", lambda source: tiny_tokenizer())
    router = Router(RouterSettings(models=["bundled"]))
    up(router.dispatcher, "large", 7)
    why = "the tokenizer in 'bundled' is not that of the served model large"
    with pytest.raises(service.RouterError, match=f"^no tokenizer for '/models/large': {why}; give it by --tokenizer$"):
        await router.connect()
    await router.stop()


def up(dispatcher: Dispatcher, model: str, digest: int) -> None:
    peer = Peer(PeerId(f"target@{model}"), Role.TARGET, dispatcher.pool)
    dispatcher.pool.peers[peer.peer] = peer
    peer.up(Welcome("target", model, 400, 64, digest, source=f"/models/{model}"))


async def test_a_router_whose_port_is_taken_while_it_starts_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    bound = addresses.bound

    def bound_by_two(host: str, port: int) -> socket.socket:
        listener = bound(host, port)
        other = bound(host, listener.getsockname()[1])
        other.listen()
        others.append(other)
        return listener

    others: list[socket.socket] = []
    monkeypatch.setattr(addresses, "bound", bound_by_two)
    router = Router(RouterSettings(targets=("127.0.0.1:9",), port=0, ready_timeout=0.0, drain_timeout=0.0))
    with pytest.raises(addresses.AddressError, match=r"cannot listen on 127\.0\.0\.1"):
        await router.start()
    await router.stop()
    others[0].close()


async def test_a_router_opens_nothing_on_the_word_of_a_worker() -> None:
    router = Router(RouterSettings(models=["a"]))
    with pytest.raises(TokenizerError, match="is not that of the served model m"):
        await router.tokenizers.of(ServedModel("m", 400, 64, 0, "/etc"))


async def test_the_command_says_that_it_serves_without_a_target(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    def notify(state: str) -> None:
        told.append(state)
        if state == READY:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(serving, "READY_SECONDS", 0.0)
    monkeypatch.setattr(command, "notify", notify)
    monkeypatch.setattr(service, "freeze_loaded", lambda: told.append("frozen"))
    config = from_mapping({"router": {"port": free_port(), "drain_timeout": 0}}, "test")
    directory = StaticDirectory({Role.TARGET: ["127.0.0.1:9"], Role.DRAFT: []})
    assert await command._serve(config, directory) == 0
    assert capsys.readouterr().out.endswith(" (no target worker yet)\n")
    assert told == ["frozen", READY, STOPPING]


@pytest.mark.parametrize(("awaited", "models"), [(True, ("large", "small")), (False, ())])
async def test_models_of_a_file_are_waited_for_only_where_their_workers_are_started_with_the_router(
    awaited: bool, models: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: list[RouterSettings] = []

    class Stopped(Exception):
        pass

    def router(given: RouterSettings) -> Router:
        settings.append(given)
        raise Stopped

    monkeypatch.setattr(service, "Router", router)
    listed = {name: {"target": {"model": "models/target"}} for name in ("small", "large")}
    config = from_mapping({"models": listed}, "test")
    with pytest.raises(Stopped):
        await command._serve(config, StaticDirectory({Role.TARGET: ["127.0.0.1:9"], Role.DRAFT: []}), awaited=awaited)
    assert tuple(sorted(settings[0].limits.models)) == models
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().remove_signal_handler(number)


def test_the_collector_passes_by_what_a_router_has_loaded() -> None:
    said = (
        "from router.service import freeze_loaded; freeze_loaded(); print(gc.get_freeze_count(), *gc.get_threshold())"
    )
    done = subprocess.run([sys.executable, "-c", f"import gc; {said}"], capture_output=True, text=True, check=True)
    frozen, young, *_ = map(int, done.stdout.split())
    assert frozen > 10_000
    assert young == service.YOUNG_OBJECTS


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library decides for itself")
def test_a_router_keeps_the_memory_of_frames() -> None:
    """The second time as many frames are made, no page is new."""
    said = """
import resource
from router.service import freeze_loaded

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    frames = [b"x" * 400_000 for _ in range(16)]
    del frames
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults(), print(faults())
freeze_loaded()
faults(), print(faults())
"""
    done = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, check=True)
    by_default, kept = map(int, done.stdout.split())
    assert kept < 50 < 500 < by_default
