"""A draft source of an operator's own: all there is to it stands in this file, and in nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from router.service import Router, RouterSettings
from speculation.messages import Open, Token
from speculation.sources.lookup import Continuation
from speculation.sources.registry import _makers, register
from target_service.verify_loop import TargetLimits
from tests.stack import Running, target_worker

LETTER = 40
PROMPT = "def add(a, b):\n"
TOKENS = 24


class Again:
    """Whatever was said last is said again, and again."""

    source = "again"
    depth = 3

    def __init__(self, opened: Open) -> None:
        self._last: tuple[Token, ...] = opened.tokens[-1:]

    def extend(self, tokens: Sequence[Token]) -> None:
        self._last = (*self._last, *tokens)[-1:]

    def propose(self, depth: int) -> Continuation:
        return Continuation(self._last * depth, matched=4)


class Broken(Again):
    """One that has a mistake."""

    source = "broken"

    def propose(self, depth: int) -> Continuation:
        return Continuation(self._last * depth, matched=1 // (depth * 0))


@pytest.fixture(autouse=True)
def own_sources() -> Iterator[None]:
    register(Again.source, Again)
    register(Broken.source, Broken)
    yield
    del _makers[Again.source]
    del _makers[Broken.source]


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[httpx.AsyncClient, Running]]:
    async with target_worker(TargetLimits(adaptive=False)) as target:
        router = Router(RouterSettings([target.worker.address], port=0))
        await router.start()
        try:
            async with httpx.AsyncClient(base_url=router.address, timeout=60) as client:
                yield client, target
        finally:
            await router.stop()


async def complete(client: httpx.AsyncClient, sources: list[str] | None, **fields: Any) -> dict[str, Any]:
    steering = {"details": True} | ({"enabled": False} if sources is None else {"sources": sources})
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": True, "speculation": steering} | fields
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_source_in_one_file_is_accepted_counted_told_and_steered() -> None:
    same_letter = {"allowed_token_ids": [LETTER], "temperature": 0.0}
    drawn = {"temperature": 0.8, "seed": 3}
    async with serving() as (client, target):
        plain = await complete(client, None, **same_letter)
        again = await complete(client, ["again"], **same_letter)
        without = await complete(client, ["lookup", "broken"], **drawn)
        both = await complete(client, ["again", "broken", "lookup"], **drawn)
        unknown = await client.post("/v1/completions", json={"prompt": PROMPT, "speculation": {"sources": ["agian"]}})
        worker = target.machine.load().counters
        async with asyncio.timeout(60):  # until the router has heard of it
            while "again" not in (await client.get("/cluster")).json()["workers"][0]["sources"]:
                await asyncio.sleep(0.05)
        metrics = (await client.get("/metrics")).text
    assert text(again) == text(plain)
    summary = again["speculation"]["summary"]
    assert summary["steps"] < TOKENS / 3
    assert summary["by_source"]["again"]["accepted"] == TOKENS - summary["steps"] > 0
    assert set(summary["by_source"]) == {"again"}
    pieces = [piece for commit in again["speculation"]["commits"] for piece in commit["pieces"]]
    assert {piece["source"] for piece in pieces if piece["drafted"]} == {"again"}
    assert text(both) == text(without)
    assert "again" in both["speculation"]["summary"]["by_source"]
    assert "again" not in without["speculation"]["summary"]["by_source"]
    assert worker["offered_from_again"] > worker["accepted_from_again"] > 0
    assert worker["source_faults"] == 2, "one for each session that was to draft with the broken one"
    assert worker["offered_from_broken"] == 0
    assert unknown.status_code == 400
    assert "lookup, prediction, grammar, eagle, suffix, again, broken" in unknown.json()["error"]["message"]
    counted = [line for line in metrics.splitlines() if "worker_offered_tokens" in line and 'source="again"' in line]
    assert len(counted) == 1
    assert float(counted[0].split()[-1]) > 0


def text(answer: dict[str, Any]) -> str:
    said = answer["choices"][0]["text"]
    assert isinstance(said, str)
    return said
