"""From the bytes of a request body to a request that can run, or an error that names the field at fault.

Parse, don't validate: what comes out of :func:`parse_completion` and :func:`parse_chat` needs no further
checks. Every default and every bound of the API is decided here; the names of the fields stand in
:mod:`router.openai_fields`. Knows nothing of HTTP.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NoReturn

from router.errors import ApiError
from router.fields import Fields, nearest, show
from router.generation import Generation, ServedModel
from router.openai_fields import CHAT_FIELDS, CHAT_NEUTRAL, COMPLETION_FIELDS, COMPLETION_NEUTRAL, Neutral
from router.prompts import chat_prompt, completion_prompts
from router.tokenizer import Tokenizer
from speculation.messages import MAX_PRIORITY, Rule, Sampling, Schedule, Source, Speculation, Token

COMPLETION_MAX_TOKENS = 16
"""Default of ``max_tokens`` for completions, as in OpenAI's API. Chat takes the rest of the context."""
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKENS = 64
MAX_DRAFT_DEPTH = 64
MAX_TEMPERATURE = 100.0
MIN_TEMPERATURE = 1e-6
"""Below this logits divided by it overflow; 0 itself means greedy."""
MAX_MODEL_CHARACTERS = 256
MAX_MODELS_NAMED = 16
MASK64 = 0xFFFF_FFFF_FFFF_FFFF


@dataclass(frozen=True, slots=True)
class Offer:
    """What requests are checked against: the served model, its public name, and the bounds of this server."""

    name: str
    model: ServedModel
    tokenizer: Tokenizer
    max_choices: int
    speculation: Speculation = Speculation()
    """What a request gets that does not say otherwise."""


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """A request that can run: one generation per choice, in the order of the answer's choices."""

    kind: Literal["completion", "chat"]
    model: str
    generations: tuple[Generation, ...]
    stop: tuple[str, ...]
    prompt_tokens: int
    """Of all prompts; a prompt that is continued several times counts once."""
    n: int = 1
    """Choices of each prompt."""
    stream: bool = False
    include_usage: bool = False
    include_speculation: bool = False


Offers = Mapping[str, Offer]
"""Every model that is served, by its public name. Not empty."""


def parse_completion(body: bytes, offers: Offers, request_id: str) -> ApiRequest:
    """The body of ``POST /v1/completions``. Raises :class:`ApiError`."""
    fields = _read(body, COMPLETION_FIELDS, COMPLETION_NEUTRAL)
    offer = _model(fields, offers)
    n = fields.integer("n", 1, low=1, high=offer.max_choices)
    prompts = completion_prompts(fields, offer.tokenizer, offer.model.vocabulary, offer.max_choices)
    if len(prompts) * n > offer.max_choices:
        raise fields.wrong_value("n", f"at most {offer.max_choices // len(prompts)} with {len(prompts)} prompts")
    return _request("completion", fields, prompts, n, offer, request_id)


def parse_chat(body: bytes, offers: Offers, request_id: str) -> ApiRequest:
    """The body of ``POST /v1/chat/completions``. Raises :class:`ApiError`."""
    fields = _read(body, CHAT_FIELDS, CHAT_NEUTRAL)
    offer = _model(fields, offers)
    n = fields.integer("n", 1, low=1, high=offer.max_choices)
    prompts = (chat_prompt(fields, offer.tokenizer, offer.model.vocabulary),)
    return _request("chat", fields, prompts, n, offer, request_id)


