"""What a request asks of the text's form: read, tried in a process apart, or refused with the name of the field."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from router.errors import ApiError
from router.schema.request_schema import Body, ChatBody, CompletionBody
from router.schema.requests import read_body
from router.schema.structured import FORMAT_FIELDS, demands_structure, json_schema_grammar, text_grammar
from router.text import grammar_checker
from router.text.grammar_check import ends
from router.text.grammar_checker import GrammarChecker, GrammarRefused
from tests.grammars import random_schema

LIST: dict[str, Any] = {
    "type": "object",
    "required": ["rest"],
    "properties": {"rest": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
}


ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


def grammar(**fields: Any) -> str:
    return text_grammar(Body.read(fields))


def schema(value: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": value}}}


def structured(**fields: Any) -> dict[str, Any]:
    return {"structured_outputs": fields}


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, dict.fromkeys(FORMAT_FIELDS)])
def test_any_text(fields):
    assert grammar(**fields) == ""


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"response_format": {"type": "json_object"}}, '"type":"object"'),
        (structured(json_object=True), '"type":"object"'),
        (schema({"type": "boolean"}), '"type":"boolean"'),
        (schema(LIST), '"$ref":"#"'),
        (structured(json={"type": "null"}), '"type":"null"'),
        (structured(json='{"type": "null"}', disable_fallback=True), '"type":"null"'),
        (structured(json={}, disable_any_whitespace=True), '"whitespace_flexible":false'),
        (structured(json={}, whitespace_pattern="[ ]{1,2}"), "[ ]{1,2}"),
        (structured(regex="^[ab]+$"), "/^[ab]+$/"),
        (structured(choice=["yes", "n\no", '"é🎉"']), '"yes" | "n\\no" | "\\"'),
        (structured(grammar='start: "a" | "b"'), 'start: "a" | "b"'),
        (structured(grammar='root ::= "a" | "b" root'), '"b" start'),
        ({"guided_json": {"type": "null"}}, '"type":"null"'),
        ({"guided_regex": "[ab]+"}, "/[ab]+/"),
        ({"guided_choice": ["yes"]}, '"yes"'),
        ({"guided_grammar": 'start: "a"'}, '"a"'),
    ],
)
def test_what_is_asked_for_becomes_a_grammar(fields, part):
    assert part in grammar(**fields)
    assert demands_structure(Body.read(fields))


ENDLESS = {"type": "object", "required": ["next"], "properties": {"next": {"$ref": "#"}}}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": "json"}, "response_format", "must be an object"),
        ({"response_format": {}}, "response_format.type", "is missing"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "must be one of text, json_object, json_schema"),
        ({"response_format": {"type": "text", "x": 1}}, "response_format.x", "there is no field"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "is missing"),
        (schema(3), "response_format.json_schema.schema", "must be a JSON schema"),
        (schema(False), "response_format.json_schema.schema", "no JSON fits it"),
        (
            schema({"type": "integer", "minimum": 5, "maximum": 3}),
            "response_format.json_schema.schema",
            "Unsatisfiable",
        ),
        (schema({"not": {}}), "response_format.json_schema.schema", "Unimplemented keys"),
        (schema({"$ref": "http://x/y"}), "response_format.json_schema.schema", "http://x/y"),
        (schema(ENDLESS), "response_format.json_schema.schema", "recurses without end"),
        (schema({"$ref": "#"}), "response_format.json_schema.schema", "allows no text"),
        (schema({"enum": ["x" * 200_000]}), "response_format.json_schema.schema", "at most 131072"),
        (structured(), "structured_outputs", "exactly one of"),
        (structured(regex="a", choice=["a"]), "structured_outputs", "got regex and choice"),
        (structured(json="{"), "structured_outputs.json", "must be a JSON schema"),
        (structured(json_object=False), "structured_outputs.json_object", "must be true"),
        (structured(regex="("), "structured_outputs.regex", "unclosed group"),
        (structured(regex=" "), "structured_outputs.regex", "must be not empty"),
        (structured(regex=3), "structured_outputs.regex", "must be a string"),
        (structured(choice=[]), "structured_outputs.choice", "1 to 1024 strings"),
        (structured(choice=["a", 1]), "structured_outputs.choice", "1 to 1024 strings"),
        (structured(choice=["a", ""]), "structured_outputs.choice", "none of them empty"),
        (structured(grammar="start: ("), "structured_outputs.grammar", "cannot be used"),
        (structured(grammar='start: "a" start'), "structured_outputs.grammar", "cannot be used"),
        (structured(grammar="start: X\nX: /a/ & /b/"), "structured_outputs.grammar", "allows no text at all"),
        (structured(regex="a", whitespace_pattern=" "), "structured_outputs.whitespace_pattern", "unless JSON"),
        (structured(json={}, whitespace_pattern="("), "structured_outputs.json", "cannot be used"),
        (structured(json={}, structural_tag="x"), "structured_outputs.structural_tag", "not supported"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "give guided_regex or guided_choice"),
        ({"guided_grammar": ""}, "guided_grammar", "must be not empty"),
    ],
)
def test_what_cannot_be_is_refused_with_its_name(fields, param, words):
    with pytest.raises(ApiError) as caught:
        grammar(**fields)
    assert caught.value.param == param
    assert words in caught.value.message
    assert "\n" not in caught.value.message
    assert caught.value.code.status == 400


@pytest.mark.parametrize(
    ("value", "ends"),
    [
        (LIST, True),
        (ENDLESS, False),
        ({**ENDLESS, "required": []}, True),
        ({"type": "array", "items": {"$ref": "#"}}, True),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, False),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/b"}]}, "b": {"type": "null"}}}, True),
        (
            {"$ref": "#/$defs/a~1b", "$defs": {"a/b": ENDLESS | {"properties": {"next": {"$ref": "#/$defs/a~1b"}}}}},
            False,
        ),
    ],
)
def test_a_schema_that_recurses_has_to_end_somewhere(value, ends):
    if ends:
        assert json_schema_grammar(value, "field")
    else:
        with pytest.raises(ApiError, match="recurses without end"):
            json_schema_grammar(value, "field")


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("end", [{"type": "null"}, {"$ref": "#/$defs/a0"}])
def test_long_chains_of_references_are_followed_in_time(order, end):
    places = {f"a{i}": required("n", f"#/$defs/a{i + 1}") for i in range(800)} | {"a800": end}
    chain = {"$ref": "#/$defs/a0", "$defs": dict([*places.items()][::order])}
    started = time.process_time()
    assert ends(chain) is (end == {"type": "null"})
    assert time.process_time() - started < 0.25


def required(name: str, reference: str) -> dict[str, Any]:
    return {"type": "object", "properties": {name: {"$ref": reference}}, "required": [name]}


@pytest.mark.parametrize("value", ['{"const": "\\ud800"}', '{"\\udfff": 1}', "[" * 10_000 + "]" * 10_000])
def test_json_in_a_string_is_text_and_not_nested_too_deeply(value):
    for fields, param in (({"guided_json": value}, "guided_json"), (structured(json=value), "structured_outputs.json")):
        with pytest.raises(ApiError, match="must be a JSON schema") as caught:
            grammar(**fields)
        assert caught.value.param == param


def test_a_schema_nested_too_deeply_is_refused():
    """At every depth: where Python can read it, but not write it, or not show it in a message."""
    for depth in range(200, sys.getrecursionlimit(), 3):
        nested: Any = True
        for _ in range(depth):
            nested = [nested]
        with pytest.raises(ApiError) as caught:
            grammar(guided_json={"const": nested})
        assert caught.value.param == "guided_json"
        with pytest.raises(ApiError) as caught:
            grammar(guided_json=nested)
        assert caught.value.param == "guided_json"


def test_any_json_may_be_asked_for():
    assert json_schema_grammar(True, "field") == json_schema_grammar({}, "field")


def test_names_may_be_written_with_escapes():
    body = json.dumps({"prompt": "a", "guided_json": {}}).replace("_", "\\u005f").encode()
    assert json.loads(body) == {"prompt": "a", "guided_json": {}}
    assert demands_structure(read_body(body, "completion"))


def test_what_names_no_grammar_is_read_without_waiting():
    tool = {"type": "function", "function": {"name": "f", "strict": False}}
    strict = {"type": "function", "function": {"name": "f", "strict": True}}
    assert not demands_structure(CompletionBody.read({"prompt": "guided_json strict tool_choice \u00fc"}))
    for fields in (
        {"response_format": {"type": "text"}},
        {"tools": [tool], "tool_choice": "auto"},
        {"tools": [], "tool_choice": "none", "guided_json": None},
    ):
        assert not demands_structure(ChatBody.read(ASKED | fields))
    for fields in ({"tools": [tool, strict]}, {"tools": [tool], "tool_choice": "required"}):
        assert demands_structure(ChatBody.read(ASKED | fields))
    with pytest.raises(ApiError, match="tools must be an array"):
        ChatBody.read(ASKED | {"tools": 3, "tool_choice": "none", "guided_json": None})


def test_random_schemas_are_taken():
    rng = Random(9)
    assert all(json_schema_grammar(random_schema(rng), "field") for _ in range(60))


@pytest.fixture
def checker() -> Iterator[GrammarChecker]:
    checker = GrammarChecker()
    yield checker
    checker.close()


def crash() -> str:
    """So many rules that the compiler's stack does not suffice."""
    rules = (f'r{i}: r{i + 1} r{i + 1} | "{i}"' for i in range(8000))
    return "\n".join(("start: r0", *rules, 'r8000: "x"'))


