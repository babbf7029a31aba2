"""Messages with much in them, to the wire and back.

What a session is opened with: its tokens, and all that its request says of them. What a worker says of itself: who it
is, how busy, and before that what it loads. What an EAGLE head away from the target is told: its numbers are bytes here
as everywhere but at their two ends, and a router passes them on unread. And what messages share: the largest sizes, the
sources of drafts, what a target may tell of log-probabilities.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from protos.paceline.v1 import worker_pb2 as pb
from speculation import messages
from speculation.sources.registry import MAX_SOURCES, NAME

_E = TypeVar("_E", bound=StrEnum)

MAX_TOKENS = 1 << 20
"""Longest sequence in one message."""
MAX_TEXT = 4096
"""Longest message text, in characters."""
MAX_COMMITTED = 1 << 12
"""Most tokens of one verification."""
MAX_PLAIN_BYTES = 1 << 16
"""Longest message of a target that tells no log-probabilities; the longest there is has a few kilobytes."""

MAX_STOP_TOKENS = 1024
MAX_SHAPED = 1 << 16
"""Most tokens that a request biases, allows or bans."""
MAX_GRAMMAR = 1 << 20
"""Longest grammar, in characters."""
MAX_LOGPROBS = 128
"""Most likeliest tokens reported with one token."""
MAX_COUNTERS = 256
MAX_WIDTH = 1 << 16
"""Most numbers a token."""
MAX_FEATURE_BYTES = 1 << 20
"""Most bytes of values in one message; a target sends more of a prompt in several."""

OPEN = ("session", "epoch", "priority", "age_ms", "prompt", "digest")
LOAD = ("sessions", "waiting", "free_tokens", "capacity_tokens", "draining")
WELCOME = ("vocabulary", "context", "tokenizer", "revision", "head")
WELCOME_TEXTS = ("role", "model", "instance", "dtype", "source", "exactness")
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed", "presence_penalty", "frequency_penalty")
SUBSCRIBE = ("session", "epoch", "head")
FEATURES = ("session", "epoch", "position", "head", "width", "values", "scales")
OPTION_TEXTS = ("request", "trace", "scope", "cache_salt")
"""Fields of messages that are rare, as they stand on the wire and here; of texts up to :data:`MAX_TEXT` characters."""


def _members(names: type[_E], wire: Any) -> dict[int, _E]:
    """By their numbers on the wire, where each is named after its kind as well."""
    kind = re.sub("(?<=[a-z])(?=[A-Z])", "_", wire.DESCRIPTOR.name).upper()
    return {wire.Value(f"{kind}_{member.name}"): member for member in names}


def _numbers(members: dict[int, _E]) -> dict[_E, Any]:
    return {member: number for number, member in members.items()}


SOURCE = _members(messages.Source, pb.Source)
SOURCE_OUT: dict[messages.SourceName, pb.Source] = _numbers(SOURCE)  # type: ignore[assignment]  # a source is a name
FEATURE_FORMAT = _members(messages.FeatureFormat, pb.FeatureFormat)
FEATURE_FORMAT_OUT = _numbers(FEATURE_FORMAT)
RULE, SCHEDULE = _members(messages.Rule, pb.Rule), _members(messages.Schedule, pb.Schedule)
RULE_OUT, SCHEDULE_OUT = _numbers(RULE), _numbers(SCHEDULE)
FINISH, CODE = _members(messages.FinishReason, pb.Finish), _members(messages.RefusalCode, pb.Code)
FINISH_OUT, CODE_OUT = _numbers(FINISH), _numbers(CODE)


def _same(message: object, names: Sequence[str]) -> dict[str, Any]:
    """Fields of a message, ours or the wire's, as the other has them."""
    return {name: getattr(message, name) for name in names}


def _texts(message: object, names: Sequence[str]) -> dict[str, Any]:
    """The same of texts."""
    return {name: getattr(message, name)[:MAX_TEXT] for name in names}


def at_most(field: str, count: int, limit: int) -> None:
    """Raise ValueError, which names the field, if it has more entries than are taken."""
    if count > limit:
        raise ValueError(f"{field} has {count} entries; at most {limit} are allowed")


def names_in(sources: Collection[messages.SourceName]) -> list[messages.SourceName]:
    """Those without a number, each once, in an order that depends on nothing else."""
    return sorted(set(sources) - SOURCE_OUT.keys()) if sources else []


def read_names(field: str, names: Sequence[str]) -> tuple[messages.SourceName, ...]:
    """Names of draft sources as they came. Raises ValueError."""
    at_most(field, len(names), MAX_SOURCES)
    for name in names:
        if not NAME.fullmatch(name):
            raise ValueError(f"{field} has {name[:80]!r}; a name has up to 32 lower-case letters, digits, - and _")
    return tuple(names)


