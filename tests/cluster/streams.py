"""Streaming requests of a test, several at once, and what the same requests give in plain decoding."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.cluster.processes import PATIENCE
from tests.stack import MODELS

TIMEOUT = httpx.Timeout(PATIENCE)
"""Longer than a router lets a text wait for its model to be loaded again (``begun_timeout``)."""


def prompts(count: int) -> list[str]:
    """Some of the bundled held-out prompts."""
    lines = (MODELS / "prompts.jsonl").read_text().splitlines()[:count]
    return [json.loads(line)["prompt"] for line in lines]


def body(prompt: str, max_tokens: int, *, temperature: float = 0.0, **extra: Any) -> dict[str, Any]:
    """A request that never ends early."""
    settings = {"max_tokens": max_tokens, "temperature": temperature, "seed": 7, "ignore_eos": True}
    return {"prompt": prompt, **settings, **extra}


async def plain(url: str, bodies: Sequence[dict[str, Any]]) -> list[str]:
    """The texts without speculation and without streaming, one after the other."""
    texts = []
    async with httpx.AsyncClient(timeout=TIMEOUT, trust_env=False) as client:
        for request in bodies:
            answer = await client.post(f"{url}/v1/completions", json={**request, "speculation": {"enabled": False}})
            assert answer.status_code == 200, answer.text
            texts.append(answer.json()["choices"][0]["text"])
    return texts


@dataclass
class Streamed:
    """One streamed completion."""

    parts: list[str] = field(default_factory=list)
    done: bool = False
    accepted: int = 0
    tokens: int = 0

    @property
    def text(self) -> str:
        return "".join(self.parts)


async def streamed(
    url: str, bodies: Sequence[dict[str, Any]], meanwhile: Callable[[list[Streamed]], Awaitable[None]] | None = None
) -> list[Streamed]:
    """All at once. ``meanwhile`` runs as soon as every stream has begun."""
    results = [Streamed() for _ in bodies]
    begun = asyncio.Barrier(len(bodies) + 1)
    async with httpx.AsyncClient(timeout=TIMEOUT, trust_env=False) as client, asyncio.TaskGroup() as group:
        for request, result in zip(bodies, results, strict=True):
            group.create_task(stream(client, url, request, result, begun))
        await begun.wait()
        if meanwhile is not None:
            await meanwhile(results)
    return results


async def stream(client: httpx.AsyncClient, url: str, body: dict[str, Any], into: Streamed, begun: asyncio.Barrier):
    """One streamed completion; waits where ``begun`` is after its third part."""
    request = {**body, "stream": True, "stream_options": {"include_speculation": True}}
    async with client.stream("POST", f"{url}/v1/completions", json=request) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                into.done = True
            elif line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                into.parts.append(event["choices"][0]["text"])
                if speculation := event.get("speculation"):
                    into.tokens += speculation["tokens"]
                    into.accepted += speculation["accepted"]
                if len(into.parts) == 3:
                    await begun.wait()
