"""Prompts that were asked, kept in local files where the operator wants that: data for ``paceline align``.

Off unless a folder is named. What is kept is the prompt or the messages, and the model's name; nothing of who asked,
and no answer. A request that says ``"store": false`` is left out. Files are for their owner only, and all together have
a bound: the oldest go.

A request costs the event loop an entry in a bounded queue; a thread does the rest. Where it cannot keep up, prompts are
dropped and counted. A disk that is full ends the recording, with one warning, and nothing else.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from router.schema.prompts import Prompt
from router.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

MAX_QUEUED = 1024
MAX_QUEUED_BYTES = 32 << 20
"""Of the bodies of requests that wait to be written."""
MAX_FILE_BYTES = 64 << 20
FILES = 4
"""At least so many make up all that is kept, so that what goes is a part of it."""
CLOSE_SECONDS = 5.0
"""In which what is queued must be written when the router stops."""
PATTERN = "prompts-*.jsonl"


class RecordingError(Exception):
    """The folder cannot be used. One line, for the operator."""


@dataclass(frozen=True, slots=True)
class RecordSettings:
    """Where prompts are kept, and how much of them."""

    folder: Path
    total_bytes: int
    """Of all files there, those of other routers included."""

    @property
    def file_bytes(self) -> int:
        """From this size on a new file is begun."""
        return max(min(self.total_bytes // FILES, MAX_FILE_BYTES), 1)


@dataclass(frozen=True, slots=True)
class RecordedPrompt:
    """A request, as it is queued."""

    model: str
    body: bytes
    """JSON that was read before, and is an object."""
    prompts: Sequence[Prompt]
    tokenizer: Tokenizer

    def lines(self) -> Iterator[bytes]:
        """A line of JSON for each prompt that has text: special tokens alone have none."""
        body = json.loads(self.body.decode("utf-8-sig"))
        if "messages" in body:
            record: dict[str, Any] = {"messages": [_plain(message) for message in body["messages"]]}
            if body.get("tools") and body.get("tool_choice") != "none":
                record["tools"] = [tool | {"function": _given(tool["function"])} for tool in body["tools"]]
            yield self._line(record)
            return
        for prompt in self.prompts:
            if text := prompt.text(self.tokenizer):
                yield self._line({"prompt": text})

    def _line(self, record: dict[str, Any]) -> bytes:
        return json.dumps({"model": self.model} | record, ensure_ascii=False).encode("utf-8", "replace") + b"\n"


class PromptRecorder:
    """Of one router. Made and closed in one thread, which may be an event loop's."""

    def __init__(self, settings: RecordSettings) -> None:
        """Begin. Raises :class:`RecordingError`."""
        self.recorded = 0
        self.dropped = 0
        """Requests that found the queue full."""
        self._settings = settings
        self._files = _Files(settings)
        try:
            self._files.open()
        except OSError as error:
            raise RecordingError(f"prompts cannot be recorded in {settings.folder}: {error.strerror}") from error
        self._queue: SimpleQueue[RecordedPrompt | None] = SimpleQueue()
        self._queued_bytes = self._taken_bytes = 0
        """Of bodies, since the start: counted by the event loop, and by the thread."""
        self._ended = False
        self._thread = threading.Thread(target=self._write_all, name="prompt recorder", daemon=True)
        self._thread.start()

    def take(self, asked: RecordedPrompt) -> None:
        """Keep a request's prompts, if there is room in the queue. Takes microseconds."""
        if self._ended:
            return
        waiting = self._queued_bytes - self._taken_bytes
        if self._queue.qsize() < MAX_QUEUED and waiting + len(asked.body) <= MAX_QUEUED_BYTES:
            self._queued_bytes += len(asked.body)
            self._queue.put(asked)
            return
        self.dropped += 1
        if self.dropped & (self.dropped - 1) == 0:  # 1, 2, 4 ...
            log.warning("prompts come faster than they can be recorded: %d dropped so far", self.dropped)

    def close(self) -> None:
        """Write what is queued, within :data:`CLOSE_SECONDS`."""
        self._ended = True
        self._queue.put(None)
        self._thread.join(CLOSE_SECONDS)

    def _write_all(self) -> None:
        try:
            while (asked := self._queue.get()) is not None:
                self._taken_bytes += len(asked.body)
                for line in asked.lines():
                    self._files.append(line)
                    self.recorded += 1
        except OSError as error:
            self._ended = True
            self._queue = SimpleQueue()  # what waits is let go
            log.warning("prompts are recorded no more: %s: %s", self._settings.folder, error.strerror)
        self._files.close()


class _Files:
    """The file that is written, and those before it."""

    def __init__(self, settings: RecordSettings) -> None:
        self._settings = settings
        self._file, self._path = -1, settings.folder
        self._size = self._number = 0
        self._began = time.strftime("%Y%m%dT%H%M%S", time.gmtime())

    def open(self) -> None:
        """Begin a new file, for which the oldest make room. Raises OSError."""
        self.close()
        folder = self._settings.folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_oldest(folder.glob(PATTERN), self._settings.total_bytes - self._settings.file_bytes)
        self._path = folder / f"prompts-{self._began}-{os.getpid()}-{self._number:05}.jsonl"
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._size, self._number = os.fstat(self._file).st_size, self._number + 1

    def append(self, line: bytes) -> None:
        """Write a line, as a whole or not at all. Raises OSError."""
        full = self._size and self._size + len(line) > self._settings.file_bytes
        if full or not os.fstat(self._file).st_nlink:  # another router may have taken it for the oldest
            self.open()
        try:
            written = os.write(self._file, line)
            while written < len(line):
                written += os.write(self._file, line[written:])
        except OSError:
            os.ftruncate(self._file, self._size)
            raise
        self._size += len(line)

    def close(self) -> None:
        """No more is written; a file without a prompt does not stay."""
        if self._file < 0:
            return
        os.close(self._file)
        self._file = -1
        if not self._size:
            with suppress(OSError):
                self._path.unlink()


def _remove_oldest(files: Iterable[Path], max_bytes: int) -> None:
    found = []
    for file in files:
        with suppress(FileNotFoundError):  # another router was first
            told = file.stat()
            found.append((told.st_mtime_ns, file, told.st_size))
    excess = sum(size for _, _, size in found) - max_bytes
    for _, file, size in sorted(found):
        if excess <= 0:
            return
        file.unlink(missing_ok=True)
        excess -= size


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(part["text"] for part in content)
    role = "system" if message["role"] == "developer" else message["role"]
    return _given(message) | {"role": role, "content": content or ""}


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