def test_a_hostile_grammar_costs_a_process_and_no_more(checker):
    for form, text in (("json", {"type": "integer", "multipleOf": 1_234_567}), ("grammar", crash())):
        with pytest.raises(GrammarRefused, match="too complex"):
            checker.grammar(form, text)
        assert checker.grammar("regex", f"[ab]+{form}") == checker.grammar("regex", f"[ab]+{form}")


def test_a_process_that_does_not_answer_is_given_up_and_another_asked(monkeypatch):
    checker = GrammarChecker()
    checker.grammar("regex", "[ab]+")
    hanging = checker._process
    assert hanging is not None
    hanging.send_signal(signal.SIGSTOP)
    with monkeypatch.context() as hasty:
        hasty.setattr(grammar_checker, "CHECK_SECONDS", 0.1)
        with pytest.raises(GrammarRefused, match="too complex"):
            checker.grammar("regex", "[cd]+")
    assert checker.grammar("regex", "[ef]+")
    assert hanging.returncode == -signal.SIGKILL
    checker.close()


def test_descriptors_beyond_1023_are_as_good_as_others(checker):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1024)]
    try:
        assert checker.grammar("regex", "[ab]+")
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_after_an_error_another_process_is_asked(checker, monkeypatch):
    checker.grammar("regex", "[ab]+")
    broken = checker._process
    with monkeypatch.context() as context:
        context.setattr(GrammarChecker, "_exchange", lambda *_: b"no JSON\n")
        with pytest.raises(ValueError, match="Expecting value"):
            checker.grammar("regex", "[cd]+")
    assert broken.returncode is not None
    assert checker.grammar("regex", "[cd]+")
    assert checker._process is not broken


