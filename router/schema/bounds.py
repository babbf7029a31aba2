"""What is too large to be looked at: checked before a template is filled in or a text tokenised.

Tokenising takes seconds for megabytes. A text that cannot fit the model's context, however well it is put into tokens,
is refused unread.
"""

from __future__ import annotations

from router.errors import ApiError
from router.schema.request_objects import text_of
from router.schema.request_schema import MAX_MESSAGES, Body, ChatBody, CompletionBody

ALWAYS_READ = 1 << 16
"""Characters that are tokenised in any case, so that a refusal can tell how many tokens they are."""


def check_sizes(body: Body, max_characters: int) -> None:
    """Whether the prompt, or all messages together, have at most ``max_characters`` characters.

    Raises :class:`ApiError`.

    Of what is no text nothing is said here, nor of :data:`ALWAYS_READ` characters.
    """
    max_characters = max(max_characters, ALWAYS_READ)
    if isinstance(body, ChatBody) and len(body.messages) > MAX_MESSAGES:
        message = f"messages has {len(body.messages)} entries, more than {MAX_MESSAGES}"
        raise ApiError("invalid_value", message, "messages")
    if body.truncate_prompt_tokens is not None:
        return
    if isinstance(body, CompletionBody):
        for text in body.prompt if isinstance(body.prompt, list) else [body.prompt]:
            if isinstance(text, str) and len(text) > max_characters:
                raise _too_long("prompt", len(text), max_characters)
    if isinstance(body, ChatBody):
        characters = sum(len(text_of(message.content or "")) for message in body.messages)
        if characters > max_characters:
            raise _too_long("messages", characters, max_characters)


def _too_long(name: str, characters: int, max_characters: int) -> ApiError:
    message = f"{name} has {characters} characters; more than {max_characters} cannot fit the model's context"
    return ApiError("context_length_exceeded", message, name)
