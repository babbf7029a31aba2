"""The request fields that say how tokens are drawn and drafted: sampling, ``speculation``, and OpenAI's ``prediction``.

Values mean what they mean to vLLM and OpenAI; what is out of bounds is refused, never clipped. Nothing of speculation
bears on the text, but for ``speculation.rule``, and that not on its law. With speculation off a prediction is checked
like any other and then of no use: so the same request can be sent with and without.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import replace

from router.errors import ApiError
from router.generation import ServedModel
from router.schema.fields import show, wrong_value
from router.schema.request_objects import text_of
from router.schema.request_schema import MAX_SEED, Body
from router.text.tokenizer import Tokenizer
from speculation.messages import Sampling, Source, SourceName, Speculation, Token


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
    if (worst := max(tokens, default=0)) >= model.vocabulary:
        message = f"{where} has token id {worst}; the model's ids go from 0 to {model.vocabulary - 1}"
        raise ApiError("invalid_value", message, where)
    return tokens


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
