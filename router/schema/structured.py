"""Structured outputs: from what a request demands of the text's form to one grammar that workers can follow.

Reads OpenAI's ``response_format``, vLLM's ``structured_outputs`` and its older ``guided_*`` fields. Every grammar is
tried before a worker sees it (:mod:`router.text.grammar_checker`), so that one that is invalid, too large, endless or
impossible is refused with the name of its field.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from router.errors import ApiError
from router.schema.fields import loads, missing, show, wrong_value
from router.schema.request_objects import ResponseFormat, StructuredOutputs
from router.schema.request_schema import Body, ChatBody
from router.text.grammar_checker import GrammarChecker, GrammarRefused
from speculation.settings import MAX_GRAMMAR_BYTES

FORMS = ("json", "regex", "choice", "grammar")
FORMAT_FIELDS = ("response_format", "structured_outputs", *(f"guided_{form}" for form in FORMS))
"""Of these at most one may ask for something."""
MAX_FORM_BYTES = MAX_GRAMMAR_BYTES // 2
"""Of a schema or grammar as it is sent, in JSON."""
MAX_WHITESPACE_PATTERN = 256
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,40}"
"""Between the parts of JSON: as the model likes, but no endless run of it."""

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
    """The grammar that the text of a request has to follow; empty: any text will do. Raises :class:`ApiError`.

    May take seconds: to be called in a thread if :func:`demands_structure`.
    """
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


def tried(grammar: str, field: str, tags: Sequence[str]) -> str:
    """A grammar of ours, tried. ``field``: what in the request it is made for. ``tags``: the tokens that it names."""
    _check_size(grammar, field)
    return _tried("llguidance", grammar, field, tags=tags)


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
