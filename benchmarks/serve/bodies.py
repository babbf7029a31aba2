"""The JSON of a request: OpenAI's fields, what the server offers beyond them, and what the user adds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.serve.prompts import Prompt
from benchmarks.serve.settings import Contender, Json, Make, Options, Variant

DEPTH_PLACE = "{depth}"
"""A string in the user's fields that a sweep replaces by a number."""


def path(chat: bool) -> str:
    """Of the endpoint."""
    return "/v1/chat/completions" if chat else "/v1/completions"


def body(options: Options, variant: Variant, make: Make, model: str, prompt: Prompt, number: int) -> Json:
    """Of request ``number`` (below 0 to warm up), whose seed depends on it alone: it is the same for all contenders."""
    contender = variant.contender
    said: Json = {"prompt": prompt.text}
    if options.chat:
        said = {"messages": list(prompt.messages) or [{"role": "user", "content": prompt.text}]}
    fields: Json = {
        "model": model,
        **said,
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "seed": options.seed + abs(number),
        "stream": True,
        "stream_options": _stream_options(make),
    }
    if make is Make.PACELINE:
        fields["speculation"] = _speculation(variant)
    extra = {key: _placed(value, variant.depth) for key, value in contender.extra.items()}
    return {key: value for key, value in _merged(fields, extra).items() if value is not None}


def remembers(contender: Contender) -> bool:
    """Whether a Paceline may keep its answers to draft for later requests, which the user has to ask for."""
    said = contender.extra.get("speculation", {})
    return not isinstance(said, Mapping) or said.get("remember", False) is not False


def has_place(value: object) -> bool:
    """Whether the sweep's depth stands somewhere in it."""
    if isinstance(value, Mapping):
        return any(has_place(inner) for inner in value.values())
    if isinstance(value, list):
        return any(has_place(inner) for inner in value)
    return value == DEPTH_PLACE


def _speculation(variant: Variant) -> Json:
    """Nobody drafts from the answers that others, or warming up, had to the same requests."""
    said: Json = {"remember": False}
    if variant.contender.plain:
        said["enabled"] = False
    elif variant.depth is not None:
        said["max_depth"] = variant.depth
    return said


def _stream_options(make: Make) -> Json:
    """Whatever makes the server say how many tokens a chunk has."""
    options: Json = {"include_usage": True}
    match make:
        case Make.PACELINE:
            options["include_speculation"] = True
        case Make.VLLM:
            options["continuous_usage_stats"] = True
        case Make.LLAMA_CPP | Make.OTHER:
            pass
    return options


def _placed(value: Any, depth: int | None) -> Any:
    if isinstance(value, Mapping):
        return {key: _placed(inner, depth) for key, inner in value.items()}
    if isinstance(value, list):
        return [_placed(inner, depth) for inner in value]
    return depth if value == DEPTH_PLACE else value


def _merged(fields: Json, extra: Json) -> Json:
    """Objects of the same name are merged, as in ``speculation``; else the user's word stands."""
    both = {
        key for key in fields.keys() & extra.keys() if isinstance(fields[key], dict) and isinstance(extra[key], dict)
    }
    return fields | extra | {key: fields[key] | extra[key] for key in both}
