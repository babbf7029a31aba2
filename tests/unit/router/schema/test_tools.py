"""Texts that call tools: what a grammar of theirs takes, where marks are letters and where they are tokens."""

from __future__ import annotations

import json
import re
from random import Random
from typing import Any

import jsonschema
import openai
import pydantic
import pytest
from llguidance import LLMatcher, LLTokenizer

from router.errors import ApiError
from router.schema.request_schema import Body, ChatBody
from router.schema.structured import grammar_of, json_schema_grammar, text_grammar, tools_of
from router.text.grammar_check import END, check, tokenizer_of
from router.text.tokenizer import Tokenizer
from router.text.tool_calls import ToolForm, parser_of
from tests.fakes import EOS, tiny_tokenizer
from tests.grammars import random_schema

HERMES = "{{ tools }}<tool_call>{{ messages[0] }}"
LLAMA = '{{ tools }}"parameters"{{ messages[0] }}'
TAGS = ("<tool_call>", "</tool_call>", "<|python_tag|>", "<think>", "</think>")


class Part(pydantic.BaseModel):
    name: str
    size: int


class Order(pydantic.BaseModel):
    parts: list[Part]
    inside: list[Order]


def tool(name: str, parameters: Any = None, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters} | fields}


ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
TREE = tool("tree", {"type": "object", "properties": {"child": {"$ref": "#"}}, "additionalProperties": False})
ORDER: Any = openai.pydantic_function_tool(Order, name="order")
ORDER["function"]["strict"] = False
NAMED = tool("a.b-c", {"$defs": {"x": {"type": "integer"}}, "properties": {"x": {"$ref": "#/$defs/x"}}})


def tokenizer(template: str, *, tagged: bool) -> Tokenizer:
    return tiny_tokenizer(template, TAGS if tagged else ())


def grammar_for(
    tools: list[dict[str, Any]], template: str, *, tagged: bool = False, answer: str = "", **fields: Any
) -> str:
    own = tokenizer(template, tagged=tagged)
    return grammar_of(tools_of(ChatBody.read(ASKED | {"tools": tools} | fields), own), answer, own)


def call(form: ToolForm, name: str, arguments: Any) -> str:
    return json.dumps({"name": name, form.arguments: arguments})


def framed(form: ToolForm, *calls: str) -> str:
    """Some calls as a text."""
    marked = [f"<tool_call>\n{one}\n</tool_call>" for one in calls] if form is ToolForm.HERMES else calls
    return form.between.join(marked)


