"""OpenAI's own client, for every kind of call, over a fake router on a real socket."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import openai
import pytest

from router.generation import Generation, ServedModel
from router.tokenizer import Tokenizer
from tests.fakes import EOS, FakeGenerator, commits, tiny_tokenizer
from tests.http_server import serve

TEXT = "hello 世界 🎉"
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>'
TEMPLATE = "{% for t in tools or [] %}{{ t | tojson }}<tool_call>{% endfor %}{{ messages[-1].content }}:"
MESSAGES: Any = [{"role": "user", "content": "hi"}]
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


@cache
def tokenizer() -> Tokenizer:
    return tiny_tokenizer(TEMPLATE)


def answer(generation: Generation) -> Any:
    """A call where tools are offered, else a text; each choice of several another."""
    prompt = tokenizer().decode(generation.prompt)
    said = CALL if "weather" in prompt else TEXT if prompt != "count:" else str(generation.sampling.seed)
    return commits((*tokenizer().encode(said, special=False), EOS), (1, 4, 2))


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    model = ServedModel("tiny", tokenizer().size, 256, tokenizer().digest)
    with serve(FakeGenerator(answer, model=model), tokenizer()) as url:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as opened:
            yield opened


def test_completions_with_logprobs_and_echo(client: openai.OpenAI) -> None:
    found = client.completions.create(
        model="tiny",
        prompt="hi",
        max_tokens=99,
        logprobs=2,
        echo=True,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        logit_bias={"5": 1},
        best_of=1,
        user="me",
    )
    (choice,) = found.choices
    assert choice.text == "hi" + TEXT
    assert choice.logprobs is not None
    assert choice.logprobs.text_offset is not None
    assert choice.logprobs.tokens is not None
    assert len(choice.logprobs.tokens) == len(choice.logprobs.text_offset)
    assert choice.logprobs.text_offset[-1] == len(choice.text)


def test_chat_with_logprobs_streamed_and_not(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "messages": MESSAGES, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**asked).choices[0]
    assert whole.logprobs is not None
    assert whole.logprobs.content is not None
    assert b"".join(bytes(token.bytes or ()) for token in whole.logprobs.content).decode() == TEXT
    streamed = []
    for chunk in client.chat.completions.create(**asked, stream=True):
        logprobs = chunk.choices[0].logprobs
        streamed += logprobs.content or [] if logprobs is not None else []
    assert streamed == whole.logprobs.content


def test_three_choices(client: openai.OpenAI) -> None:
    counted: Any = [{"role": "user", "content": "count"}]
    found = client.chat.completions.create(model="tiny", messages=counted, n=3, seed=4)
    assert len({choice.message.content for choice in found.choices}) == 3
    assert found.choices[0].message.content == "4"


def test_tools(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "tool_choice": "auto"}
    (choice,) = client.chat.completions.create(**asked).choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert json.loads(call.function.arguments) == {"city": "Bern"}
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "warm"}
    after = client.chat.completions.create(model="tiny", messages=[*MESSAGES, choice.message, result])
    assert after.choices[0].message.content == TEXT


def test_streamed_tools(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="tiny", messages=MESSAGES, tools=TOOLS) as stream:
        final = stream.get_final_completion()
    (choice,) = final.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    assert [call.function.name for call in choice.message.tool_calls] == ["weather"]
