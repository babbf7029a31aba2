"""Which prompts are measured: those that come with Paceline, by kind of text, or the user's own.

A file holds JSON lines, objects with ``prompt`` (a string) or ``messages`` and perhaps ``tools`` (as in a chat
request), and perhaps ``kind``, or else plain text with a prompt a line. What it is shows in its first line. In a file
named ``*.jsonl``, a line may also be a string.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.console import BadInput
from router.errors import ApiError
from router.generation import ServedModel
from router.schema.prompts import chat_prompt
from router.schema.request_schema import ChatBody
from router.schema.structured import tools_of
from router.text.tokenizer import Tokenizer
from speculation.messages import Token

BUNDLED = Path(__file__).parent.parent / "prompts"
KINDS = ("code", "json", "prose", "creative")
"""Kinds of text that prompts are bundled for, a file each."""
MOST_PROMPTS = 2000
"""In one file; measuring takes seconds a prompt."""
MOST_BYTES = 64 << 20
LONGEST_KIND = 40


class PromptError(BadInput):
    """A file of prompts is of no use. One line that names file and line, and says what would be right."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt as it was given."""

    kind: str
    """Kind of text, for the tables: as its line says, else the file's name without its ending."""
    where: str
    text: str = ""
    messages: tuple[Mapping[str, Any], ...] = ()
    """Of a chat; then there is no ``text``."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Functions that the model may call in that chat."""

    def tokens(self, tokenizer: Tokenizer) -> tuple[Token, ...]:
        """As the API would encode it. Raises :class:`PromptError`."""
        if not self.messages:
            return tokenizer.encode(self.text, special=True)
        if tokenizer.template(tools=bool(self.tools)) is None:
            raise PromptError(f"{self.where}: the model has no chat template; give a prompt instead of messages")
        try:
            body = ChatBody.read({"messages": list(self.messages), "tools": list(self.tools)})
            model = ServedModel("", tokenizer.size, sys.maxsize, tokenizer.digest)  # what is too long is told later
            return chat_prompt(body, tokenizer, model, tools_of(body, tokenizer)).tokens
        except ApiError as error:
            raise PromptError(f"{self.where}: {error.message}") from error


def bundled() -> list[Prompt]:
    """All prompts that come with Paceline."""
    return [prompt for kind in KINDS for prompt in read(BUNDLED / f"{kind}.jsonl")]


def read(file: Path) -> list[Prompt]:
    """The prompts of a file; raises :class:`PromptError`."""
    sample, no_text = "give a sample of your traffic, at most", "give a text file with prompts"
    try:
        if (size := file.stat().st_size) > MOST_BYTES:
            raise PromptError(f"{file}: is {size >> 20} MB; {sample} {MOST_BYTES >> 20} MB")
        raw = file.read_bytes()
        text = raw.decode("utf-8")
    except OSError as error:
        raise PromptError(f"{file}: {error.strerror}; {no_text}") from error
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise PromptError(f"{file}: line {line} is not UTF-8 text; {no_text}") from error
    before, zero, _ = text.partition("\0")
    if zero:
        line = before.count("\n") + 1
        raise PromptError(f"{file}: line {line} holds a zero byte; {no_text}")
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise PromptError(f"{file}: holds no prompts; give one a line, or JSON lines with prompt or messages")
    if len(lines) > MOST_PROMPTS:
        raise PromptError(f"{file}: holds {len(lines)} prompts; {sample} {MOST_PROMPTS}")
    structured = lines[0][1].lstrip().startswith(("{", '"') if file.suffix == ".jsonl" else "{")
    return [
        _structured(where, line, file.stem) if structured else Prompt(file.stem, where, line.rstrip("\r"))
        for number, line in lines
        for where in [f"{file}: line {number}"]
    ]


def _structured(where: str, line: str, kind: str) -> Prompt:
    try:
        given = json.loads(line)
        json.dumps(given, ensure_ascii=False).encode()  # half a surrogate pair is no text
    except (ValueError, RecursionError):
        given = None
    given = {"prompt": given} if isinstance(given, str) else given
    if not isinstance(given, dict):
        raise PromptError(f"{where} is no JSON object, as the first is to be; give JSON in UTF-8 in every line")
    kind = given.get("kind", kind)
    if not isinstance(kind, str) or not 0 < len(kind) <= LONGEST_KIND or not kind.isprintable():
        raise PromptError(f"{where}: kind is {_short(kind)}; it must be a name of 1 to {LONGEST_KIND} characters")
    if ("prompt" in given) == ("messages" in given):
        raise PromptError(f"{where}: must have either prompt or messages, has {', '.join(given) or 'neither'}")
    if "prompt" in given:
        text = given["prompt"]
        if not isinstance(text, str) or not text:
            raise PromptError(f"{where}: prompt is {_short(text)}; it must be a string that is not empty")
        return Prompt(kind, where, text)
    return _chat(where, kind, given["messages"], given.get("tools") or [])


def _chat(where: str, kind: str, messages: object, tools: object) -> Prompt:
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise PromptError(f"{where}: messages must be a list of objects with role and content, such as a chat has")
    if not isinstance(tools, list):
        raise PromptError(f"{where}: tools is {_short(tools)}; it must be a list, such as a chat has")
    return Prompt(kind, where, messages=tuple(messages), tools=tuple(tools))


def _is_message(given: object) -> bool:
    return isinstance(given, dict) and isinstance(given.get("role"), str) and "content" in given


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= LONGEST_KIND else f"{text[:LONGEST_KIND]}..."