def takes(grammar: str, text: str, *, tagged: bool = False, whole: bool = True) -> bool:
    """Whether a text is one of a grammar's (``whole``), or begins one. ``tagged``: its marks are tokens."""
    tags = TAGS if tagged else ()
    matcher = LLMatcher(tokenizer_of(tags), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens: list[int] = []
    for piece in re.split("(" + "|".join(map(re.escape, TAGS)) + ")", text):
        tokens += [END + 1 + tags.index(piece)] if piece in tags else piece.encode()
    return matcher.try_consume_tokens(tokens) == len(tokens) and (matcher.is_accepting() or not whole)


GOOD = {"parts": [{"name": "a", "size": 1}], "inside": [{"parts": [], "inside": []}]}
CALLS: list[tuple[str, Any, bool]] = [
    ("order", GOOD, True),
    ("order", GOOD | {"inside": [{"parts": [{"name": "a"}], "inside": []}]}, False),
    ("order", {"parts": [{"name": "a", "size": "1"}], "inside": []}, False),
    ("tree", {"child": {"child": {}}}, True),
    ("tree", {"child": {"name": "tree", "arguments": {}}}, False),
    ("a.b-c", {"x": 3, "y": [1]}, True),
    ("a.b-c", {"x": "3"}, False),
    ("a.b-c", 3, False),
    ("axb-c", {}, False),
]


@pytest.mark.parametrize("tagged", [False, True])
@pytest.mark.parametrize(("form", "template"), [(ToolForm.HERMES, HERMES), (ToolForm.LLAMA, LLAMA)])
def test_references_in_a_tools_schema_mean_its_own_parts(form: ToolForm, template: str, tagged: bool) -> None:
    tools = [TREE, ORDER, NAMED]
    required = grammar_for(tools, template, tagged=tagged, tool_choice="required")
    for name, arguments, fits in CALLS:
        one = call(form, name, arguments)
        assert takes(required, framed(form, one), tagged=tagged) is fits, one
        assert takes(required, framed(form, call(form, "tree", {}), one), tagged=tagged) is fits, one
        if name != "axb-c":
            named = {"type": "function", "function": {"name": name}}
            grammar = grammar_for(tools, template, tagged=tagged, tool_choice=named)
            assert takes(grammar, framed(form, one), tagged=tagged) is fits, one
            assert not takes(grammar, framed(form, one, one), tagged=tagged)
            assert not takes(grammar, framed(form, call(form, "other", arguments)), tagged=tagged)


@pytest.mark.parametrize(("form", "template"), [(ToolForm.HERMES, HERMES), (ToolForm.LLAMA, LLAMA)])
def test_between_the_parts_of_a_demanded_call_is_a_space_or_nothing(form: ToolForm, template: str) -> None:
    grammar = grammar_for([TREE], template, tool_choice="required")
    spaced = f'{{ "name" : "tree" , "{form.arguments}" : {{ "child" : {{ }} }} }}'
    assert takes(grammar, framed(form, spaced))
    assert takes(grammar, framed(form, spaced.replace(" ", "")))
    assert not takes(grammar, framed(form, spaced.replace(" ", "  ", 1)))
    assert not takes(grammar, framed(form, spaced.replace(" ", "\n", 1)))


def test_marks_that_are_tokens_are_written_as_tokens() -> None:
    text = framed(ToolForm.HERMES, call(ToolForm.HERMES, "tree", {}))
    for tagged in (False, True):
        grammar = grammar_for([TREE], HERMES, tagged=tagged, tool_choice="required")
        matcher = LLMatcher(tokenizer_of(TAGS if tagged else ()), grammar)
        assert matcher.compute_ff_tokens() == ([END + 1, *b"\n{"] if tagged else [*b"<tool_call>\n{"])
        assert takes(grammar, text, tagged=tagged)


def test_few_sets_of_tags_are_kept() -> None:
    for number in range(100):
        assert check("llguidance", "start: /a+/", {}, [f"<tag {number}>"])[1] == ""
    assert tokenizer_of.cache_info().currsize <= 16


@pytest.mark.parametrize("tag", TAGS)
def test_arguments_may_spell_a_mark_that_is_a_token(tag: str) -> None:
    spelling = tool("t", {"properties": {"x": {"const": tag}}, "required": ["x"], "additionalProperties": False})
    grammar = grammar_for([spelling], HERMES, tagged=True, tool_choice="required")
    matcher = LLMatcher(tokenizer_of(TAGS), grammar)
    for letters in ([END + 1], b'\n{"name":"t","arguments":{"x":"', tag.encode(), b'"}}\n', [END + 2]):
        assert matcher.try_consume_tokens([*letters]) == len(letters)
    assert matcher.is_accepting()


STRICT = tool("tree", TREE["function"]["parameters"], strict=True)
ANY = tool("any", {"type": "object", "properties": {"x": {"type": "integer"}}})
SPACES = ["", " ", "\n\t", "\x1c", "\u3000"]
HERMES_TEXTS: list[tuple[str, bool]] = [
    ("", True),
    ("hello wörld 🎉 {}\n", True),
    ("1 < 2 <tool_cal", True),
    ("</tool_call> <|python_tag|>{", True),
    ("<tool_call>", False),
    ("so <tool_call>x", False),
    ("so <<tool_call>\n{}", False),
    ("so\n[] <|python_tag|> [].\n", True),
    ("[][]", True),
    ("[tree {}] and [any {}] and no more", True),
    ('[tree {"child": {}}]', True),
    ('[tree {"child": 3}]', False),
    ('[any {"x": "no integer", "child": 3}]', True),
    ("[any 3]", False),
    ("[other {}]", False),
    ("<think>[tree {}]<think>so<think>", True),
    ("<think>maybe [] or not</think>so [any {}]", True),
    ("<think>[other {}]", False),
    ("<think>a<tool_call>x", False),
]


def written(form: ToolForm, text: str) -> str:
    """``[]`` and ``[name arguments]`` stand for calls, see :data:`HERMES_TEXTS`."""

    def one(match: re.Match[str]) -> str:
        return framed(form, call(form, match[1] or "tree", json.loads(match[2] or "{}")))

    return re.sub(r"\[(\w*) ?([^\]]*)\]", one, text)


@pytest.mark.parametrize("tagged", [False, True])
@pytest.mark.parametrize(("text", "good"), HERMES_TEXTS)
def test_free_text_has_calls_that_are_valid_where_a_tool_is_strict(text: str, good: bool, tagged: bool) -> None:
    text = written(ToolForm.HERMES, text)
    good = good and not (tagged and text.startswith("</tool_call>"))
    for several in (True, False):  # a call within reasoning is none: the grammar cannot count
        grammar = grammar_for([STRICT, ANY], HERMES, tagged=tagged, parallel_tool_calls=several)
        assert takes(grammar, text, tagged=tagged) is good


def test_an_opening_mark_counts_in_letters_too() -> None:
    grammar = grammar_for([STRICT], HERMES, tagged=True)
    for before in ([], [END + 4], [*b"a "], [END + 4, *b"a "]):
        for mark in ([*b"<tool_call>"], [END + 1]):
            matcher = LLMatcher(tokenizer_of(TAGS), grammar)
            taken = matcher.try_consume_tokens([*before, *mark, *b'\n{"name": "other"'])
            assert taken == len([*before, *mark, *b'\n{"name": "'])
            rest = [*b'tree", "arguments": {}}\n', END + 2]
            assert matcher.try_consume_tokens(rest) == len(rest)
            assert matcher.is_accepting()


LLAMA_TEXTS: list[tuple[str, bool]] = [
    ("", True),
    ("hello [] wörld 🎉", True),
    ("<|python_tag", True),
    ("<|python_ta {", True),
    ("[tree {}]; [any {}]", True),
    ("<|python_tag|>[]", True),
    ("<|python_tag|>[other {}]", False),
    ("<|python_tag|>print()", False),
    ('[tree {"child": {"child": {}}}]', True),
    ('[tree {"child": 3}]', False),
    ('[any {"x": "no integer", "child": 3}]', True),
    ("[any 3]", False),
    ("[] and more", False),
    ('{"answer": 3}', False),
    ("<think>{} []<think>", True),
]


@pytest.mark.parametrize("tagged", [False, True])
@pytest.mark.parametrize(("text", "good"), LLAMA_TEXTS)
def test_a_text_is_calls_or_does_not_begin_as_one_where_a_tool_is_strict(text: str, good: bool, tagged: bool) -> None:
    text = written(ToolForm.LLAMA, text)
    assert takes(grammar_for([STRICT, ANY], LLAMA, tagged=tagged), text, tagged=tagged) is good
    once = grammar_for([STRICT, ANY], LLAMA, tagged=tagged, parallel_tool_calls=False)
    assert takes(once, text, tagged=tagged) is (good and "; " not in text)


@pytest.mark.parametrize("space", SPACES)
def test_white_space_does_not_hide_that_a_text_begins_as_a_call(space: str) -> None:
    grammar = grammar_for([STRICT], LLAMA)
    assert takes(grammar, f"{space}a{{")
    assert not takes(grammar, space + '{"name": "other"', whole=False)
    assert not takes(grammar, space + "<|python_tag|>x", whole=False)


@pytest.mark.parametrize("tagged", [False, True])
@pytest.mark.parametrize(("form", "template"), [(ToolForm.HERMES, HERMES), (ToolForm.LLAMA, LLAMA)])
def test_what_is_read_of_a_random_text_that_is_allowed_fits(form: ToolForm, template: str, tagged: bool) -> None:
    grammar, rng, called, refused = grammar_for([STRICT, ANY], template, tagged=tagged), Random(5), 0, 0
    pieces = ["[]", "[]", '[tree {"child": {}}]', '[tree {"child": 3}]', "[any {}]", "[other {}]", "; ", " a\n", *TAGS]
    for _ in range(600):
        text = written(form, "".join(rng.choices(pieces, k=rng.randint(1, 4))))
        if rng.random() < 0.3:
            at = rng.randrange(len(text))
            text = text[:at] + text[at + 1 :]
        if not takes(grammar, text, tagged=tagged):
            refused += 1
            continue
        parser = parser_of(form, ("tree", "any"))
        found, rest = parser.push(text), parser.finish()
        for one in found.calls + rest.calls:
            assert one.name in ("tree", "any")
            if one.name == "tree":
                jsonschema.validate(json.loads(one.arguments), STRICT["function"]["parameters"])
        content = found.content + rest.content
        answer = re.sub(r"(?s)^\s*<think>.*?(</think>|\Z)", "", content)  # within reasoning a call is text
        assert "<tool_call>" not in answer if form is ToolForm.HERMES else not content.lstrip().startswith("{")
        called += bool(found.calls + rest.calls)
    assert called > 30
    assert refused > 100


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ANSWERS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (
        {"response_format": {"type": "json_object"}},
        ["{}", '{"name": "tree"}', '{\n "a": [1, "<tool"] }', '{"name": "tree", "x": {}}'],
        ["", "[]", "3", "hello"],
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": PERSON}}},
        ['{"name": "tree", "age": 3}', '{\n  "name": "Ann",\n  "age": 3}', '{"name":"treeee","age":3}'],
        ["{}", '{"name": "tree", "age": "3"}', '{"name": "tree"}', "so"],
    ),
    ({"guided_regex": "<[a-z]+>[0-9]*"}, ["<tool>3", "<t>", "<x>"], ["<tool_x>", "3"]),
    ({"guided_choice": ["yes", "no", "<tool_"]}, ["yes", "no", "<tool_"], ["maybe", "<tool"]),
    ({"guided_grammar": 'start: "(" start ")" | "x"'}, ["((x))", "x"], ["((x)", ""]),
]


