"""The prompt of a request as token ids: texts, token arrays, lists of either, and chat messages.

Decides which forms are taken and checks that every id is one of the model's. How long a prompt may be is
decided in :mod:`router.requests`.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.chat_template import Message, TemplateError
from router.errors import ApiError
from router.fields import Fields
from router.openai_fields import MESSAGE_FIELDS, MESSAGE_NEUTRAL
from router.tokenizer import Tokenizer
from speculation.messages import Token

ROLES = ("system", "developer", "user", "assistant")
"""``developer`` is OpenAI's newer name of ``system``, which is what chat templates know."""

_PROMPT = "a string, an array of token ids, or an array of either"


def completion_prompts(
    fields: Fields, tokenizer: Tokenizer, vocabulary: int, most: int
) -> tuple[tuple[Token, ...], ...]:
    """The field ``prompt``, which may hold up to ``most`` prompts. Raises :class:`ApiError`."""
    value = fields.get("prompt")
    if value is None:
        raise fields.missing("prompt", _PROMPT)
    if not isinstance(value, str | list):
        raise fields.wrong_type("prompt", _PROMPT)
    several = isinstance(value, list) and bool(value) and isinstance(value[0], str | list)
    prompts: Sequence[object] = value if several else [value]
    if len(prompts) > most:
        message = f"prompt has {len(prompts)} prompts; this server takes at most {most} in one request"
        raise ApiError("invalid_value", message, "prompt")
    return tuple(
        _one_prompt(prompt, f"prompt[{index}]" if several else "prompt", tokenizer, vocabulary)
        for index, prompt in enumerate(prompts)
    )


def _one_prompt(value: object, where: str, tokenizer: Tokenizer, vocabulary: int) -> tuple[Token, ...]:
    fields = Fields({where: value})
    if isinstance(value, str):
        tokens = tokenizer.encode(value, special=True) if value else ()
    elif isinstance(value, list):
        if any(not isinstance(token, int) or isinstance(token, bool) for token in value):
            raise fields.wrong_type(where, "a string or an array of token ids, not a mixture")
        tokens = tuple(value)
    else:
        raise fields.wrong_type(where, "a string or an array of token ids")
    if not tokens:
        raise fields.wrong_value(where, "not empty")
    _check_ids(tokens, where, vocabulary)
    return tokens


def chat_prompt(fields: Fields, tokenizer: Tokenizer, vocabulary: int) -> tuple[Token, ...]:
    """The field ``messages`` through the model's chat template. Raises :class:`ApiError`."""
    value = fields.get("messages")
    if value is None:
        raise fields.missing("messages", "an array of messages")
    if not isinstance(value, list):
        raise fields.wrong_type("messages", "an array of messages")
    if not value:
        raise fields.wrong_value("messages", "an array of at least one message")
    messages = [_message(item, f"messages[{index}]") for index, item in enumerate(value)]
    if tokenizer.chat_template is None:
        message = "this model has no chat template, so messages cannot be used; use /v1/completions"
        raise ApiError("no_chat_template", message, "messages")
    try:
        text = tokenizer.chat_template.render(messages)
    except TemplateError as error:
        raise ApiError("invalid_value", str(error), "messages") from None
    tokens = tokenizer.encode(text, special=False) if text else ()
    if not tokens:
        raise ApiError("invalid_value", "messages are empty once the chat template is applied", "messages")
    _check_ids(tokens, "messages", vocabulary)
    return tokens


def _message(item: object, where: str) -> Message:
    if not isinstance(item, dict):
        raise Fields({where: item}).wrong_type(where, "an object with role and content")
    fields = Fields(item, where)
    fields.refuse_others(MESSAGE_FIELDS, MESSAGE_NEUTRAL)
    role = fields.string("role", None)
    if role is None:
        raise fields.missing("role", f"one of {', '.join(ROLES)}")
    if role not in ROLES:
        raise fields.wrong_value("role", f"one of {', '.join(ROLES)}")
    message = {"role": "system" if role == "developer" else role, "content": _content(fields)}
    name = fields.string("name", None)
    return message if name is None else message | {"name": name}


def _content(fields: Fields) -> str:
    """A string, or text parts joined by line breaks."""
    value = fields.get("content")
    if value is None:
        raise fields.missing("content", "a string or an array of text parts")
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise fields.wrong_type("content", "a string or an array of text parts")
    return "\n".join(_part(part, f"{fields.where('content')}[{index}]") for index, part in enumerate(value))


def _part(item: object, where: str) -> str:
    if not isinstance(item, dict):
        raise Fields({where: item}).wrong_type(where, 'an object {"type": "text", "text": ...}')
    fields = Fields(item, where)
    kind = fields.string("type", None)
    if kind is None:
        raise fields.missing("type", '"text"')
    if kind != "text":
        path = fields.where("type")
        raise ApiError("unsupported_parameter", f'{path} must be "text"; this model reads text only', path)
    fields.refuse_others(frozenset({"type", "text"}))
    text = fields.string("text", None)
    if text is None:
        raise fields.missing("text", "a string")
    return text


def _check_ids(tokens: Sequence[Token], where: str, vocabulary: int) -> None:
    """Also for ids of our own: a tokenizer may know tokens for which the model has no row."""
    for token in tokens:
        if not 0 <= token < vocabulary:
            message = f"{where} has token id {token}; the model's ids go from 0 to {vocabulary - 1}"
            raise ApiError("invalid_value", message, where)
