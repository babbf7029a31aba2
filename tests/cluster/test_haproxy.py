"""HTTP as the manifests have it served: by HAProxy, which Serve replaces whenever routers come or go."""

import asyncio

import httpx
import pytest

from tests.cluster.processes import PATIENCE, STARTS, Paceline, haproxy_environment
from tests.cluster.streams import Streamed, body, prompts, stream
from tests.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.thorough]
STREAMS = 4


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
