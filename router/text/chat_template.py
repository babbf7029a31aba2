"""Turning chat messages into one prompt text, the way transformers does.

Chat templates are Jinja programs that come with a model, so they run in Jinja's immutable sandbox with
exactly the filters, functions and whitespace rules that transformers gives them (``apply_chat_template``);
importing transformers for that would pull torch into the router. A template's own refusal
(``raise_exception``) becomes a :class:`TemplateError` for the client.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import chain, takewhile
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from router.text.tool_calls import ToolForm, form_shown, overlap, parser_of

Message = Mapping[str, Any]
"""A chat message: ``role``, ``content`` and perhaps ``name``, ``tool_calls`` or ``tool_call_id``."""

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", *SPECIAL_TOKENS})
"""Variables that are not a caller's to set."""

LONGEST_REASON = 300
_SAID = "Said on trial."
_ASKED: Sequence[Message] = [{"role": "user", "content": _SAID}]
"""What a template is tried with, to see what it makes of it."""
_ANSWERED: Sequence[Message] = [*_ASKED, {"role": "assistant", "content": _SAID}]
_FUNCTION, _GIVEN = "called_on_trial", ("Given first.", "Given next.")
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": _FUNCTION,
            "description": "None.",
            "parameters": {"type": "object", "properties": {"x": {"type": "string", "description": "None."}}},
        },
    }
]
_REFUSALS = (
    jinja2.TemplateError,
    AttributeError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    RecursionError,
)
"""What a template raises that was written for other messages or tools."""


class TemplateError(ValueError):
    """The template does not accept these messages, or is itself wrong."""


class ChatTemplate:
    """A compiled chat template with the model's special tokens (``bos_token`` and so on) as its variables."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], hidden: Collection[str] = ()) -> None:
        """``hidden``: tokens that show in no answer. Raises :class:`TemplateError` when ``source`` does not compile."""
        self._variables = dict(special_tokens)
        try:
            environment = _environment()
            self._template = environment.from_string(source)
            names = jinja2.meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateError as error:
            raise TemplateError(f"the model's chat template does not compile: {_reason(error)}") from error
        self.variables = frozenset(names) - environment.globals.keys()
        self.knows_tools = "tools" in self.variables
        """Whether it has a place for the functions a model may call."""
        self._parts = self._singly = False
        """Whether it writes a content only where that comes in parts, and the call of a message only where there is no
        other."""
        if _SAID not in self._tried(_ASKED):
            self._parts = True
            self._parts = _SAID in self._tried(_ASKED)
        if self.knows_tools and not self._writes(*_GIVEN):
            self._singly = self._writes(_GIVEN[0])
        form = form_shown(source) if self.knows_tools else None
        self.tool_form = None if form is None or self._differs(form, hidden) else form
        """How it writes calls; None: in no form known here."""

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt for the next assistant turn. ``tools``: as OpenAI's; ``variables``: none of :data:`RESERVED`."""
        variables = {
            **(variables or {}),
            **self._variables,
            "messages": [self._as_wanted(message) for message in (_singly(messages) if self._singly else messages)],
            "tools": list(tools) or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(variables)
        except _REFUSALS as error:
            raise TemplateError(f"the model's chat template refuses these messages: {_reason(error)}") from error

    def _as_wanted(self, message: Message) -> dict[str, Any]:
        wanted = dict(message)
        if self._parts and isinstance(content := message.get("content"), str):
            wanted["content"] = [{"type": "text", "text": content}]
        return wanted

    def _differs(self, form: ToolForm, hidden: Collection[str]) -> bool:
        """Whether calls are seen to be written in another form. Where none is written nothing is seen."""
        plain, called = self._tried(_ANSWERED, _TOOLS), self._tried([*_ASKED, _calling(*_GIVEN[:1])], _TOOLS)
        for mark in sorted({*hidden}.difference(form.marks), key=len, reverse=True):  # one may stand within another
            plain, called = plain.replace(mark, ""), called.replace(mark, "")
        same = sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(plain, called, strict=False)))
        said = called[same - overlap(called[:same], form.marks[0]) :]  # a plain answer may begin with the same letters
        if not plain or _FUNCTION not in said:
            return False
        if form is ToolForm.LLAMA:  # which has no end, and here the turn's end behind it
            said = said[: said.rfind("}") + 1]
        parser = parser_of(form, {_FUNCTION})
        calls = parser.push(said).then(parser.finish()).calls
        return not any(call.name == _FUNCTION and json.loads(call.arguments) == {"x": _GIVEN[0]} for call in calls)

    def _writes(self, *given: str) -> bool:
        """Whether a message with these calls is written, with all of them."""
        written = self._tried([*_ASKED, _calling(*given)], _TOOLS)
        return all(one in written for one in given)

    def _tried(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """What is written of them; empty: it does not take them, for whatever reason."""
        try:
            return self.render(messages, tools, add_generation_prompt=messages[-1]["role"] == "user")
        except Exception:  # a template is a program: that it cannot be tried must not keep it from use
            return ""


def _calling(*given: str) -> Message:
    calls = [
        {"id": f"{number:09}", "type": "function", "function": {"name": _FUNCTION, "arguments": {"x": one}}}
        for number, one in enumerate(given)  # ids of nine digits, as Mistral's are
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _singly(messages: Sequence[Message]) -> Iterator[Message]:
    """The same, each call as a message of its own, with what answers it behind it."""
    waiting = deque(messages)
    while waiting:
        message = waiting.popleft()
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            yield message
            continue
        answers: dict[str | None, list[Message]] = {}
        while waiting and waiting[0]["role"] == "tool":
            answer = waiting.popleft()
            answers.setdefault(answer.get("tool_call_id"), []).append(answer)
        for number, call in enumerate(calls):
            yield {**message, "content": "" if number else message["content"], "tool_calls": [call]}
            yield from answers.pop(call.get("id"), ())
        yield from chain(*answers.values())


def _reason(error: Exception) -> str:
    return str(error)[:LONGEST_REASON] or type(error).__name__


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; Jinja's own filter escapes HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _GenerationBlock(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's words, for training. Here it passes its text through."""

    tags = {"generation"}  # noqa: RUF012  (declared so by the base class)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """Compile the block to its own body."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_body", [], [])
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()
