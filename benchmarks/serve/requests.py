"""What is sent: prompts from a file, a line of JSON each or a line of text each, and the JSON of a request.

That has OpenAI's fields, what the server offers beyond them, and what the user adds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.options import BadInput
from benchmarks.serve.settings import BUNDLED_PROMPTS, Json, Make, ServeOptions, ServerContender
from cluster.config.environment import BUNDLED

MOST = 10_000
"""Prompts that are read; a longer file is read no further."""
LONGEST = 1 << 20
"""Characters of a line."""


class PromptError(BadInput):
    """The file has no prompts that can be sent. One line."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Text to continue, or a conversation."""

    text: str = ""
    messages: tuple[dict[str, Any], ...] = ()


def read(source: str, chat: bool) -> list[Prompt]:
    """The prompts of a file, or the bundled ones. Raises :class:`PromptError`.

    In a file named ``*.jsonl``, a line is a string, or an object with ``prompt`` (a string) or, for ``chat``,
    ``messages`` (OpenAI's). In any other, a line is a prompt. Empty lines are left out.
    """
    path = BUNDLED / "prompts.jsonl" if source == BUNDLED_PROMPTS else Path(source)
    found = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number in range(1, MOST + 1):
                line = lines.readline(LONGEST)
                if not line:
                    break
                if len(line) == LONGEST:
                    raise PromptError(f"--prompts {source}: line {number} has more than {LONGEST} characters")
                if text := line.strip():
                    found.append(
                        _parse(text, f"--prompts {source}: line {number}", chat)
                        if path.suffix == ".jsonl"
                        else Prompt(text)
                    )
    except OSError as error:
        raise PromptError(f"--prompts {source}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise PromptError(f"--prompts {source}: not a text file in UTF-8 ({error.reason})") from error
    if not found:
        raise PromptError(f"--prompts {source}: no prompts in it; write one a line")
    return found


def _parse(line: str, where: str, chat: bool) -> Prompt:
    try:
        value = json.loads(line)
        json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair cannot be sent
    except (ValueError, RecursionError) as error:
        raise PromptError(f"{where} is not JSON in UTF-8; a file of plain text must not be named *.jsonl") from error
    if isinstance(value, str):
        return Prompt(value)
    if isinstance(value, dict) and isinstance(value.get("prompt"), str):
        return Prompt(value["prompt"])
    messages = value.get("messages") if isinstance(value, dict) else None
    if isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages):
        if not chat:
            raise PromptError(f"{where} is a conversation; send it with --chat")
        return Prompt(messages=tuple(messages))
    raise PromptError(f'{where} must be a string, or an object with "prompt" or "messages"')


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