@pytest.mark.parametrize("tagged", [False, True])
@pytest.mark.parametrize(("fields", "good", "bad"), ANSWERS)
@pytest.mark.parametrize(("form", "template"), [(ToolForm.HERMES, HERMES), (ToolForm.LLAMA, LLAMA)])
def test_an_answer_of_a_demanded_form_may_be_calls_instead(
    form: ToolForm, template: str, fields: dict[str, Any], good: list[str], bad: list[str], tagged: bool
) -> None:
    answer = text_grammar(Body.read(fields))
    grammar = grammar_for([STRICT, ANY, NAMED], template, tagged=tagged, answer=answer)
    single = grammar_for([STRICT, ANY, NAMED], template, tagged=tagged, answer=answer, parallel_tool_calls=False)
    for text in good:
        assert takes(grammar, text, tagged=tagged), text
        assert not takes(grammar, text + framed(form, call(form, "tree", {})), tagged=tagged)
    for text in bad:
        assert not takes(grammar, text, tagged=tagged), text
    one, two = call(form, "tree", {"child": {}}), call(form, "any", {"x": "no integer"})
    for name, text, many in (("one", framed(form, one), False), ("two", framed(form, one, two), True)):
        assert takes(grammar, text, tagged=tagged), name
        assert takes(single, text, tagged=tagged) is not many
    for wrong in (call(form, "tree", {"child": 3}), call(form, "other", {}), call(form, "any", 3)):
        unless = form is ToolForm.LLAMA and fields == ANSWERS[0][0]  # where it is an answer in JSON
        assert takes(grammar, framed(form, wrong), tagged=tagged) is unless, wrong


