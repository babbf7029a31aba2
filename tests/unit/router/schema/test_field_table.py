"""The table of fields against what parsing does: every example, every bound, every wrong type."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from router.errors import CODES, ApiError
from router.generation import ServedModel
from router.http.openapi import description
from router.schema.request_schema import Kind
from router.schema.requests import ApiRequest, ModelEntry
from speculation.messages import Sampling
from tests.api_page import ROWS, FieldRow, FieldSupport, document
from tests.fakes import BOS, EOS, TURN, tiny_tokenizer
from tests.parsing import parse_chat, parse_completion

CONTEXT = 64
BASES: dict[Kind, dict[str, Any]] = {
    "completion": {"prompt": "hi"},
    "chat": {"messages": [{"role": "user", "content": "hi"}]},
}
KINDS: tuple[Kind, ...] = ("completion", "chat")
ANYTHING: list[Any] = [3.5, -1, 10**400, "", "x", True, [], [None], ["x"], [-1], [3.5], {}, {"a": []}, {"9": "x"}]


@cache
def model_entry() -> ModelEntry:
    tokenizer = tiny_tokenizer()
    return ModelEntry("tiny", ServedModel("tiny", tokenizer.size, CONTEXT, 0), tokenizer, max_choices=4)


def parse(kind: Kind, **fields: Any) -> ApiRequest:
    body = json.dumps(BASES[kind] | fields).encode()
    return (parse_completion if kind == "completion" else parse_chat)(body, {"tiny": model_entry()}, "r1")


def refused(kind: Kind, row: FieldRow, value: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(kind, **{row.name: value})
    return caught.value


def top_level(*supports: FieldSupport) -> list[Any]:
    rows = [(kind, row) for row in ROWS for kind in KINDS if row.of(kind) and not row.inside]
    return [
        pytest.param(kind, row, id=f"{kind}-{row.name}")
        for kind, row in rows
        if not supports or row.support in supports
    ]


def test_every_field_is_there_once() -> None:
    for kind in KINDS:
        names = [row.name for row in ROWS if row.of(kind)]
        assert len(names) == len(set(names))


def test_the_document_is_current() -> None:
    assert (Path(__file__).parents[4] / "docs" / "api.md").read_text() == document()


@pytest.mark.parametrize(("kind", "row"), top_level(FieldSupport.SUPPORTED, FieldSupport.LABEL))
def test_examples_are_accepted(kind: Kind, row: FieldRow) -> None:
    for example in row.examples:
        parse(kind, **{row.name: example})
        if "pattern" not in json.dumps(row.schema):
            jsonschema.validate(example, row.schema)


@pytest.mark.parametrize(("kind", "row"), top_level())
def test_what_the_schema_does_not_allow_is_refused_by_name(kind: Kind, row: FieldRow) -> None:
    validator = jsonschema.Draft202012Validator(row.schema)
    for value in ANYTHING:
        if not validator.is_valid(value):
            error = refused(kind, row, value)
            assert (error.param or "").startswith(row.name), error.message
            assert "\n" not in error.message


@pytest.mark.parametrize(("kind", "row"), top_level(FieldSupport.SUPPORTED))
def test_numbers_are_bounded_as_the_table_says(kind: Kind, row: FieldRow) -> None:
    schema = row.schema
    low, high = schema.get("minimum"), schema.get("maximum")
    if "exclusiveMinimum" in schema:
        refused(kind, row, schema["exclusiveMinimum"])
    together = {"logprobs": True} if row.name == "top_logprobs" else {"echo": True} if kind == "completion" else {}
    for bound, beyond in ((low, -1), (high, 1)):
        if bound is None or row.name in ("n", "best_of", "max_tokens", "truncate_prompt_tokens"):
            continue
        parse(kind, **{**together, row.name: bound})
        refused(kind, row, bound + beyond)


def test_no_tokens_may_be_asked_for_with_echo_by_either_name() -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        assert parse("completion", **{name: 0, "echo": True}).prompt_only
        for kind in KINDS:
            assert refused(kind, FieldRow(name, {}, ""), 0).param == name


def test_null_leaves_a_field_of_the_table_out_and_makes_no_other_one_known() -> None:
    for kind in KINDS:
        parse(kind, **{row.name: None for row in ROWS if row.of(kind) and not row.inside and not row.required})
        assert refused(kind, FieldRow("foo", {}, ""), None).code.name == "unknown_parameter"


def test_objects_inside_the_body_are_described_with_what_they_take() -> None:
    for kind, name in zip(KINDS, ("CompletionRequest", "ChatCompletionRequest"), strict=True):
        schema = description("1.0")["components"]["schemas"][name]
        for fields in ({"json": {"type": "null"}, "disable_fallback": True}, {"regex": "a"}, {"json_object": True}):
            jsonschema.validate(BASES[kind] | {"structured_outputs": fields}, schema)
            parse(kind, structured_outputs=fields)


def test_sampling_fields_arrive() -> None:
    request = parse(
        "chat",
        presence_penalty=1,
        frequency_penalty=-0.5,
        repetition_penalty=1.5,
        logit_bias={"9": 5, "2": -100, "3": 0},
        allowed_token_ids=[9, 4, 9],
        seed=1,
        min_tokens=3,
        logprobs=True,
        top_logprobs=2,
        prompt_logprobs=0,
    )
    (generation,) = request.generations
    assert generation.sampling == Sampling(
        seed=1,
        presence_penalty=1.0,
        frequency_penalty=-0.5,
        repetition_penalty=1.5,
        bias=((2, -100.0), (9, 5.0)),
        allowed=(4, 9),
    )
    assert generation.min_tokens == 3
    assert (generation.request_options.logprobs, generation.request_options.prompt_logprobs) == (2, 0)


def test_bad_words_are_banned_at_the_start_and_after_a_space() -> None:
    tokenizer = model_entry().tokenizer
    (generation,) = parse("completion", bad_words=["hello", " hello", "world", "z"]).generations
    written = [tokenizer.encode(space + word, special=False) for word in ("hello", "world", "z") for space in ("", " ")]
    assert len({len(tokens) for tokens in written[2:4]}) == 2
    assert set(generation.sampling.banned) == {*written}


BAD: list[tuple[Kind, dict[str, Any], str, str]] = [
    ("chat", {"logit_bias": {"100000": 1}}, "logit_bias", "100000"),
    ("chat", {"logit_bias": {"01": 1}}, "logit_bias", "'01'"),
    ("chat", {"logit_bias": {"\u0663": 1}}, "logit_bias", "token ids"),
    ("chat", {"logit_bias": {"5": 101}}, "logit_bias.5", "101"),
    ("chat", {"logit_bias": {"5": None}}, "logit_bias.5", "null"),
    ("chat", {"logit_bias": {"<array>": "x"}}, "logit_bias.<array>", '"x"'),
    ("chat", {"logit_bias": dict.fromkeys(map(str, range(9999)), "x")}, "logit_bias", "at most 1024"),
    ("chat", {"metadata": dict.fromkeys(map(str, range(9999)), 1)}, "metadata", "at most 16"),
    ("chat", {"allowed_token_ids": [10**6]}, "allowed_token_ids", "1000000"),
    ("chat", {"allowed_token_ids": []}, "allowed_token_ids", "no token"),
    ("chat", {"bad_words": [" "]}, "bad_words[0]", "word"),
    ("chat", {"stop": ["a"] * 10_000}, "stop", "at most 16"),
    ("chat", {"top_logprobs": 3}, "top_logprobs", "unless logprobs"),
    (
        "completion",
        {"stream": True, "stream_options": {"continuous_usage_stats": True}},
        "stream_options.continuous_usage_stats",
        "unless include_usage",
    ),
    ("chat", {"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "streamed"),
    ("chat", {"min_tokens": 9, "max_tokens": 8}, "min_tokens", "0 to 8"),
    ("chat", {"chat_template": "{{ messages }}"}, "chat_template", "program"),
    ("chat", {"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs.enable_thinking", "no such"),
    ("chat", {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", "no such"),
    ("chat", {"reasoning_effort": "high"}, "reasoning_effort", "no such variable"),
    ("chat", {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "false"),
    ("completion", {"best_of": 3, "n": 2}, "best_of", "what n is (2)"),
    ("completion", {"max_tokens": 0}, "max_tokens", "at least 1"),
    ("completion", {"suffix": "x"}, "suffix", "fill-in-the-middle"),
    ("completion", {"logprobs": 21}, "logprobs", "0 to 20"),
    ("completion", {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "-1"),
    ("completion", {"metadata": {"a": "x" * 600}}, "metadata", "512"),
    ("completion", {"user": "x" * 600}, "user", "512"),
]


@pytest.mark.parametrize(("kind", "fields", "param", "text"), BAD)
def test_bad_values_are_refused_by_name(kind: Kind, fields: dict[str, Any], param: str, text: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse(kind, **fields)
    assert caught.value.param == param
    assert text in caught.value.message
    assert len(caught.value.message) < 400


def test_prompts_can_be_cut_from_the_left() -> None:
    whole = parse("completion", prompt="hello world").generations[0].prompt
    assert parse("completion", prompt="hello world", truncate_prompt_tokens=2).generations[0].prompt == whole[-2:]
    (generation,) = parse("completion", prompt=[5] * 100, truncate_prompt_tokens=-1, max_tokens=10).generations
    assert (len(generation.prompt), generation.max_tokens) == (CONTEXT - 10, 10)
    assert len(parse("chat", truncate_prompt_tokens=3).generations[0].prompt) == 3


def test_special_tokens_around_a_text_are_a_choice() -> None:
    with_them = parse("completion").generations[0].prompt
    assert parse("completion", add_special_tokens=False).generations[0].prompt == with_them[1:]
    plain = parse("chat").generations[0].prompt
    assert parse("chat", add_special_tokens=True).generations[0].prompt == (0, *plain)


def test_the_last_message_can_be_continued() -> None:
    tokenizer = model_entry().tokenizer
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello wor"}]
    (opened,) = parse("chat", messages=messages).generations
    (closed,) = parse("chat", messages=messages, add_generation_prompt=False).generations
    request = parse("chat", messages=messages, continue_final_message=True)
    assert tokenizer.decode(opened.prompt).endswith("hello wor\nassistant:")
    assert tokenizer.decode(closed.prompt).endswith("hello wor\n")
    assert tokenizer.decode(request.generations[0].prompt).endswith("assistant: hello wor")
    assert request.continues


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
TRIMMING = CHATML.replace("m.content", "m.content | trim")


@pytest.mark.parametrize("template", [CHATML, TRIMMING])
@pytest.mark.parametrize("content", ["<", "end", "assistant", "Sure,", "\n a", "hello \n", "<|im_end|>", "a\n"])
def test_what_is_continued_is_the_last_message_and_not_what_the_template_puts_after_it(
    template: str, content: str
) -> None:
    tokenizer = tiny_tokenizer(template)
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": content}]
    body = json.dumps({"messages": messages, "continue_final_message": True}).encode()
    request = parse_chat(body, {"tiny": ModelEntry("tiny", model_entry().model, tokenizer, max_choices=4)}, "r1")
    written = content.strip() if template == TRIMMING else content
    prompt = tokenizer.decode(request.generations[0].prompt)
    assert prompt == f"<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n{written}"


@pytest.mark.parametrize(
    ("template", "content"), [(CHATML.replace("m.content", "m.content | upper"), "hi"), (CHATML, ""), (CHATML, " ")]
)
def test_a_message_that_is_not_written_as_it_is_cannot_be_continued(template: str, content: str) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": content}]
    body = json.dumps({"messages": messages, "continue_final_message": True}).encode()
    with pytest.raises(ApiError, match="does not write the last message") as caught:
        parse_chat(
            body, {"tiny": ModelEntry("tiny", model_entry().model, tiny_tokenizer(template), max_choices=4)}, "r1"
        )
    assert caught.value.param == "continue_final_message"


@pytest.mark.parametrize(
    ("fields", "ends"),
    [
        ({"stop": "<turn>"}, {EOS, TURN}),
        ({"stop": ["<bos>", "<turn>", "<turn"], "include_stop_str_in_output": True}, {EOS, BOS, TURN}),
        ({"stop": ["a", "<eos>"], "ignore_eos": True}, {EOS}),
        ({"stop": ["a", "<turn> ", "<none>"]}, {EOS}),
        ({"stop": ["<turn>"], "skip_special_tokens": False}, {EOS}),  # its text ends the text
    ],
)
def test_a_stop_string_that_names_a_token_without_text_is_that_token(fields: dict[str, Any], ends: set[int]) -> None:
    messages = [{"role": "user", "content": "hi"}]
    body = json.dumps({"messages": messages} | fields).encode()
    request = parse_chat(body, {"tiny": model_entry()}, "r1")
    assert request.generations[0].stop_tokens == ends


def test_the_description_is_openapi_and_knows_every_field() -> None:
    document = description("1.0")
    schemas = document["components"]["schemas"]
    for kind, name in zip(KINDS, ("CompletionRequest", "ChatCompletionRequest"), strict=True):
        jsonschema.Draft202012Validator.check_schema(schemas[name])
        assert set(schemas[name]["properties"]) == {row.name for row in ROWS if row.of(kind) and not row.inside}
        jsonschema.validate(BASES[kind], schemas[name])
    codes = schemas["Error"]["properties"]["error"]["properties"]["code"]["enum"]
    assert set(codes) == CODES.keys()
