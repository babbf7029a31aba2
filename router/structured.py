"""Structured outputs: from what a request demands of the text's form to one grammar that workers can follow.

Reads OpenAI's ``response_format``, vLLM's ``structured_outputs`` and its older ``guided_*`` fields. Every grammar is
tried before a worker sees it (:mod:`router.grammar_checker`), so that one that is invalid, too large, endless or
impossible is refused with the name of its field.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from router.errors import ApiError
from router.field_bounds import MAX_CHOICES
from router.field_table import known, refusals
from router.fields import Fields, loads, show
from router.grammar_checker import GrammarChecker, GrammarRefused
from speculation.constraint import MAX_GRAMMAR_BYTES

FORMAT_FIELDS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)
"""Of these at most one may ask for something."""
MAX_FORM_BYTES = MAX_GRAMMAR_BYTES // 2
"""Of a schema or grammar as it is sent, in JSON."""
MAX_WHITESPACE_PATTERN = 256
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,40}"
"""Between the parts of JSON: as the model likes, but no endless run of it."""
FORMS = ("json", "regex", "choice", "grammar", "json_object")

_checker = GrammarChecker()


def demands_structure(fields: Fields) -> bool:
    """Whether reading a request may take a while, since it has a grammar to be tried."""
    if any(fields.get(name) not in (None, {"type": "text"}) for name in FORMAT_FIELDS):
        return True
    tools = fields.get("tools")
    demanded = fields.get("tool_choice") not in (None, "none", "auto")
    return isinstance(tools, list) and (demanded or any(map(_strict, tools)))


def _strict(tool: object) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and bool(function.get("strict"))


def text_grammar(fields: Fields) -> str:
    """The grammar that the text of a request has to follow; empty: any text will do. Raises :class:`ApiError`.

    May take seconds: to be called in a thread if :func:`demands_structure`.
    """
    asked = {name: grammar for name in FORMAT_FIELDS if (grammar := _READERS[name](fields, name))}
    if len(asked) > 1:
        first, second, *_ = asked
        raise ApiError("invalid_value", f"give {first} or {second}, not both", second)
    return next(iter(asked.values()), "")


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


def _response_format(fields: Fields, name: str) -> str:
    inner = fields.nested(name)
    if fields.get(name) is None:
        return ""
    if inner.get("type") is None:
        raise inner.missing("type", "text, json_object or json_schema")
    form = inner.choice("type", "text", ("text", "json_object", "json_schema"))
    if form != "json_schema":
        inner.refuse_others(frozenset({"type"}))
        return "" if form == "text" else json_schema_grammar({"type": "object"}, name)
    inner.refuse_others(frozenset({"type", "json_schema"}))
    described = inner.nested("json_schema")
    described.refuse_others(frozenset({"name", "description", "strict", "schema"}))
    described.string("name", None)
    described.string("description", None)
    described.boolean("strict")
    if described.get("schema") is None:
        raise described.missing("schema", "a JSON schema")
    return json_schema_grammar(described.get("schema"), described.where("schema"))


def _structured_outputs(fields: Fields, name: str) -> str:
    inner = fields.nested(name)
    if fields.get(name) is None:
        return ""
    inner.refuse_others(known("completion", name), refusals("completion", name))
    given = [form for form in FORMS if inner.get(form) is not None]
    if len(given) != 1:
        got = "none" if not given else " and ".join(given)
        raise ApiError("invalid_value", f"{name} must have exactly one of {', '.join(FORMS)}; got {got}", name)
    inner.boolean("disable_fallback")
    whitespace = _whitespace(inner)
    if whitespace and given[0] not in ("json", "json_object"):
        raise inner.wrong_value(_given_option(inner), "left out unless JSON is asked for")
    if given[0] == "json_object":
        if not inner.boolean("json_object"):
            raise inner.wrong_value("json_object", "true; leave structured_outputs out for any text")
        return json_schema_grammar({"type": "object"}, inner.where("json_object"), whitespace)
    return _FORMS[given[0]](inner, given[0], whitespace)


def _given_option(inner: Fields) -> str:
    return "whitespace_pattern" if inner.get("whitespace_pattern") is not None else "disable_any_whitespace"


def _whitespace(inner: Fields) -> dict[str, object]:
    """How JSON may be laid out, as llguidance is told."""
    pattern = inner.string("whitespace_pattern", None)
    if inner.boolean("disable_any_whitespace"):
        if pattern is not None:
            raise inner.wrong_value("whitespace_pattern", "left out if disable_any_whitespace is true")
        return {"whitespace_flexible": False, "whitespace_pattern": None}
    if pattern is None:
        return {}
    if not 0 < len(pattern) <= MAX_WHITESPACE_PATTERN:
        raise inner.wrong_value(
            "whitespace_pattern", f"a regular expression of 1 to {MAX_WHITESPACE_PATTERN} characters"
        )
    return {"whitespace_pattern": pattern}


def _json(fields: Fields, name: str, options: Mapping[str, object] | None = None) -> str:
    """A schema, or one in a string."""
    schema = fields.get(name)
    if isinstance(schema, str):
        try:
            schema = loads(schema)
        except ValueError:
            raise fields.wrong_value(name, "a JSON schema") from None
    return "" if schema is None else json_schema_grammar(schema, fields.where(name), options)


def _text(fields: Fields, name: str, _options: Mapping[str, object] | None = None) -> str:
    """A regular expression, or a grammar in Lark's or llama.cpp's notation."""
    text = fields.string(name, None)
    if text is None:
        return ""
    if not text.strip():
        raise fields.wrong_value(name, "not empty")
    return _grammar(name.removeprefix("guided_"), text, fields.where(name))


def _choice(fields: Fields, name: str, _options: Mapping[str, object] | None = None) -> str:
    choices = fields.get(name)
    if choices is None:
        return ""
    expected = f"an array of 1 to {MAX_CHOICES} strings, none of them empty"
    if not isinstance(choices, list) or not all(isinstance(choice, str) for choice in choices):
        raise fields.wrong_type(name, expected)
    if not 0 < len(choices) <= MAX_CHOICES or not all(choices):
        raise fields.wrong_value(name, expected)
    return _grammar("choice", choices, fields.where(name))


_FORMS = {"json": _json, "regex": _text, "choice": _choice, "grammar": _text}
_READERS: Mapping[str, Any] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    **{f"guided_{form}": reader for form, reader in _FORMS.items()},
}
