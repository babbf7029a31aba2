"""Several models behind one router: real workers of the bundled models under other names, without Ray."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import httpx
import pytest
import pytest_asyncio

from benchmarks.harness.proxy import Proxy
from engine.loading.checkpoint import revision_of
from router.dispatch import Dispatcher, DispatchLimits
from router.generation import Committed, Generation, GenerationError
from router.service import Router, RouterSettings
from router.sessions.choice import ServedModels
from speculation.events import PeerId, Role
from speculation.messages import Sampling, Schedule, Source, Speculation
from speculation.request.session import SessionLimits
from speculation.verifying import planner
from tests.cluster.processes import PATIENCE
from tests.integration.test_graceful_stop import hold
from tests.stack import MODELS, Result, Running, decode, dispatcher, draft_worker, held_out_prompts, target_worker

pytestmark = pytest.mark.asyncio(loop_scope="module")
TOKENS = 24
IMPATIENT = DispatchLimits(session=SessionLimits(placement_timeout=0.5, begun_timeout=0.5, backoff=0.05))
CONTEXT_EXCEEDED = "context_length_exceeded", "max_tokens"
IN_TURN = Speculation(sources=frozenset({Source.DRAFT}), schedule=Schedule.SEQUENTIAL, max_depth=4)
"""The target waits for drafts, however busy the machine is."""


@dataclass
class Cluster:
    """Two targets of different models, and one drafter for both."""

    large: Running
    small: Running
    drafter: Running
    texts: dict[str, tuple[int, ...]]
    """What each says to the first prompt, asked alone."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack:
        large = await stack.enter_async_context(target_worker(name="large"))
        small = await stack.enter_async_context(target_worker(model="draft", name="org/small"))
        drafter = await stack.enter_async_context(draft_worker())
        texts = {}
        for worker in (large, small):
            async with dispatcher([worker.worker.address]) as serving:
                result = await decode(serving, held_out_prompts()[0], TOKENS)
                texts[worker.worker.welcome.model] = tuple(result.tokens)
        assert texts["large"] != texts["org/small"]
        yield Cluster(large, small, drafter, texts)


@asynccontextmanager
async def serving_both(cluster: Cluster, limits: DispatchLimits = DispatchLimits()) -> AsyncIterator[Dispatcher]:
    targets = [cluster.large.worker.address, cluster.small.worker.address]
    async with dispatcher(targets, [cluster.drafter.worker.address], limits) as serving:
        yield serving


async def generated(
    serving: Dispatcher, model: str, tokens: int = TOKENS, speculation: Speculation = Speculation()
) -> Result:
    result = Result()
    chosen = serving.models[model]
    generation = Generation(held_out_prompts()[0], Sampling(0.0), tokens, speculation=speculation, model=chosen)
    async for item in serving.generate(generation):
        if isinstance(item, Committed):
            result.tokens += item.tokens
            result.accepted += item.accepted
    return result


async def known(serving: Dispatcher, address: str) -> None:
    """Wait until the target there has introduced itself."""
    async with asyncio.timeout(60):
        while serving.pool.peers[PeerId(f"target@{address}")].welcome is None:
            await asyncio.sleep(0.005)


async def test_each_model_says_its_own_and_one_drafter_serves_both(cluster, monkeypatch):
    monkeypatch.setattr(planner, "DEAF_AFTER", 30.0)
    async with serving_both(cluster) as serving:
        assert list(serving.models) == ["large", "org/small"]
        names = ["large", "org/small"] * 3
        results = await asyncio.gather(*(generated(serving, name) for name in names))
        assert [tuple(result.tokens) for result in results] == [cluster.texts[name] for name in names]
        for name in ("large", "org/small"):
            in_turn = await generated(serving, name, speculation=IN_TURN)
            assert tuple(in_turn.tokens) == cluster.texts[name]
            assert in_turn.accepted > 0


async def test_what_a_small_cache_holds_is_what_may_be_asked_for(cluster):
    """Also where nothing says how long an answer may be; the largest cache of a model decides."""
    chat = {"messages": [{"role": "user", "content": "hi"}], "model": "large", "temperature": 0}
    async with target_worker(name="large", cache_tokens=64) as small:
        for others, most in (([], 64), ([cluster.large.worker.address], cluster.large.worker.welcome.context)):
            router = Router(RouterSettings([small.worker.address, *others], [], port=0))
            await router.start()
            async with httpx.AsyncClient(base_url=router.address, timeout=60, trust_env=False) as client:
                while len([peer for peer in router.dispatcher.pool.peers.values() if peer.welcome]) <= len(others):
                    await asyncio.sleep(0.005)
                (entry,) = (await client.get("/v1/models")).json()["data"]
                assert entry["max_model_len"] == most
                if not others:
                    answer = (await client.post("/v1/chat/completions", json=chat)).json()
                    assert answer["usage"]["total_tokens"] <= most
                refused = await client.post("/v1/chat/completions", json=chat | {"max_tokens": most})
                error = refused.json()["error"]
                assert (refused.status_code, error["code"], error["param"]) == (400, *CONTEXT_EXCEEDED)
            await router.stop()


