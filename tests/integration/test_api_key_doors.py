"""The HTTP door with API keys: in memory, over a real socket, and through OpenAI's own client."""

from __future__ import annotations

import httpx
import openai
import pytest
from starlette.datastructures import URL
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from deploy import reference_rules
from router.http import auth
from router.http.api import ApiSettings, build_app
from router.http.auth import OPEN_PATHS, OPERATORS_PATHS, ApiKeys
from tests.fakes import FakeTokenizers
from tests.http_server import serve
from tests.integration.test_http_api import TEXT, fake, in_memory, shared

KEY, OTHER = "sk-paceline-0123456789", "sk-paceline-9876543210"


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "keys"
    path.write_text(f"alice: {KEY}\n")
    return path


def guarded(path) -> ApiSettings:
    return ApiSettings(api_keys=ApiKeys(path))


async def test_every_path_but_those_of_probes_needs_a_key(path):
    generator = fake()
    app = build_app(generator, FakeTokenizers(shared()), guarded(path))
    paths = {route.path for route in app.routes if isinstance(route, Route)} | {"/", "/nowhere", "/v1/nowhere"}
    assert {"/v1/completions", "/v1/models", "/v1/models/{name:path}", "/metrics", "/cluster"} <= paths - OPEN_PATHS
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://paceline") as client:
        for known in sorted(paths - OPEN_PATHS):
            for method in ("GET", "POST", "OPTIONS"):
                assert (await client.request(method, known)).status_code == 401, (method, known)
        assert (await client.get("/health")).status_code == 200
        told = (await client.get("/metrics/picker")).text
    assert {line.partition(" ")[0] for line in told.splitlines() if line[:1] != "#"} == {
        "vllm:num_requests_waiting",
        "vllm:num_requests_running",
        "vllm:kv_cache_usage_perc",
    }
    assert not generator.generations


async def test_a_host_header_opens_no_other_path(path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Starlette up to 1.0 takes ``Host: x/metrics?`` for a part of the URL, path and all."""
    monkeypatch.setattr(Request, "url", property(lambda _: URL("http://x/metrics?/metrics/picker")))
    async with in_memory(fake(), guarded(path)) as client:
        told = await client.get("/metrics/picker", headers={"host": "x/metrics?"})
        lost = await client.get("/nowhere", headers={"host": "x/metrics?", "authorization": f"Bearer {KEY}"})
    assert not [line for line in told.text.splitlines() if line.startswith("paceline_")]
    assert lost.json()["error"]["message"].startswith("GET /nowhere: ")


@pytest.mark.parametrize(
    ("header", "challenge"),
    [
        (None, "Bearer"),
        ("", "Bearer"),
        (KEY, "Bearer"),
        (f"Basic {KEY}", "Bearer"),
        ("Bearer", "Bearer"),
        ("Bearer  ", "Bearer"),
        (f"Bearer {OTHER}", 'Bearer error="invalid_token"'),
        (f"Bearer {KEY} {OTHER}", 'Bearer error="invalid_token"'),
        (f"Bearer {KEY[:-1]}", 'Bearer error="invalid_token"'),
    ],
)
async def test_without_the_key_the_answer_is_openais(path, header, challenge):
    headers = {} if header is None else {"authorization": header}
    async with in_memory(fake(), guarded(path)) as client:
        refused = await client.post("/v1/completions", json={"prompt": "hi"}, headers=headers)
    assert refused.status_code == 401
    error = refused.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "invalid_api_key", None)
    assert refused.headers["www-authenticate"] == challenge
    assert refused.headers["x-request-id"]
    assert KEY[:-1] not in refused.text


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER "])
async def test_with_the_key_its_name_is_known(path, scheme):
    app = build_app(fake(), FakeTokenizers(shared()), guarded(path))

    async def who(request: Request) -> PlainTextResponse:
        return PlainTextResponse(request.state.api_key_name)

    app.router.routes.append(Route("/who", who))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://paceline") as client:
        assert (await client.get("/who", headers={"authorization": f"{scheme} {KEY}"})).text == "alice"


def test_keys_come_and_go_under_openais_client(path, monkeypatch):
    monkeypatch.setattr(auth, "LOOK_SECONDS", 0.0)
    with serve(fake(), shared(), guarded(path)) as url:
        with (
            openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as alice,
            openai.OpenAI(base_url=f"{url}/v1", api_key=OTHER, max_retries=0) as bob,
        ):
            assert alice.completions.create(model="tiny/model", prompt="hi", max_tokens=200).choices[0].text == TEXT
            with pytest.raises(openai.AuthenticationError, match="not known here"):
                bob.models.list()
            path.write_text(f"alice: {KEY}\nbob: {OTHER}\n")
            assert bob.models.list().data
            path.write_text(f"bob: {OTHER}\n")
            with pytest.raises(openai.AuthenticationError):
                alice.models.list()
            assert bob.models.list().data


async def test_what_names_all_callers_is_for_operators_where_there_are_some(path):
    """Any key sees it while none is an operator's; one that is has the API as well."""

    async def seen(client: httpx.AsyncClient, key: str) -> list[int]:
        paths = ("/metrics", "/cluster", "/v1/models", "/")
        return [(await client.get(at, headers={"authorization": f"Bearer {key}"})).status_code for at in paths]

    assert set(reference_rules.OPERATORS_PATHS) == OPERATORS_PATHS
    path.write_text(f"alice: {KEY}\nops: {OTHER} operator=0\n")
    async with in_memory(fake(), guarded(path)) as client:
        assert await seen(client, KEY) == await seen(client, OTHER) == [200] * 4
    path.write_text(f"alice: {KEY} requests_per_minute=9\nops: {OTHER} operator=1\n")
    async with in_memory(fake(), guarded(path)) as client:
        assert await seen(client, OTHER) == [200] * 4
        assert await seen(client, KEY) == [403, 403, 200, 200]
        assert await seen(client, KEY[:-1]) == [401, 401, 401, 200]
        refused = await client.get("/metrics", headers={"authorization": f"Bearer {KEY}"})
        told = (await client.get("/metrics", headers={"authorization": f"Bearer {OTHER}"})).text
    assert refused.json()["error"]["code"] == "permission_denied"
    assert "paceline_" not in refused.text and "alice" not in refused.text
    assert 'code="permission_denied"} 3.0' in told


async def test_refusals_are_counted(path):
    async with in_memory(fake(), guarded(path)) as client:
        for _ in range(2):
            assert (await client.get("/v1/models")).status_code == 401
        told = (await client.get("/metrics", headers={"authorization": f"Bearer {KEY}"})).text
    assert 'code="invalid_api_key"} 2.0' in told
