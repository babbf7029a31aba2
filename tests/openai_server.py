"""A stand-in for any server with OpenAI's API: says what a script says, byte by byte, and keeps what it was asked."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]
HANG = -1.0
"""A pause without an end."""


@dataclass(frozen=True)
class Reply:
    """An answer: a status, headers, and pieces of its body with the pause before each."""

    pieces: list[tuple[float, bytes]]
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=lambda: {"content-type": "text/event-stream"})
    whole: bool = True
    """False: the connection is closed where more should come."""
    kept: bool = True
    """False: the connection is closed without a word of it before."""


def as_json(value: object, status: int = 200, **headers: str) -> Reply:
    """A body of JSON."""
    head = {"content-type": "application/json"} | {name.replace("_", "-"): text for name, text in headers.items()}
    return Reply([(0.0, json.dumps(value).encode())], status, head)


def events(*chunks: object, done: bool = True, pause: float = 0.0) -> Reply:
    """A stream of these, with a pause before each."""
    pieces = [(pause, f"data: {json.dumps(chunk)}\n\n".encode()) for chunk in chunks]
    return Reply(pieces + ([(0.0, b"data: [DONE]\n\n")] if done else []))


def text(content: str, finish: str | None = None, **more: object) -> Json:
    """A chunk of a completion."""
    return {"choices": [{"index": 0, "text": content, "finish_reason": finish}], **more}


def models(*names: str, owner: str = "someone") -> Reply:
    """A list of models."""
    return as_json({"object": "list", "data": [{"id": name, "object": "model", "owned_by": owner} for name in names]})


Script = Callable[[str, Json], Reply]
"""The answer to a path and a body."""


@dataclass
class FakeServer:
    """What was asked of it, in order."""

    url: str
    asked: list[tuple[str, Json]] = field(default_factory=list)
    headers: list[str] = field(default_factory=list)

    @property
    def completions(self) -> list[Json]:
        """The bodies of the requests for text."""
        return [body for path, body in self.asked if path.endswith("completions")]


@contextmanager
def serving(script: Script) -> Iterator[FakeServer]:
    """Serve in a thread with a loop of its own."""
    loop, ready = asyncio.new_event_loop(), threading.Event()
    server, stop = FakeServer(""), asyncio.Event()

    async def run() -> None:
        async with await asyncio.start_server(lambda r, w: _connection(server, script, r, w), "127.0.0.1", 0) as it:
            server.url = f"http://127.0.0.1:{it.sockets[0].getsockname()[1]}"
            ready.set()
            await stop.wait()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),), daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(60)
    assert not thread.is_alive()
    loop.close()


async def _connection(
    server: FakeServer, script: Script, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    try:
        while head := await reader.readuntil(b"\r\n\r\n"):
            lines = head.decode().split("\r\n")
            path = lines[0].split()[1]
            fields = dict(line.lower().split(": ", 1) for line in lines[1:] if ": " in line)
            body = await reader.readexactly(int(fields.get("content-length", 0)))
            asked = json.loads(body) if body else {}
            server.asked.append((path, asked))
            server.headers.append(head.decode())
            if not await _answer(script(path, asked), writer) or fields.get("connection") == "close":
                return
    except (asyncio.IncompleteReadError, ConnectionError):
        return
    finally:
        writer.close()


async def _answer(reply: Reply, writer: asyncio.StreamWriter) -> bool:
    """Whether the connection is kept."""
    head = "".join(f"{name}: {value}\r\n" for name, value in reply.headers.items())
    writer.write(f"HTTP/1.1 {reply.status} Because\r\n{head}transfer-encoding: chunked\r\n\r\n".encode())
    for pause, piece in reply.pieces:
        await writer.drain()
        await (asyncio.get_running_loop().create_future() if pause == HANG else asyncio.sleep(pause))
        writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
    if reply.whole:
        writer.write(b"0\r\n\r\n")
    await writer.drain()
    return reply.whole and reply.kept
