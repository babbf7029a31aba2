"""The request fields that say how tokens are drawn: temperature, filters, penalties, biases, exclusions, the seed.

Values mean what they mean to vLLM and OpenAI; what is out of bounds is refused, never clipped.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import replace

from router.field_bounds import (
    LEAST_REPETITION_PENALTY,
    MAX_ALLOWED,
    MAX_BAD_WORD_CHARACTERS,
    MAX_BAD_WORDS,
    MAX_BIAS,
    MAX_BIASED,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_SEED,
    MAX_TEMPERATURE,
    MAX_TOP_K,
    MIN_SEED,
    MIN_TEMPERATURE,
)
from router.fields import Fields
from router.tokenizer import Tokenizer
from speculation.messages import Sampling, Token


def sampling_of(fields: Fields, vocabulary: int, tokenizer: Tokenizer) -> Sampling:
    """How the tokens of a request's first choice are drawn. Raises :class:`ApiError`."""
    temperature = fields.number("temperature", 1.0, low=0.0, high=MAX_TEMPERATURE)
    if 0 < temperature < MIN_TEMPERATURE:
        raise fields.wrong_value("temperature", f"0 (greedy) or at least {MIN_TEMPERATURE:g}")
    top_k = fields.integer("top_k", 0, low=-1, high=MAX_TOP_K)
    seed = fields.integer("seed", None, low=MIN_SEED, high=MAX_SEED)
    return Sampling(
        temperature=temperature,
        top_k=min(max(top_k, 0), vocabulary),  # -1 is vLLM's "off"
        top_p=_top_p(fields),
        min_p=fields.number("min_p", 0.0, low=0.0, high=1.0),
        seed=secrets.randbits(64) if seed is None else seed & MAX_SEED,
        presence_penalty=fields.number("presence_penalty", 0.0, low=-MAX_PENALTY, high=MAX_PENALTY),
        frequency_penalty=fields.number("frequency_penalty", 0.0, low=-MAX_PENALTY, high=MAX_PENALTY),
        repetition_penalty=fields.number(
            "repetition_penalty", 1.0, low=LEAST_REPETITION_PENALTY, high=MAX_REPETITION_PENALTY
        ),
        bias=_bias(fields, vocabulary),
        allowed=_allowed(fields, vocabulary),
        banned=_banned(fields, vocabulary, tokenizer),
    )


def with_own_seed(sampling: Sampling, choice: int) -> Sampling:
    """Choices share no noise. The first keeps the request's seed, so a larger ``n`` does not change it."""
    if choice == 0:
        return sampling
    digest = hashlib.blake2b(f"{sampling.seed}/{choice}".encode(), digest_size=8).digest()
    return replace(sampling, seed=int.from_bytes(digest, "big"))


def _top_p(fields: Fields) -> float:
    value = fields.number("top_p", 1.0, low=0.0, high=1.0)
    if value == 0:
        raise fields.wrong_value("top_p", "more than 0 and at most 1")
    return value


def _bias(fields: Fields, vocabulary: int) -> tuple[tuple[Token, float], ...]:
    """``logit_bias``: JSON has no integer keys, so token ids are written as strings."""
    inner = fields.nested("logit_bias")
    if len(inner.raw) > MAX_BIASED:
        raise fields.wrong_value("logit_bias", f"an object of at most {MAX_BIASED} token ids")
    for name in inner.raw:
        if not _is_token(name, vocabulary):
            message = f"an object whose keys are token ids from 0 to {vocabulary - 1}; {name[:20]!r} is none"
            raise fields.wrong_value("logit_bias", message)
        if inner.get(name) is None:
            raise inner.wrong_type(name, f"a number from {-MAX_BIAS:g} to {MAX_BIAS:g}")
    biases = ((int(name), inner.number(name, 0.0, low=-MAX_BIAS, high=MAX_BIAS)) for name in inner.raw)
    return tuple(sorted((token, bias) for token, bias in biases if bias))


def _is_token(name: str, vocabulary: int) -> bool:
    digits = name.isascii() and name.isdigit() and len(name) <= len(str(vocabulary))
    return digits and str(int(name)) == name and int(name) < vocabulary


def _allowed(fields: Fields, vocabulary: int) -> tuple[Token, ...]:
    if fields.get("allowed_token_ids") is None:
        return ()
    tokens = fields.tokens("allowed_token_ids", vocabulary, MAX_ALLOWED)
    if not tokens:
        raise fields.wrong_value("allowed_token_ids", "left out, or at least one token id: no token could be drawn")
    return tuple(sorted(set(tokens)))


def _banned(fields: Fields, vocabulary: int, tokenizer: Tokenizer) -> tuple[tuple[Token, ...], ...]:
    """``bad_words``: each as a text begins with it and as it follows a space, in as many tokens as that takes."""
    words = fields.strings("bad_words", MAX_BAD_WORDS, MAX_BAD_WORD_CHARACTERS)
    banned: dict[tuple[Token, ...], None] = {}
    for index, word in enumerate(words):
        first = tokenizer.encode(word.lstrip(), special=False)
        spaced = tokenizer.encode(" " + word.lstrip(), special=False)
        if not word.strip() or not first or max(first) >= vocabulary:
            raise Fields({f"bad_words[{index}]": word}).wrong_value(f"bad_words[{index}]", "a word the model can write")
        banned[first] = None
        if max(spaced) < vocabulary:
            banned[spaced] = None
    return tuple(banned)
