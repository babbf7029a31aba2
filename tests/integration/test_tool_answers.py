"""Answers that call tools: where they end, and what of odd calls is read, however the text arrives."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import repeat
from random import Random
from typing import Any

import pytest

from router.schema.prompts import ALWAYS_READ
from router.text.tokenizer import Tokenizer
from router.text.tool_calls import Found, HermesParser, ToolCall
from tests.fakes import EOS
from tests.integration.test_answers import PATHS, TOOL_TEMPLATE, WEATHER, call, encode, generator, post, whole

SIZES = [(1,), (3, 5), (400,)]


async def answers(text: str, **fields: Any) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The same text, committed in other portions each time: the answer and its usage."""
    asked = {"tools": [WEATHER], **fields}
    found = []
    for sizes in SIZES:
        response = await post(generator((*encode(text), EOS), sizes), PATHS[1], asked)
        (answer,) = whole(response)
        found.append((answer, response.json()["usage"]))
    return found


@pytest.mark.parametrize("stop", [[], ["Done"], [">\nDone. A!"]])
async def test_where_the_first_call_is_the_end_drafts_behind_it_are_not_read(stop: list[str]) -> None:
    told = {"logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    text = "Well. " + call(a=1) + "\nDone. All good."
    first, *others = await answers(text, parallel_tool_calls=False, stop=stop, **told)
    answer, usage = first
    assert (answer["text"], [one["arguments"] for one in answer["calls"]]) == ("Well.", ['{"a": 1}'])
    assert answer["finish"] == "tool_calls"
    assert usage["completion_tokens"] == len(answer["token_ids"]) == len(answer["logprobs"]["content"])
    if not stop or stop == ["Done"]:  # the other one begins with the end of the call, which so is known later
        assert usage["completion_tokens"] == len(encode("Well. " + call(a=1)))
    for other, counted in others:
        assert other == answer
        assert counted["completion_tokens"] == usage["completion_tokens"]


LONG = "x " * (ALWAYS_READ // 2)
CALLING = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": json.dumps({"a": LONG})}}]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f", "description": LONG}}]}, "messages"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": [LONG]}}}]}, "messages"),
        ({"messages": [CALLING], "tools": [WEATHER]}, "messages"),
        ({"prediction": {"type": "content", "content": LONG + "x"}}, "prediction.content"),
    ],
)
async def test_what_cannot_fit_is_not_tokenised_wherever_it_stands(
    fields: dict[str, Any], param: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = Tokenizer.encode

    def only_short_ones(self: Tokenizer, text: str, **how: bool) -> tuple[int, ...]:
        assert len(text) <= ALWAYS_READ
        return encode(self, text, **how)

    monkeypatch.setattr(Tokenizer, "encode", only_short_ones)
    response = await post(generator(()), PATHS[1], fields)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", param)
    assert "characters" in error["message"]


async def test_arguments_go_by_either_name() -> None:
    text = '<tool_call>{"name": "weather", "parameters": {"city": "Bern"}}</tool_call>'
    for answer, _ in await answers(text):
        assert [one["arguments"] for one in answer["calls"]] == ['{"city": "Bern"}']


CLOSE = "</tool_call>"
CALL = call(a=1)
ODD: list[tuple[str, str, list[str]]] = [
    (call(html=f"a{CLOSE}b"), "", [json.dumps({"html": f"a{CLOSE}b"})]),
    (call(html=f'"\\{CLOSE}" \\\\{CLOSE}') + " so", "so", [json.dumps({"html": f'"\\{CLOSE}" \\\\{CLOSE}'})]),
    (call(html=CLOSE * 8), "", [json.dumps({"html": CLOSE * 8})]),
    (call(html=CLOSE * 9), call(html=CLOSE * 9), []),
    (call(html=f"a{CLOSE}b").removesuffix(CLOSE), "", [json.dumps({"html": f"a{CLOSE}b"})]),
    (f'<tool_call>{{"na{CLOSE} so {CALL}', f'<tool_call>{{"na{CLOSE} so', ['{"a": 1}']),
    (f'<tool_call>{{"na{CLOSE} so "', f'<tool_call>{{"na{CLOSE} so "', []),
    (f"<tool_call>no{CLOSE} so {CALL}", f"<tool_call>no{CLOSE} so", ['{"a": 1}']),
    (f"<think>Maybe {CALL}? No.</think>\n\n{call(b=2)}", f"<think>Maybe {CALL}? No.</think>", ['{"b": 2}']),
    (f"\n<think>\n{CALL}\n</thin {CALL}", f"\n<think>\n{CALL}\n</thin {CALL}", []),
    (f"<think></think>{CALL}<think>{call(b=2)}", "<think></think><think>", ['{"a": 1}', '{"b": 2}']),
    (f"So <think> is a tag. {CALL}", "So <think> is a tag.", ['{"a": 1}']),
    (f"I call in <tool_call> tags.\n{CALL}", "I call in <tool_call> tags.", ['{"a": 1}']),
    (f'Draft: <tool_call>{{"name": "f", ...\n{CALL} so', 'Draft: <tool_call>{"name": "f", ...so', ['{"a": 1}']),
    (f"<tool_call>\n{CALL}", "<tool_call>", ['{"a": 1}']),
    (f"<tool_call>\n{CALL}".removesuffix(CLOSE), "<tool_call>", ['{"a": 1}']),
    ("a <tool_call> b <tool_call> c" + CALL + CALL, "a <tool_call> b <tool_call> c", ['{"a": 1}'] * 2),
    ("<tool_call> or " + call(a="<tool_call>"), "<tool_call> or", ['{"a": "<tool_call>"}']),
    (call(a=f"<tool_call>{{{CLOSE}"), "", [json.dumps({"a": f"<tool_call>{{{CLOSE}"})]),
    (f'<tool_call>"{CLOSE}' * 12 + CALL, f'<tool_call>"{CLOSE}' * 12, ['{"a": 1}']),
]


@pytest.mark.parametrize(("text", "content", "arguments"), ODD)
async def test_closing_tags_within_arguments(text: str, content: str, arguments: list[str]) -> None:
    for answer, _ in await answers(text):
        assert ([one["arguments"] for one in answer["calls"]], answer["text"]) == (arguments, content)


@pytest.mark.parametrize("end", ["<think>", "<think>\n"])
@pytest.mark.parametrize(
    ("text", "content", "arguments"),
    [
        (f"\nMaybe {CALL}? No.\n</think>\n\n{call(b=2)}", f"\nMaybe {CALL}? No.\n</think>", ['{"b": 2}']),
        (f"Maybe {CALL}? No.", f"Maybe {CALL}? No.", []),
        (f"<think>\n{CALL}</think>so", f"<think>\n{CALL}</think>so", []),
        (f"\n{CALL}", "", ['{"a": 1}']),  # none at all
    ],
)
async def test_what_a_prompt_has_opened_is_reasoning(end: str, text: str, content: str, arguments: list[str]) -> None:
    template = TOOL_TEMPLATE.replace("assistant:", end)
    for sizes in SIZES:
        response = await post(generator((*encode(text), EOS), sizes), PATHS[1], {"tools": [WEATHER]}, template)
        (answer,) = whole(response)
        assert ([one["arguments"] for one in answer["calls"]], answer["text"]) == (arguments, content)


def read(text: str, sizes: Iterator[int]) -> tuple[str, list[ToolCall]]:
    parser, found = HermesParser(), Found()
    while text:
        size = next(sizes)
        found, text = found.then(parser.push(text[:size])), text[size:]
    found = found.then(parser.finish())
    return found.content, found.calls


def test_calls_are_the_same_however_the_text_arrives() -> None:
    rng = Random(16)
    parts = [
        "<think>",
        "</think>",
        "<tool_call>",
        CLOSE,
        '"',
        "\\",
        '{"name": "f", "arguments": {"a": "',
        '"}}',
        " ",
        "x",
        "</tool",
        CALL,
    ]
    called = 0
    for _ in range(2000):
        text = "".join(rng.choices(parts, k=rng.randint(1, 14)))
        whole = read(text, repeat(len(text)))
        assert whole == read(text, repeat(1))
        assert whole == read(text, iter(lambda: rng.randint(1, 9), 0))
        assert whole[1] or whole[0] == text
        called += bool(whole[1])
    assert called > 200


@pytest.mark.parametrize("stream", [False, True])
async def test_every_call_has_an_id_of_its_own_that_others_take_back(stream: bool) -> None:
    fields = {"tools": [WEATHER], "n": 3, "stream": stream}
    response = await post(generator((*encode(CALL + CALL), EOS)), PATHS[1], fields)
    ids = re.findall(r'"id":"(call_[0-9a-f_]+)"', response.text)
    assert len(set(ids)) == len(ids) == 6
    assert all(len(one) <= 40 for one in ids)


async def test_a_schema_that_the_template_cannot_write_is_refused() -> None:
    template = TOOL_TEMPLATE.replace("{{ t | tojson }}", "{{ t.function.parameters.properties | dictsort }}")
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": [1]}}}
    response = await post(generator((*encode("x"), EOS)), PATHS[1], {"tools": [tool]}, template)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "messages")
