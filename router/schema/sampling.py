"""The fields of a request that say how its tokens are drawn: sampling, seeds, and tokens banned, favoured or final."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import replace

from router.schema.fields import show, wrong_value
from router.schema.request_schema import MAX_SEED, Body
from router.text.tokenizer import Tokenizer
from speculation.messages import Sampling, Token


def stop_strings_of(body: Body) -> tuple[str, ...]:
    """Those of ``stop``, each once."""
    return tuple(dict.fromkeys([body.stop] if isinstance(body.stop, str) else body.stop))


def stop_tokens_of(body: Body, vocabulary: int, tokenizer: Tokenizer) -> frozenset[Token]:
    """The caller's and, unless ``ignore_eos``, the model's own. Raises :class:`ApiError`.

    A token that ``stop`` names and that shows in no text is one of the caller's: no text would ever end there.
    """
    own = () if body.ignore_eos else tokenizer.stop_tokens
    given = _known_tokens("stop_token_ids", body.stop_token_ids, vocabulary)
    stops = stop_strings_of(body) if body.skip_special_tokens else ()
    named = [token for stop in stops if (token := tokenizer.hidden_token(stop)) is not None]
    return frozenset((*given, *(token for token in (*own, *named) if token < vocabulary)))


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
        allowed=tuple(sorted(set(_known_tokens("allowed_token_ids", body.allowed_token_ids or (), vocabulary)))),
        banned=_banned(body, vocabulary, tokenizer),
    )


def with_own_seed(sampling: Sampling, choice: int) -> Sampling:
    """Choices share no noise. The first keeps the request's seed, so a larger ``n`` does not change it."""
    if choice == 0:
        return sampling
    digest = hashlib.blake2b(f"{sampling.seed}/{choice}".encode(), digest_size=8).digest()
    return replace(sampling, seed=int.from_bytes(digest, "big"))


def _known_tokens(where: str, tokens: Sequence[Token], vocabulary: int) -> Sequence[Token]:
    """The same tokens, all of which the model has. Raises :class:`ApiError`."""
    wrong = next((token for token in tokens if token >= vocabulary), None)
    if wrong is not None:
        raise wrong_value(where, f"an array of token ids below {vocabulary}; there is no {show(wrong)}", [*tokens])
    return tokens


def _bias(body: Body, vocabulary: int) -> tuple[tuple[Token, float], ...]:
    """``logit_bias``: JSON has no integer keys, so token ids are written as strings."""
    for name in body.logit_bias:
        digits = name.isascii() and name.isdigit() and len(name) <= len(str(vocabulary))
        if not digits or str(int(name)) != name or int(name) >= vocabulary:
            expected = f"an object whose keys are token ids from 0 to {vocabulary - 1}; {name[:20]!r} is none"
            raise wrong_value("logit_bias", expected, body.logit_bias)
    return tuple(sorted((int(name), bias) for name, bias in body.logit_bias.items() if bias))


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
