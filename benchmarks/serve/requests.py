"""What is sent: prompts from a file, and the JSON of a request.

That has OpenAI's fields, what the server offers beyond them, and what the user adds.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness import prompts
from benchmarks.harness.prompts import Prompt, PromptError
from benchmarks.serve.settings import BUNDLED_PROMPTS, Json, Make, ServeOptions, ServerContender
from cluster.config.environment import BUNDLED


def read(source: str, chat: bool) -> list[Prompt]:
    """The prompts of a file, or the bundled ones. Raises :class:`benchmarks.harness.prompts.PromptError`."""
    try:
        found = prompts.read(BUNDLED / "prompts.jsonl" if source == BUNDLED_PROMPTS else Path(source))
    except PromptError as error:
        raise PromptError(f"--prompts {error}") from error
    for prompt in found:
        if prompt.messages and not chat:
            raise PromptError(f"--prompts {prompt.where} is a conversation; send it with --chat")
    return found


def path(chat: bool) -> str:
    """Of the endpoint."""
    return "/v1/chat/completions" if chat else "/v1/completions"


def body(
    options: ServeOptions, contender: ServerContender, make: Make, model: str, prompt: Prompt, number: int
) -> Json:
    """Of request ``number`` (below 0 to warm up), whose seed depends on it alone: it is the same for all contenders."""
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
        # Nobody drafts from the answers that others, or warming up, had to the same requests.
        fields["speculation"] = {"remember": False} | ({"enabled": False} if contender.plain else {})
    return {key: value for key, value in _merged(fields, contender.extra).items() if value is not None}


def remembers(contender: ServerContender) -> bool:
    """Whether a Paceline may keep its answers to draft for later requests, which the user has to ask for."""
    said = contender.extra.get("speculation", {})
    return not isinstance(said, Mapping) or said.get("remember", False) is not False


def _stream_options(make: Make) -> Json:
    """Whatever makes the server say how many tokens a chunk has."""
    own = {Make.PACELINE: {"include_speculation": True}, Make.VLLM: {"continuous_usage_stats": True}}
    return {"include_usage": True, **own.get(make, {})}


def _merged(fields: Json, extra: Mapping[str, Any]) -> Json:
    """Objects of the same name are merged, as in ``speculation``; else the user's word stands."""
    both = {
        key for key in fields.keys() & extra.keys() if isinstance(fields[key], dict) and isinstance(extra[key], dict)
    }
    return fields | dict(extra) | {key: fields[key] | extra[key] for key in both}
