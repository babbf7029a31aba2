"""Another library as a contender: transformers, in a process of its own (:mod:`benchmarks.transformers_baseline`).

It gets what ours gets: the same two models, prompts and number format, and as many cores in all. It runs while ours is
idle, in turn with it. Which of its settings are tried is decided here; the best of them is what we compare with.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass

from benchmarks.measure import Batch, Commit, Decoded, Run, Runner
from benchmarks.pair import Pair
from benchmarks.workers import READY_SECONDS, WorkerFailed

CORES = 2
"""Ours has one for the target and one for the drafter."""


@dataclass(frozen=True, slots=True)
class Mode:
    """How transformers decodes."""

    kind: str
    """``plain``, ``assisted`` (by the draft model) or ``lookup``."""
    length: int = 0
    """Draft tokens a step; where the heuristic schedule begins."""
    schedule: str = "constant"
    confidence: float = 0.0
    """Drafting ends early where the draft model is less sure than this."""

    def __str__(self) -> str:
        """For tables."""
        return self.kind if not self.length else f"{self.kind} {self.length} {self.schedule} {self.confidence:g}"


PLAIN = Mode("plain")
LOOKUP = Mode("lookup", 10)
ASSISTED = (
    Mode("assisted", 3),
    Mode("assisted", 5),
    Mode("assisted", 8),
    Mode("assisted", 5, "heuristic"),
    Mode("assisted", 20, confidence=0.4),
)
"""Settings of assisted generation that are tried; the last is the library's default."""


class Transformers:
    """The process, ready."""

    def __init__(self, process: Process) -> None:
        """See :func:`transformers`."""
        self._process = process

    def runner(self, mode: Mode) -> Runner:
        """The contender that decodes so; greedy, one prompt at a time."""

        async def run(batch: Batch) -> Run:
            assert len(batch.prompts) == 1 and batch.temperature == 0.0
            request = {"prompt": batch.prompts[0], "tokens": batch.wanted[0], "mode": asdict(mode)}
            answer = json.loads(await self._ask(json.dumps(request)))
            commits = tuple(Commit(at, tokens) for at, tokens in answer["commits"])
            return Run((Decoded(tuple(answer["tokens"]), commits),))

        return run

    async def _ask(self, request: str) -> bytes:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(request.encode() + b"\n")
        await self._process.stdin.drain()
        answer = await self._process.stdout.readline()
        if not answer:
            raise WorkerFailed("the transformers process ended")
        return answer


@asynccontextmanager
async def transformers(pair: Pair, dtype: str) -> AsyncIterator[Transformers]:
    """The process with the pair loaded, while it runs; raises :class:`benchmarks.workers.WorkerFailed`."""
    threads = min(CORES, len(os.sched_getaffinity(0)))
    command = [sys.executable, "-m", "benchmarks.transformers_baseline", str(pair.target), str(pair.draft)]
    command += ["--dtype", dtype, "--threads", str(threads)]
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
    try:
        assert process.stdout is not None
        async with asyncio.timeout(READY_SECONDS):
            if not await process.stdout.readline():
                raise WorkerFailed("the transformers process did not start")
        yield Transformers(process)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