async def test_a_model_that_loses_its_workers_changes_nothing_for_another(cluster):
    async with serving_both(cluster, IMPATIENT) as serving:
        running = asyncio.create_task(generated(serving, "large", 100))
        while not serving.metrics.tally.committed:
            await asyncio.sleep(0.005)
        serving.pool.set_workers(Role.TARGET, [cluster.large.worker.address])
        with pytest.raises(GenerationError, match="no target worker is available for model org/small") as caught:
            await generated(serving, "org/small")
        assert caught.value.code.name == "unavailable"
        assert tuple((await running).tokens[:TOKENS]) == cluster.texts["large"]
        assert serving.totals.reopened == 0
        serving.pool.set_workers(Role.TARGET, [cluster.large.worker.address, cluster.small.worker.address])
        await known(serving, cluster.small.worker.address)
        assert tuple((await generated(serving, "org/small")).tokens) == cluster.texts["org/small"]


async def test_a_model_is_forgotten_some_time_after_its_last_target_left(cluster):
    async with serving_both(cluster) as serving:
        now = [0.0]
        serving.pool.clock = lambda: now[0]
        serving.pool._models = ServedModels()
        assert list(serving.models) == ["large", "org/small"]
        serving.pool.set_workers(Role.TARGET, [cluster.large.worker.address])
        now[0] = 299.0
        assert list(serving.models) == ["large", "org/small"]
        now[0] = 301.0
        assert list(serving.models) == ["large"]


async def test_the_api_chooses_by_the_name_in_the_request(cluster):
    targets = (cluster.large.worker.address, cluster.small.worker.address)
    router = Router(RouterSettings(targets, (cluster.drafter.worker.address,), port=0))
    await router.start()
    try:
        async with asyncio.timeout(60):
            while len(router.dispatcher.models) < 2:
                await asyncio.sleep(0.01)
        async with httpx.AsyncClient(base_url=router.address, timeout=PATIENCE, trust_env=False) as client:
            listed = (await client.get("/v1/models")).json()["data"]
            assert [entry["id"] for entry in listed] == ["large", "org/small"]
            assert (await client.get("/v1/models/org/small")).json()["id"] == "org/small"
            request = {"prompt": list(held_out_prompts()[0]), "max_tokens": TOKENS, "temperature": 0}
            answers = [
                await client.post("/v1/completions", json=request | {"model": name}) for name in ("large", "org/small")
            ]
            assert [answer.json()["model"] for answer in answers] == ["large", "org/small"]
            texts = [answer.json()["choices"][0]["text"] for answer in answers]
            assert texts[0] != texts[1]
            refused = await client.post("/v1/completions", json=request | {"model": "larg"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
            assert "'large', 'org/small'" in refused.json()["error"]["message"]
            assert (await client.get("/v1/models/larg")).json() == refused.json()
            unnamed = await client.post("/v1/completions", json=request)
            assert (unnamed.status_code, unnamed.json()["error"]["param"]) == (400, "model")
            assert "one of 'large', 'org/small'" in unnamed.json()["error"]["message"]
    finally:
        await router.stop()


async def test_a_text_is_not_continued_by_another_revision(cluster):
    """New requests go to the new one; running ones end where they began, or fail and say why."""
    async with target_worker(model="draft", name="large") as replacement:
        assert replacement.worker.welcome.revision != cluster.large.worker.welcome.revision
        old, new = cluster.large.worker.address, replacement.worker.address
        async with dispatcher([old], limits=IMPATIENT) as serving:

            async def list_only(address: str) -> None:
                serving.pool.set_workers(Role.TARGET, [address])
                await known(serving, address)

            async def begun(tokens: int) -> asyncio.Task[Result]:
                before = serving.metrics.tally.committed
                task = asyncio.create_task(generated(serving, "large", tokens))
                async with asyncio.timeout(60):
                    while serving.metrics.tally.committed == before:
                        await asyncio.sleep(0.001)
                return task

            ending = await begun(100)
            await list_only(new)
            assert tuple((await generated(serving, "large")).tokens) == cluster.texts["org/small"]
            assert tuple((await ending).tokens[:TOKENS]) == cluster.texts["large"]
            assert list(serving.pool.peers) == [f"target@{new}"]

            await list_only(old)
            released = hold(cluster.large.machine)
            doomed = await begun(900)
            await list_only(new)
            cut = serving.pool.peers[PeerId(f"target@{old}")].task
            assert cut is not None
            cut.cancel()
            with pytest.raises(GenerationError, match="model large was replaced by another revision") as caught:
                await doomed
            released.set()
            assert caught.value.code.name == "unavailable"


async def test_the_router_measures_how_far_its_workers_are(cluster):
    async with (
        Proxy(cluster.drafter.worker.address, lambda: 0.15) as proxy,
        dispatcher([cluster.large.worker.address], [proxy.address]) as serving,
        asyncio.timeout(60),
    ):
        peers = {peer.role: peer for peer in serving.pool.peers.values()}
        near, far = peers[Role.TARGET].connection, peers[Role.DRAFT].connection
        while not (near.round_trip or 9) < 0.25 < (far.round_trip or 0) < 2:
            await asyncio.sleep(0.02)


async def test_a_revision_is_that_of_the_files_and_the_number_format(tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(MODELS / "draft", folder)
    first = revision_of(str(folder), "bfloat16")
    assert first == revision_of(str(MODELS / "draft"), "bfloat16")
    assert first != revision_of(str(folder), "float32")
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[100_000] ^= 1
    weights.write_bytes(data)
    assert revision_of(str(folder), "bfloat16") not in (0, first)
    assert revision_of(str(tmp_path / "none"), "bfloat16") == 0
