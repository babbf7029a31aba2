"""The request fields that say where a text ends: its lengths, stop strings and stop tokens."""

from __future__ import annotations

from dataclasses import dataclass

from router.errors import ApiError
from router.field_bounds import COMPLETION_MAX_TOKENS, MAX_STOP_CHARACTERS, MAX_STOP_TOKENS, MAX_STOPS
from router.field_row import Kind
from router.fields import Fields, show
from router.tokenizer import Tokenizer
from speculation.messages import Token


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


def length_of(fields: Fields, kind: Kind, *, least: int) -> Length:
    """``max_tokens`` or ``max_completion_tokens``; ``least``: 0 where no token is an answer too."""
    names = [name for name in ("max_tokens", "max_completion_tokens") if fields.get(name) is not None]
    if len(names) == 2:
        raise ApiError("invalid_value", "give max_tokens or max_completion_tokens, not both", names[1])
    if not names:
        return Length(kind, None, 1)
    return Length(kind, names[0], fields.integer(names[0], 0, low=least))


def min_tokens_of(fields: Fields, max_tokens: int) -> int:
    """How many tokens are generated whatever they are; at most ``max_tokens``."""
    return fields.integer("min_tokens", 0, low=0, high=max_tokens)


def stop_strings_of(fields: Fields) -> tuple[str, ...]:
    """``stop``: one string or several."""
    value = fields.get("stop")
    if isinstance(value, str):
        fields = Fields({"stop": [value]})
    return tuple(dict.fromkeys(fields.strings("stop", MAX_STOPS, MAX_STOP_CHARACTERS, "a string or ")))


def stop_tokens_of(fields: Fields, vocabulary: int, tokenizer: Tokenizer) -> frozenset[Token]:
    """The caller's and, unless ``ignore_eos``, the model's own."""
    own = frozenset() if fields.boolean("ignore_eos") else tokenizer.stop_tokens
    given = fields.tokens("stop_token_ids", vocabulary, MAX_STOP_TOKENS)
    return frozenset(given) | {token for token in own if token < vocabulary}
