"""Processes of a benchmark that answer each line of their input with a line: both ends."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from benchmarks.harness.command import BenchError
from cluster.console import say

READY_SECONDS = 180.0
LINE_BYTES = 1 << 28
"""Longest answer."""


class WorkerFailed(BenchError):
    """A process of the benchmark ended before it was ready, or before it had answered; why is on stderr."""


@dataclass(frozen=True, slots=True)
class ReadyProcess:
    """One that is ready."""

    name: str
    process: Process
    first: str
    """What it said first."""

    async def ask(self, line: str = "") -> str:
        """Its answer. Raises :class:`WorkerFailed`."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{line}\n".encode())
        await self.process.stdin.drain()
        answer = await self.process.stdout.readline()
        if not answer:
            raise WorkerFailed(f"the {self.name} ended")
        return answer.decode().strip()


@asynccontextmanager
async def child(name: str, module: str, *arguments: str) -> AsyncIterator[ReadyProcess]:
    """A module run as a program, until it is left. Raises :class:`WorkerFailed`, TimeoutError."""
    command = [sys.executable, "-m", module, *arguments]
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, limit=LINE_BYTES)
    assert process.stdin is not None and process.stdout is not None
    try:
        async with asyncio.timeout(READY_SECONDS):
            first = await process.stdout.readline()
        if not first:
            raise WorkerFailed(f"the {name} did not start")
        yield ReadyProcess(name, process, first.decode().strip())
    finally:
        process.stdin.close()
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def answer_lines(first: str, answer: Callable[[str], str]) -> None:
    """The other end: say the first line, then answer each line until the input ends."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    say(first)
    while line := await reader.readline():
        say(answer(line.decode().strip()))