@pytest.mark.parametrize(("form", "template"), [(ToolForm.HERMES, HERMES), (ToolForm.LLAMA, LLAMA)])
def test_calls_take_nothing_from_random_answers(form: ToolForm, template: str) -> None:
    """Whatever a schema's own grammar takes is taken beside calls too."""
    rng, taken = Random(4), 0
    for _ in range(25):
        answer = json_schema_grammar(random_schema(rng), "field")
        alone, beside = (
            LLMatcher(tokenizer_of(()), one) for one in (answer, grammar_for([STRICT, ANY], template, answer=answer))
        )
        for _ in range(60):
            mask = alone.compute_logit_bias()
            choices = [byte for byte in range(256) if mask[byte]]
            if not choices:
                break
            byte = rng.choice(choices)
            assert alone.consume_token(byte)
            assert beside.consume_token(byte)
            assert alone.is_accepting() == beside.is_accepting()
            taken += 1
    assert taken > 300


def test_arguments_that_recurse_without_end_are_refused() -> None:
    endless = {"properties": {"a": {"$ref": "#"}}, "required": ["a"]}  # but for what is no object, which no argument is
    with pytest.raises(ApiError, match="recurses without end") as caught:
        grammar_for([ANY, tool("f", endless, strict=True)], HERMES)
    assert caught.value.param == "tools[1].function.parameters"


