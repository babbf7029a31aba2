"""Prompts from a file: a line of JSON each, or a line of text each."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.serve.settings import BUNDLED_PROMPTS
from cluster.checkout import BUNDLED

MOST = 10_000
"""Prompts that are read; a longer file is read no further."""
LONGEST = 1 << 20
"""Characters of a line."""


class PromptError(Exception):
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
