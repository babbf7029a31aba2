"""A running router with real workers, scraped: its figures are right, and dashboard and alerts use no other names."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from router.service import Router, RouterSettings
from router.sessions.snapshot import WorkerState
from speculation.events import Role
from speculation.verifying import planner
from tests.monitoring import FROM_CONTROLLER, SCRAPING, expressions, needs_prometheus, rules_beside, unknown_names
from tests.ports import free_port
from tests.stack import draft_worker, target_worker

TOKENS = 40
IN_TURN = {"speculation": {"schedule": "sequential", "max_depth": 4}}
"""The target waits for drafts, however busy the machine is."""
QUIET = {
    "panel Certificates end in A",
    "panel Acceptance by pair of workers A",
    "panel Replicas of pools A",
    "panel Why A",
}
"""Queries that have nothing to show here: no TLS, no measured round trip, too few tokens, no Ray."""


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[Router, httpx.AsyncClient]]:
    """A router over HTTP with a target and a drafter, and a client."""
    async with target_worker() as target, draft_worker() as draft:
        router = Router(RouterSettings([target.worker.address], [draft.worker.address], port=0))
        await router.start()
        try:
            async with httpx.AsyncClient(base_url=router.address, timeout=30, trust_env=False) as client:
                yield router, client
        finally:
            await router.stop()


async def complete(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    body = {"prompt": "def add(a, b):", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True} | fields
    return await client.post("/v1/completions", json=body)


def values(text: str) -> dict[str, float]:
    """Sums over all labels, by name."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


async def heartbeat(router: Router, committed: int) -> None:
    """Wait until the target's own account has reached the router, and the drafter's has."""
    async with asyncio.timeout(60):
        while True:
            up = [worker for worker in router.dispatcher.snapshot().workers if worker.state is not WorkerState.DOWN]
            drafted = any(worker.load.counters.get("proposed", 0) for worker in up if worker.role is Role.DRAFT)
            loads = [worker.load for worker in up if worker.role is Role.TARGET]
            if drafted and any(load.counters.get("committed", 0) >= committed and not load.sessions for load in loads):
                return
            await asyncio.sleep(0.02)


async def test_a_scrape_after_two_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "DEAF_AFTER", 30.0)
    async with serving() as (router, client):
        usage = [(await complete(client, **fields)).json()["usage"] for fields in ({}, IN_TURN)]
        generated = sum(entry["completion_tokens"] for entry in usage)
        details = [entry["completion_tokens_details"] for entry in usage]
        accepted = sum(entry["accepted_draft_tokens"] for entry in details)
        assert (await complete(client, max_tokens="many")).status_code == 400
        await heartbeat(router, generated)
        response = await client.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain; version=")
        found = values(response.text)
        expected = {
            "paceline_generation_tokens_total": generated,
            "paceline_worker_committed_tokens_total": generated,
            "paceline_spec_decode_num_accepted_tokens_total": accepted,
            "paceline_spec_decode_num_accepted_tokens_per_pos_total": accepted,
            "paceline_worker_accepted_tokens_total": accepted,
            "paceline_request_success_total": 2,
            "paceline_time_to_first_token_seconds_count": 2,
            "paceline_e2e_request_latency_seconds_count": 2,
            "paceline_prompt_tokens_total": sum(entry["prompt_tokens"] for entry in usage),
            "paceline_requests_refused_total": 1,
            "paceline_request_failure_total": 0,
            "paceline_router_ready": 1,
            "paceline_router_sessions": 0,
            "paceline_feature_tokens_total": 0,
            "paceline_features_refused_total": 0,
            "paceline_features_received_tokens_total": 0,
            "paceline_features_dropped_total": 0,
        }
        assert {name: found[name] for name in expected} == expected
        assert accepted > 0
        assert found["paceline_worker_bytes_total"] > 0
        assert found["paceline_prefix_cache_hits_total"] > 0
        assert found["paceline_draft_lead_tokens_count"] > 0

        families = [(f.name, f.type) for f in text_string_to_metric_families(response.text)]
        known = set(found) | {name for name, kind in families if kind == "gauge"}
        assert unknown_names(expressions(), known | FROM_CONTROLLER) == {}
        planted = {"alert Planted": "rate(paceline_request_sucess_total[1m]) > paceline_router_ready"}
        assert unknown_names(planted, known) == {"alert Planted": {"paceline_request_sucess_total"}}