@pytest.mark.parametrize("asked", [{"tool_choice": "required"}, {}])
@pytest.mark.parametrize(("form", "template"), [(ToolForm.HERMES, HERMES), (ToolForm.LLAMA, LLAMA)])
def test_arguments_are_an_object_whatever_else_a_schema_takes(
    form: ToolForm, template: str, asked: dict[str, str]
) -> None:
    nullable = tool("f", {"type": ["object", "null"], "properties": {"x": {"type": "integer"}}}, strict=True)
    grammar = grammar_for([nullable], template, **asked)
    assert takes(grammar, framed(form, call(form, "f", {"x": 3})))
    for wrong in (None, [], {"x": "3"}):
        assert not takes(grammar, framed(form, call(form, "f", wrong)))


@pytest.mark.parametrize("kind", ["array", ["array", "null"], [], None, 3])
def test_a_schema_of_arguments_that_takes_no_object_is_refused(kind: Any) -> None:
    for strict, asked in ((True, "auto"), (False, "required")):
        with pytest.raises(ApiError, match='must be "object", got') as caught:
            grammar_for([ANY, tool("f", {"type": kind}, strict=strict)], HERMES, tool_choice=asked)
        assert (caught.value.code.name, caught.value.param) == ("invalid_value", "tools[1].function.parameters.type")
    assert grammar_for([tool("f", {"type": kind})], HERMES) == ""


def test_without_a_strict_tool_nothing_is_asked() -> None:
    assert grammar_for([ANY, tool("f", None, strict=False)], HERMES) == ""


def test_a_tool_may_be_named_as_a_choice_is() -> None:
    assert grammar_for([tool("auto")], HERMES) == ""
    named = {"type": "function", "function": {"name": "required"}}
    grammar = grammar_for([tool("required"), ANY], HERMES, tool_choice=named)
    assert takes(grammar, framed(ToolForm.HERMES, call(ToolForm.HERMES, "required", {})))
    assert not takes(grammar, framed(ToolForm.HERMES, call(ToolForm.HERMES, "any", {})))


def test_workers_hold_the_same_marks_for_tokens() -> None:
    own = tokenizer(HERMES, tagged=True)
    assert own.tags.keys() >= {*TAGS}
    seen = LLTokenizer(own._backend.to_str(), eos_token=EOS)
    assert all(seen.is_special_token(own.tags[tag]) for tag in TAGS)
    grammar = grammar_for([TREE], HERMES, tagged=True, tool_choice="required")
    tokens = own.encode(framed(ToolForm.HERMES, call(ToolForm.HERMES, "tree", {})), special=False)
    matcher = LLMatcher(seen, grammar)
    assert matcher.try_consume_tokens([*tokens]) == len(tokens)
    assert matcher.is_accepting()