@dataclass(frozen=True, slots=True)
class AskedLogprobs:
    """What a target was asked to tell of an opening's tokens."""

    tokens: int | None = None
    """With the log-probability of each committed one those of so many likeliest ones; None: nothing."""
    prompt: int | None = None
    """The same of the prompt's; None: nothing, or it has told them."""
    prompt_tokens: int = 0

    @property
    def max_bytes(self) -> int:
        """No message of the target about the opening is longer."""
        committed = 0 if self.tokens is None else MAX_COMMITTED * (16 + 9 * self.tokens)
        prompt = 0 if self.prompt is None else self.prompt_tokens * (16 + 9 * self.prompt)
        return MAX_PLAIN_BYTES + committed + prompt


Asked = Callable[[messages.SessionId, int], AskedLogprobs | None]
"""Of a session under an epoch; None: it is not open there, or not any more."""


def check_asked(message: pb.Verification, asked: Asked) -> tuple[Sequence[pb.Logprobs], Sequence[pb.Logprobs]]:
    """Its log-probabilities, and those of the prompt; none that are told too late, of a session no longer open.

    Raises ValueError for those that nobody asked for.
    """
    wanted = asked(messages.SessionId(message.session), message.epoch)
    if wanted is None:
        return (), ()
    at_most("logprobs", len(message.logprobs), 0 if wanted.tokens is None else MAX_COMMITTED)
    prompt_tokens = 0 if wanted.prompt is None else wanted.prompt_tokens
    at_most("prompt_logprobs", len(message.prompt_logprobs), prompt_tokens)
    return message.logprobs, message.prompt_logprobs


def _encode_open(message: messages.Open) -> pb.Open:
    limits, speculation, request_options = message.limits, message.speculation, message.request_options
    return pb.Open(
        **_same(message, OPEN),
        tokens=message.tokens,
        sampling=_sampling(message.sampling),
        limits=pb.Limits(end=limits.end, stop_tokens=sorted(limits.stop_tokens), min_end=limits.min_end),
        speculation=pb.Speculation(
            enabled=speculation.enabled,
            max_depth=speculation.max_depth,
            rule=RULE_OUT[speculation.rule],
            schedule=SCHEDULE_OUT[speculation.schedule],
            **_sources(speculation.sources),
        ),
        grammar=request_options.grammar,
        prediction=request_options.prediction,
        logprobs=request_options.logprobs,
        prompt_logprobs=request_options.prompt_logprobs,
        **_texts(request_options, OPTION_TEXTS),
        not_remembered=not speculation.remember,
    )


def _decode_open(message: pb.Open) -> messages.Open:
    speculation = message.speculation
    at_most("tokens", len(message.tokens), MAX_TOKENS)
    at_most("limits.stop_tokens", len(message.limits.stop_tokens), MAX_STOP_TOKENS)
    if not message.tokens:
        raise ValueError("tokens is empty; a session has at least one token")
    if message.limits.end <= len(message.tokens):
        raise ValueError(f"limits.end is {message.limits.end}; it must be above the {len(message.tokens)} tokens sent")
    return messages.Open(
        **_same(message, OPEN),
        tokens=tuple(message.tokens),
        sampling=_read_sampling(message.sampling),
        limits=messages.Limits(message.limits.end, frozenset(message.limits.stop_tokens), message.limits.min_end),
        speculation=messages.Speculation(
            enabled=speculation.enabled,
            max_depth=speculation.max_depth,
            rule=RULE.get(speculation.rule, messages.Rule.COUPLED),
            schedule=SCHEDULE.get(speculation.schedule, messages.Schedule.TRIE),
            sources=_read_sources(speculation),
            remember=not message.not_remembered,
        ),
        request_options=_read_request_options(message),
    )


def _sources(sources: messages.Sources) -> dict[str, Any]:
    """The fields of ``pb.Speculation`` that say them. Routers and workers that know no names read the numbers alone."""
    names = sources.names if isinstance(sources, messages.AllBut) else sources
    return {
        "sources": sorted(SOURCE_OUT[name] for name in names if name in SOURCE_OUT),
        "named": names_in(names),
        "all_but": isinstance(sources, messages.AllBut),
    }


def _read_sources(message: pb.Speculation) -> messages.Sources:
    numbered = frozenset(SOURCE[number] for number in message.sources if number in SOURCE)
    if not message.HasField("all_but"):
        return numbered or messages.AllBut()
    names = numbered | frozenset(read_names("speculation.named", message.named))
    return messages.AllBut(names) if message.all_but else names


def _sampling(sampling: messages.Sampling) -> pb.Sampling:
    return pb.Sampling(
        **_same(sampling, SAMPLING),
        repetition_penalty=sampling.repetition_penalty,
        bias_tokens=[token for token, _ in sampling.bias],
        bias_values=[value for _, value in sampling.bias],
        allowed=sampling.allowed,
        banned=[pb.TokenList(tokens=tokens) for tokens in sampling.banned],
    )


