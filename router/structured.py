"""Structured outputs: from what a request demands of the text's form to one grammar that workers can follow.

Reads OpenAI's ``response_format``, vLLM's ``structured_outputs`` and its older ``guided_*`` fields. Every grammar is
tried before a worker sees it (:mod:`router.grammar_checker`), so that one that is invalid, too large, endless or
impossible is refused with the name of its field.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from router.errors import ApiError
from router.field_table import refusals
from router.fields import Fields, show
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
MAX_CHOICES = 1024
MAX_WHITESPACE_PATTERN = 256
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,40}"
"""Between the parts of JSON: as the model likes, but no endless run of it."""
FORMS = ("json", "regex", "choice", "grammar", "json_object")

_checker = GrammarChecker()


def mentions_structure(body: bytes) -> bool:
    """Whether reading a request may take a while, since it has a grammar to be tried."""
    return any(name.encode() in body for name in (*FORMAT_FIELDS, "tool_choice"))


def text_grammar(fields: Fields) -> str:
    """The grammar that the text of a request has to follow; empty: any text will do. Raises :class:`ApiError`.

    May take seconds: to be called in a thread if :func:`mentions_structure`.
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
    grammar = _grammar("json", schema, field, {"whitespace_pattern": WHITESPACE, **(options or {})})
    if not _ends(schema, schema):
        raise ApiError("invalid_value", f"{field} recurses without end: no JSON of finite length fits it", field)
    return grammar


def lark_grammar(text: str, field: str) -> str:
    """A Lark grammar, tried. ``field``: what in the request it is made for."""
    return _grammar("grammar", text, field)


def _grammar(form: str, text: object, field: str, options: Mapping[str, object] | None = None) -> str:
    size = len(json.dumps(text, ensure_ascii=False).encode())
    if size > MAX_FORM_BYTES:
        message = f"{field} has {size} bytes; at most {MAX_FORM_BYTES} are taken"
        raise ApiError("invalid_value", message, field)
    try:
        grammar = _checker.grammar(form, text, options)
    except GrammarRefused as refused:
        raise ApiError("invalid_value", f"{field} cannot be used: {refused}", field) from None
    if len(grammar.encode()) > MAX_GRAMMAR_BYTES:
        message = f"{field} makes a grammar of {len(grammar)} bytes; at most {MAX_GRAMMAR_BYTES} are taken"
        raise ApiError("invalid_value", message, field)
    return grammar


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
    options = {"disable_any_whitespace", "whitespace_pattern", "disable_fallback"}
    inner.refuse_others(frozenset(FORMS) | options, refusals("completion", name))
    given = [form for form in FORMS if inner.get(form) is not None]
    if len(given) != 1:
        got = "none" if not given else " and ".join(given)
        raise ApiError("invalid_value", f"{name} must have exactly one of {', '.join(FORMS)}; got {got}", name)
    inner.boolean("disable_fallback")  # there is one backend, so none to fall back on
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
            schema = json.loads(schema)
        except (ValueError, RecursionError):
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


def _ends(schema: object, root: object) -> bool:
    """Whether any finite JSON fits a schema: the references that surely end are found first, then those above them."""
    ending: set[str] = set()
    while True:
        found = {reference for reference in _references(root) if _fits(_at(root, reference), ending)}
        if found == ending:
            return _fits(schema, ending)
        ending = found


def _fits(schema: object, ending: set[str]) -> bool:
    """The same for a schema, given the references that surely end."""
    if not isinstance(schema, dict):
        return True
    parts: list[bool] = []
    if isinstance(reference := schema.get("$ref"), str):
        parts.append(reference in ending or not reference.startswith("#"))
    if isinstance(every := schema.get("allOf"), list):
        parts.append(all(_fits(one, ending) for one in every))
    for name in ("anyOf", "oneOf"):
        if isinstance(some := schema.get(name), list) and some:
            parts.append(any(_fits(one, ending) for one in some))
    if schema.get("type") == "object" and isinstance(required := schema.get("required"), list):
        properties = schema.get("properties")
        described = properties if isinstance(properties, dict) else {}
        parts += [_fits(described.get(name), ending) for name in required if isinstance(name, str)]
    if schema.get("type") == "array" and isinstance(least := schema.get("minItems"), int):
        first = schema.get("prefixItems")
        before = first[:least] if isinstance(first, list) else []
        parts += [_fits(one, ending) for one in before]
        parts.append(len(before) >= least or _fits(schema.get("items"), ending))
    return all(parts)


def _references(schema: object) -> set[str]:
    """All references inside a schema to a part of it."""
    if isinstance(schema, list):
        return set().union(*map(_references, schema))
    if not isinstance(schema, dict):
        return set()
    reference = schema.get("$ref")
    own = {reference} if isinstance(reference, str) and reference.startswith("#") else set()
    return own.union(*map(_references, schema.values()))


def _at(root: object, reference: str) -> object:
    """What a JSON pointer (RFC 6901) in a URI fragment points to; True, which anything fits, if it is none."""
    place = root
    for part in reference.removeprefix("#").split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(place, list) and name.isdecimal() and int(name) < len(place):
            place = place[int(name)]
        elif isinstance(place, dict) and name in place:
            place = place[name]
        else:
            return True
    return place
