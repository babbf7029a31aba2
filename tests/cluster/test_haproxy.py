"""HTTP as the manifests have it served: by HAProxy, which Serve replaces whenever routers come or go."""

import asyncio
import os
import socket
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import Awaitable, Callable

import httpx
import pytest
import pytest_asyncio

from benchmarks.chaos.settings import haproxy_environment
from tests.cluster.processes import CHECKOUT, PATIENCE, STARTS, Paceline
from tests.cluster.streams import Streamed, body, prompts, stream
from tests.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
STREAMS = 4
LIMIT_SECONDS = 1
"""Of a client that is silent, and of streams in an HAProxy that was replaced."""
SERVE = """
import asyncio, sys
from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
from ray.serve.config import HTTPOptions

async def main(port, router):
    backend = BackendConfig("app", "/", app_name="app", servers=[ServerConfig("router", "127.0.0.1", router)])
    haproxy = HAProxyApi(HAProxyConfig(http_options=HTTPOptions(port=port)), {"app": backend})
    try:
        await haproxy.start()
        print(flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            await haproxy.reload()
            print(flush=True)
    finally:
        await haproxy.stop()

asyncio.run(main(*map(int, sys.argv[1:])))
"""
"""Starts HAProxy as Serve does and says so, and replaces it for every line of the input, until that ends."""
ASK = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
CHUNK, END = b"1\r\na\r\n", b"0\r\n\r\n"
Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


class Fronted:
    """A router behind an HAProxy with short limits, which answers as each test says, and what replaces the HAProxy."""

    def __init__(self) -> None:
        self.answer: Answer | None = None
        self.port = free_port()
        self.process: Process | None = None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Of the router."""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            if b"/-/healthz" in head:
                writer.write(HEAD + END)
            else:
                await self.answer(writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def haproxy():
    served = Fronted()
    router = await asyncio.start_server(served.serve, "127.0.0.1", 0)
    settings = {name: str(free_port()) for name in ("STATS_PORT", "METRICS_PORT")}
    settings |= dict.fromkeys(("TIMEOUT_CLIENT_S", "HARD_STOP_AFTER_S"), str(LIMIT_SECONDS))
    with tempfile.TemporaryDirectory(prefix="haproxy-") as folder:
        files = {"CONFIG_FILE_LOC": "cfg", "SOCKET_PATH": "socket", "SERVER_STATE_FILE": "state"}
        settings |= {name: f"{folder}/{file}" for name, file in files.items()} | {"SERVER_STATE_BASE": folder}
        settings = {f"RAY_SERVE_HAPROXY_{name}": value for name, value in settings.items()}
        environment = {**os.environ, **haproxy_environment(), **settings, "PYTHONPATH": str(CHECKOUT)}
        command = [sys.executable, "-c", SERVE, str(served.port), str(router.sockets[0].getsockname()[1])]
        served.process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, env=environment)
        try:
            async with router:
                async with asyncio.timeout(PATIENCE):
                    assert await served.process.stdout.readline() == b"\n"
                yield served
        finally:
            served.process.stdin.close()
            assert await served.process.wait() == 0


async def test_a_head_that_does_not_come_is_not_waited_for(haproxy):
    async def at_once(writer):
        writer.write(HEAD + END)

    async def drip(writer):
        writer.write(ASK[:-2] + b"x-slow: ")
        while True:
            writer.write(b"a")
            await asyncio.sleep(LIMIT_SECONDS / 10)

    haproxy.answer = at_once
    async with asyncio.timeout(PATIENCE):
        for asked in (b"", ASK):
            reader, writer = await asyncio.open_connection("127.0.0.1", haproxy.port)
            if asked:
                writer.write(asked)
                assert (await reader.readuntil(END)).startswith(b"HTTP/1.1 200 ")
            dripping = asyncio.create_task(drip(writer))
            assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")
            dripping.cancel()
            writer.close()


async def test_a_client_that_does_not_read_is_gone_in_the_end(haproxy):
    gone = asyncio.Event()

    async def endless(writer):
        writer.write(HEAD)
        try:
            while True:
                writer.write(b"10000\r\n%b\r\n" % bytes(1 << 16))
                await writer.drain()
        finally:
            gone.set()

    haproxy.answer = endless
    async with asyncio.timeout(PATIENCE):
        with socket.create_connection(("127.0.0.1", haproxy.port)) as client:
            client.sendall(ASK)
            await gone.wait()


@pytest.mark.thorough
async def test_a_router_that_is_silent_for_longer_than_a_client_may_be_is_waited_for(haproxy):
    async def slow(writer):
        for part in (HEAD, CHUNK, CHUNK + END):
            await asyncio.sleep(2 * LIMIT_SECONDS)
            writer.write(part)
            await writer.drain()

    haproxy.answer = slow
    async with asyncio.timeout(PATIENCE):
        reader, writer = await asyncio.open_connection("127.0.0.1", haproxy.port)
        writer.write(ASK)
        assert (await reader.readuntil(END)).endswith(b"\r\n\r\n" + CHUNK + CHUNK + END)
        writer.close()


async def test_a_short_hard_stop_ends_streams_once_haproxy_is_replaced(haproxy):
    """What the next test would show of a cluster, if the manifests said so."""

    async def endless(writer):
        writer.write(HEAD + CHUNK)
        await asyncio.Event().wait()

    haproxy.answer = endless
    async with asyncio.timeout(PATIENCE):
        reader, writer = await asyncio.open_connection("127.0.0.1", haproxy.port)
        writer.write(ASK)
        assert (await reader.readuntil(CHUNK)).startswith(b"HTTP/1.1 200 ")
        haproxy.process.stdin.write(b"\n")
        assert await haproxy.process.stdout.readline() == b"\n"
        assert await reader.read() == b""
        writer.close()


@pytest.mark.thorough
async def test_streams_outlive_the_haproxy_that_carries_them(monkeypatch, slow_target):
    """Those of the router that is lost end; with a hard stop of one second all would."""
    for name, value in haproxy_environment().items():
        monkeypatch.setenv(name, value)
    flags = ["--dtype", "fp32", "--port", str(free_port()), "--router-replicas", "2"]
    with Paceline("up", "--target", str(slow_target), *flags) as up:
        up.expect("Ctrl-C stops it", STARTS)
        url = up.expect(r"Paceline serves at (\S+)")
        request = body(prompts(1)[0], 900, speculation={"enabled": False})
        results, begun = [Streamed() for _ in range(STREAMS)], asyncio.Barrier(STREAMS + 1)
        async with httpx.AsyncClient(timeout=PATIENCE, trust_env=False) as client:
            streams = [asyncio.create_task(stream(client, url, request, result, begun)) for result in results]
            await begun.wait()
            (carrier,) = up.descendants("bin/haproxy")
            up.descendants("ray::ServeReplica:paceline:Router")[0].kill()
            await asyncio.to_thread(up.successor, carrier, "bin/haproxy")
            assert not any(result.done for result in results)
            ends = await asyncio.gather(*streams, return_exceptions=True)

    assert {type(end) for end in ends} <= {type(None), httpx.RemoteProtocolError, httpx.ReadError}
    whole = [result.text for result in results if result.done]
    assert len(whole) == STREAMS // 2
    assert all(text.startswith(result.text) for text in whole for result in results)
