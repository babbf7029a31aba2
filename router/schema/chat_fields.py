"""The chat messages of a request, and the other fields that the model's chat template puts into the prompt."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from router.errors import ApiError
from router.schema.fields import missing, nearest, shortened, wrong_type, wrong_value
from router.schema.request_objects import Message as Written
from router.schema.request_objects import text_of
from router.schema.request_schema import ChatBody
from router.schema.tools import NO_TOOLS, Tools
from router.text.chat_template import RESERVED, ChatTemplate, Message, TemplateError

_CONTENT = "a string or an array of text parts"


def chat_text(body: ChatBody, template: ChatTemplate | None, tools: Tools) -> str:
    """The conversation as the prompt's text. Raises :class:`ApiError`."""
    messages = [_message(message, f"messages[{index}]") for index, message in enumerate(body.messages)]
    if template is None:
        message = "this model has no chat template, so messages cannot be used; use /v1/completions"
        raise ApiError("no_chat_template", message, "messages")
    if not template.knows_tools:
        _refuse_tool_messages(messages)
    continued = body.continue_final_message
    opened = not continued if body.add_generation_prompt is None else body.add_generation_prompt
    if continued and opened:
        raise wrong_value("continue_final_message", "false where add_generation_prompt is true", continued)
    variables = _variables(body, template)
    mark = secrets.token_hex(16)
    written = _marked(messages, mark) if continued else messages
    try:
        text = template.render(written, tools=tools.offered, add_generation_prompt=opened, variables=variables)
    except TemplateError as error:
        raise ApiError("invalid_value", str(error), "messages") from None
    return _up_to(mark, text, messages[-1]) if continued else text


def _check_message(written: Written, where: str) -> None:
    """Raise :class:`ApiError` if a message lacks what those of its role have, or has what they have not."""
    role, calls, answered = written.role, written.tool_calls, written.tool_call_id
    if calls and role != "assistant":
        raise wrong_value(
            f"{where}.tool_calls",
            "left out, except in messages of role assistant",
            [call.model_dump(exclude_unset=True) for call in calls],
        )
    if written.content is None and not calls:
        raise missing(f"{where}.content", _CONTENT)
    if written.content == []:
        raise wrong_type(f"{where}.content", _CONTENT, [])
    if role == "tool" and answered is None:
        raise missing(f"{where}.tool_call_id", "the id of the call this message answers")
    if role != "tool" and answered is not None:
        raise wrong_value(f"{where}.tool_call_id", "left out, except in messages of role tool", answered)


def _message(written: Written, where: str) -> Message:
    """As templates want it: the arguments of calls are objects."""
    _check_message(written, where)
    role, calls, answered = written.role, written.tool_calls, written.tool_call_id
    message: dict[str, Any] = {"role": "system" if role == "developer" else role}
    message["content"] = "" if written.content is None else text_of(written.content, "\n")
    if calls:
        message["tool_calls"] = [
            ({} if call.id is None else {"id": call.id})
            | {"type": "function", "function": {"name": call.function.name, "arguments": call.function.arguments}}
            for call in calls
        ]
    if written.name is not None:
        message["name"] = written.name
    return message if answered is None else message | {"tool_call_id": answered}


def _refuse_tool_messages(messages: list[Message]) -> None:
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        if message["role"] == "tool":
            raise ApiError("unsupported_parameter", f"{path}.role is tool; {NO_TOOLS}", f"{path}.role")
        if "tool_calls" in message:
            raise ApiError("unsupported_parameter", f"{path} has tool_calls; {NO_TOOLS}", f"{path}.tool_calls")


def _variables(body: ChatBody, template: ChatTemplate) -> Mapping[str, object]:
    """``chat_template_kwargs`` and ``reasoning_effort``: for templates that have such variables only."""
    free, effort = template.variables - RESERVED, body.reasoning_effort
    for name, value in body.chat_template_kwargs.items():
        if name not in free:
            hint = nearest(name, free) if free else "; it has none that a request may set"
            expected = f"left out: the model's chat template has no such variable{hint}"
            raise wrong_value(f"chat_template_kwargs.{shortened(name)}", expected, value)
    if "reasoning_effort" in free and effort is not None:
        return {**body.chat_template_kwargs, "reasoning_effort": effort}
    if effort not in (None, "none"):
        raise wrong_value("reasoning_effort", "left out: the model's chat template has no such variable", effort)
    return body.chat_template_kwargs


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