async def test_ready_follows_the_workers_while_health_stays() -> None:
    async with serving() as (router, client):
        ready = await client.get("/ready")
        assert (ready.status_code, ready.json()) == (200, {"status": "ready", "exact": None})
        router.dispatcher.draining = True
        drains = await client.get("/ready")
        assert (drains.status_code, drains.json()["reason"]) == (503, "this router is draining")
        router.dispatcher.draining = False
        router.dispatcher.pool.set_workers(Role.TARGET, [])
        without = await client.get("/ready")
        assert (without.status_code, without.json()) == (
            503,
            {"status": "unready", "reason": "no target worker is known"},
        )
        assert (await client.get("/health")).status_code == 200


@asynccontextmanager
async def prometheus(folder: Path, router: str) -> AsyncIterator[httpx.AsyncClient]:
    """The real one with our example configuration, scraping a router. It answers."""
    configuration = yaml.safe_load(SCRAPING.read_text(encoding="utf-8"))
    configuration["global"] = {"scrape_interval": "250ms", "evaluation_interval": "250ms"}
    for job in configuration["scrape_configs"]:
        job["static_configs"] = [
            {"targets": [router.removeprefix("http://")] if job["job_name"] == "paceline-routers" else []}
        ]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration))
    rules_beside(folder)
    port = free_port()
    flags = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    process = await asyncio.create_subprocess_exec(
        "prometheus", *flags, f"--web.listen-address=127.0.0.1:{port}", stderr=asyncio.subprocess.DEVNULL
    )
    try:
        url = f"http://127.0.0.1:{port}/api/v1"
        async with httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as client:
            async with asyncio.timeout(60):
                while not await answers(client):
                    await asyncio.sleep(0.1)
            yield client
    finally:
        process.terminate()
        await process.wait()


async def answers(prometheus: httpx.AsyncClient) -> bool:
    try:
        return (await prometheus.get("/query", params={"query": "1"})).is_success
    except httpx.ConnectError:
        return False


async def query(prometheus: httpx.AsyncClient, expression: str) -> list[dict[str, Any]]:
    response = await prometheus.get("/query", params={"query": expression})
    assert response.status_code == 200, f"{expression}: {response.text}"
    result = response.json()["data"]["result"]
    assert isinstance(result, list)
    return result


@pytest.mark.thorough
@needs_prometheus
async def test_a_real_prometheus_answers_every_panel(tmp_path: Path) -> None:
    async with serving() as (router, client), prometheus(tmp_path, router.address) as asked:
        async with asyncio.timeout(60):
            while True:
                await complete(client)
                await complete(client, **IN_TURN)  # which waits for drafts, so that there are some
                scrapes = await query(asked, 'count_over_time(paceline_generation_tokens_total{model="target"}[1m])')
                if scrapes and float(scrapes[0]["value"][1]) >= 4:
                    break
                await asyncio.sleep(0.2)
        graphs = {
            where: text.removesuffix(" > 0") for where, text in expressions().items() if where.startswith("panel")
        }
        assert {where for where, text in graphs.items() if not await query(asked, text)} == QUIET
        rules = (await asked.get("/rules")).json()["data"]["groups"]
        assert {rule["health"] for group in rules for rule in group["rules"]} == {"ok"}
        # What was judged before the first scrape is judged again; a rule that is wrong stays.
        async with asyncio.timeout(60):
            while (await asked.get("/alerts")).json()["data"]["alerts"]:
                await asyncio.sleep(0.2)
