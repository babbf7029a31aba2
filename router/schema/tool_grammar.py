"""The grammars of texts that call tools.

Each tool's arguments are a grammar of their own, so that a reference in their schema (``#``, ``#/$defs/...``) means
what it means in the request. Marks that are tokens of their own are written as such: a grammar does not find a token by
the letters of its name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from router.errors import ApiError
from router.schema.structured import json_schema_grammar, tried
from router.schema.tool_fields import Tools
from router.text.tokenizer import Tokenizer
from router.text.tool_calls import CLOSE, OPEN, PYTHON_TAG, ToolForm

WHITESPACE = r"\x20"
"""Between the parts of a call that a grammar demands, or nothing: a model that cannot end must not go on with white."""
_ANY = r"(.|\n)"


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
        return _tried(["start: calls", *_calls(tools, tokenizer)], tokenizer.tags)
    if answer:
        return _tried_with(answer, ["start: @answer | calls", *_calls(tools, tokenizer)], tokenizer.tags)
    if not tools.strict:
        return ""
    free = _beside_hermes if tools.form is ToolForm.HERMES else _beside_llama
    return _tried([*free(tools, tokenizer), *_calls(tools, tokenizer)], tokenizer.tags)


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
    yield "start: opened* text" if tools.several else "start: opened | text"
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
    yield f"gap: /{WHITESPACE}/?"
    for index in indices:
        name = tools.offered[index]["function"]["name"]
        yield f"call_{index}: {_string(name)} arguments %json {json.dumps(_parameters(tools, index))}"


def _parameters(tools: Tools, index: int) -> Mapping[str, Any]:
    """The schema that a function's arguments have to follow."""
    function = tools.offered[index]["function"]
    schema = {"type": "object"}
    if tools.demanded or function.get("strict"):
        schema |= function.get("parameters") or {}
        json_schema_grammar(schema, f"tools[{index}].function.parameters")
    return schema | {"x-guidance": {"whitespace_pattern": WHITESPACE}}


def _mark(mark: str, tags: Collection[str]) -> str:
    return mark if mark in tags else json.dumps(mark)


def _either(letters: str, mark: str, tags: Collection[str]) -> str:
    return f"({letters} | {mark})" if mark in tags else letters


def _string(text: str) -> str:
    """A JSON string, as a grammar names it."""
    return json.dumps(json.dumps(text))


def _tried_with(answer: str, rules: Iterable[str], tags: Collection[str]) -> str:
    """``answer``: a Lark grammar, or JSON that holds one grammar.

    While a text may still be either, its white space is that of the answer. Of a call in Llama's form there can then be
    none before the arguments, if the answer in JSON may be alike so far and has no object there.
    """
    (inner,) = json.loads(answer)["grammars"] if answer.startswith("{") else ({"lark_grammar": answer},)
    outer = {"name": "answer or calls", "lark_grammar": "\n".join(rules)}
    return _tried([json.dumps({"grammars": [outer, inner | {"name": "answer"}]})], tags)


def _tried(rules: Iterable[str], tags: Collection[str]) -> str:
    grammar = "\n".join(rules)
    return tried(grammar, "tools", [tag for tag in sorted(tags) if tag in grammar])
