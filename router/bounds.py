"""What is too large to be looked at: checked on the raw request, before a template is filled in or a text tokenised.

Tokenising takes seconds for megabytes. A text that cannot fit the model's context, however well it is put into tokens,
is refused unread.
"""

from __future__ import annotations

from collections.abc import Iterator

from router.errors import ApiError
from router.field_bounds import MOST_MESSAGES
from router.fields import Fields

ALWAYS_READ = 1 << 16
"""Characters that are tokenised in any case, so that a refusal can tell how many tokens they are."""


def check_sizes(fields: Fields, most: int) -> None:
    """Whether the prompt, or all messages together, have at most ``most`` characters. Raises :class:`ApiError`.

    Of what is no text nothing is said here, nor of :data:`ALWAYS_READ` characters.
    """
    most = max(most, ALWAYS_READ)
    prompt, messages = fields.get("prompt"), fields.get("messages")
    for text in prompt if isinstance(prompt, list) else [prompt]:
        if isinstance(text, str) and len(text) > most and fields.get("truncate_prompt_tokens") is None:
            raise _too_long("prompt", len(text), most)
    if not isinstance(messages, list):
        return
    if len(messages) > MOST_MESSAGES:
        raise ApiError("invalid_value", f"messages has {len(messages)} entries, more than {MOST_MESSAGES}", "messages")
    characters = sum(map(len, _texts(messages)))
    if characters > most and fields.get("truncate_prompt_tokens") is None:
        raise _too_long("messages", characters, most)


def _texts(messages: list[object]) -> Iterator[str]:
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else [content]:
            text = part.get("text") if isinstance(part, dict) else part
            if isinstance(text, str):
                yield text


def _too_long(name: str, characters: int, most: int) -> ApiError:
    message = f"{name} has {characters} characters; more than {most} cannot fit the model's context"
    return ApiError("context_length_exceeded", message, name)
