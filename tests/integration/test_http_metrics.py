"""What the HTTP side counts: how requests end, once each, however they end."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from router.generation import GenerationError, ServedModel
from router.http.api import build_app
from router.sessions.snapshot import Snapshot
from router.sessions.tally import RouterCounters
from router.telemetry.metrics import RouterMetrics
from tests.fakes import EOS, FakeGenerator, FakeTokenizers, commits, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
MODEL = ServedModel("tiny/model", TOKENIZER.size, 256, TOKENIZER.digest)
TEXT = tuple(TOKENIZER.encode("hello world, the fox", special=False))


async def counted(text: tuple[int, ...], error: Exception | None = None, **fields: Any) -> dict[str, int]:
    """What one request adds to the counters, by label."""
    generator = FakeGenerator(lambda _: commits(text, (1, 3)), model=MODEL, error=error)
    tally = RouterCounters()
    app = build_app(generator, FakeTokenizers(TOKENIZER), None, RouterMetrics(tally, Snapshot))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://paceline") as client:
        await client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 100} | fields)
    totals = tally.refused + tally.failed + tally.model(MODEL.name).finished
    return dict(totals)


@pytest.mark.parametrize("stream", [False, True])
async def test_every_request_is_counted_once_as_what_became_of_it(stream: bool) -> None:
    async def ends(text: tuple[int, ...], error: Exception | None = None, **fields: Any) -> dict[str, int]:
        return await counted(text, error, stream=stream, **fields)

    assert await ends((*TEXT, EOS)) == {"stop": 1}
    assert await ends((*TEXT, EOS), n=3) == {"stop": 3}
    assert await ends(TEXT, max_tokens=2) == {"length": 1}
    assert await ends(TEXT, stop="world") == {"stop": 1}
    assert await ends(TEXT, GenerationError("faulty", "x")) == {"faulty": 1}
    assert await ends(TEXT, RuntimeError("a bug")) == {"internal": 1}
    assert await ends((), GenerationError("overloaded", "x")) == {"overloaded": 1}
    assert await ends((), GenerationError("unavailable", "x")) == {"unavailable": 1}
    assert await ends(TEXT, max_tokens="many") == {"invalid_type": 1}
    assert await ends(TEXT, model="other") == {"model_not_found": 1}


@pytest.mark.parametrize(
    "accept", ["", "text/plain;version=x.y", "application/openmetrics-text; version=1.0.0", ";;=,"]
)
async def test_a_scraper_is_answered_in_plain_text_whatever_it_asks_for(accept: str) -> None:
    app = build_app(FakeGenerator(lambda _: [], model=MODEL), FakeTokenizers(TOKENIZER))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://paceline") as client:
        answer = await client.get("/metrics", headers={"accept": accept})
    assert answer.status_code == 200
    assert "paceline_build_info" in answer.text
    assert "\nvllm:num_requests_waiting " in answer.text  # OpenMetrics has another name for it in prometheus_client
