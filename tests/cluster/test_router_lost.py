"""The only router on a real Ray is killed: whoever asks meanwhile is told to ask again, and then is answered."""

import asyncio
import json

import httpx
import pytest

from benchmarks.chaos.settings import haproxy_environment
from tests.cluster.processes import PATIENCE, STARTS, Paceline
from tests.cluster.streams import TIMEOUT, body, plain, prompts
from tests.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.thorough]
TOKENS = 600


@pytest.mark.parametrize("environment", [{}, haproxy_environment()], ids=["proxy", "haproxy"])
async def test_who_asks_while_no_router_runs_is_told_to_ask_again(environment, monkeypatch, slow_target):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with Paceline("up", "--target", str(slow_target), "--dtype", "fp32", "--port", str(free_port())) as up:
        up.expect("Ctrl-C stops it", STARTS)
        url = up.expect(r"Paceline serves at (\S+)")
        short = body(prompts(1)[0], 4)
        (wanted,) = await plain(url, [short])
        async with httpx.AsyncClient(timeout=TIMEOUT, trust_env=False) as client:
            waiting = asyncio.create_task(client.post(f"{url}/v1/completions", json=body(prompts(1)[0], TOKENS)))
            async with asyncio.timeout(PATIENCE):
                while (await client.get(f"{url}/cluster")).json()["workers"][0]["router_sessions"] == 0:
                    await asyncio.sleep(0.01)
            (router,) = up.descendants("ray::ServeReplica:paceline:Router")
            router.kill()
            answers = [await waiting]
            async with asyncio.timeout(PATIENCE):
                while answers[-1].status_code != 200:
                    await asyncio.sleep(0.2)
                    answers.append(await client.post(f"{url}/v1/completions", json=short))
    assert answers[-1].json()["choices"][0]["text"] == wanted
    assert answers[:-1], "the router was back before anybody asked"
    for answer in answers[:-1]:
        assert answer.status_code == 503, answer.text
        assert answer.headers["retry-after"] == "5"
        assert answer.headers["content-type"] == "application/json"
        assert json.loads(answer.text)["error"]["code"] == "unavailable"
