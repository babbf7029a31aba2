"""The prompt of a request as token ids: texts, token arrays, lists of either, and chat messages.

Decides which forms are taken, what is cut off where a caller says so, and checks that every id is one of the model's.
What is too large to be looked at is refused unread: tokenising takes seconds for megabytes. How long a prompt may be
in tokens is decided in :mod:`router.schema.answer_fields`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from router.errors import ApiError
from router.schema.chat_fields import chat_text
from router.schema.fields import wrong_type, wrong_value
from router.schema.request_objects import text_of
from router.schema.request_schema import MAX_MESSAGES, Body, ChatBody, CompletionBody
from router.schema.tools import Tools
from router.text.text import Detokenizer
from router.text.tokenizer import Tokenizer
from speculation.messages import Token

ALWAYS_READ = 1 << 16
"""Characters that are tokenised in any case, so that a refusal can tell how many tokens they are."""
_NOTHING_HIDDEN: frozenset[Token] = frozenset()


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: never empty."""

    tokens: tuple[Token, ...]
    given: str | None = None
    """The text it was given as; None: it was given as tokens, or is cut."""

    def text(self, tokenizer: Tokenizer) -> str:
        """As an answer repeats it."""
        return tokenizer.decode(self.tokens) if self.given is None else self.given

    def starts(self, tokenizer: Tokenizer) -> Iterator[int]:
        """The character of that text where each token's own begins; what the tokenizer puts around a text has none."""
        hidden = tokenizer.hidden if self.given is None else _NOTHING_HIDDEN
        text, at, waiting = self.text(tokenizer), 0, 0
        detokenizer = Detokenizer(tokenizer, hidden=hidden)
        for token in self.tokens:
            piece = detokenizer.push(token)
            waiting += 1
            if detokenizer.pending:
                continue
            yield from [at] * waiting
            waiting = 0
            at += len(piece) if text.startswith(piece, at) else 0
        yield from [at] * waiting


def completion_prompts(
    body: CompletionBody, tokenizer: Tokenizer, vocabulary: int, max_prompts: int
) -> tuple[Prompt, ...]:
    """The field ``prompt``, which may hold up to ``max_prompts`` prompts. Raises :class:`ApiError`."""
    value = body.prompt
    several = isinstance(value, list) and bool(value) and isinstance(value[0], str | list)
    prompts: Sequence[object] = value if several else [value]
    special = body.add_special_tokens is not False
    if len(prompts) > max_prompts:
        message = f"prompt has {len(prompts)} prompts; this server takes at most {max_prompts} in one request"
        raise ApiError("invalid_value", message, "prompt")
    return tuple(
        _one_prompt(prompt, f"prompt[{index}]" if several else "prompt", tokenizer, vocabulary, special=special)
        for index, prompt in enumerate(prompts)
    )


def _one_prompt(value: object, where: str, tokenizer: Tokenizer, vocabulary: int, *, special: bool) -> Prompt:
    if isinstance(value, str):
        tokens = tokenizer.encode(value, special=special) if value else ()
    elif isinstance(value, list):
        if any(not isinstance(token, int) or isinstance(token, bool) for token in value):
            raise wrong_type(where, "a string or an array of token ids, not a mixture", value)
        tokens = tuple(value)
    else:
        raise wrong_type(where, "a string or an array of token ids", value)
    if not tokens:
        raise wrong_value(where, "not empty", value)
    _check_ids(tokens, where, vocabulary)
    return Prompt(tokens, value if isinstance(value, str) else None)


def chat_prompt(body: ChatBody, tokenizer: Tokenizer, vocabulary: int, tools: Tools) -> Prompt:
    """The field ``messages`` through the model's chat template. Raises :class:`ApiError`."""
    text = chat_text(body, tokenizer.chat_template, tools)
    tokens = tokenizer.encode(text, special=bool(body.add_special_tokens)) if text else ()
    if not tokens:
        raise ApiError("invalid_value", "messages are empty once the chat template is applied", "messages")
    _check_ids(tokens, "messages", vocabulary)
    return Prompt(tokens)


def truncated(body: Body, prompts: Sequence[Prompt], context: int, wanted: int) -> tuple[Prompt, ...]:
    """``truncate_prompt_tokens``: the last tokens only; -1: as many as leave room for ``wanted`` ones."""
    max_tokens = body.truncate_prompt_tokens
    if max_tokens is None:
        return tuple(prompts)
    if max_tokens == 0 or max_tokens > context:
        raise wrong_value("truncate_prompt_tokens", f"-1 (as many as fit) or from 1 to {context}", max_tokens)
    max_tokens = max(context - wanted, 1) if max_tokens < 0 else max_tokens
    return tuple(
        prompt if len(prompt.tokens) <= max_tokens else Prompt(prompt.tokens[-max_tokens:]) for prompt in prompts
    )


def _check_ids(tokens: Sequence[Token], where: str, vocabulary: int) -> None:
    """Also for ids of our own: a tokenizer may know tokens for which the model has no row."""
    for token in tokens:
        if not 0 <= token < vocabulary:
            message = f"{where} has token id {token}; the model's ids go from 0 to {vocabulary - 1}"
            raise ApiError("invalid_value", message, where)


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
