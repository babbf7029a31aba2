"""Decides what text an alignment reads: which parts of which files, in which order, and what is held out.

A file is a row of blocks, and a passage of plain text is what one block holds; a file of JSON lines has a passage a
line. Blocks are read one at a time, by seeking, in an order scattered over all files that depends on the seed alone. So
ten gigabytes take no more memory than ten kilobytes, and whoever stops early has seen a fair sample of them.

Whether a passage is held out depends on a hash of its text alone: the same text is on the same side in every run, and
wherever in the data it stands.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

from alignment.options import DataError

BLOCK_BYTES = 4096
SLACK_BYTES = 1024
"""How far behind the end of a block the end of its last line is looked for."""
MAX_RECORD_BYTES = 16 << 20
"""Of a line of JSON."""
RECORDS = (".jsonl", ".ndjson")
"""Endings of files with a JSON object a line."""
HELD_OUT_PERCENT = 10
WANTED = '"text", "prompt" (and "completion") or "messages"'

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages for a model's chat template."""

    messages: tuple[Message, ...]
    tools: tuple[Message, ...] = ()
    """Functions that the model may call."""

    def __str__(self) -> str:
        return json.dumps([self.messages, self.tools], sort_keys=True)


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece of the data."""

    start: str | Conversation
    """What a model is asked to go on from, as a whole: text or a conversation. Empty: it may be asked anywhere."""
    rest: str
    """What follows in the data; may be empty if ``start`` is not."""

    @property
    def held_out(self) -> bool:
        """Whether it is never trained on. One start has one answer, whatever follows it."""
        told = str(self.start) or self.rest
        digest = hashlib.blake2b(told.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        return int.from_bytes(digest, "big") % 100 < HELD_OUT_PERCENT


@dataclass(frozen=True, slots=True)
class DataSource:
    """A file: where it lies and how many bytes it had when it was found."""

    path: Path
    size: int

    @property
    def blocks(self) -> int:
        """How many there are."""
        return math.ceil(self.size / BLOCK_BYTES)

    def read(self, block: int) -> Iterator[Passage]:
        """The passages of one block. Raises :class:`alignment.options.DataError`."""
        read = _records if self.path.suffix in RECORDS else _lines
        try:
            with self.path.open("rb") as file:
                yield from read(self.path, file, block)
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read: {error.strerror}") from error


class Data:
    """All passages of some files."""

    def __init__(self, sources: Sequence[DataSource]) -> None:
        self._sources = tuple(sources)
        self._ends = tuple(accumulate(source.blocks for source in sources))
        """How many blocks there are up to the end of each."""

    def passages(self, seed: int, *, held_out: bool) -> Iterator[Passage]:
        """Once each, those that are held out or those that are not, in an order that depends on ``seed`` alone.

        Raises :class:`alignment.options.DataError` where a block turns out not to be text.
        """
        for index in scattered(self._ends[-1], seed):
            place = bisect_right(self._ends, index)
            source = self._sources[place]
            for passage in source.read(index - self._ends[place] + source.blocks):
                if passage.held_out == held_out:
                    yield passage

    def __str__(self) -> str:
        first, others = self._sources[0].path, len(self._sources) - 1
        size = sum(source.size for source in self._sources)
        return f"{first}{f' and {others} more' if others else ''} ({size} bytes)"


def find_data(paths: Iterable[Path]) -> Data:
    """The files that are meant: those named, and the text files below folders named (hidden ones left out).

    Raises :class:`alignment.options.DataError` for one that is missing, empty or not text.
    """
    sources: list[DataSource] = []
    for path in paths:
        path = Path(os.path.expanduser(path))
        if os.path.isdir(path):
            found = [source for file in _below(path) if (source := _source(file)) is not None]
            if not found:
                raise DataError(f"{path}: holds no text file; give text or JSON lines in UTF-8")
            sources += found
        elif not os.path.exists(path):
            raise DataError(f"{path}: no such file or folder")
        else:
            source = _source(path, named=True)
            assert source is not None
            sources.append(source)
    if not sources:
        raise DataError("there is no data; name a file or a folder")
    return Data(sources)


def scattered(count: int, seed: int) -> Iterator[int]:
    """Every number below ``count`` once, each far from the one before: multiples of a step without common divisor.

    Takes no memory, unlike a shuffled list.
    """
    draw = random.Random(seed)
    start, step = draw.randrange(max(count, 1)), draw.randrange(max(count // 4, 1), max(count // 2, 2))
    while math.gcd(step, count) != 1:
        step += 1
    return ((start + place * step) % count for place in range(count))


def _below(folder: Path) -> list[Path]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return sorted(file for file in files if not any(part.startswith(".") for part in file.relative_to(folder).parts))


def _source(path: Path, *, named: bool = False) -> DataSource | None:
    """None for what is no text, unless the user named it: that is an error."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(BLOCK_BYTES)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    binary = b"\0" in head
    try:
        head.decode("utf-8")
    except UnicodeDecodeError as error:  # a character may be cut in two at the end of what was read
        binary = not (len(head) == BLOCK_BYTES and error.start >= len(head) - 3)
    wrong = "is binary; give text or JSON lines in UTF-8" if binary else ""
    if size <= BLOCK_BYTES and not head.strip():
        wrong = "is empty"
    if wrong and named:
        raise DataError(f"{path}: {wrong}")
    return None if wrong else DataSource(path, size)


