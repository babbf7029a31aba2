"""OpenAI's own client, for every kind of call, over a fake router on a real socket."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import openai
import pydantic
import pytest

from router.generation import Generation, ServedModel
from router.text.tokenizer import Tokenizer
from tests.fakes import EOS, FakeGenerator, commits, tiny_tokenizer
from tests.http_server import serve

TEXT = "hello 世界 🎉"
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>'
PLACE = '{"city": "Bern"}'
TEMPLATE = "{% for t in tools or [] %}{{ t | tojson }}<tool_call>{% endfor %}{{ messages[-1].content }}:"
MESSAGES: Any = [{"role": "user", "content": "hi"}]
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


@cache
def tokenizer() -> Tokenizer:
    return tiny_tokenizer(TEMPLATE)


def answer(generation: Generation) -> Any:
    """A call where tools are offered, else a text, or what was asked; each choice of several another."""
    prompt = tokenizer().decode(generation.prompt)
    said = CALL if "weather" in prompt else TEXT if prompt != "count:" else str(generation.sampling.seed)
    said = PLACE if prompt == f"{PLACE}:" else said
    return commits((*tokenizer().encode(said, special=False), EOS), (1, 4, 2))


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    model = ServedModel("tiny", tokenizer().size, 1024, tokenizer().digest)
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


class Place(pydantic.BaseModel):
    city: str


def test_tools_of_pydantic_models(client: openai.OpenAI) -> None:
    """They are strict, and the model may call them or not."""
    offered: Any = [openai.pydantic_function_tool(Place, name="weather")]
    (choice,) = client.chat.completions.parse(model="tiny", messages=MESSAGES, tools=offered).choices
    assert choice.message.tool_calls is not None
    assert [call.function.parsed_arguments for call in choice.message.tool_calls] == [Place(city="Bern")]


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_what_the_client_has_parsed_can_be_sent_back(client: openai.OpenAI) -> None:
    offered: Any = [openai.pydantic_function_tool(Place, name="weather")]
    asked: list[Any] = [{"role": "user", "content": PLACE}]
    answered = client.chat.completions.parse(model="tiny", messages=asked, response_format=Place).choices[0].message
    assert answered.parsed == Place(city="Bern")
    called = client.chat.completions.parse(model="tiny", messages=MESSAGES, tools=offered).choices[0].message
    with client.chat.completions.stream(model="tiny", messages=asked, response_format=Place) as stream:
        streamed = stream.get_final_completion().choices[0].message
    with client.chat.completions.stream(model="tiny", messages=MESSAGES, tools=offered) as stream:
        called_in_stream = stream.get_final_completion().choices[0].message
    results: list[Any] = []
    for message in (answered, streamed, called, called_in_stream):
        calls = [call.id for call in message.tool_calls or []]
        results += [message, *({"role": "tool", "tool_call_id": identity, "content": "warm"} for identity in calls)]
    assert len(results) == 6
    after = client.chat.completions.create(model="tiny", messages=[*MESSAGES, *results, *MESSAGES])
    assert after.choices[0].message.content == TEXT


def test_fields_of_a_message_that_are_null_are_taken(client: openai.OpenAI) -> None:
    nothing = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "parsed", "tool_calls", "name"))
    message: Any = {"role": "assistant", "content": "a"} | nothing
    after = client.chat.completions.create(model="tiny", messages=[*MESSAGES, message, *MESSAGES])
    assert after.choices[0].message.content == TEXT


def test_streamed_tools(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="tiny", messages=MESSAGES, tools=TOOLS) as stream:
        final = stream.get_final_completion()
    (choice,) = final.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    assert [call.function.name for call in choice.message.tool_calls] == ["weather"]
