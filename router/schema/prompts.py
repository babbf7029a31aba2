"""The prompt of a request as token ids: texts, token arrays, lists of either, and chat messages.

Decides which forms are taken, what of a chat goes into the model's template, what is cut off where a caller says so,
how long prompt and text may be in tokens, and checks that every id is one of the model's. What is too large to be
looked at is refused unread: tokenising takes seconds for megabytes.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from router.errors import ApiError
from router.generation import ServedModel
from router.schema.fields import missing, nearest, shortened, show, wrong_type, wrong_value
from router.schema.request_objects import Message as Written
from router.schema.request_objects import text_of
from router.schema.request_schema import COMPLETION_MAX_TOKENS, MAX_MESSAGES, Body, ChatBody, CompletionBody
from router.schema.structured import NO_TOOLS, Tools
from router.text.chat_template import RESERVED, ChatTemplate, Message, TemplateError
from router.text.text import Detokenizer
from router.text.tokenizer import Tokenizer
from speculation.messages import Token

MAX_PROMPT_LOGPROBS = 1 << 20
"""Of all choices of a request together."""
ALWAYS_READ = 1 << 16
"""Characters that are tokenised in any case, so that a refusal can tell how many tokens they are."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: never empty."""

    tokens: tuple[Token, ...]
    given: str | None = None
    """The text it was given as; None: it was given as tokens, or is cut."""

    def text(self, tokenizer: Tokenizer, hidden: frozenset[Token] | None = None) -> str:
        """As an answer repeats it. ``hidden`` as in :meth:`Tokenizer.decode`; a text that was given shows them all."""
        return tokenizer.decode(self.tokens, hidden) if self.given is None else self.given

    def starts(self, tokenizer: Tokenizer, hidden: frozenset[Token] | None = None) -> Iterator[int]:
        """The character of that text where each token's own begins; what the tokenizer puts around a text has none."""
        text, at, waiting = self.text(tokenizer, hidden), 0, 0
        hidden = hidden if self.given is None else frozenset()
        detokenizer = Detokenizer(tokenizer, hidden=hidden)
        for token in self.tokens:
            piece = detokenizer.push(token)
            waiting += 1
            if detokenizer.pending:
                continue
            yield from [at] * waiting
            waiting = 0
            if not text.startswith(piece, at):
                piece = piece.removeprefix(" ")  # that a tokenizer puts before a text, also behind special tokens
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
    check_ids(tokens, where, vocabulary)
    return Prompt(tokens, value if isinstance(value, str) else None)


def chat_prompt(body: ChatBody, tokenizer: Tokenizer, model: ServedModel, tools: Tools) -> Prompt:
    """The field ``messages`` through the model's chat template. Raises :class:`ApiError`."""
    text = chat_text(body, tokenizer.template(tools=bool(tools.offered)), tools)
    if body.truncate_prompt_tokens is None:
        check_characters(
            len(text), max_characters(tokenizer, model), "messages", " in the chat template, with all calls and tools"
        )
    tokens = tokenizer.encode(text, special=bool(body.add_special_tokens)) if text else ()
    if not tokens:
        raise ApiError("invalid_value", "messages are empty once the chat template is applied", "messages")
    check_ids(tokens, "messages", model.vocabulary)
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


def max_characters(tokenizer: Tokenizer, model: ServedModel) -> int:
    """Of a text that may fit the model's context."""
    return max(model.context * tokenizer.longest, ALWAYS_READ)


def check_characters(characters: int, most: int, name: str, where: str = "") -> None:
    """Raise :class:`ApiError` for a text of more characters than may fit."""
    if characters > most:
        message = f"{name} has {characters} characters{where}; more than {most} cannot fit the model's context"
        raise ApiError("context_length_exceeded", message, name)


