"""A proxy for TCP connections to a worker: the long way, or the broken one, that one machine does not have."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from transport.address import parse

CHUNK_BYTES = 1 << 16


class Proxy:
    """Passes TCP connections on, late if asked to, and can hold back what comes from those who connect, ends too."""

    def __init__(self, address: str, late: Callable[[], float] = lambda: 0.0) -> None:
        """``address``: where to, HOST:PORT. ``late``: by how many seconds now, either way; nothing is overtaken."""
        self.address, self._late = "", late
        self._there = parse(address)
        self._open = asyncio.Event()
        self._open.set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Proxy:
        """Listen on a free port of this machine."""
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_error: object) -> None:
        """Cut all connections."""
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Meanwhile nothing arrives there. What is held back arrives afterwards."""
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()

    def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._connected(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        always = asyncio.Event()
        always.set()
        writers, passing = [writer], list[asyncio.Task[None]]()
        try:
            with contextlib.suppress(OSError):  # who is there is gone: whoever has connected sees that
                there_reader, there_writer = await asyncio.open_connection(*self._there)
                writers.append(there_writer)
                for way in ((reader, there_writer, self._open), (there_reader, writer, always)):
                    passing.append(asyncio.create_task(self._pass_on(*way)))
                await asyncio.wait(passing, return_when=asyncio.FIRST_COMPLETED)
                await self._open.wait()
        finally:
            for each in passing:
                each.cancel()
            for end in writers:
                end.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, may: asyncio.Event) -> None:
        """Until there is no more, each piece once it ``may`` go on, and late."""
        loop, held, due = asyncio.get_running_loop(), deque[bytes](), 0.0
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                await may.wait()
                held.append(data)
                due = max(due, loop.time() + self._late())
                loop.call_at(due, lambda: writer.write(held.popleft()))  # timers that fire out of order do no harm
                await writer.drain()
        await asyncio.sleep(max(due - loop.time(), 0.0))
