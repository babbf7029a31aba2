"""Finding the tool calls in a model's text, while it arrives.

Which of two forms a model writes is read from its chat template, and seen where that writes a call. Text outside of
calls passes through at once, but for what may still begin one. What looks like a call and is none, or is cut off,
comes out as text: nothing is lost. A call comes out whole, when its last character has.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import StrEnum


class ToolForm(StrEnum):
    """How a model writes a call."""

    HERMES = "Hermes"
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, any number of them. Qwen writes it too."""
    LLAMA = "Llama 3"
    """The whole text is ``{"name": ..., "parameters": {...}}``, or several of these with ``;`` between."""

    @property
    def arguments(self) -> str:
        """The name that arguments go by."""
        return "arguments" if self is ToolForm.HERMES else "parameters"

    @property
    def between(self) -> str:
        """What a model writes between two calls."""
        return "\n" if self is ToolForm.HERMES else "; "

    @property
    def marks(self) -> tuple[str, ...]:
        """What frames calls. It has to show in the text even where a tokenizer holds it for special."""
        return (OPEN, CLOSE) if self is ToolForm.HERMES else (PYTHON_TAG,)


OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
THINK, THOUGHT = "<think>", "</think>"
"""What reasoning stands between, at the beginning of a text or of what a prompt has opened."""
MAX_WITHIN = 8
"""Closing tags in the strings of one call, so that no text is read more often than that."""
_BEGUN = re.compile(OPEN + r"\s*\{")
"""What a call in Hermes' form begins with, and not the mere name of its tag."""
_BETWEEN = re.compile(r"\s*;?\s*")
"""What stands between two calls in the Llama form."""
_KEYS = frozenset({"name", "type", "parameters", "arguments"})
"""What a call in the Llama form may have."""


def form_shown(template: str) -> ToolForm | None:
    """The form that a chat template writes calls in, by what stands in it; None: another one."""
    if OPEN in template:
        return None if "<function=" in template or "<arg_key>" in template else ToolForm.HERMES
    return ToolForm.LLAMA if '"parameters"' in template or PYTHON_TAG in template else None


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call: the function's name and its arguments, a JSON object as text."""

    name: str
    arguments: str


@dataclass(slots=True)
class Found:
    """What some more text turned out to be: content for the reader, and calls after it."""

    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def then(self, later: Found) -> Found:
        """Both together."""
        return Found(self.content + later.content, self.calls + later.calls)


class HermesParser:
    """Calls between tags. White space next to a call is no content.

    A closing tag within a string of the call does not end it, unless nothing comes of the call: then all up to its
    first closing tag is text, and what follows is read again. So is what opens within that text: a model may mention
    the tag, or give up a call that it has begun.

    Reasoning that the text begins with has no calls: what is drafted there may be rejected there.
    """

    def __init__(self, *, several: bool = True, thinks: bool = False) -> None:
        """``several``: False: nothing is read behind the first call. ``thinks``: reasoning was opened before."""
        self._several = several
        self._begun = False
        """Whether it has shown if the text begins with reasoning."""
        self._thinks = thinks
        self._held = ""
        self._later: list[str] = []
        """What came since and decides nothing, apart: to put every piece to the others would copy them each time."""
        self._tail = ""
        """Of what is held inside a call: the most that may be of a closing tag."""
        self._inside = self._after_call = False
        self._gap = ""
        self._searched = 0
        self._within: list[int] = []
        """Where closing tags stand in the strings of the call that has begun."""

    def push(self, text: str) -> Found:
        """Take more text."""
        self._later.append(text)
        if not self._decides(text):
            return Found()
        self._join()
        return self._read()

    def finish(self) -> Found:
        """A call without its closing tag is one all the same, if it is complete."""
        found = Found()
        self._join()
        while self._inside:
            self._end(found, len(self._held), "")
            found = found.then(self._read())
        self._tell(found, self._held)
        self._held = ""
        return found

    def _decides(self, text: str) -> bool:
        """Whether what is held may turn out to be something by this piece that comes after it."""
        if not self._inside:
            return bool((self._held[-1:] + text).strip())  # white space alone may be next to a call, or not
        ending = self._tail + text
        self._tail = ending[1 - len(CLOSE) :]
        return CLOSE in ending

    def _join(self) -> None:
        self._held, self._later = "".join((self._held, *self._later)), []

    def _read(self) -> Found:
        """What has come of all that is held."""
        found = Found()
        while self._close(found) if self._inside else self._open(found):
            if found.calls and not self._several:
                self._held = ""
        self._tail = self._held[1 - len(CLOSE) :]
        return found

    def _open(self, found: Found) -> bool:
        """Pass on what stands before the next call; whether there is one."""
        if not self._answers(found):
            return False
        start = self._held.find(OPEN)
        before = self._held[: len(self._held) - overlap(self._held, OPEN) if start < 0 else start]
        content = before.rstrip()
        self._tell(found, content)
        if start < 0:
            self._held = self._held[len(content) :]
            return False
        self._gap, self._held = before[len(content) :], self._held[start + len(OPEN) :]
        self._inside, self._searched, self._within = True, 0, []
        return True

    def _answers(self, found: Found) -> bool:
        """Pass on reasoning; whether it is over, or there is none."""
        if not self._begun:
            start = self._held.lstrip()
            if any(mark.startswith(start) and mark != start for mark in (THINK, OPEN)):
                return False
            self._begun = True
            self._thinks = start.startswith(THINK) or (self._thinks and not start.startswith(OPEN))
        if self._thinks:
            end = self._held.find(THOUGHT)
            self._thinks = end < 0
            end = len(self._held) - overlap(self._held, THOUGHT) if end < 0 else end + len(THOUGHT)
            self._tell(found, self._held[:end])
            self._held = self._held[end:]
        return not self._thinks

    def _close(self, found: Found) -> bool:
        """Take the call that has begun; whether it has ended."""
        while (end := self._held.find(CLOSE, self._searched)) >= 0:
            if len(self._within) == MAX_WITHIN or not self._in_string(end):
                self._end(found, end, CLOSE)
                return True
            self._within.append(end)
            self._searched = end + len(CLOSE)
        self._searched = max(len(self._held) - len(CLOSE), self._searched)
        return False

    def _in_string(self, end: int) -> bool:
        """Whether a string of the call goes on there; of what can be no call any more it does not matter."""
        try:
            json.loads(self._held[:end])
        except json.JSONDecodeError as error:
            return error.msg.startswith("Unterminated string")
        except (ValueError, RecursionError):
            pass
        return False

    def _end(self, found: Found, end: int, mark: str) -> None:
        """The call goes up to ``end``, where the ``mark`` stands; or it is none."""
        self._inside = False
        try:
            found.calls.append(_call(json.loads(self._held[:end]), ("arguments", "parameters")))
            self._after_call = True
        except (ValueError, RecursionError):
            if self._within:
                end, mark = self._within[0], CLOSE
            opened = [begun.start() for begun in _BEGUN.finditer(self._held, 0, end)]
            if opened:  # the last one only: no text is read once more for each
                end, mark = len(self._held[: opened[-1]].rstrip()), ""
            self._tell(found, self._gap + OPEN + self._held[:end] + mark)
        self._held = self._held[end + len(mark) :]

    def _tell(self, found: Found, text: str) -> None:
        text = text.lstrip() if self._after_call else text
        self._after_call = self._after_call and not text
        found.content += text


