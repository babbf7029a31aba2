"""Every field of the table over real workers: the same answer for the same seed, with speculation and without."""

from __future__ import annotations

import asyncio
import json
import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.http.api import build_app
from router.schema.request_schema import Kind
from router.text.tokenizer import Tokenizers
from tests import stack
from tests.api_page import ROWS, FieldRow, FieldSupport
from tests.bundled import MODELS

BASES: dict[Kind, dict[str, Any]] = {
    "completion": {"prompt": "Once upon a time, there was a little"},
    "chat": {"messages": [{"role": "user", "content": "Tell me a story"}]},
}
PATHS: dict[Kind, str] = {"completion": "/v1/completions", "chat": "/v1/chat/completions"}
SENT_ELSEWHERE = {
    "model",
    "messages",
    "messages[].role",
    "messages[].content",
    "messages[].name",
    "messages[].tool_calls",
    "messages[].tool_call_id",
    "messages[].parsed",
    "messages[].tool_calls[].function.parsed_arguments",
    "tools[].function.strict",
    "structured_outputs.whitespace_pattern",
    "structured_outputs.disable_any_whitespace",
    "structured_outputs.disable_fallback",
    "continue_final_message",
    "chat_template_kwargs",
    "tools",
    "top_logprobs",
    "stream_options",
    "speculation",
}
"""Supported fields that depend on others or on the model's template; those of a chat are in :data:`CHATS`."""
NEEDS: dict[str, dict[str, Any]] = {"stream_options": {"stream": True, "stream_options": {"include_usage": True}}}
TEMPLATE = (
    "{% if style %}{{ style }}\n{% endif %}"
    "{% for t in tools or [] %}{{ t | tojson }}<tool_call>{}</tool_call>\n{% endfor %}"
    "{% for m in messages %}{{ m.name or m.role }}: {{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
ASKED: dict[str, Any] = {"role": "user", "content": "Is it warm in Rome?", "name": "Ann"}
CALLED: dict[str, Any] = {
    "role": "assistant",
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}],
}
TOLD: dict[str, Any] = {"role": "tool", "tool_call_id": "1", "content": "31 degrees"}
STRICT = WEATHER | {"function": WEATHER["function"] | {"strict": True}}
PAIR = {"type": "array", "minItems": 2, "maxItems": 2, "items": {"type": "integer"}}
PARSED = deepcopy(CALLED)
PARSED["tool_calls"][0]["function"]["parsed_arguments"] = {"city": "Rome"}
NAMED = {"type": "function", "function": {"name": "weather"}}
CHATS: list[dict[str, Any]] = [
    {"messages": [ASKED], "logprobs": True, "top_logprobs": 3},
    {"messages": [ASKED], "tools": [WEATHER]},
    {"messages": [ASKED], "tools": [WEATHER], "tool_choice": "none"},
    {"messages": [ASKED, CALLED, TOLD], "tools": [WEATHER]},
    {
        "messages": [ASKED],
        "tools": [WEATHER],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 60,
    },
    {"messages": [ASKED], "tools": [WEATHER], "tool_choice": NAMED, "max_tokens": 60, "temperature": 0},
    {"messages": [ASKED], "chat_template_kwargs": {"style": "Be brief."}},
    {"messages": [ASKED], "tools": [STRICT], "max_tokens": 40},
    {"messages": [ASKED], "tools": [STRICT], "response_format": {"type": "json_object"}, "max_tokens": 40},
    {"messages": [ASKED], "structured_outputs": {"json": PAIR, "disable_any_whitespace": True}},
    {"messages": [ASKED], "structured_outputs": {"json": PAIR, "whitespace_pattern": " ", "disable_fallback": True}},
    {"messages": [ASKED, {"role": "assistant", "content": "[]", "parsed": []}, PARSED, TOLD], "tools": [WEATHER]},
    {
        "messages": [ASKED, {"role": "assistant", "content": "It is"}],
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
]
CASES = [
    pytest.param(kind, row, example, id=f"{kind}-{row.name}-{json.dumps(example)}")
    for row in ROWS
    if row.support is not FieldSupport.REFUSED
    for kind in PATHS
    if row.of(kind)
    for example in row.examples
    if row.name != "speculation.enabled"  # which all of them send
]


def test_every_supported_field_has_an_example() -> None:
    assert {row.name for row in ROWS if row.support is not FieldSupport.REFUSED and not row.examples} == SENT_ELSEWHERE


def body_with(kind: Kind, row: FieldRow, example: object, *, enabled: bool) -> dict[str, Any]:
    body = {"max_tokens": 12, "seed": 3, **BASES[kind], "speculation": {"enabled": enabled}}
    if row.name == "max_completion_tokens":
        del body["max_tokens"]
    body |= NEEDS.get(row.inside or row.name, {})
    if not row.inside:
        return body | {row.name: example}
    return body | {row.inside: {**body.get(row.inside, {}), row.own_name: example}}


async def answer(client: httpx.AsyncClient, kind: Kind, body: dict[str, Any]) -> list[Any]:
    """What is said in each choice, with what stands beside it."""
    response = await client.post(PATHS[kind], json=body)
    assert response.status_code == 200, response.text
    if not body.get("stream"):
        return list(response.json()["choices"])
    texts: dict[int, str] = {}
    for line in response.text.split("\n\n"):
        if line and not line.endswith("[DONE]"):
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                said = choice.get("delta", {}).get("content", choice.get("text")) or ""
                texts[choice["index"]] = texts.get(choice["index"], "") + said
    return [texts[index] for index in sorted(texts)]


def near(value: Any) -> Any:
    """Equal but for the rounding of log-probabilities."""
    if isinstance(value, dict):
        return {name: near(item) for name, item in value.items()}
    if isinstance(value, list):
        return [near(item) for item in value]
    return pytest.approx(value, abs=1e-4) if isinstance(value, float) else value


@pytest.mark.slow
async def test_every_field_is_carried_out_the_same_with_speculation_and_without() -> None:
    async with (
        stack.target_worker() as target,
        stack.draft_worker() as draft,
        stack.dispatcher([target.worker.address], [draft.worker.address]) as serving,
    ):
        app = build_app(serving, Tokenizers(str(MODELS / "target")))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://paceline", timeout=60) as client:
            at_once = asyncio.Semaphore(8)
            await asyncio.gather(*(compare(client, at_once, *case.values) for case in CASES))
        assert serving.metrics.tally.recent.totals[2] > 0


@pytest.fixture
def with_tools(tmp_path: Path) -> Path:
    """The tokenizer of the bundled pair, with a template that knows tools, names and a style."""
    for file in ("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"):
        shutil.copy(MODELS / "target" / file, tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path


@pytest.mark.slow
async def test_conversations_are_the_same_with_speculation_and_without(with_tools: Path) -> None:
    async with (
        stack.target_worker() as target,
        stack.draft_worker() as draft,
        stack.dispatcher([target.worker.address], [draft.worker.address]) as serving,
    ):
        transport = httpx.ASGITransport(build_app(serving, Tokenizers(str(with_tools))))
        async with httpx.AsyncClient(transport=transport, base_url="http://paceline", timeout=60) as client:
            for chat in CHATS:
                body = {"max_tokens": 12, "seed": 3, **chat}
                drafted, plain = [
                    without_ids(await answer(client, "chat", body | {"speculation": {"enabled": on}}))
                    for on in (True, False)
                ]
                assert drafted == near(plain), chat
                if chat.get("tool_choice") in ("required", NAMED):
                    (called,) = drafted[0]["message"]["tool_calls"]
                    assert called["function"]["name"] == "weather"
                    assert json.loads(called["function"]["arguments"])["city"] in ("Oslo", "Rome")
                    assert drafted[0]["finish_reason"] == "tool_calls"
        assert serving.metrics.tally.recent.totals[2] > 0


def without_ids(choices: list[Any]) -> list[Any]:
    """Calls are numbered at random."""
    for choice in choices:
        for call in choice["message"].get("tool_calls") or []:
            del call["id"]
    return choices


async def compare(
    client: httpx.AsyncClient, at_once: asyncio.Semaphore, kind: Kind, row: FieldRow, example: object
) -> None:
    async with at_once:
        answers = [await answer(client, kind, body_with(kind, row, example, enabled=on)) for on in (True, False)]
    assert answers[0] == near(answers[1]), (kind, row.name, example)
