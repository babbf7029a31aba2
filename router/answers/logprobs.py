"""Tokens beside their text: names, bytes, places and log-probabilities, in the forms of OpenAI and vLLM.

A log-probability of minus infinity, which JSON does not have, is written as vLLM writes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from router.schema.requests import AnswerForm
from router.text.tokenizer import Tokenizer
from speculation.messages import Token, TokenLogprobs

MIN_LOGPROB = -9999.0
"""Stands for all log-probabilities below it."""


@dataclass(frozen=True, slots=True)
class NamedToken:
    """A token and, if somebody asked, its log-probability; None: unknown."""

    token: Token
    name: str
    content: bytes | None
    """What it adds to the text; None: nothing."""
    logprob: float | None = None


@dataclass(frozen=True, slots=True)
class ShownToken:
    """A token of an answer."""

    named: NamedToken
    start: int
    """The character of the answer's text where its own begins."""
    top: tuple[NamedToken, ...] | None = None
    """The likeliest tokens at its place, best first; None: nobody could tell."""


def shown_token(
    tokenizer: Tokenizer, token: Token, start: int, logprobs: TokenLogprobs | None, form: AnswerForm, top: int
) -> ShownToken:
    """A token in an answer of this form, with up to ``top`` of the likeliest tokens that were told."""

    def named(token: Token, logprob: float | None) -> NamedToken:
        name, content = tokenizer.spelling(token)
        name = f"token_id:{token}" if form.names_as_ids else name
        return NamedToken(token, name, content, None if logprob is None else max(logprob, MIN_LOGPROB))

    if logprobs is None:
        return ShownToken(named(token, None), start)
    likeliest = zip(logprobs.tokens[:top], logprobs.logprobs[:top], strict=True)
    return ShownToken(named(token, logprobs.logprob), start, tuple(named(*other) for other in likeliest))


def of_completion(shown: Sequence[ShownToken], top: int) -> dict[str, Any]:
    """The ``logprobs`` of a completion: the ``top`` likeliest tokens and, as OpenAI does it, the one that was drawn."""
    return {
        "tokens": [token.named.name for token in shown],
        "token_logprobs": [token.named.logprob for token in shown],
        "top_logprobs": [_with_drawn(token, top) for token in shown],
        "text_offset": [token.start for token in shown],
    }


def of_chat(shown: Iterable[ShownToken]) -> dict[str, Any]:
    """The ``logprobs`` of a chat completion."""
    content = [
        _chat_entry(token.named) | {"top_logprobs": [_chat_entry(t) for t in token.top or ()]} for token in shown
    ]
    return {"content": content, "refusal": None}


def of_prompt(shown: Iterable[ShownToken], top_logprobs: int) -> list[dict[str, Any] | None]:
    """The ``prompt_logprobs`` of vLLM, none for the first token. Beyond the likeliest a token's rank is not known."""
    return [None if token.top is None else _prompt_entry(token.named, token.top[:top_logprobs]) for token in shown]


def _with_drawn(shown: ShownToken, top: int) -> dict[str, float | None] | None:
    if shown.top is None:
        return None
    best: dict[str, float | None] = {}
    for named in (*shown.top[:top], shown.named):
        best.setdefault(named.name, named.logprob)
    return best


def _chat_entry(named: NamedToken) -> dict[str, Any]:
    content = None if named.content is None else list(named.content)
    return {"token": named.name, "logprob": named.logprob, "bytes": content}


def _prompt_entry(drawn: NamedToken, top: tuple[NamedToken, ...]) -> dict[str, Any]:
    ranks = {named.token: rank for rank, named in enumerate(top, 1)}
    return {
        str(named.token): {"logprob": named.logprob, "rank": ranks.get(named.token), "decoded_token": named.name}
        for named in {named.token: named for named in (*top, drawn)}.values()
    }
