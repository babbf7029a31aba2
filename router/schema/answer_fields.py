"""The request fields that say where a text ends, and what an answer shows beside it: lengths, stops, logprobs, ids."""

from __future__ import annotations

from dataclasses import dataclass

from router.errors import ApiError
from router.schema.decoding_fields import known_tokens
from router.schema.fields import show, wrong_value
from router.schema.request_schema import COMPLETION_MAX_TOKENS, Body, ChatBody, CompletionBody, Kind
from router.text.tokenizer import Tokenizer
from speculation.messages import Token


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """What an answer shows."""

    logprobs: int | None = None
    """With each token its log-probability and those of so many of the likeliest; None: without any."""
    prompt_logprobs: int | None = None
    """The same of the prompt, in vLLM's form."""
    echo: bool = False
    """The answer begins with the prompt, with log-probabilities if there are any."""
    token_ids: bool = False
    """With the ids of the tokens of prompt and text."""
    names_as_ids: bool = False
    """Tokens are named ``token_id:5``."""
    special: bool = False
    """Special tokens show in the text."""
    stop_string: bool = False
    """The text ends after a stop string instead of before it."""

    @property
    def of_prompt(self) -> int | None:
        """Of how many tokens the target has to tell log-probabilities at each place of the prompt."""
        wanted = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((count for count in wanted if count is not None), default=None)


def answer_form_of(body: Body) -> AnswerForm:
    """Raises :class:`ApiError`."""
    if body.prompt_logprobs is not None and body.stream:
        raise ApiError("invalid_value", "prompt_logprobs cannot be streamed; set stream to false", "prompt_logprobs")
    return AnswerForm(
        logprobs=_logprobs(body),
        prompt_logprobs=body.prompt_logprobs,
        echo=isinstance(body, CompletionBody) and body.echo,
        token_ids=body.return_token_ids,
        names_as_ids=body.return_tokens_as_token_ids,
        special=not body.skip_special_tokens,
        stop_string=body.include_stop_str_in_output,
    )


def _logprobs(body: Body) -> int | None:
    if isinstance(body, CompletionBody):
        return body.logprobs
    if not isinstance(body, ChatBody) or body.logprobs:
        return body.top_logprobs if isinstance(body, ChatBody) else None
    if body.top_logprobs:
        raise wrong_value("top_logprobs", "0 or left out, unless logprobs is true", body.top_logprobs)
    return None


@dataclass(frozen=True, slots=True)
class Length:
    """How long a text may become, as the request says it."""

    kind: Kind
    field: str | None
    """The field that says so; None: none does."""
    asked: int

    def within(self, prompt: int, context: int) -> int:
        """How many tokens may follow a prompt of this many. Raises :class:`ApiError`."""
        room = context - prompt
        if room < 1:
            message = f"the prompt has {prompt} tokens; the model's context of {context} leaves at most {context - 1}"
            raise ApiError("context_length_exceeded", message, "messages" if self.kind == "chat" else "prompt")
        if self.field is None:
            return room if self.kind == "chat" else min(COMPLETION_MAX_TOKENS, room)
        if self.asked > room:
            message = (
                f"{self.field} is {show(self.asked)}, but a prompt of {prompt} tokens leaves at most {room} in the "
                f"model's context of {context}"
            )
            raise ApiError("context_length_exceeded", message, self.field)
        return self.asked


def length_of(body: Body, *, minimum: int) -> Length:
    """``max_tokens`` or ``max_completion_tokens``; ``minimum``: 0 where no token is an answer too."""
    names = [name for name in ("max_tokens", "max_completion_tokens") if getattr(body, name) is not None]
    if len(names) == 2:
        raise ApiError("invalid_value", "give max_tokens or max_completion_tokens, not both", names[1])
    field = names[0] if names else None
    asked = int(getattr(body, field)) if field else 1
    if field and asked < minimum:
        raise wrong_value(field, f"an integer of at least {minimum}", asked)
    return Length("chat" if isinstance(body, ChatBody) else "completion", field, asked)


def min_tokens_of(body: Body, max_tokens: int) -> int:
    """How many tokens are generated whatever they are; at most ``max_tokens``."""
    if body.min_tokens > max_tokens:
        raise wrong_value("min_tokens", f"an integer from 0 to {max_tokens}", body.min_tokens)
    return body.min_tokens


def stop_strings_of(body: Body) -> tuple[str, ...]:
    """``stop``: one string or several."""
    return tuple(dict.fromkeys([body.stop] if isinstance(body.stop, str) else body.stop))


def stop_tokens_of(body: Body, vocabulary: int, tokenizer: Tokenizer) -> frozenset[Token]:
    """The caller's and, unless ``ignore_eos``, the model's own."""
    own = frozenset() if body.ignore_eos else tokenizer.stop_tokens
    given = known_tokens("stop_token_ids", body.stop_token_ids, vocabulary)
    return frozenset(given) | {token for token in own if token < vocabulary}