def _read_sampling(sampling: pb.Sampling) -> messages.Sampling:
    shaped = len(sampling.bias_tokens) + len(sampling.allowed) + sum(len(each.tokens) for each in sampling.banned)
    at_most("sampling.bias, allowed and banned", shaped, MAX_SHAPED)
    if len(sampling.bias_tokens) != len(sampling.bias_values):
        raise ValueError(f"bias has {len(sampling.bias_values)} values for {len(sampling.bias_tokens)} tokens")
    return messages.Sampling(
        **_same(sampling, SAMPLING),
        repetition_penalty=sampling.repetition_penalty or 1.0,
        bias=tuple(zip(sampling.bias_tokens, sampling.bias_values, strict=True)),
        allowed=tuple(sampling.allowed),
        banned=tuple(tuple(each.tokens) for each in sampling.banned),
    )


def _read_request_options(message: pb.Open) -> messages.RequestOptions:
    at_most("grammar", len(message.grammar), MAX_GRAMMAR)
    at_most("prediction", len(message.prediction), MAX_TOKENS)
    at_most("logprobs", max(message.logprobs, message.prompt_logprobs), MAX_LOGPROBS)
    return messages.RequestOptions(
        grammar=message.grammar,
        prediction=tuple(message.prediction),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        **_texts(message, OPTION_TEXTS),
    )


# -- what a worker says of itself --------------------------------------------------------------------------------------


def _encode_loading(message: messages.Loading) -> pb.Loading:
    return pb.Loading(doing=message.doing[:MAX_TEXT], fraction=message.fraction, model=message.model)


def _decode_loading(message: pb.Loading) -> messages.Loading:
    known = message.HasField("fraction") and 0 <= message.fraction <= 1
    fraction = round(message.fraction, 3) if known else None
    return messages.Loading(message.doing[:MAX_TEXT], fraction, message.model[:MAX_TEXT])


def encode_load(message: messages.Load, known: Sequence[str]) -> pb.Load:
    """As it is sent; the names of counters that are ``known`` on this stream are left out."""
    names = tuple(message.counters)
    return pb.Load(
        **_same(message, LOAD),
        counters=message.counters.values(),
        counter_names=() if names == tuple(known) else names,
    )


def decode_load(message: pb.Load, known: Sequence[str]) -> messages.Load:
    """As it was sent; raises ValueError."""
    if max(len(message.counters), len(message.counter_names)) > MAX_COUNTERS:
        raise ValueError(f"counters has {len(message.counters)} entries; at most {MAX_COUNTERS} are allowed")
    names = tuple(message.counter_names or known) if message.counters else ()
    if not len(message.counters) == len(names) == len(set(names)):
        raise ValueError(f"counters has {len(message.counters)} entries for {len(set(names))} names")
    return messages.Load(**_same(message, LOAD), counters=dict(zip(names, message.counters, strict=True)))


def _encode_welcome(message: messages.Welcome) -> pb.Welcome:
    return pb.Welcome(
        **_same(message, (*WELCOME, "started", "sources")),
        **_texts(message, WELCOME_TEXTS),
        no_speculation=not message.speculates,
        features=FEATURE_FORMAT_OUT[message.features] if message.head else None,
    )


def _decode_welcome(message: pb.Welcome) -> messages.Welcome:
    return messages.Welcome(
        **_same(message, WELCOME),
        **_texts(message, WELCOME_TEXTS),
        speculates=not message.no_speculation,
        started=message.started if math.isfinite(message.started) else 0.0,
        sources=tuple(name for name in message.sources[:MAX_SOURCES] if NAME.fullmatch(name)),
        features=_read_format(message.features),
    )


# -- features ----------------------------------------------------------------------------------------------------------


def _encode_subscribe(message: messages.Subscribe) -> pb.Subscribe:
    return pb.Subscribe(**_same(message, SUBSCRIBE), format=FEATURE_FORMAT_OUT[message.format])


def _decode_subscribe(message: pb.Subscribe) -> messages.Subscribe:
    return messages.Subscribe(**_same(message, SUBSCRIBE), format=_read_format(message.format))


def _encode_features(message: messages.Features) -> pb.Features:
    return pb.Features(**_same(message, FEATURES), format=FEATURE_FORMAT_OUT[message.format])


def _decode_features(message: pb.Features) -> messages.Features:
    at_most("values", len(message.values), MAX_FEATURE_BYTES)
    if message.width > MAX_WIDTH:
        raise ValueError(f"width is {message.width}; at most {MAX_WIDTH} numbers a token are allowed")
    return messages.Features(**_same(message, FEATURES), format=_read_format(message.format))


def _read_format(number: int) -> messages.FeatureFormat:
    """What a number means; one that is not known here, as of a newer peer, is read as bf16 and fails by its size."""
    return FEATURE_FORMAT.get(number, messages.FeatureFormat.BF16)


OPEN_KIND = messages.Open, _encode_open, _decode_open
LOADING_KIND = messages.Loading, _encode_loading, _decode_loading
WELCOME_KIND = messages.Welcome, _encode_welcome, _decode_welcome
SUBSCRIBE_KIND = messages.Subscribe, _encode_subscribe, _decode_subscribe
FEATURES_KIND = messages.Features, _encode_features, _decode_features
"""Kinds of messages: the value, how it is written, and how it is read, which raises ValueError."""
