"""The chat messages of a request, and the other fields that the model's chat template puts into the prompt."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from router.chat_template import RESERVED, ChatTemplate, Message, TemplateError
from router.errors import ApiError
from router.field_bounds import EFFORTS, ROLES
from router.field_table import known, refusals
from router.fields import Fields, nearest, shortened
from router.tool_fields import NO_TOOLS, Tools, past_calls

_CONTENT = "a string or an array of text parts"


def chat_text(fields: Fields, template: ChatTemplate | None, tools: Tools) -> str:
    """The conversation as the prompt's text. Raises :class:`ApiError`."""
    messages = _messages(fields)
    if template is None:
        message = "this model has no chat template, so messages cannot be used; use /v1/completions"
        raise ApiError("no_chat_template", message, "messages")
    if not template.knows_tools:
        _refuse_tool_messages(messages)
    continued = fields.boolean("continue_final_message")
    opened = fields.boolean("add_generation_prompt", not continued)
    if continued and opened:
        raise fields.wrong_value("continue_final_message", "false where add_generation_prompt is true")
    variables = _variables(fields, template)
    mark = secrets.token_hex(16)
    written = _marked(messages, mark) if continued else messages
    try:
        text = template.render(written, tools=tools.offered, add_generation_prompt=opened, variables=variables)
    except TemplateError as error:
        raise ApiError("invalid_value", str(error), "messages") from None
    return _up_to(mark, text, messages[-1]) if continued else text


def _messages(fields: Fields) -> list[Message]:
    value = fields.get("messages")
    if value is None:
        raise fields.missing("messages", "an array of messages")
    if not isinstance(value, list):
        raise fields.wrong_type("messages", "an array of messages")
    if not value:
        raise fields.wrong_value("messages", "an array of at least one message")
    return [_message(item, f"messages[{index}]") for index, item in enumerate(value)]


def _message(item: object, where: str) -> Message:
    if not isinstance(item, dict):
        raise Fields({where: item}).wrong_type(where, "an object with role and content")
    fields = Fields(item, where)
    fields.refuse_others(known("chat", "messages[]"), refusals("chat", "messages[]"))
    role = fields.string("role", None)
    if role is None:
        raise fields.missing("role", f"one of {', '.join(ROLES)}")
    if role not in ROLES:
        raise fields.wrong_value("role", f"one of {', '.join(ROLES)}")
    message: dict[str, Any] = {"role": "system" if role == "developer" else role}
    calls = past_calls(fields)
    if calls and role != "assistant":
        raise fields.wrong_value("tool_calls", "left out, except in messages of role assistant")
    message["content"] = "" if calls and fields.get("content") is None else _content(fields)
    if calls:
        message["tool_calls"] = calls
    if (name := fields.string("name", None)) is not None:
        message["name"] = name
    answered = fields.string("tool_call_id", None)
    if (answered is not None) != (role == "tool"):
        if answered is None:
            raise fields.missing("tool_call_id", "the id of the call this message answers")
        raise fields.wrong_value("tool_call_id", "left out, except in messages of role tool")
    return message if answered is None else message | {"tool_call_id": answered}


def _content(fields: Fields) -> str:
    """A string, or text parts joined by line breaks."""
    value = fields.get("content")
    if value is None:
        raise fields.missing("content", _CONTENT)
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise fields.wrong_type("content", _CONTENT)
    return "\n".join(text_part(part, f"{fields.where('content')}[{index}]") for index, part in enumerate(value))


def text_part(item: object, where: str) -> str:
    """The text of one part of a content; ``where`` it stands. Raises :class:`ApiError`."""
    if not isinstance(item, dict):
        raise Fields({where: item}).wrong_type(where, 'an object {"type": "text", "text": ...}')
    fields = Fields(item, where)
    kind = fields.string("type", None)
    if kind is None:
        raise fields.missing("type", '"text"')
    if kind != "text":
        path = fields.where("type")
        raise ApiError("unsupported_parameter", f'{path} must be "text"; this model reads text only', path)
    fields.refuse_others(frozenset({"type", "text", "prompt_cache_breakpoint"}))
    text = fields.string("text", None)
    if text is None:
        raise fields.missing("text", "a string")
    return text


def _refuse_tool_messages(messages: list[Message]) -> None:
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        if message["role"] == "tool":
            raise ApiError("unsupported_parameter", f"{path}.role is tool; {NO_TOOLS}", f"{path}.role")
        if "tool_calls" in message:
            raise ApiError("unsupported_parameter", f"{path} has tool_calls; {NO_TOOLS}", f"{path}.tool_calls")


def _variables(fields: Fields, template: ChatTemplate) -> Mapping[str, object]:
    """``chat_template_kwargs`` and ``reasoning_effort``: for templates that have such variables only."""
    inner = fields.nested("chat_template_kwargs")
    free = template.variables - RESERVED
    for name in inner.raw:
        if name not in free:
            hint = nearest(name, free) if free else "; it has none that a request may set"
            short = Fields({shortened(name): inner.raw[name]}, inner.path)
            expected = f"left out: the model's chat template has no such variable{hint}"
            raise short.wrong_value(shortened(name), expected)
    effort = fields.choice("reasoning_effort", "none", EFFORTS)
    if "reasoning_effort" in free and fields.get("reasoning_effort") is not None:
        return {**inner.raw, "reasoning_effort": effort}
    if effort != "none":
        raise fields.wrong_value("reasoning_effort", "left out: the model's chat template has no such variable")
    return inner.raw


def _marked(messages: list[Message], mark: str) -> list[Message]:
    """With a mark after the last message's content, and a space that shows whether the template trims contents."""
    *before, last = messages
    return [*before, {**last, "content": f"{last['content']}{mark} "}]


def _up_to(mark: str, text: str, last: Message) -> str:
    """The prompt up to the mark after the last message's content, so that the model goes on with it."""
    before, found, after = text.rpartition(mark)
    trims = not after.startswith(" ")
    content = last["content"].strip() if trims else last["content"].lstrip()
    prompt = before.rstrip() if trims else before
    if not found or not content.strip() or not prompt.endswith(content):
        where = "continue_final_message"
        message = f"{where} must be false: the chat template does not write the last message as it is"
        raise ApiError("invalid_value", message, where)
    return prompt
