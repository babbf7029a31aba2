"""Raw JSON to a request that can run: defaults, bounds, and errors that name the field."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.errors import CODES, ApiError
from router.generation import ServedModel
from router.schema import prompts
from router.schema.request_schema import BODIES
from router.schema.requests import ApiRequest, ModelEntry, parse_object, read_body
from speculation.events import FailureCode
from speculation.messages import RefusalCode, Sampling, Speculation
from tests.fakes import BOS, EOS, tiny_tokenizer
from tests.parsing import parse_chat, parse_completion

CONTEXT = 64
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


@cache
def model_entry(*, template: bool = True) -> ModelEntry:
    tokenizer = tiny_tokenizer() if template else tiny_tokenizer(chat_template=None)
    return ModelEntry("tiny", ServedModel("tiny", tokenizer.size, CONTEXT, 0), tokenizer, max_choices=4)


def completion(**fields: Any) -> ApiRequest:
    return parse_completion(json.dumps({"prompt": "hi"} | fields).encode(), {"tiny": model_entry()}, "r1")


def chat(**fields: Any) -> ApiRequest:
    return parse_chat(json.dumps(CHAT | fields).encode(), {"tiny": model_entry()}, "r1")


def refusal(parse: Any, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(**fields)
    return caught.value


def test_defaults_are_openais() -> None:
    request = completion(seed=7)
    (generation,) = request.generations
    assert generation.sampling == Sampling(temperature=1.0, seed=7)
    assert generation.max_tokens == 16
    assert generation.stop_tokens == {EOS}
    assert generation.speculation == Speculation()
    assert generation.request_id == "r1"
    assert generation.prompt[0] == BOS
    assert request.prompt_tokens == len(generation.prompt)
    assert (request.model, request.stop, request.stream) == ("tiny", (), False)


def test_chat_takes_the_rest_of_the_context() -> None:
    (generation,) = chat().generations
    assert len(generation.prompt) + generation.max_tokens == CONTEXT


def test_a_default_that_does_not_fit_shrinks() -> None:
    (generation,) = completion(prompt=[5] * (CONTEXT - 3)).generations
    assert generation.max_tokens == 3


def test_every_field_arrives() -> None:
    request = completion(
        model="tiny",
        max_tokens=9,
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        seed=-1,
        stop=["a", "b", "a"],
        stop_token_ids=[9],
        ignore_eos=True,
        stream=True,
        stream_options={"include_usage": True, "include_speculation": True},
        user="me",
        priority=-3,
        speculation={"enabled": False, "max_depth": 3},
    )
    (generation,) = request.generations
    assert generation.sampling == Sampling(0.5, 5, 0.9, 0.1, 2**64 - 1)
    assert (generation.max_tokens, generation.stop_tokens) == (9, frozenset({9}))
    assert generation.priority == -3
    assert generation.speculation == Speculation(enabled=False, max_depth=3)
    assert request.stop == ("a", "b")
    shown = request.stream_options
    assert (request.stream, shown.include_usage, shown.include_speculation) == (True, True, True)


def test_null_stands_for_every_absent_field() -> None:
    fields = dict.fromkeys((BODIES["completion"].names | BODIES["completion"].refused.keys()) - {"prompt"})
    assert completion(**fields).generations[0].max_tokens == 16
    fields = dict.fromkeys((BODIES["chat"].names | BODIES["chat"].refused.keys()) - {"messages"})
    assert chat(**fields).kind == "chat"


@pytest.mark.parametrize("parse", [completion, chat])
def test_refused_fields_give_their_reason_and_take_values_that_ask_for_nothing(parse: Any) -> None:
    for name, (reason, neutral) in BODIES["completion" if parse is completion else "chat"].refused.items():
        for value in neutral:
            parse(**{name: value})
        error = refusal(parse, **{name: "something else"})
        assert (error.code.name, error.param) == ("unsupported_parameter", name)
        assert reason in error.message
    assert refusal(parse, length_penalty=True).param == "length_penalty"
    parse(length_penalty=1.0)


@pytest.mark.parametrize(
    ("value", "code"), [(101, "invalid_value"), (-101, "invalid_value"), (1.0, "invalid_type"), (True, "invalid_type")]
)
def test_priorities_are_bounded_whole_numbers(value: object, code: str) -> None:
    error = refusal(completion, priority=value)
    assert (error.code.name, error.param) == (code, "priority")
    assert error.message == f"priority must be an integer from -100 to 100, got {json.dumps(value)}"
    assert completion().generations[0].priority == 0


def test_choices_have_their_own_seeds_and_the_first_keeps_the_requests() -> None:
    one, several = completion(seed=3), completion(seed=3, n=4)
    assert several.generations[0] == one.generations[0]
    assert len({g.sampling.seed for g in several.generations}) == 4
    assert several == completion(seed=3, n=4)
    assert several.prompt_tokens == one.prompt_tokens


def test_requests_without_seed_do_not_share_one() -> None:
    assert len({completion().generations[0].sampling.seed for _ in range(20)}) == 20


def test_prompts_in_all_forms() -> None:
    ids = list(completion(prompt="hi").generations[0].prompt)
    assert completion(prompt=["hi"]).generations[0].prompt == tuple(ids)
    assert completion(prompt=ids).generations[0].prompt == tuple(ids)
    several = completion(prompt=["hi", ids[:1]], n=2, seed=1)
    assert [g.prompt for g in several.generations] == [tuple(ids)] * 2 + [tuple(ids[:1])] * 2
    assert several.prompt_tokens == len(ids) + 1
    assert len({g.sampling.seed for g in several.generations}) == 4


def test_messages_in_all_forms() -> None:
    parts = [{"type": "text", "text": "hi"}, {"type": "text", "text": "you"}]
    assert chat(messages=[{"role": "user", "content": parts}]).generations[0].prompt == (
        chat(messages=[{"role": "user", "content": "hi\nyou"}]).generations[0].prompt
    )
    answer: dict[str, Any] = {
        "role": "assistant",
        "content": "x",
        "refusal": None,
        "tool_calls": None,
        "annotations": [],
    }
    chat(messages=[{"role": "developer", "content": "be kind", "name": "boss"}, answer])


BAD_COMPLETIONS: list[tuple[dict[str, Any], str, str, str]] = [
    ({"model": "gpt-4"}, "model_not_found", "model", "'tiny'"),
    ({"model": 3}, "invalid_type", "model", "3"),
    ({"prompt": None}, "missing_required_parameter", "prompt", "prompt"),
    ({"prompt": ""}, "invalid_value", "prompt", "empty"),
    ({"prompt": []}, "invalid_value", "prompt", "empty"),
    ({"prompt": ["hi", ""]}, "invalid_value", "prompt[1]", "empty"),
    ({"prompt": 3}, "invalid_type", "prompt", "3"),
    ({"prompt": {"text": "hi"}}, "invalid_type", "prompt", "string"),
    ({"prompt": [1, True]}, "invalid_type", "prompt", "true"),
    ({"prompt": [1, "a"]}, "invalid_type", "prompt", "mixture"),
    ({"prompt": ["a", 1]}, "invalid_type", "prompt[1]", "1"),
    ({"prompt": [[1], [None]]}, "invalid_type", "prompt[1]", "null"),
    ({"prompt": [5, 100_000]}, "invalid_value", "prompt", "100000"),
    ({"prompt": [-1]}, "invalid_value", "prompt", "-1"),
    ({"prompt": ["a"] * 5}, "invalid_value", "prompt", "at most 4"),
    ({"prompt": ["a"] * 3, "n": 2}, "invalid_value", "n", "at most 1"),
    ({"prompt": [5] * CONTEXT}, "context_length_exceeded", "prompt", "64 tokens"),
    ({"prompt": "zqj" * 2000}, "context_length_exceeded", "prompt", "6001 tokens"),
    ({"max_tokens": 0}, "invalid_value", "max_tokens", "0"),
    ({"max_tokens": -5}, "invalid_value", "max_tokens", "-5"),
    ({"max_tokens": CONTEXT}, "context_length_exceeded", "max_tokens", "at most"),
    ({"max_tokens": 10**400}, "context_length_exceeded", "max_tokens", "at most"),
    ({"max_completion_tokens": 10**6}, "context_length_exceeded", "max_completion_tokens", "1000000"),
    ({"max_tokens": 3, "max_completion_tokens": 3}, "invalid_value", "max_completion_tokens", "not both"),
    ({"max_tokens": True}, "invalid_type", "max_tokens", "true"),
    ({"max_tokens": 16.0}, "invalid_type", "max_tokens", "16.0"),
    ({"max_tokens": "16"}, "invalid_type", "max_tokens", '"16"'),
    ({"temperature": -0.1}, "invalid_value", "temperature", "-0.1"),
    ({"temperature": 101}, "invalid_value", "temperature", "100"),
    ({"temperature": 10**400}, "invalid_value", "temperature", "100"),
    ({"temperature": 1e-9}, "invalid_value", "temperature", "greedy"),
    ({"temperature": False}, "invalid_type", "temperature", "false"),
    ({"top_p": 0}, "invalid_value", "top_p", "more than 0"),
    ({"top_p": 1.1}, "invalid_value", "top_p", "1.1"),
    ({"top_k": -2}, "invalid_value", "top_k", "-2"),
    ({"top_k": 1.5}, "invalid_type", "top_k", "1.5"),
    ({"min_p": 2}, "invalid_value", "min_p", "2"),
    ({"seed": "1"}, "invalid_type", "seed", '"1"'),
    ({"seed": 2**64}, "invalid_value", "seed", str(2**64)),
    ({"stop": 3}, "invalid_type", "stop", "3"),
    ({"stop": ""}, "invalid_value", "stop", "1 to 256"),
    ({"stop": ["a", None]}, "invalid_type", "stop", "null"),
    ({"stop": ["a"] * 10_000}, "invalid_value", "stop", "at most 16"),
    ({"stop": "a" * 257}, "invalid_value", "stop", "256"),
    ({"stop_token_ids": 1}, "invalid_type", "stop_token_ids", "array"),
    ({"stop_token_ids": [True]}, "invalid_type", "stop_token_ids", "true"),
    ({"stop_token_ids": [10**9]}, "invalid_value", "stop_token_ids", "below"),
    ({"ignore_eos": 1}, "invalid_type", "ignore_eos", "true or false"),
    ({"stream": "yes"}, "invalid_type", "stream", "yes"),
    ({"stream_options": {"include_usage": True}}, "invalid_value", "stream_options", "stream is true"),
    ({"stream": True, "stream_options": {"usage": True}}, "unknown_parameter", "stream_options.usage", "include_usage"),
    ({"stream": True, "stream_options": []}, "invalid_type", "stream_options", "object"),
    ({"n": 0}, "invalid_value", "n", "1 to 4"),
    ({"n": 5}, "invalid_value", "n", "1 to 4"),
    ({"user": 5}, "invalid_type", "user", "5"),
    ({"speculation": False}, "invalid_type", "speculation", "object"),
    ({"speculation": {"max_dept": 3}}, "unknown_parameter", "speculation.max_dept", "'max_depth'"),
    ({"speculation": {"max_depth": 0}}, "invalid_value", "speculation.max_depth", "0"),
    ({"speculation": {"enabled": "no"}}, "invalid_type", "speculation.enabled", "no"),
    ({"temprature": 1}, "unknown_parameter", "temprature", "'temperature'"),
    ({"messages": []}, "unknown_parameter", "messages", "messages"),
    ({"x" * 5000: None}, "unknown_parameter", "x" * 64 + "...", "no field"),
]


@pytest.mark.parametrize(("fields", "code", "param", "text"), BAD_COMPLETIONS)
def test_bad_completions_name_the_field(fields: dict[str, Any], code: str, param: str, text: str) -> None:
    error = refusal(completion, **fields)
    assert (error.code.name, error.param) == (code, param)
    assert text in error.message
    assert len(error.message) < 400


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"} | fields]}


IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}
CALLED = "messages[0].tool_calls[0].function.arguments"
BAD_CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": None}, "missing_required_parameter", "messages"),
    ({"messages": []}, "invalid_value", "messages"),
    ({"messages": "hi"}, "invalid_type", "messages"),
    ({"messages": ["hi"]}, "invalid_type", "messages[0]"),
    ({"prompt": "hi"}, "unknown_parameter", "prompt"),
    (message(role=None), "missing_required_parameter", "messages[0].role"),
    (message(role="robot"), "invalid_value", "messages[0].role"),
    (message(role="tool"), "missing_required_parameter", "messages[0].tool_call_id"),
    (message(role="tool", tool_call_id="1"), "unsupported_parameter", "messages[0].role"),
    (message(content=None), "missing_required_parameter", "messages[0].content"),
    (message(content=3), "invalid_type", "messages[0].content"),
    (message(content=[]), "invalid_type", "messages[0].content"),
    (message(content=["hi"]), "invalid_type", "messages[0].content[0]"),
    (message(content=[IMAGE]), "unsupported_parameter", "messages[0].content[0].type"),
    (message(content=[{"type": "text"}]), "missing_required_parameter", "messages[0].content[0].text"),
    (message(contents="x"), "unknown_parameter", "messages[0].contents"),
    (message(tool_calls=[{}]), "missing_required_parameter", "messages[0].tool_calls[0].function"),
    *(
        (
            message(role="assistant", tool_calls=[{"function": {"name": "f", "arguments": text}}]),
            "invalid_value",
            CALLED,
        )
        for text in ("[]", "{", '{"x": NaN}', '{"x": -Infinity}', '{"x": 1e999}', '{"x": "\\ud800"}', '{"x":' * 9999)
    ),
    (message(content="zqj" * 100), "context_length_exceeded", "messages"),
]


@pytest.mark.parametrize(("fields", "code", "param"), BAD_CHATS)
def test_bad_chats_name_the_field(fields: dict[str, Any], code: str, param: str) -> None:
    error = refusal(chat, **fields)
    assert (error.code.name, error.param) == (code, param)


def test_a_model_without_chat_template_cannot_chat() -> None:
    with pytest.raises(ApiError, match="no chat template") as caught:
        parse_chat(json.dumps(CHAT).encode(), {"tiny": model_entry(template=False)}, "r1")
    assert caught.value.code.name == "no_chat_template"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b'{"temperature": NaN}',
        b'{"temperature": -Infinity}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\\uDfff"}',
        b'{"a":' * 100_000,
        b'{"max_tokens": ' + b"9" * 5000 + b"}",
    ],
)
def test_bodies_that_are_no_json_object_are_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse_object(body)
    assert caught.value.code.name == "invalid_json"
    assert len(caught.value.message) < 300


def test_pairs_of_surrogates_and_byte_order_marks_are_fine() -> None:
    assert parse_object(b'\xef\xbb\xbf{"prompt": "\\ud83c\\udf89"}') == {"prompt": "🎉"}


def test_an_overflowing_float_is_refused() -> None:
    with pytest.raises(ApiError, match="temperature"):
        parse_completion(b'{"prompt": "hi", "temperature": 1e999}', {"tiny": model_entry()}, "r1")


@pytest.mark.parametrize("number", ["1e999", "-1e999"])
@pytest.mark.parametrize(
    ("where", "fields"),
    [
        (
            "tools[0].function.parameters",
            '"tools": [{"type": "function", "function": {"name": "f", "parameters": %s}}]',
        ),
        ("chat_template_kwargs", '"chat_template_kwargs": %s'),
    ],
)
def test_what_a_template_shows_has_no_overflowing_float_either(where: str, fields: str, number: str) -> None:
    body = '{"messages": [{"role": "user", "content": "hi"}], ' + fields % f'{{"a": [{{"maximum": {number}}}]}}' + "}"
    with pytest.raises(ApiError, match="without too large numbers") as caught:
        read_body(body.encode(), "chat")
    assert (caught.value.code.name, caught.value.param) == ("invalid_value", where)
    read_body(body.replace("e999", "e99").encode(), "chat")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=400, derandomize=True)
@given(st.dictionaries(st.sampled_from(sorted(BODIES["completion"].names | BODIES["chat"].names)), JSON, max_size=4))
def test_anything_is_either_a_request_that_fits_or_a_refusal(fields: dict[str, Any]) -> None:
    for parse, base in ((parse_completion, {"prompt": "hi"}), (parse_chat, CHAT)):
        try:
            request = parse(json.dumps(base | fields).encode(), {"tiny": model_entry()}, "r1")
        except ApiError:
            continue
        for generation in request.generations:
            assert generation.max_tokens >= 1
            assert len(generation.prompt) + generation.max_tokens <= CONTEXT


def test_the_table_of_errors_knows_how_sessions_fail() -> None:
    assert {code.value for code in FailureCode} <= CODES.keys()
    for code in RefusalCode:
        assert code.value in CODES
        assert CODES[code.value].retryable == code.retryable
    assert all(400 <= row.status < 600 and row.name == name and row.meaning for name, row in CODES.items())


def test_a_long_name_is_not_repeated():
    with pytest.raises(ApiError) as caught:
        chat(chat_template_kwargs={"a" * 100_000: 1})
    assert caught.value.param == f"chat_template_kwargs.{'a' * 64}..."
    assert len(caught.value.message) < 300
    assert "got 1" in caught.value.message


def test_hints_about_caches_are_taken_and_looked_at():
    part = {"type": "text", "text": "hi", "prompt_cache_breakpoint": {"mode": "explicit"}}
    hinted = chat(messages=[{"role": "user", "content": [part]}], prompt_cache_options={"mode": "explicit"})
    assert hinted.prompts == chat(messages=[{"role": "user", "content": "hi"}]).prompts
    with pytest.raises(ApiError) as caught:
        completion(prompt_cache_options={"mode": "none"})
    assert caught.value.param == "prompt_cache_options.mode"


@pytest.mark.parametrize(
    ("asked", "field"), [({"prompt_logprobs": 2}, "prompt_logprobs"), ({"echo": True, "logprobs": 2}, "logprobs")]
)
def test_no_more_log_probabilities_of_prompts_are_told_than_one_answer_can_hold(asked, field, monkeypatch):
    monkeypatch.setattr(prompts, "MAX_PROMPT_LOGPROBS", 3 * 2 * 4)
    assert completion(prompt=[5, 6, 7, 8], n=2, **asked).prompt_tokens == 4
    with pytest.raises(ApiError, match="for 12 tokens of prompts, in all choices, exceed the 24 ") as refused:
        completion(prompt=[5, 6, 7, 8], n=3, **asked)
    assert refused.value.param == field