def parse_object(body: bytes) -> dict[str, object]:
    """A JSON object in UTF-8, without Python's extensions NaN and Infinity. Raises :class:`ApiError`."""
    try:
        text = body.decode("utf-8-sig")
        raw = json.loads(text, parse_constant=_no_constant)
        if "\\ud" in text or "\\uD" in text:  # Half of a surrogate pair is valid JSON, but no text.
            json.dumps(raw, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise ApiError("invalid_json", f"the body is not UTF-8: byte {error.start} is not valid") from None
    except UnicodeEncodeError:
        raise ApiError("invalid_json", "the body has half of a surrogate pair (\\ud800 to \\udfff)") from None
    except RecursionError:
        raise ApiError("invalid_json", "the body is nested too deeply") from None
    except ValueError as error:
        raise ApiError("invalid_json", f"the body is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ApiError("invalid_json", f"the body must be a JSON object, got {show(raw)}")
    return raw


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _read(body: bytes, known: frozenset[str], neutral: Neutral) -> Fields:
    fields = Fields(parse_object(body))
    fields.refuse_others(known, neutral)
    fields.string("user", None)
    return fields


def _model(fields: Fields, offers: Offers) -> Offer:
    """What the request is for; it need not say so where there is only one model."""
    only = next(iter(offers)) if len(offers) == 1 else None
    name = fields.string("model", only)
    if name is None:
        raise fields.missing("model", f"one of {known_models(offers)}")
    if name not in offers:
        raise no_such_model(name, offers)
    return offers[name]


def no_such_model(name: str, offers: Iterable[str]) -> ApiError:
    """The refusal of a model that is not served; it names those that are."""
    shown = show(name[:MAX_MODEL_CHARACTERS])
    message = f"there is no model {shown}{nearest(name, offers)}; this server has {known_models(offers)}"
    return ApiError("model_not_found", message, "model")


def known_models(offers: Iterable[str]) -> str:
    """Their names, for messages."""
    names = [repr(name) for name in offers]
    more = f" and {len(names) - MAX_MODELS_NAMED} more" if len(names) > MAX_MODELS_NAMED else ""
    return ", ".join(names[:MAX_MODELS_NAMED]) + more


def _request(
    kind: Literal["completion", "chat"],
    fields: Fields,
    prompts: Sequence[tuple[Token, ...]],
    n: int,
    offer: Offer,
    request_id: str,
) -> ApiRequest:
    sampling = _sampling(fields, offer.model.vocabulary)
    stop_tokens = _stop_tokens(fields, offer)
    speculation = _speculation(fields, offer.speculation)
    stream, include_usage, include_speculation = _streaming(fields)
    priority = fields.integer("priority", 0, low=-MAX_PRIORITY, high=MAX_PRIORITY)
    limits = [_max_tokens(fields, kind, len(prompt), offer.model.context) for prompt in prompts]
    return ApiRequest(
        kind=kind,
        model=offer.name,
        generations=tuple(
            Generation(
                prompt=prompts[choice // n],
                sampling=_with_own_seed(sampling, choice),
                max_tokens=limits[choice // n],
                stop_tokens=stop_tokens,
                speculation=speculation,
                request_id=request_id,
                priority=priority,
                model=offer.model,
            )
            for choice in range(len(prompts) * n)
        ),
        stop=_stop(fields),
        prompt_tokens=sum(map(len, prompts)),
        n=n,
        stream=stream,
        include_usage=include_usage,
        include_speculation=include_speculation,
    )


def _sampling(fields: Fields, vocabulary: int) -> Sampling:
    temperature = fields.number("temperature", 1.0, low=0.0, high=MAX_TEMPERATURE)
    if 0 < temperature < MIN_TEMPERATURE:
        raise fields.wrong_value("temperature", f"0 (greedy) or at least {MIN_TEMPERATURE:g}")
    top_p = fields.number("top_p", 1.0, low=0.0, high=1.0)
    if top_p == 0:
        raise fields.wrong_value("top_p", "more than 0 and at most 1")
    top_k = fields.integer("top_k", 0, low=-1, high=2**31 - 1)
    seed = fields.integer("seed", None, low=-(2**63), high=MASK64)
    return Sampling(
        temperature=temperature,
        top_k=min(max(top_k, 0), vocabulary),  # -1 is vLLM's "off"
        top_p=top_p,
        min_p=fields.number("min_p", 0.0, low=0.0, high=1.0),
        seed=secrets.randbits(64) if seed is None else seed & MASK64,
    )


def _with_own_seed(sampling: Sampling, choice: int) -> Sampling:
    """Choices share no noise. The first keeps the request's seed, so a larger ``n`` does not change it."""
    if choice == 0:
        return sampling
    digest = hashlib.blake2b(f"{sampling.seed}/{choice}".encode(), digest_size=8).digest()
    return Sampling(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, int.from_bytes(digest, "big"))


def _max_tokens(fields: Fields, kind: str, prompt: int, context: int) -> int:
    """How many tokens may follow a prompt of this many."""
    room = context - prompt
    if room < 1:
        message = f"the prompt has {prompt} tokens; the model's context of {context} leaves at most {context - 1}"
        raise ApiError("context_length_exceeded", message, "messages" if kind == "chat" else "prompt")
    names = [n for n in ("max_tokens", "max_completion_tokens") if fields.get(n) is not None]
    if len(names) == 2:
        raise ApiError("invalid_value", "give max_tokens or max_completion_tokens, not both", names[1])
    if not names:
        return room if kind == "chat" else min(COMPLETION_MAX_TOKENS, room)
    value = fields.get(names[0])
    if isinstance(value, int) and not isinstance(value, bool) and value > room:
        message = (
            f"{names[0]} is {show(value)}, but a prompt of {prompt} tokens leaves at most {room} in the model's "
            f"context of {context}"
        )
        raise ApiError("context_length_exceeded", message, names[0])
    return fields.integer(names[0], room, low=1, high=room)


def _stop(fields: Fields) -> tuple[str, ...]:
    value = fields.get("stop")
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise fields.wrong_type("stop", f"a string or an array of at most {MAX_STOPS} strings")
    if len(stops) > MAX_STOPS:
        raise fields.wrong_value("stop", f"a string or an array of at most {MAX_STOPS} strings")
    for stop in stops:
        if not isinstance(stop, str):
            raise fields.wrong_type("stop", "a string or an array of strings")
        if not 0 < len(stop) <= MAX_STOP_CHARACTERS:
            raise fields.wrong_value("stop", f"strings of 1 to {MAX_STOP_CHARACTERS} characters")
    return tuple(dict.fromkeys(stops))


def _stop_tokens(fields: Fields, offer: Offer) -> frozenset[Token]:
    """The caller's and, unless ``ignore_eos``, the model's own."""
    value = fields.get("stop_token_ids")
    expected = f"an array of at most {MAX_STOP_TOKENS} token ids below {offer.model.vocabulary}"
    tokens = [] if value is None else value
    if not isinstance(tokens, list):
        raise fields.wrong_type("stop_token_ids", expected)
    if any(not isinstance(token, int) or isinstance(token, bool) for token in tokens):
        raise fields.wrong_type("stop_token_ids", expected)
    if len(tokens) > MAX_STOP_TOKENS or any(not 0 <= token < offer.model.vocabulary for token in tokens):
        raise fields.wrong_value("stop_token_ids", expected)
    own = frozenset() if fields.boolean("ignore_eos") else offer.tokenizer.stop_tokens
    return frozenset(tokens) | {token for token in own if token < offer.model.vocabulary}


def _speculation(fields: Fields, default: Speculation) -> Speculation:
    inner = fields.nested("speculation")
    inner.refuse_others(frozenset({"enabled", "max_depth", "rule", "schedule", "sources"}))
    return Speculation(
        enabled=inner.boolean("enabled", default.enabled),
        max_depth=inner.integer("max_depth", default.max_depth, low=1, high=MAX_DRAFT_DEPTH),
        rule=Rule(inner.choice("rule", default.rule, list(Rule))),
        schedule=Schedule(inner.choice("schedule", default.schedule, list(Schedule))),
        sources=_sources(inner, default.sources),
    )


def _sources(inner: Fields, default: frozenset[Source]) -> frozenset[Source]:
    value = inner.get("sources")
    expected = f"a list of draft sources, among {', '.join(Source)}"
    if value is None:
        return default
    if not isinstance(value, list):
        raise inner.wrong_type("sources", expected)
    if any(source not in list(Source) for source in value):
        raise inner.wrong_value("sources", expected)
    return frozenset(Source(source) for source in value)


def _streaming(fields: Fields) -> tuple[bool, bool, bool]:
    """``stream``, ``stream_options.include_usage`` and ``stream_options.include_speculation``."""
    stream = fields.boolean("stream")
    options = fields.nested("stream_options")
    if not stream and fields.get("stream_options") is not None:
        raise fields.wrong_value("stream_options", "left out unless stream is true")
    options.refuse_others(frozenset({"include_usage", "include_speculation"}), {"include_obfuscation": (False,)})
    return stream, options.boolean("include_usage"), options.boolean("include_speculation")
