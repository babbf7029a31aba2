"""``GET /cluster`` of a router with real workers: before, while and after one of them is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest

from cluster import cli
from router.service import Router, RouterSettings
from tests.stack import draft_worker, target_worker

Cluster = dict[str, Any]
BODY = {"prompt": "def add(a, b):", "temperature": 0, "ignore_eos": True}


async def cluster(client: httpx.AsyncClient, until: Callable[[Cluster], Any] = lambda _: True) -> Cluster:
    async with asyncio.timeout(60):
        while True:
            answer = await client.get("/cluster")
            assert answer.status_code == 200
            view: Cluster = answer.json()
            if until(view):
                return view
            await asyncio.sleep(0.02)


async def test_the_view_follows_the_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    async with AsyncExitStack() as stack:
        targets = [await stack.enter_async_context(target_worker()) for _ in range(2)]
        draft = await stack.enter_async_context(draft_worker())
        router = Router(RouterSettings([t.worker.address for t in targets], [draft.worker.address], port=0))
        await router.start()
        stack.push_async_callback(router.stop)
        client = await stack.enter_async_context(
            httpx.AsyncClient(base_url=router.address, timeout=120, trust_env=False)
        )
        view = await cluster(client, lambda view: all(worker["state"] == "up" for worker in view["workers"]))
        assert [worker["role"] for worker in view["workers"]] == ["target", "target", "draft"]
        assert {worker["address"] for worker in view["workers"]} == {t.worker.address for t in (*targets, draft)}
        assert sorted(event["kind"] for event in view["events"]) == ["worker_up"] * 3
        assert view["models"][0]["name"] == "target"
        assert await asyncio.to_thread(cli.main, ["top", "--once", "--url", router.address]) == 0
        shown = capsys.readouterr().out
        assert all(f"{worker['role']:6} {worker['address']}" in shown for worker in view["workers"])

        in_turn = {"speculation": {"schedule": "sequential", "max_depth": 4}}  # it waits for drafts
        plain = (await client.post("/v1/completions", json=BODY | {"max_tokens": 400} | in_turn)).json()
        view = await cluster(client, lambda view: sum(w["tokens_per_second"] or 0 for w in view["workers"]) > 0)
        assert view["totals"]["generated_tokens"] == 400
        assert 0 < (view["router"]["now"]["acceptance"] or 0) <= 1
        assert view["router"]["now"]["tokens_per_second"] > 0
        (drafter,) = (worker for worker in view["workers"] if worker["role"] == "draft")
        assert 0 < (drafter["acceptance"] or 0) <= 1
        (sources,) = (worker["sources"] for worker in view["workers"] if worker["sources"])
        assert all(0 <= source["accepted"] <= source["offered"] for source in sources.values())

        asked = asyncio.create_task(client.post("/v1/completions", json=BODY | {"max_tokens": 400}))
        view = await cluster(client, lambda view: view["router"]["sessions"]["running"] == 1)
        (busy,) = (w for w in view["workers"] if w["role"] == "target" and w["router_sessions"])
        (victim,) = (target for target in targets if target.worker.address == busy["address"])
        await victim.worker._server.stop(None)  # its streams end, and nobody can reach it any more
        assert (await asked).json()["choices"][0]["text"] == plain["choices"][0]["text"]
        view = await cluster(client)
        states = {worker["address"]: worker["state"] for worker in view["workers"]}
        assert states.pop(busy["address"]) == "lost"
        assert set(states.values()) == {"up"}
        kinds = [event["kind"] for event in view["events"][3:]]
        assert kinds == ["worker_lost", "session_reopened"], view["events"]
        assert (view["totals"]["reopened"], view["totals"]["sessions"]) == (1, 2)