def _lines(path: Path, file: BinaryIO, block: int) -> Iterator[Passage]:
    """Plain text: from the cut at the block's beginning to that at its end."""
    begin = block * BLOCK_BYTES
    file.seek(max(begin - 1, 0))
    head = b"\n" if begin == 0 else b""  # The byte before the block.
    raw = head + file.read(1 + BLOCK_BYTES + SLACK_BYTES - len(head))
    first = _cut(raw, 0) if begin else 1
    last = _cut(raw, BLOCK_BYTES) if len(raw) > 1 + BLOCK_BYTES else len(raw)
    text = _text(path, raw[first:last], begin + first - 1)
    if text.strip():
        yield Passage("", text)


def _cut(raw: bytes, at: int) -> int:
    """Where, at or behind ``at`` + 1, a new line begins; a new character, if none does within the slack."""
    line = raw.find(b"\n", at, at + SLACK_BYTES)
    if line >= 0:
        return line + 1
    at += 1
    while at < len(raw) and raw[at] & 0xC0 == 0x80:
        at += 1
    return at


def _records(path: Path, file: BinaryIO, block: int) -> Iterator[Passage]:
    """JSON lines: those that begin in the block."""
    begin = block * BLOCK_BYTES
    file.seek(max(begin - 1, 0))
    if begin:
        before = file.read(BLOCK_BYTES)
        line = before.find(b"\n")
        if line < 0:
            return
        file.seek(begin + line)
    while (at := file.tell()) < begin + BLOCK_BYTES:
        raw = file.readline(MAX_RECORD_BYTES + 1)
        if not raw:
            return
        if len(raw) > MAX_RECORD_BYTES:
            raise DataError(f"{path}: the line at byte {at} is longer than {MAX_RECORD_BYTES >> 20} MB")
        if raw.strip():
            found = _record(f"{path}: the line at byte {at}", _text(path, raw, at))
            if found.start or found.rest:  # routers once recorded prompts of special tokens alone, without their text
                yield found


def _record(where: str, line: str) -> Passage:
    """Without start and rest for a record without text."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not JSON: {error}") from None
    match record:
        case {"messages": [*messages]} if messages and all(_is_message(message) for message in messages):
            last = messages[-1]
            answered = last["role"] == "assistant" and len(messages) > 1 and "completion" not in record
            rest = last["content"] if answered else record.get("completion", "")
            tools = record.get("tools", [])
            if isinstance(rest, str) and isinstance(tools, list):
                return Passage(Conversation(tuple(messages[:-1] if answered else messages), tuple(tools)), rest)
        case {"prompt": str(prompt), **others}:
            completion = others.get("completion", "")
            if isinstance(completion, str):
                return Passage(prompt, completion)
        case {"text": str(text)}:
            return Passage("", text)
    raise DataError(f"{where} has none of {WANTED} as text")


def _is_message(given: object) -> bool:
    return isinstance(given, dict) and isinstance(given.get("role"), str) and isinstance(given.get("content"), str)


def _text(path: Path, raw: bytes, at: int) -> str:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: byte {at + error.start} is not UTF-8 text") from None
    if "\0" in text:
        raise DataError(f"{path}: byte {at + raw.find(bytes(1))} is NUL; give text or JSON lines in UTF-8")
    return text.removeprefix("\ufeff")
