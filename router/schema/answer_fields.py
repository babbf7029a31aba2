"""The request fields that say how a text is drawn and drafted, where it ends, and what an answer shows beside it.

Values mean what they mean to vLLM and OpenAI; what is out of bounds is refused, never clipped. Nothing of speculation
bears on the text, but for ``speculation.rule``, and that not on its law. With speculation off a prediction is checked
like any other and then of no use: so the same request can be sent with and without.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

from router.errors import ApiError
from router.generation import ServedModel
from router.schema.fields import show, wrong_value
from router.schema.request_objects import text_of
from router.schema.request_schema import COMPLETION_MAX_TOKENS, MAX_SEED, Body, ChatBody, CompletionBody
from router.text.tokenizer import Tokenizer
from speculation.messages import Sampling, Source, SourceName, Speculation, Token


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
    if not isinstance(body, ChatBody):
        return body.logprobs if isinstance(body, CompletionBody) else None
    if body.top_logprobs and not body.logprobs:
        raise wrong_value("top_logprobs", "0 or left out, unless logprobs is true", body.top_logprobs)
    return body.top_logprobs if body.logprobs else None


def length_asked(body: Body, *, minimum: int) -> tuple[str, int]:
    """``max_tokens`` or ``max_completion_tokens``, and its value; no name and 1 where neither is given.

    ``minimum``: 0 where no token is an answer too. Raises :class:`ApiError`.
    """
    given = {name: getattr(body, name) for name in ("max_tokens", "max_completion_tokens")}
    given = {name: value for name, value in given.items() if value is not None}
    if len(given) == 2:
        raise ApiError("invalid_value", "give max_tokens or max_completion_tokens, not both", "max_completion_tokens")
    for field, asked in given.items():
        if asked < minimum:
            raise wrong_value(field, f"an integer of at least {minimum}", asked)
        return field, asked
    return "", 1


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


def min_tokens_of(body: Body, max_tokens: int) -> int:
    """How many tokens are generated whatever they are; at most ``max_tokens``."""
    if body.min_tokens > max_tokens:
        raise wrong_value("min_tokens", f"an integer from 0 to {max_tokens}", body.min_tokens)
    return body.min_tokens


def stop_tokens_of(body: Body, vocabulary: int, tokenizer: Tokenizer) -> frozenset[Token]:
    """The caller's and, unless ``ignore_eos``, the model's own."""
    own = frozenset() if body.ignore_eos else tokenizer.stop_tokens
    given = known_tokens("stop_token_ids", body.stop_token_ids, vocabulary)
    return frozenset(given) | {token for token in own if token < vocabulary}


def speculation_of(body: Body, default: Speculation, registered: Sequence[SourceName] = ()) -> Speculation:
    """The field ``speculation`` over what the server does by default. Raises :class:`ApiError`.

    ``registered``: draft sources there are besides the built-in ones.
    """
    if body.speculation is None:
        return default
    given = body.speculation.model_dump(exclude_none=True, exclude={"details"})
    if "sources" in given:
        names = (*Source, *registered)
        if any(source not in names for source in given["sources"]):
            raise wrong_value(
                "speculation.sources", f"a list of draft sources, among {', '.join(names)}", given["sources"]
            )
        given["sources"] = frozenset(given["sources"])
    return replace(default, **given)


def wants_details(body: Body) -> bool:
    """``speculation.details``: whether the answer tells of steps and proposals, and ends with a summary."""
    return body.speculation is not None and body.speculation.details


def prediction_of(body: Body, tokenizer: Tokenizer, model: ServedModel) -> tuple[Token, ...]:
    """The field ``prediction`` as tokens; none if it is absent. Raises :class:`ApiError`."""
    text = "" if body.prediction is None else text_of(body.prediction.content)
    tokens = tokenizer.encode(text, special=False) if text else ()
    where = "prediction.content"
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


def sampling_of(body: Body, vocabulary: int, tokenizer: Tokenizer) -> Sampling:
    """How the tokens of a request's first choice are drawn. Raises :class:`ApiError`."""
    return Sampling(
        temperature=body.temperature,
        top_k=min(max(body.top_k, 0), vocabulary),  # -1 is vLLM's "off"
        top_p=body.top_p,
        min_p=body.min_p,
        seed=secrets.randbits(64) if body.seed is None else body.seed & MAX_SEED,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        bias=_bias(body, vocabulary),
        allowed=tuple(sorted(set(known_tokens("allowed_token_ids", body.allowed_token_ids or (), vocabulary)))),
        banned=_banned(body, vocabulary, tokenizer),
    )


def with_own_seed(sampling: Sampling, choice: int) -> Sampling:
    """Choices share no noise. The first keeps the request's seed, so a larger ``n`` does not change it."""
    if choice == 0:
        return sampling
    digest = hashlib.blake2b(f"{sampling.seed}/{choice}".encode(), digest_size=8).digest()
    return replace(sampling, seed=int.from_bytes(digest, "big"))


def known_tokens(where: str, tokens: Sequence[Token], vocabulary: int) -> Sequence[Token]:
    """The same tokens, all of which the model has. Raises :class:`ApiError`."""
    wrong = next((token for token in tokens if token >= vocabulary), None)
    if wrong is not None:
        raise wrong_value(where, f"an array of token ids below {vocabulary}; there is no {show(wrong)}", [*tokens])
    return tokens


def _bias(body: Body, vocabulary: int) -> tuple[tuple[Token, float], ...]:
    """``logit_bias``: JSON has no integer keys, so token ids are written as strings."""
    for name in body.logit_bias:
        if not _is_token(name, vocabulary):
            expected = f"an object whose keys are token ids from 0 to {vocabulary - 1}; {name[:20]!r} is none"
            raise wrong_value("logit_bias", expected, body.logit_bias)
    return tuple(sorted((int(name), bias) for name, bias in body.logit_bias.items() if bias))


def _is_token(name: str, vocabulary: int) -> bool:
    digits = name.isascii() and name.isdigit() and len(name) <= len(str(vocabulary))
    return digits and str(int(name)) == name and int(name) < vocabulary


def _banned(body: Body, vocabulary: int, tokenizer: Tokenizer) -> tuple[tuple[Token, ...], ...]:
    """``bad_words``: each as a text begins with it and as it follows a space, in as many tokens as that takes."""
    banned: dict[tuple[Token, ...], None] = {}
    for index, word in enumerate(body.bad_words):
        first = tokenizer.encode(word.lstrip(), special=False)
        spaced = tokenizer.encode(" " + word.lstrip(), special=False)
        if not word.strip() or not first or max(first) >= vocabulary:
            raise wrong_value(f"bad_words[{index}]", "a word the model can write", word)
        banned[first] = None
        if max(spaced) < vocabulary:
            banned[spaced] = None
    return tuple(banned)
