"""The HTTP API over a fake router: in memory, over a real socket, and through OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from starlette.types import Message

from router.errors import CODES
from router.generation import Committed, Generation, GenerationError, ServedModel
from router.http.api import ApiSettings, build_app
from router.text.tokenizer import Tokenizer
from tests.fakes import EOS, FakeGenerator, FakeTokenizers, Script, commits, tiny_tokenizer
from tests.http_server import serve

TEXT = "hello wörld, 世界 🎉 the fox says\n"
CONTEXT = 256


@cache
def shared() -> Tokenizer:
    return tiny_tokenizer()


def model() -> ServedModel:
    return ServedModel("tiny/model", shared().size, CONTEXT, shared().digest)


def says(text: str, sizes: tuple[int, ...] = (1, 4, 2)) -> Script:
    """A script that commits ``text`` and the end of sequence."""
    tokens = (*shared().encode(text, special=False), EOS)
    return lambda _: commits(tokens, sizes)


def fake(text: str = TEXT, sizes: tuple[int, ...] = (1, 4, 2), **options: Any) -> FakeGenerator:
    return FakeGenerator(says(text, sizes), model=model(), **options)


def length(text: str) -> int:
    return len(shared().encode(text, special=False))


def in_memory(generator: FakeGenerator, settings: ApiSettings | None = None) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(
        build_app(generator, FakeTokenizers(shared()), settings), raise_app_exceptions=False
    )
    return httpx.AsyncClient(transport=transport, base_url="http://paceline")


def over_socket(url: str) -> httpx.Client:
    return httpx.Client(base_url=url, timeout=60, trust_env=False)


@pytest_asyncio.fixture(autouse=True)
async def no_task_left() -> AsyncIterator[None]:
    """Whatever a test did, nothing of it runs afterwards."""
    yield
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def post(generator: FakeGenerator, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
    default = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi"}
    async with in_memory(generator) as client:
        response = await client.post(path, json=default | {"max_tokens": 200} | fields)
    assert generator.running == 0
    return response


def events(response: httpx.Response) -> list[Any]:
    """The data of every event; ``[DONE]`` as it is."""
    assert response.headers["content-type"].startswith("text/event-stream")
    data = [part.removeprefix("data: ") for part in response.text.split("\n\n") if part]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


# Answers


async def test_a_grammar_arrives_and_a_bad_one_is_refused_with_its_field() -> None:
    generator = fake()
    assert (await post(generator, response_format={"type": "json_object"})).status_code == 200
    assert "json_schema" in generator.generations[0].request_options.grammar
    response = await post(generator, "/v1/chat/completions", structured_outputs={"regex": "("})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "structured_outputs.regex"
    assert len(generator.generations) == 1


async def test_a_completion() -> None:
    generator = fake()
    response = await post(generator)
    body = response.json()
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["model"] == "tiny/model"
    assert body["choices"] == [{"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "stop"}]
    tokens = length(TEXT) + 1
    parts = says(TEXT)(generator.generations[0])
    accepted, offered = sum(c.accepted for c in parts), sum(c.offered for c in parts)
    assert body["usage"] == {
        "prompt_tokens": len(generator.generations[0].prompt),
        "completion_tokens": tokens,
        "total_tokens": len(generator.generations[0].prompt) + tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {
            "accepted_draft_tokens": accepted,
            "rejected_draft_tokens": offered - accepted,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_cached_tokens_are_counted_once_for_each_prompt(path: str) -> None:
    def script(generation: Generation) -> list[Committed]:
        """The first choice finds 2 tokens in the cache, the others find more."""
        first, *rest = says(TEXT)(generation)
        return [replace(first, cached=2 + len(generator.generations)), *rest]

    generator = FakeGenerator(script, model=model())
    body = (await post(generator, path, n=3)).json()
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    generator = FakeGenerator(script, model=model())
    response = await post(generator, path, n=3, stream=True, stream_options={"include_usage": True})
    assert events(response)[-2]["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}


async def test_a_chat_completion() -> None:
    body = (await post(fake(), "/v1/chat/completions")).json()
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": TEXT, "refusal": None}
    assert choice["finish_reason"] == "stop"


async def test_max_tokens_ends_with_length() -> None:
    body = (await post(fake(), max_tokens=3)).json()
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 3


async def test_a_stop_string_cuts_the_text_and_the_count_and_ends_the_generation() -> None:
    generator = fake(sizes=(5,), hang=True)
    body = (await post(generator, stop=["界 ", "never"])).json()
    assert body["choices"][0]["text"] == TEXT.split("界")[0]
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == length(TEXT.split("界")[0] + "界 ")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stop", [[], ["wör"], ["界 🎉 t", "zz"], ["\n"], ["h"]])
@pytest.mark.parametrize("sizes", [(1,), (2, 5), (7, 1, 3), (100,)])
async def test_streaming_equals_not_streaming(path: str, stop: list[str], sizes: tuple[int, ...]) -> None:
    body = (await post(fake(sizes=sizes), path, stop=stop)).json()
    response = await post(fake(sizes=sizes), path, stop=stop, stream=True, stream_options={"include_usage": True})
    *chunks, last = events(response)
    assert last == "[DONE]"
    chat = "chat" in path
    whole = body["choices"][0]
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    text = "".join(choice["delta"].get("content", "") if chat else choice["text"] for choice in choices)
    assert text == (whole["message"]["content"] if chat else whole["text"])
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == [whole["finish_reason"]]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == body["usage"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert len({chunk["id"] for chunk in chunks}) == 1
    if chat:
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}


async def test_chunks_follow_commits_and_skip_empty_text() -> None:
    party = shared().encode("🎉", special=False)
    parts = [Committed((t,), 0, 0) for t in party] + [Committed((*shared().encode("ab", special=False), EOS), 2, 4)]
    *chunks, _ = events(await post(FakeGenerator(lambda _: parts, model=model()), stream=True))
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["🎉", "ab", ""]
    assert all("usage" not in chunk and "speculation" not in chunk for chunk in chunks)


async def test_speculation_of_every_commit_on_demand() -> None:
    options = {"include_usage": True, "include_speculation": True}
    *chunks, _ = events(await post(fake(), stream=True, stream_options=options, stop=["the"]))
    details = [(c["speculation"], c["choices"][0]["text"]) for c in chunks if "speculation" in c]
    assert all("".join(p["text"] for p in spec["pieces"]) == text for spec, text in details)
    assert any(p["drafted"] for spec, _ in details for p in spec["pieces"])
    usage = chunks[-1]["usage"]
    assert sum(spec["tokens"] for spec, _ in details) == usage["completion_tokens"]
    accepted, offered = (sum(spec[key] for spec, _ in details) for key in ("accepted", "offered"))
    assert usage["completion_tokens_details"] == {
        "accepted_draft_tokens": accepted,
        "rejected_draft_tokens": offered - accepted,
        "accepted_prediction_tokens": 0,
        "rejected_prediction_tokens": 0,
    }


async def test_several_choices_and_prompts() -> None:
    def by_seed(generation: Generation) -> list[Committed]:
        return commits((*shared().encode(f"<{generation.sampling.seed}>", special=False), EOS), (3,))

    generator = FakeGenerator(by_seed, model=model())
    body = (await post(generator, prompt=["a", "b"], n=2, seed=5)).json()
    expected = [f"<{generation.sampling.seed}>" for generation in generator.generations]
    assert [choice["text"] for choice in body["choices"]] == expected
    assert len(set(expected)) == 4
    streamed = ["", "", "", ""]
    again = FakeGenerator(by_seed, model=model())
    *chunks, _ = events(await post(again, prompt=["a", "b"], n=2, seed=5, stream=True))
    for chunk in chunks:
        streamed[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert streamed == expected
    assert sum(chunk["choices"][0]["finish_reason"] == "stop" for chunk in chunks) == 4


async def test_models_and_health() -> None:
    async with in_memory(fake(), ApiSettings(model_name="org/public")) as client:
        (entry,) = (await client.get("/v1/models")).json()["data"]
        assert entry["id"] == "org/public"
        assert (await client.get("/v1/models/org/public")).json() == entry
        missing = await client.get("/v1/models/other")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
        assert missing.json()["error"]["message"].count("org/public") == 1
        assert (await client.get("/health")).status_code == 200


# Errors


def error_of(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert response.headers["x-request-id"]
    assert CODES[error["code"]].status == response.status_code
    return error


async def test_without_a_target_worker() -> None:
    async with in_memory(FakeGenerator(says(TEXT), model=None)) as client:
        response = await client.post("/v1/completions", json={"prompt": "hi"})
        assert error_of(response)["code"] == "unavailable"
        assert response.headers["retry-after"] == "1"
        assert (await client.get("/v1/models")).json()["data"] == []
        assert (await client.get("/v1/models/x")).status_code == 503
        assert (await client.get("/health")).status_code == 200


async def test_paths_and_methods_that_do_not_exist() -> None:
    async with in_memory(fake()) as client:
        assert error_of(await client.get("/v1/nothing"))["code"] == "not_found"
        wrong = await client.get("/v1/completions")
        assert error_of(wrong)["code"] == "method_not_allowed"
        assert wrong.headers["allow"] == "POST"


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'{"prompt": "\xff"}', b'{"prompt": "hi", "tempratur\\u00e9": 1}'])
async def test_bad_bodies_reach_no_generator(body: bytes) -> None:
    generator = fake()
    async with in_memory(generator) as client:
        response = await client.post("/v1/completions", content=body, headers={"content-type": "a/b, application/json"})
    assert error_of(response)["type"] == "invalid_request_error"
    assert response.status_code == 400
    assert response.headers["x-should-retry"] == "false"
    assert generator.generations == []


async def test_large_bodies_are_tokenised_and_refused_by_field() -> None:
    response = await post(fake(), prompt="zqj " * 50_000)
    assert error_of(response)["code"] == "context_length_exceeded"


@pytest.mark.parametrize("code", ["invalid", "overloaded", "unavailable", "faulty", "draining", "internal", "no such"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_generation_that_fails_before_its_first_commit_has_a_status(code: str, stream: bool) -> None:
    generator = FakeGenerator(lambda _: [], model=model(), error=GenerationError(code, "because"))
    response = await post(generator, stream=stream)
    assert error_of(response)["message"] == "because"
    assert ("retry-after" in response.headers) == CODES[response.json()["error"]["code"]].retryable


def unfinished(_: Generation) -> list[Committed]:
    return commits(shared().encode("hello", special=False), (2,))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("failure", "code"), [(GenerationError("faulty", "because"), "faulty"), (ValueError("secret"), "internal")]
)
async def test_a_failure_within_a_stream_is_its_last_event(path: str, failure: Exception, code: str) -> None:
    response = await post(FakeGenerator(unfinished, model=model(), error=failure), path, stream=True)
    assert response.status_code == 200
    *chunks, last = events(response)
    assert chunks
    assert last["error"]["code"] == code
    assert "secret" not in response.text


async def test_a_fault_of_ours_is_a_500_that_says_nothing_of_it() -> None:
    response = await post(FakeGenerator(unfinished, model=model(), error=ValueError("secret")))
    assert error_of(response)["code"] == "internal"
    assert "secret" not in response.text


async def test_one_failing_choice_ends_the_others() -> None:
    def script(generation: Generation) -> list[Committed]:
        if generation.sampling.seed == 1:
            raise GenerationError("faulty", "because")
        return unfinished(generation)

    response = await post(FakeGenerator(script, model=model(), hang=True), n=3, seed=1)
    assert error_of(response)["code"] == "faulty"


async def test_request_ids() -> None:
    generator = fake()
    async with in_memory(generator) as client:
        given = await client.post("/v1/completions", json={"prompt": "hi"}, headers={"x-request-id": "mine-1"})
        assert given.headers["x-request-id"] == "mine-1"
        other = await client.get("/health", headers={"x-request-id": "not sane\t"})
        assert other.headers["x-request-id"] not in ("", "not sane\t", "mine-1")
    assert generator.generations[0].request_id == "mine-1"


# Clients that leave


async def leave_while_running(generator: FakeGenerator, body: dict[str, Any], *, reads: bool = True) -> None:
    """Post ``body`` and leave once the generator waits, or whoever sends: a client that does not read blocks it."""
    asked = False

    async def receive() -> Message:
        nonlocal asked
        if not asked:
            asked = True
            return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}
        await generator.started.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body" and not reads:
            generator.started.set()
            await asyncio.get_running_loop().create_future()

    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": [],
    }
    async with asyncio.timeout(60):
        await build_app(generator, FakeTokenizers(shared()))(scope, receive, send)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", [unfinished, lambda _: []], ids=["after text", "before text"])
@pytest.mark.parametrize("n", [1, 3])
async def test_a_client_that_leaves_stops_its_generations(stream: bool, script: Script, n: int) -> None:
    generator = FakeGenerator(script, model=model(), hang=True)
    await leave_while_running(generator, {"prompt": "hi", "stream": stream, "n": n})
    assert len(generator.generations) == n
    assert generator.running == 0


@pytest.mark.parametrize("n", [1, 3])
async def test_a_client_that_stops_reading_and_leaves_stops_its_generations(n: int) -> None:
    generator = FakeGenerator(unfinished, model=model(), hang=True)
    await leave_while_running(generator, {"prompt": "hi", "stream": True, "n": n}, reads=False)
    assert generator.running == 0


# Over a socket


def opened(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serve(fake(), shared()) as url:
        yield url


@pytest.fixture
def client(address: str) -> Iterator[openai.OpenAI]:
    with opened(address) as openai_client:
        yield openai_client


def test_openai_client_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny/model", prompt="hi", max_tokens=200)
    assert answer.choices[0].text == TEXT
    assert answer.usage is not None
    details = answer.usage.completion_tokens_details
    assert details is not None
    assert details.model_dump()["accepted_draft_tokens"] > 0
    stream = client.completions.create(model="tiny/model", prompt="hi", max_tokens=200, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == TEXT


def test_openai_client_chat(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "system", "content": "x"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    answer = client.chat.completions.create(model="tiny/model", messages=messages)
    assert answer.choices[0].message.content == TEXT
    messages += [answer.choices[0].message, {"role": "user", "content": "more"}]
    stream = client.chat.completions.create(
        model="tiny/model",
        messages=messages,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"top_k": 5, "speculation": {"enabled": False}},
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == TEXT
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == length(TEXT) + 1


def test_openai_client_models(client: openai.OpenAI) -> None:
    assert [entry.id for entry in client.models.list()] == ["tiny/model"]
    assert client.models.retrieve("tiny/model").id == "tiny/model"


def test_openai_client_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-4", prompt="hi")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="tiny/model", prompt="hi", max_tokens=0)
    assert bad.value.param == "max_tokens"
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="tiny/model", prompt="hi", extra_body={"temprature": 1})


@pytest.mark.parametrize(
    ("code", "raised"),
    [
        ("overloaded", openai.RateLimitError),
        ("unavailable", openai.InternalServerError),
        ("faulty", openai.InternalServerError),
    ],
)
def test_openai_client_errors_of_workers(code: str, raised: type[openai.APIStatusError]) -> None:
    generator = FakeGenerator(lambda _: [], model=model(), error=GenerationError(code, "because"))
    with (
        serve(generator, shared()) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as openai_client,
    ):
        with pytest.raises(raised) as caught:
            openai_client.completions.create(model="tiny/model", prompt="hi")
        assert caught.value.code == code


def test_openai_client_error_within_a_stream() -> None:
    generator = FakeGenerator(unfinished, model=model(), error=GenerationError("faulty", "because"))
    with (
        serve(generator, shared()) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as openai_client,
    ):
        stream = openai_client.completions.create(model="tiny/model", prompt="hi", stream=True)
        with pytest.raises(openai.APIError, match="because"):
            list(stream)


def test_a_client_that_closes_its_socket_stops_the_generation() -> None:
    generator = FakeGenerator(unfinished, model=model(), hang=True)
    with serve(generator, shared()) as url, over_socket(url) as http:
        with http.stream("POST", "/v1/completions", json={"prompt": "hi", "stream": True}) as response:
            assert next(response.iter_lines()).startswith("data: ")
        assert http.get("/health").status_code == 200
    # The server stops within the time that ``served`` gives it only if this request was cancelled.


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_of_50_megabytes_is_cut_off_early(chunked: bool) -> None:
    sent = 0

    def body() -> Iterator[bytes]:
        nonlocal sent
        for _ in range(800):
            sent += 1 << 16
            yield b" " * (1 << 16)

    headers = {} if chunked else {"content-length": str(800 << 16)}
    generator = fake()
    with serve(generator, shared(), ApiSettings(max_body_bytes=1 << 20)) as url, over_socket(url) as http:
        response = http.post("/v1/completions", content=body(), headers=headers)
        assert error_of(response)["code"] == "body_too_large"
        assert sent < 40 << 20
        assert http.get("/health").status_code == 200
    assert generator.generations == []