def test_a_process_that_died_while_nobody_asked_says_nothing_of_the_next_grammar(checker):
    checker.grammar("regex", "[ab]+")
    dead = checker._process
    dead.kill()
    dead.wait()
    assert checker.grammar("regex", "[cd]+")
    assert checker._process is not dead


def test_garbage_is_refused_or_taken():
    """Any JSON in any field."""
    rng = Random(10)
    values: list[Any] = [
        None,
        True,
        0,
        -1.5,
        "",
        "a",
        "(",
        [],
        ["a"],
        {},
        {"type": "object"},
        {"$ref": "#/x"},
        "start: x",
    ]
    names = [*FORMAT_FIELDS, "type", "json_schema", "schema", "json", "regex", "choice", "grammar", "json_object", "x"]
    taken, refused = 0, []

    def value(depth: int) -> Any:
        if depth and rng.random() < 0.6:
            return {rng.choice(names[6:]): value(depth - 1) for _ in range(rng.randint(1, 2))}
        return rng.choice(values)

    for _ in range(300):
        fields = {rng.choice(FORMAT_FIELDS): value(3)}
        try:
            taken += bool(grammar(**fields))
        except ApiError as error:
            refused.append(error)
    assert taken > 10
    assert all(error.code.status == 400 and error.param for error in refused)