def check_sizes(body: Body, most: int) -> None:
    """Raise :class:`ApiError` if the prompt, or all messages together, have more characters than may fit."""
    if isinstance(body, ChatBody) and len(body.messages) > MAX_MESSAGES:
        message = f"messages has {len(body.messages)} entries, more than {MAX_MESSAGES}"
        raise ApiError("invalid_value", message, "messages")
    if body.truncate_prompt_tokens is not None:
        return
    if isinstance(body, ChatBody):
        name, sizes = "messages", [sum(len(text_of(message.content or "")) for message in body.messages)]
    else:
        assert isinstance(body, CompletionBody)
        texts = body.prompt if isinstance(body.prompt, list) else [body.prompt]
        name, sizes = "prompt", [len(text) for text in texts if isinstance(text, str)]
    for characters in sizes:
        check_characters(characters, most, name)


def check_prompt_logprobs(asked: Mapping[str, int], tokens: int) -> None:
    """Whether as many as each field asks for can be told at each token of all prompts. Raises :class:`ApiError`."""
    for name, told in asked.items():
        if tokens * (1 + told) > MAX_PROMPT_LOGPROBS:
            most = f"the {MAX_PROMPT_LOGPROBS} log-probabilities told of the prompts of a request"
            message = f"{name} {told} for {tokens} tokens of prompts, in all choices, exceed {most}; ask for fewer"
            raise ApiError("invalid_value", message, name)


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
    written = messages
    if continued:  # a mark behind the last content, and a space that shows whether the template trims contents
        written = [*messages[:-1], {**messages[-1], "content": f"{messages[-1]['content']}{mark} "}]
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


def length_asked(body: Body, *, minimum: int) -> tuple[str, int]:
    """``max_tokens`` or ``max_completion_tokens``, and its value; no name and 1 where neither is given.

    ``minimum``: 0 where no token is an answer too. Raises :class:`ApiError`.
    """
    asked, newer = body.max_tokens, body.max_completion_tokens
    if asked is not None and newer is not None:
        raise ApiError("invalid_value", "give max_tokens or max_completion_tokens, not both", "max_completion_tokens")
    field, asked = ("max_tokens", asked) if newer is None else ("max_completion_tokens", newer)
    if asked is None:
        return "", 1
    if asked < minimum:
        raise wrong_value(field, f"an integer of at least {minimum}", asked)
    return field, asked


def max_tokens_of(body: Body, prompt: int, context: int) -> int:
    """How many tokens may follow a prompt of this many. Raises :class:`ApiError`."""
    room, chat = context - prompt, isinstance(body, ChatBody)
    if room < 1:
        message = f"the prompt has {prompt} tokens; the model's context of {context} leaves at most {context - 1}"
        raise ApiError("context_length_exceeded", message, "messages" if chat else "prompt")
    field, asked = length_asked(body, minimum=0)
    if not field:
        return room if chat else min(COMPLETION_MAX_TOKENS, room)
    if asked > room:
        message = (
            f"{field} is {show(asked)}, but a prompt of {prompt} tokens leaves at most {room} in the model's context "
            f"of {context}"
        )
        raise ApiError("context_length_exceeded", message, field)
    return asked


def prediction_of(body: Body, tokenizer: Tokenizer, model: ServedModel) -> tuple[Token, ...]:
    """The field ``prediction`` as tokens; none if it is absent. Raises :class:`ApiError`."""
    text, where = "" if body.prediction is None else text_of(body.prediction.content), "prediction.content"
    check_characters(len(text), max_characters(tokenizer, model), where)
    tokens = tokenizer.encode(text, special=False) if text else ()
    if len(tokens) > model.context:
        message = f"{where} has {len(tokens)} tokens; the model's context is {model.context}"
        raise ApiError("context_length_exceeded", message, where)
    check_ids(tokens, where, model.vocabulary)
    return tokens


def check_ids(tokens: Sequence[Token], where: str, vocabulary: int) -> None:
    """Also for ids of our own: a tokenizer may know tokens for which the model has no row. Raises :class:`ApiError`."""
    for token in tokens:
        if not 0 <= token < vocabulary:
            message = f"{where} has token id {token}; the model's ids go from 0 to {vocabulary - 1}"
            raise ApiError("invalid_value", message, where)