class LlamaParser:
    """A text that begins as an object is held back to its end; it is either calls altogether or not at all.

    Nothing marks a call, and an answer in JSON may have a ``name`` too: a call is to a function on offer, and has
    nothing that a call has not.
    """

    def __init__(self, names: Collection[str]) -> None:
        """Nothing has shown whether this is a call. ``names``: of the functions on offer."""
        self._names = names
        self._held: list[str] = []
        self._start = ""
        """The first of it that is no white space, until that shows whether it begins as a call does."""
        self._text: bool | None = None
        """Whether it is text; None: that has not shown. False: its end will show."""

    def push(self, text: str) -> Found:
        """Take more text."""
        if self._text:
            return Found(text)
        self._held.append(text)
        if self._text is None:
            self._start = start = (self._start + text).lstrip()
            if start.startswith(("{", PYTHON_TAG)):
                self._text = False
            elif start and not PYTHON_TAG.startswith(start):
                self._text = True
                return self._release()
        return Found()

    def finish(self) -> Found:
        """The text has ended."""
        try:
            return Found(calls=self._calls("".join(self._held).strip().removeprefix(PYTHON_TAG)))
        except (ValueError, RecursionError):
            return self._release()

    def _calls(self, text: str) -> list[ToolCall]:
        """Raises ValueError where it is anything else."""
        decoder, calls, at = json.JSONDecoder(), [], 0
        while at < len(text):
            value, end = decoder.raw_decode(text, at)
            calls.append(_call(value, ("parameters", "arguments")))
            if calls[-1].name not in self._names or value.keys() - _KEYS:
                raise ValueError("no call")
            between = _BETWEEN.match(text, end)
            at = between.end() if between else end
        if not calls:
            raise ValueError("nothing but white space")
        return calls

    def _release(self) -> Found:
        held, self._held = "".join(self._held), []
        return Found(held)


def parser_of(
    form: ToolForm, names: Collection[str], *, several: bool = True, thinks: bool = False
) -> HermesParser | LlamaParser:
    """A parser that has seen nothing. ``names``: of the functions on offer; the rest as in :class:`HermesParser`."""
    return HermesParser(several=several, thinks=thinks) if form is ToolForm.HERMES else LlamaParser(names)


def overlap(text: str, mark: str) -> int:
    """The length of the longest end of a text that is a beginning of ``mark``, but not all of it."""
    length = min(len(mark) - 1, len(text))
    while length > 0:
        length = mark.rfind(text[-1], 0, length) + 1
        if text.endswith(mark[:length]):
            return length
        length -= 1
    return 0


def _call(value: object, names: tuple[str, ...]) -> ToolCall:
    """Raises ValueError where it is no call."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError("no name")
    arguments: object = next((value[name] for name in names if name in value), {})
    if not isinstance(arguments, dict):
        raise ValueError("no arguments")
    written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    (value["name"] + written).encode()  # UnicodeEncodeError, a ValueError: half of a surrogate pair is no text
    return ToolCall(value["name"], written)
