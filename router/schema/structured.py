"""What a request demands of the text's form, as one grammar that workers can follow: structured outputs, tool calls.

Reads OpenAI's ``response_format``, vLLM's ``structured_outputs`` and its older ``guided_*`` fields. Every grammar is
tried before a worker sees it (:mod:`router.text.grammar_checker`), so that one that is invalid, too large, endless or
impossible is refused with the name of its field.

And the tools: which functions a model may call, whether it must, and the grammar that holds calls to them. Each tool's
arguments are a grammar of their own, so that a reference in their schema (``#``, ``#/$defs/...``) means what it means
in the request. Marks that are tokens of their own are written as such: a grammar does not find a token by the letters
of its name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from router.errors import ApiError
from router.schema.fields import loads, missing, show, wrong_value
from router.schema.request_objects import NamedTool, ResponseFormat, StructuredOutputs
from router.schema.request_schema import Body, ChatBody
from router.text.chat_template import ChatTemplate
from router.text.grammar_checker import GrammarChecker, GrammarRefused
from router.text.tokenizer import Tokenizer
from router.text.tool_calls import CLOSE, OPEN, PYTHON_TAG, ToolForm
from speculation.settings import MAX_GRAMMAR_BYTES

FORMS = ("json", "regex", "choice", "grammar")
FORMAT_FIELDS = ("response_format", "structured_outputs", *(f"guided_{form}" for form in FORMS))
"""Of these at most one may ask for something."""
MAX_FORM_BYTES = MAX_GRAMMAR_BYTES // 2
"""Of a schema or grammar as it is sent, in JSON."""
MAX_WHITESPACE_PATTERN = 256
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,40}"
"""Between the parts of JSON: as the model likes, but no endless run of it."""

NO_TOOLS = "the model's chat template has no place for tools"
CALL_WHITESPACE = r"\x20"
"""Between the parts of a call that a grammar demands, or nothing: a model that cannot end must not go on with white."""
_ANY = r"(.|\n)"

_checker = GrammarChecker()


def demands_structure(body: Body) -> bool:
    """Whether reading a request may take a while, since it has a grammar to be tried."""
    asked = (getattr(body, name) for name in FORMAT_FIELDS)
    if any(value is not None and getattr(value, "type", "") != "text" for value in asked):
        return True
    if not isinstance(body, ChatBody):
        return False
    demanded = body.tool_choice not in (None, "none", "auto")
    return demanded or any(tool.function.get("strict") for tool in body.tools)


def text_grammar(body: Body) -> str:
    """The grammar to be followed; empty: none. May take seconds, see :func:`demands_structure`. Raises ApiError."""
    given = {name: value for name in FORMAT_FIELDS if (value := getattr(body, name)) is not None}
    asked = {name: grammar for name, value in given.items() if (grammar := _field_grammar(name, value))}
    if len(asked) > 1:
        first, second, *_ = asked
        raise ApiError("invalid_value", f"give {first} or {second}, not both", second)
    return next(iter(asked.values()), "")


def _field_grammar(name: str, value: Any) -> str:
    if isinstance(value, ResponseFormat):
        return _response_format(value, name)
    if isinstance(value, StructuredOutputs):
        return _structured_outputs(value, name)
    return _form_grammar(name.removeprefix("guided_"), value, name)


def json_schema_grammar(schema: object, field: str, options: Mapping[str, object] | None = None) -> str:
    """The grammar of all JSON that fits ``schema``. ``field``: where it stands in the request, for the error."""
    if not isinstance(schema, dict | bool):
        raise ApiError("invalid_type", f"{field} must be a JSON schema: an object, or true; got {show(schema)}", field)
    if schema is False:
        raise ApiError("invalid_value", f"{field} is false: no JSON fits it", field)
    return _grammar(
        "json", {} if schema is True else schema, field, {"whitespace_pattern": WHITESPACE, **(options or {})}
    )


def _grammar(form: str, text: object, field: str, options: Mapping[str, object] | None = None) -> str:
    try:
        size = len(json.dumps(text, ensure_ascii=False).encode())
        if size > MAX_FORM_BYTES:
            message = f"{field} has {size} bytes; at most {MAX_FORM_BYTES} are taken"
            raise ApiError("invalid_value", message, field)
        return _tried(form, text, field, options)
    except RecursionError:
        raise ApiError("invalid_value", f"{field} is nested too deeply", field) from None


def _tried(
    form: str, text: object, field: str, options: Mapping[str, object] | None = None, tags: Sequence[str] = ()
) -> str:
    try:
        grammar = _checker.grammar(form, text, options, tags)
    except GrammarRefused as refused:
        raise ApiError("invalid_value", f"{field} cannot be used: {refused}", field) from None
    _check_size(grammar, field)
    return grammar


def _check_size(grammar: str, field: str) -> None:
    size = len(grammar.encode())
    if size > MAX_GRAMMAR_BYTES:
        message = f"{field} makes a grammar of {size} bytes; at most {MAX_GRAMMAR_BYTES} are taken"
        raise ApiError("invalid_value", message, field)


def _response_format(given: ResponseFormat, where: str) -> str:
    described = given.json_schema
    if given.type == "json_schema":
        if described is None or described.schema_ is None:
            raise missing(f"{where}.json_schema.schema", "a JSON schema")
        return json_schema_grammar(described.schema_, f"{where}.json_schema.schema")
    if described is not None:
        shown = described.model_dump(by_alias=True, exclude_unset=True)
        raise wrong_value(f"{where}.json_schema", "left out unless type is json_schema", shown)
    return "" if given.type == "text" else json_schema_grammar({"type": "object"}, where)


def _structured_outputs(given: StructuredOutputs, where: str) -> str:
    names = (*FORMS, "json_object")
    values = {form: getattr(given, f"{form}_" if form == "json" else form) for form in names}
    forms = [form for form, value in values.items() if value is not None]
    if len(forms) != 1:
        got = " and ".join(forms) or "none"
        raise ApiError("invalid_value", f"{where} must have exactly one of {', '.join(names)}; got {got}", where)
    (form,) = forms
    whitespace = _whitespace(given, where)
    if whitespace and form not in ("json", "json_object"):
        name = "disable_any_whitespace" if given.whitespace_pattern is None else "whitespace_pattern"
        raise wrong_value(f"{where}.{name}", "left out unless JSON is asked for", getattr(given, name))
    if form != "json_object":
        return _form_grammar(form, values[form], f"{where}.{form}", whitespace)
    if not given.json_object:
        raise wrong_value(f"{where}.{form}", "true; leave structured_outputs out for any text", False)
    return json_schema_grammar({"type": "object"}, f"{where}.{form}", whitespace)


def _whitespace(given: StructuredOutputs, where: str) -> dict[str, object]:
    """How JSON may be laid out, as llguidance is told."""
    pattern, where = given.whitespace_pattern, f"{where}.whitespace_pattern"
    if given.disable_any_whitespace:
        if pattern is not None:
            raise wrong_value(where, "left out if disable_any_whitespace is true", pattern)
        return {"whitespace_flexible": False, "whitespace_pattern": None}
    if pattern is None:
        return {}
    if not 0 < len(pattern) <= MAX_WHITESPACE_PATTERN:
        raise wrong_value(where, f"a regular expression of 1 to {MAX_WHITESPACE_PATTERN} characters", pattern)
    return {"whitespace_pattern": pattern}


def _form_grammar(form: str, value: Any, where: str, options: Mapping[str, object] | None = None) -> str:
    """Of one of :data:`FORMS`. A schema may stand in a string; a grammar is in Lark's or llama.cpp's notation."""
    if form == "json":
        if isinstance(value, str):
            try:
                value = loads(value)
            except ValueError:
                raise wrong_value(where, "a JSON schema", value) from None
        return "" if value is None else json_schema_grammar(value, where, options)
    if isinstance(value, str) and not value.strip():
        raise wrong_value(where, "not empty", value)
    return _grammar(form, value, where)


@dataclass(frozen=True, slots=True)
class Tools:
    """What a request offers."""

    offered: Sequence[dict[str, Any]] = ()
    """As the caller wrote them, for the chat template."""
    form: ToolForm | None = None
    """How calls are written in the text; None: it is not searched for any."""
    several: bool = True
    """False: the answer ends with its first call."""
    demanded: Sequence[int] = ()
    """Of which functions, by their places in ``offered``, one must be called; none: there need not be a call."""


def _demanded(body: ChatBody) -> list[int]:
    """Numbers of the tools of which one has to be called; none: the model is free."""
    chosen = body.tool_choice
    if isinstance(chosen, NamedTool):
        return [index for index, tool in enumerate(body.tools) if tool.function["name"] == chosen.function.name]
    return list(range(len(body.tools))) if chosen == "required" else []


def tools_of(body: ChatBody, tokenizer: Tokenizer) -> Tools:
    """``tools``, ``tool_choice`` and ``parallel_tool_calls``. Raises :class:`ApiError`."""
    template, chosen = tokenizer.template(tools=bool(body.tools)), body.tool_choice
    tools = [{"type": tool.type, "function": tool.function} for tool in body.tools]
    demanded = _demanded(body)
    if isinstance(chosen, NamedTool) and not demanded:
        raise wrong_value("tool_choice.function.name", "the name of one of tools", chosen.function.name)
    if chosen == "required" and not tools:
        raise wrong_value("tool_choice", "left out where there are no tools", chosen)
    if not tools or chosen == "none" or template is None:  # without template there is no chat at all
        called = any(message.role == "tool" or message.tool_calls for message in body.messages)
        return Tools(tools if called and tokenizer.tool_template else ())  # the other template has no place for calls
    several = body.parallel_tool_calls and not isinstance(chosen, NamedTool)
    return Tools(tools, _form_of(template), several, demanded)


def _form_of(template: ChatTemplate) -> ToolForm:
    """In which it has calls written; raises :class:`ApiError` where it has no place for tools, or no known form."""
    if not template.knows_tools:
        raise ApiError("unsupported_parameter", f"tools cannot be offered: {NO_TOOLS}", "tools")
    if template.tool_form is None:
        forms = " and ".join(ToolForm)
        message = f"tools cannot be offered: the model's chat template shows no form of calls known here ({forms})"
        raise ApiError("unsupported_parameter", message, "tools")
    return template.tool_form


def grammar_of(tools: Tools, answer: str, tokenizer: Tokenizer) -> str:
    """What a request holds its text to; empty: nothing.

    ``answer``: the grammar of a text without calls; empty: any. Where it is not any text, a text is an answer or calls,
    nothing of both. Where it is, and no tool is strict, nothing is asked. Raises :class:`ApiError`.
    """
    if tools.form is None:
        return answer
    if tools.demanded:
        if answer:
            message = "tool_choice makes the text a call, and another field wants it in another form; give one of them"
            raise ApiError("invalid_value", message, "tool_choice")
        beside: Iterable[str] = ["start: calls"]
    elif answer:
        beside = ["start: @answer | calls"]
    elif any(tool["function"].get("strict") for tool in tools.offered):
        beside = (_beside_hermes if tools.form is ToolForm.HERMES else _beside_llama)(tools, tokenizer)
    else:
        return ""
    rules = "\n".join([*beside, *_calls(tools, tokenizer)])
    grammar = _with_answer(answer, rules) if answer else rules
    _check_size(grammar, "tools")
    return _tried("llguidance", grammar, "tools", tags=[tag for tag in sorted(tokenizer.tags) if tag in grammar])


def _calls(tools: Tools, tokenizer: Tokenizer) -> Iterator[str]:
    """The rule ``calls``: of one, or of several, to a function that may be called."""
    assert tools.form is not None
    more = f" ({json.dumps(tools.form.between)} call)*" if tools.several else ""
    yield f"calls: call{more}"
    if tools.form is ToolForm.HERMES:
        yield f"call: {_mark(OPEN, tokenizer.tags)} called"
        yield f'called: "\\n" one "\\n" {_mark(CLOSE, tokenizer.tags)}'
    else:
        yield "call: one"
    yield from _one(tools, tools.form.arguments)


def _beside_hermes(tools: Tools, tokenizer: Tokenizer) -> Iterator[str]:
    """Any text, but what opens a call is one. An opening mark counts in letters too: that is how it is read."""
    yield "start: opened* text"  # whatever the number of calls: one within reasoning is none
    yield f"opened: text {_either('spelt', OPEN, tokenizer.tags)} called"
    yield f"spelt[lazy]: /{_ANY}*{re.escape(OPEN)}/"
    yield f"text: ({' | '.join(('TEXT', *_others(tools, tokenizer)))})*"
    yield f"TEXT: /{_ANY}+/"


def _beside_llama(tools: Tools, tokenizer: Tokenizer) -> Iterator[str]:
    """Calls, or a text that does not begin as one."""
    others = _others(tools, tokenizer)
    yield f"start: {_either(json.dumps(PYTHON_TAG), PYTHON_TAG, tokenizer.tags)}? calls | text"
    yield f"text: PLAIN? (({' | '.join(others)}) TEXT?)*" if others else "text: PLAIN?"
    yield rf"PLAIN: TEXT & ~/[\s\x1c-\x1f]*(\{{|{re.escape(PYTHON_TAG)}){_ANY}*/"  # as Python sees white space
    yield f"TEXT: /{_ANY}+/"


def _others(tools: Tools, tokenizer: Tokenizer) -> list[str]:
    """Tokens that a text may have beside letters: all that show in it, but the marks of calls."""
    assert tools.form is not None
    out = tokenizer.hidden | tokenizer.stop_tokens
    return sorted(tag for tag, token in tokenizer.tags.items() if token not in out and tag not in tools.form.marks)


def _one(tools: Tools, arguments: str) -> Iterator[str]:
    """The rule ``one``: the JSON object of a call."""
    indices = tools.demanded or range(len(tools.offered))
    yield f'one: "{{" gap {_string("name")} gap ":" gap ({" | ".join(f"call_{index}" for index in indices)}) gap "}}"'
    yield f'arguments: gap "," gap {_string(arguments)} gap ":" gap'
    yield f"gap: /{CALL_WHITESPACE}/?"
    for index in indices:
        name = tools.offered[index]["function"]["name"]
        yield f"call_{index}: {_string(name)} arguments %json {json.dumps(_parameters(tools, index))}"


def _parameters(tools: Tools, index: int) -> Mapping[str, Any]:
    function, where = tools.offered[index]["function"], f"tools[{index}].function.parameters"
    schema: dict[str, Any] = {"type": "object"}
    if tools.demanded or function.get("strict"):
        schema |= function.get("parameters") or {}
        kinds = schema["type"]
        if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
            raise wrong_value(f"{where}.type", '"object"', kinds)
        schema["type"] = "object"  # only: with other arguments a text is no call
        json_schema_grammar(schema, where)
    return schema | {"x-guidance": {"whitespace_pattern": CALL_WHITESPACE}}


def _mark(mark: str, tags: Collection[str]) -> str:
    return mark if mark in tags else json.dumps(mark)


def _either(letters: str, mark: str, tags: Collection[str]) -> str:
    return f"({letters} | {mark})" if mark in tags else letters


def _string(text: str) -> str:
    """A JSON string, as a grammar names it."""
    return json.dumps(json.dumps(text))


def _with_answer(answer: str, rules: str) -> str:
    """``answer``: a Lark grammar, or JSON that holds one grammar.

    While a text may still be either, its white space is that of the answer. Of a call in Llama's form there can then be
    none before the arguments, if the answer in JSON may be alike so far and has no object there.
    """
    (inner,) = json.loads(answer)["grammars"] if answer.startswith("{") else ({"lark_grammar": answer},)
    outer = {"name": "answer or calls", "lark_grammar": rules}
    return json.dumps({"grammars": [outer, inner | {"name": "answer"}]})
